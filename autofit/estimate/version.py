"""Which estimator made an estimate."""

ESTIMATOR_VERSION = 6
"""Counted up whenever a config comes to be estimated otherwise: what was kept before is then made anew, and trials that
were predicted before calibrate nothing."""
