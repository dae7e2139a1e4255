"""Access: the peers that may connect, and their rights."""
