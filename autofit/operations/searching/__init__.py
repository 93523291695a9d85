"""A search from the user's request to the recommendation, on one kind of device or several."""
