"""The numbers of one slice, on the heap or in a mapped file."""
