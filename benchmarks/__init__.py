"""Measurements behind the claims in README and docs.

Each module is a command (``python -m benchmarks.NAME``).
"""
