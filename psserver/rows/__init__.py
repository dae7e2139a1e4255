"""The numbers of row slices: rows of any 64-bit ids, in slabs of rows of one length."""
