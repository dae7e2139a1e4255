"""This worker's side of the protocol."""
