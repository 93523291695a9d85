"""One file per axis: its values and their order, what they change, when they are valid, how they alter the build."""
