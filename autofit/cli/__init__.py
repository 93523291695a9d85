"""The command line, a thin layer over `autofit.operations`."""
