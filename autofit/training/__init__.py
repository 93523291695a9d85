"""The training step, built from a config: the one definition that trials run and estimates trace."""
