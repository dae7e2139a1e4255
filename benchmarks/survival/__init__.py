"""The kill loop of `benchmarks.recovery` and `benchmarks.soak`: cluster, faults, proof."""
