"""SQLite stores copied from one that this process has made: to make one takes 60 ms, and ten trials 25 ms more."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from unit.operations.made_trials import fill

from autofit.store import Store


def put(path: Path, *, filled: bool = False) -> None:
    """Put a store there, empty or with the hand-made trials."""
    path.write_bytes(_made(filled))


@cache
def _made(filled: bool) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        with Store.open(str(path)) as store:
            if filled:
                fill(store)
        assert list(path.parent.iterdir()) == [path], "all of it is in one file"
        return path.read_bytes()
