"""The search: which config to run next, what an outcome rules out, and when nothing untried can still win."""
