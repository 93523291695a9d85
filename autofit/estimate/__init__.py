"""Predicts a config's memory and speed without running it."""
