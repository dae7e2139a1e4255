"""`psworker demo`: a LeNet on Fashion-MNIST, on real shards and workers, mode by mode.

`train.py` is a training script as a user writes it, `run.py` launches it and collects what it
says, `report.py` draws the table and the plot, and `data.py` reads the images.
"""
