"""What can be said about a config without running it."""
