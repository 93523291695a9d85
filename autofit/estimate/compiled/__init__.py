"""Decoder layers as torch.compile would run them, on tensors without data."""
