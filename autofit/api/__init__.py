"""The HTTP API, a thin layer over `autofit.operations`."""
