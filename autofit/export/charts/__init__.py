"""Charts: interactive pages, as plotly figures, and pictures."""
