"""A trainer's own file: whether its run fits a card, and the edits that help."""
