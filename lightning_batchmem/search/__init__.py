"""A session comes in: a training program before its first step. The size to train with goes out.

Nothing here knows Lightning.
"""
