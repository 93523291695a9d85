"""The command line: a face over `autofit.operations`."""
