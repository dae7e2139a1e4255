"""Links between hosts of a network lab: how busy they are, and workers whose GPUs are simulated."""
