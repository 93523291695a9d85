"""What a search says beside its recommendation: trials that were disturbed, and methods that it did not finish."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.operations.made_trials import fits, make_job, make_trial, out_of_memory
from unit.search.made_truth import cpu_lattice

from autofit.cli.text.search import _disturbed
from autofit.core.device.state import CardState, DeviceState
from autofit.core.errors import EnvironmentLacks
from autofit.core.outcome import TimedOut
from autofit.core.units import GIB
from autofit.operations.searching.result import Disturbed, _check_any_is_of_its_type, impractical_methods
from autofit.search.lattice_state import LatticeState
from autofit.techniques import complete

BUSY = DeviceState(seconds=3.0, cards=(CardState(uuid="GPU-a", others_share=0.5),))


def test_repeated_and_believed_trials_are_told_apart() -> None:
    one, two = (make_trial({"method": "full", "micro_batch": number}, fits(4, 100)) for number in (1, 2))
    run = [replace(one, device_state=BUSY), one, replace(two, device_state=BUSY), replace(two, device_state=BUSY)]
    trials = [replace(trial, trial_id=number) for number, trial in enumerate(run)]
    result = Disturbed.of(trials, [trials[1], trials[3]])
    assert (result.repeated, result.believed, result.reason) == (2, 1, "another process used 50% of the card")
    (sentence,) = _disturbed(result)
    assert "2 trials were repeated, 1 trial was believed" in sentence
    assert _disturbed(Disturbed.of([one, two], [one, two])) == []


def test_what_a_slow_node_has_run_is_counted_apart() -> None:
    one, two = (make_trial({"method": "full", "micro_batch": number}, fits(4, 100)) for number in (1, 2))
    result = Disturbed.of([one.set_aside("n1 is slow"), two], [two], ["n1 is slow", "n2 is slow"])
    assert result == Disturbed(set_aside=1, slow_nodes=("n1 is slow", "n2 is slow"))
    assert _disturbed(result) == ["Left out: n1 is slow, n2 is slow: 1 trial was set aside."]


def test_where_all_that_fitted_ran_on_a_slow_node_nothing_is_said_of_what_fits() -> None:
    sound = make_trial({"method": "full", "micro_batch": 1}, fits(4, 100))
    slow, failed = sound.set_aside("n1 is slow"), make_trial({"method": "full", "micro_batch": 2}, out_of_memory())
    with pytest.raises(EnvironmentLacks, match="all 1 trials that fitted ran where n1 is slow"):
        _check_any_is_of_its_type([failed], [slow, failed])
    _check_any_is_of_its_type([sound], [slow, sound])
    _check_any_is_of_its_type([failed], [failed])
    assert "set_aside" not in DeviceState(seconds=1.0).to_json()
    assert DeviceState.from_json(slow.device_state.to_json()) == slow.device_state  # type: ignore[union-attr]


def test_a_method_whose_trials_were_all_cut_is_named_with_its_speed_and_its_cause() -> None:
    state = LatticeState(cpu_lattice(make_job()), 10 * GIB)
    state.learn(make_trial(complete({"method": "lora", "precision": "fp32"}), fits(2, 160), limit=10 * GIB))
    slow = {"bf16": 128.0, "bf16-mixed": 64.0}
    cut = [
        make_trial(
            complete({"method": "full", "precision": precision}),
            TimedOut(reason="slow", deadline_seconds=60.0, least_step_seconds=least, is_proven=True),
        )
        for precision, least in slow.items()
    ]
    state.recall_bounds(cut)

    def said(recommended: str, formats: dict[str, str]) -> tuple[str, ...]:
        return impractical_methods(state, recommended=recommended, tokens_per_step=512, slow=formats)

    (sentence,) = said("lora", {"bf16": "bf16 is 90 times slower than fp32 here."})
    fastest = cut[1].config
    assert sentence == (f"full is too slow to be practical: at most 8 tokens/s, because bf16 is slow here ({fastest})")
    assert "because" not in said("lora", {})[0]
    assert said("full", {}) == ()
    state.learn(make_trial(complete({"method": "full", "precision": "fp32"}), fits(8, 50), limit=10 * GIB))
    assert said("lora", {}) == (), "its own line says how fast it is"


def test_what_only_a_first_micro_step_shows_is_said_to_be_so() -> None:
    state = LatticeState(cpu_lattice(make_job()), 10 * GIB)
    state.learn(make_trial(complete({"method": "lora", "precision": "fp32"}), fits(2, 160), limit=10 * GIB))
    slow = TimedOut(reason="slow", deadline_seconds=60.0, least_step_seconds=128.0, is_proven=False)
    config = complete({"method": "full", "precision": "fp32"})
    state.recall_bounds([make_trial(config, slow)])
    sentences = impractical_methods(state, recommended="lora", tokens_per_step=512, slow={})
    assert sentences == (
        f"full seems too slow to be practical: at most 4 tokens/s, by its first micro-step alone ({config})",
    )
