"""Where trials run: on Ray workers, or in place."""
