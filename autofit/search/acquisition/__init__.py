"""Which config is worth a trial: its expected gain, its cost, and whether it fits."""
