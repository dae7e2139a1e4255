"""What arrives over the network: control, pushes and pulls, checkpoints, metrics."""
