"""Messages from the network: control, pushes and pulls, checkpoints, metrics."""
