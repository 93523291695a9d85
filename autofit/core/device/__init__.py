"""What was learnt of a device, as values."""
