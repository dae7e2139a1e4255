"""The objects that a training script holds: the optimizer and its helpers."""
