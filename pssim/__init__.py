"""Simulates a whole job in one thread and in virtual time, with the product's own parts."""
