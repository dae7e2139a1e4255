"""A worker's connections to other workers: its listener, its mailbox, and the driver of a gossip."""
