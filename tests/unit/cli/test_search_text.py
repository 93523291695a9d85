"""What a search says at its end of what it may have missed."""

from __future__ import annotations

import pytest

from autofit.cli.text.search import WHY_WIDE, _regret

BEST = "With 95 % confidence the best config of this method is less than"
MOST = " For all that is known, the best config of this method is 10 times as fast or more."


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (None, ""),
        (0.0, " With 95 % confidence no config of this method is faster."),
        (0.2, f" {BEST} 25.0% faster (a bound, not an average)."),
        (0.5, f" {BEST} 100.0% faster (a bound, not an average)."),
        (0.6, f" {BEST} 2.5 times as fast (a bound, not an average). {WHY_WIDE}"),
        (0.97, f"{MOST} {WHY_WIDE}"),
        (1.0, f"{MOST} {WHY_WIDE}"),
    ],
)
def test_the_regret_is_told_as_a_gain(bound: float | None, said: str) -> None:
    """A bound is a share of the best speed; a user asks how much faster that is than what was found. A wide one is
    told, too, with what may have made it so."""
    assert _regret(bound) == said
