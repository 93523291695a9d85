"""Identifies which estimator made an estimate."""

ESTIMATOR_VERSION = 9
"""Incremented whenever a config's estimate changes: estimates stored before are then recomputed, and trials predicted
before calibrate nothing."""
