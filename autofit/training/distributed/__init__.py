"""Ranks that train together: where they meet, and how they agree."""
