"""Devices that do not exist, and how well a search does on them. Not on a search's path."""
