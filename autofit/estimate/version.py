"""Which estimator made an estimate."""

ESTIMATOR_VERSION = 5
"""Counted up whenever a config comes to be estimated otherwise: what was kept before is then made anew, and trials that
were predicted before calibrate nothing."""
