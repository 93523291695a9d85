"""A Ray cluster: the connection to it, its nodes, and what may be asked of them."""
