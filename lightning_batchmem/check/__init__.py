"""The memory test: live bytes of a training step on the host, compared with a stored reference.

A function that makes a model comes in; the parts that grew go out.
"""
