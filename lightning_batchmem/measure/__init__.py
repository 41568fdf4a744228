"""Run real steps and read the device."""
