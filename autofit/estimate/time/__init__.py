"""From a trace to seconds: what operations cost, and at which rates."""
