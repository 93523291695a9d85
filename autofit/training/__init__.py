"""The training step, built from a config: a single definition, run by trials and traced by estimates."""
