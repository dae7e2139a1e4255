"""Training figures of `benchmarks.convergence`: runs of each sweep, results, plots."""
