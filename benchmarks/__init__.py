"""Measurements behind the claims in README and docs; each module is a command (``python -m benchmarks.NAME``)."""
