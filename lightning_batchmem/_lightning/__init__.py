"""A Trainer comes in; its program, its loaders and its state go out.

Only this folder touches Lightning's private attributes; each use names the versions it was read in.
"""
