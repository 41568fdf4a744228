"""The version of the package, which is read without importing it."""

__version__ = "0.6.0"
