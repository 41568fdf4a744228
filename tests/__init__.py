"""A package, so that benchmarks find it where another package named ``tests`` is installed."""
