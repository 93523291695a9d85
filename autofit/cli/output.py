"""How commands answer: one JSON document, or text for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def print_json(document: Any) -> None:
    """Print `document` on standard output; nothing else is printed there with --json."""
    print(json.dumps(document, indent=2, allow_nan=False))


def columns(rows: Sequence[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> str:
    """`rows`, the first of which is the heading, as aligned columns; those in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
