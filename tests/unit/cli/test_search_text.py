"""What a search says at its end of what it may have missed."""

from __future__ import annotations

import pytest

from autofit.cli.search_text import _regret

BEST = "With 95 % confidence the best config of this method is less than"


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (None, ""),
        (0.0, " With 95 % confidence no config of this method is faster."),
        (0.2, f" {BEST} 25.0% faster (a bound, not an average)."),
        (0.5, f" {BEST} 100.0% faster (a bound, not an average)."),
        (0.97, " The trials were too noisy to say how much faster another config of this method may be."),
        (1.0, " The trials were too noisy to say how much faster another config of this method may be."),
    ],
)
def test_the_regret_is_told_as_a_gain(bound: float | None, said: str) -> None:
    """A bound is a share of the best speed; a user asks how much faster that is than what was found."""
    assert _regret(bound) == said
