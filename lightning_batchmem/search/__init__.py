"""A program comes in, before its first step. The size to train with goes out.

Nothing here knows Lightning.
"""
