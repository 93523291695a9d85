"""The HTTP face over `autofit.operations`."""
