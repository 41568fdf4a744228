"""A GPU that is not there: a stub of the CUDA runtime, on which a CUDA build of torch runs."""
