"""Search spaces measured exhaustively, and the tables of that."""
