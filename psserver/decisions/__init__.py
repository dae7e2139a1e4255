"""State machines: a message goes in, actions come out; no I/O, threads, clock or randomness."""
