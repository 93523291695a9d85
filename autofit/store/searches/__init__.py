"""Searches in the store: what each was asked, who drives it, what happened in it, and what it answered."""
