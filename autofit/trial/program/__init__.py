"""A user's own program as the trial: its command, the child that runs it, and what the program reports from inside."""
