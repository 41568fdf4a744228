"""Memory and utilization of the devices; out-of-memory detection."""
