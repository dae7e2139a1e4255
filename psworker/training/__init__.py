"""What a training script holds: the optimizer and its helpers."""
