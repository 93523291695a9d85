"""Runs one config for real: a fresh child process, a measurement, a typed outcome."""
