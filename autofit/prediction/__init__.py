"""Estimates, with this device's rates and the errors seen so far."""
