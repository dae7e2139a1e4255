"""The model as flat memory."""
