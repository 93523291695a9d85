"""Timeline: what a forward leaves behind."""

from __future__ import annotations

import numpy as np

from autofit.estimate.timeline import Timeline

WEIGHTS, SAVED, TEMPORARY, LARGE, GRADIENT = range(5)
SIZES = {WEIGHTS: 100, SAVED: 20, TEMPORARY: 8, LARGE: 50, GRADIENT: 30}


def line(*events: tuple[int, int, int]) -> Timeline:
    """From (storage, sign, phase)."""
    return Timeline(
        sizes=np.array([sign * SIZES[storage % 5] for storage, sign, _ in events]),
        storages=np.array([storage for storage, _, _ in events]),
        categories=np.zeros(len(events), dtype=np.int8),
        phases=np.array([phase for _, _, phase in events]),
        streams=np.zeros(len(events), dtype=np.int8),
    )


def step(by: int) -> list[tuple[int, int, int]]:
    saved, temporary, large, gradient = (by + n for n in (SAVED, TEMPORARY, LARGE, GRADIENT))
    return [
        *[(temporary, 1, 0), (saved, 1, 0), (temporary, -1, 0), (large, 1, 0)],
        *[(gradient, 1, 1), (large, -1, 1), (saved, -1, 1), (gradient, -1, 2)],
    ]


def test_a_forward_frees_some_and_saves_the_rest() -> None:
    found = line((WEIGHTS, 1, 0), *step(0), *step(5))
    assert found.forward_bytes(below=1000) == (8, 70)
    assert found.forward_bytes(below=50) == (8, 20)


def test_only_the_last_forward_counts() -> None:
    first = [(TEMPORARY, 1, 0), (TEMPORARY, -1, 0), (SAVED, 1, 0), (SAVED, -1, 1)]
    assert line((WEIGHTS, 1, 0), *first, *step(5)).forward_bytes(below=1000) == (8, 70)
