"""Which kernels run on a device, and what they hold while they run."""
