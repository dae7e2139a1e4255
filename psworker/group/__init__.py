"""Several processes that are one worker: the ranks of one host, or of any group of torch's."""
