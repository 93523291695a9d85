"""The processes of a trial: the fork server, its children, and what is made of how they end."""
