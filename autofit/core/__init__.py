"""Values and pure functions on them: standard library only."""
