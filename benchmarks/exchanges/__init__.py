"""Parts of `benchmarks.decentralised`: workers that exchange models with each other."""
