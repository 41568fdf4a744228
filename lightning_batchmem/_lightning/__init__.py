"""The only place that touches private attributes of Lightning.

Each use names the versions in which it was read.
"""
