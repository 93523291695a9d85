"""How many trials of a search met a device that was not free, counted and in a line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.operations.made_trials import fits, make_trial, out_of_memory

from autofit.cli.text.search import _disturbed
from autofit.core.device.state import CardState, DeviceState
from autofit.core.errors import EnvironmentLacks
from autofit.operations.searching.disturbed import Disturbed
from autofit.operations.searching.search import _check_any_is_of_its_type

BUSY = DeviceState(seconds=3.0, cards=(CardState(uuid="GPU-a", others_share=0.5),))


def test_repeated_and_believed_trials_are_told_apart() -> None:
    one, two = (make_trial({"method": "full", "micro_batch": number}, fits(4, 100)) for number in (1, 2))
    run = [replace(one, device_state=BUSY), one, replace(two, device_state=BUSY), replace(two, device_state=BUSY)]
    trials = [replace(trial, trial_id=number) for number, trial in enumerate(run)]
    found = Disturbed.of(trials, [trials[1], trials[3]])
    assert (found.repeated, found.believed, found.reason) == (2, 1, "another process used 50% of the card")
    (said,) = _disturbed(found)
    assert "2 trials were repeated, 1 trial was believed" in said
    assert _disturbed(Disturbed.of([one, two], [one, two])) == []


def test_what_a_slow_node_has_run_is_counted_apart() -> None:
    one, two = (make_trial({"method": "full", "micro_batch": number}, fits(4, 100)) for number in (1, 2))
    found = Disturbed.of([one.set_aside("n1 is slow"), two], [two], ["n1 is slow", "n2 is slow"])
    assert found == Disturbed(set_aside=1, slow_nodes=("n1 is slow", "n2 is slow"))
    assert _disturbed(found) == ["Left out: n1 is slow, n2 is slow: 1 trial was set aside."]


def test_where_all_that_fitted_ran_on_a_slow_node_nothing_is_said_of_what_fits() -> None:
    sound = make_trial({"method": "full", "micro_batch": 1}, fits(4, 100))
    slow, failed = sound.set_aside("n1 is slow"), make_trial({"method": "full", "micro_batch": 2}, out_of_memory())
    with pytest.raises(EnvironmentLacks, match="all 1 trials that fitted ran where n1 is slow"):
        _check_any_is_of_its_type([failed], [slow, failed])
    _check_any_is_of_its_type([sound], [slow, sound])
    _check_any_is_of_its_type([failed], [failed])
    assert "set_aside" not in DeviceState(seconds=1.0).to_json()
    assert DeviceState.from_json(slow.device_state.to_json()) == slow.device_state  # type: ignore[union-attr]
