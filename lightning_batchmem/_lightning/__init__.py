"""The only place that touches private attributes of Lightning; each use names the versions it was read in."""
