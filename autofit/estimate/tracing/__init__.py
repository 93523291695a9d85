"""The training step run on fake tensors."""
