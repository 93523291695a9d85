"""What every request passes on its way to a route: who asks, how much, and how long it took."""
