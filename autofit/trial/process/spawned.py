"""A child that is spawned instead of forked, for machines where forking a warm process is unsafe."""

from __future__ import annotations

import json
import sys
from pkgutil import resolve_name

from autofit.trial.process.child_process import die_with_parent


def main() -> None:
    """`spawned ENTRY DESCRIPTOR ASKED_AT`, with the request as JSON on standard input."""
    entry, descriptor, asked_at = sys.argv[1:]
    die_with_parent()
    resolve_name(entry)(json.load(sys.stdin), int(descriptor), float(asked_at))


if __name__ == "__main__":
    main()
