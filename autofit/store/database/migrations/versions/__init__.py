"""The revisions, to be applied in the order of their numbers."""
