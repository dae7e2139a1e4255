"""The parts of `benchmarks.drawings`: one module for each kind of picture."""
