"""Which configs a search comes to last, because others like them have crashed."""

from __future__ import annotations

import itertools

from unit.operations.made_trials import crashed, fits, make_trial

from autofit.core.lattice import Config
from autofit.core.outcome import Crashed, Outcome
from autofit.search.acquisition.suspects import suspicious

CONFIGS = [Config(tuple(zip("abcd", values, strict=True))) for values in itertools.product((1, 2), repeat=4)]
"""Of four axes with two values each."""


def last(*outcomes: tuple[int, Outcome]) -> set[int]:
    """The positions that come last after trials of some positions."""
    are_last = suspicious(CONFIGS, [make_trial(CONFIGS[number], outcome) for number, outcome in outcomes])
    return {number for number, is_last in enumerate(are_last) if is_last}


def sharing(least: int, **values: int) -> set[int]:
    """The positions that have at least so many of these values."""
    return {
        number
        for number, config in enumerate(CONFIGS)
        if sum(config[axis] == value for axis, value in values.items()) >= least
    }


def test_one_crash_shows_nothing() -> None:
    assert not last((0, crashed()))


def test_after_two_crashes_the_half_that_is_more_like_them_comes_last() -> None:
    assert last((0, crashed()), (1, crashed())) == sharing(2, a=1, b=1, c=1)


def test_what_fits_clears_its_values() -> None:
    """(1, 1, 2, 1) fits: of what the two share, only c is left."""
    assert last((0, crashed()), (1, crashed()), (2, fits(1.0, 1.0))) == sharing(1, c=1)
    assert not last((0, crashed()), (1, crashed()), (2, fits(1.0, 1.0)), (12, fits(1.0, 1.0)))


def test_each_further_crash_halves_what_comes_first() -> None:
    first = [len(CONFIGS) - len(last(*((number, crashed()) for number in range(count)))) for count in (1, 2, 3)]
    assert first == [16, 8, 4]


def test_two_causes_are_told_apart() -> None:
    """Whatever has a=1 or b=1 crashes: 4 and 5 have the one, 8 and 11 the other, so that all of them share nothing."""
    work = [(12, fits(1.0, 1.0)), (15, fits(1.0, 1.0))]
    assert last(*((number, crashed()) for number in (4, 5, 8, 11)), *work) == sharing(1, a=1, b=1)
    assert last(*((number, crashed()) for number in (5, 8, 11)), *work) == sharing(1, b=1)  # one crash shows nothing


def test_what_befell_the_machine_shows_nothing() -> None:
    transient = Crashed(reason="no space left on /tmp", transient=True)
    lost = Crashed(reason="its node was lost", worker_lost=True)
    assert not last((0, transient), (1, transient), (2, lost), (3, lost))
