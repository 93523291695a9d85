"""What a search says at its end of what it may have missed."""

from __future__ import annotations

import pytest

from autofit.cli.text.search import WHY_WIDE, _regret


@pytest.mark.parametrize(
    ("bound", "sentence"),
    [
        (0.0, "No config of this method is faster (95 % confidence)."),
        (0.2, "You may be missing up to 25.0% (95 % confidence)."),
        (0.5, "You may be missing up to 100.0% (95 % confidence)."),
        (0.6, f"The best config of this method may be more than twice as fast (95 % confidence). {WHY_WIDE}"),
        (1.0, f"The best config of this method may be more than twice as fast (95 % confidence). {WHY_WIDE}"),
    ],
)
def test_the_regret_is_told_as_a_gain(bound: float, sentence: str) -> None:
    """A bound is a share of the best speed; a user asks how much faster that is than what was found."""
    assert _regret(bound) == sentence
