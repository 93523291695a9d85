"""How far off predicted memory is, learnt from the trials in the store."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from jobs import tiny_model
from unit.operations.made_trials import HARDWARE, OPTIONS, fits, make_job, make_prediction, make_trial, out_of_memory
from unit.operations.test_calibration import CARD

from autofit.core.outcome import Outcome, Trial
from autofit.core.units import GIB
from autofit.estimate.assumptions import CONTEXT_ERROR, SEEN_CONTEXT_BYTES
from autofit.estimate.estimate import Estimate
from autofit.estimate.memory.deviation import ONE_CARD, UNKNOWN
from autofit.operations import Estimation, WorkloadOptions
from autofit.prediction.calibration import memory_deviations
from autofit.store import Store
from autofit.techniques import complete


def predicted(outcome: Outcome, **values: object) -> Trial:
    return replace(make_trial(values, outcome, limit=12 * GIB), prediction=make_prediction(10, seconds=None))


def add_lora(store: Store) -> None:
    """Twenty trials that took a tenth more than predicted, with the context that estimates assume."""
    for rank in (8, 16, 32, 64, 128):
        for micro_batch in (1, 2):
            for targets in ("attention", "all-linear"):
                values = {"method": "lora", "rank": rank, "micro_batch": micro_batch, "targets": targets}
                fitted = fits(11.0 + 0.01 * micro_batch, 100)
                reserved = fitted.measurement.device_bytes - SEEN_CONTEXT_BYTES["9.0"]
                measured = replace(fitted.measurement, peak_reserved_bytes=reserved)
                store.add(predicted(replace(fitted, measurement=measured), **values))


def test_where_nothing_was_compared_nothing_is_known(store: Store) -> None:
    store.add(make_trial({"method": "lora"}, fits(11, 100)))
    for opened in (None, store):
        result = memory_deviations(make_job(), opened)
        assert set(result) == {"full", "lora", "qlora"}
        assert {(one.mean, one.deviation, one.compared_on) for one in result.values()} == {(0.0, ONE_CARD, 0)}
        on_two = make_job(replace(OPTIONS, devices=2))
        assert {one.deviation for one in memory_deviations(on_two, opened).values()} == {UNKNOWN}


def test_a_users_program_shows_nothing_of_autofits_own_step(store: Store) -> None:
    trial = predicted(fits(11, 100), method="lora")
    store.add(replace(trial, workload=replace(trial.workload, program="python train.py")))
    assert memory_deviations(make_job(), store)["lora"].compared_on == 0


def test_each_method_is_judged_by_its_own_trials(store: Store) -> None:
    add_lora(store)
    store.add(predicted(out_of_memory(), method="full"))
    result = memory_deviations(make_job(), store)
    assert result["lora"].compared_on == 20
    assert result["lora"].mean == pytest.approx(0.09, abs=0.015)
    assert ONE_CARD / 2 < result["lora"].deviation < UNKNOWN / 2, "a tenth more is more than was to be expected"
    assert (result["full"].compared_on, result["qlora"].compared_on) == (1, 0)
    assert result["full"].mean > 0  # it ran out at a limit above what was predicted
    assert result == memory_deviations(make_job(hardware=CARD), store), (
        "a card that is not here errs as the one that was measured"
    )
    elsewhere = replace(HARDWARE, device_name="NVIDIA H100 NVL")
    assert memory_deviations(make_job(hardware=elsewhere), store)["lora"].compared_on == 0


def test_an_estimate_is_as_sure_as_the_trials_on_its_hardware(store: Store, path: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_model(vocabulary=4096, hidden=128).config))
    options = WorkloadOptions(model=str(tmp_path), seq_len=256, global_batch=4)
    config = complete({"method": "lora", "checkpointing": "full"})
    estimation = partial(Estimation.of, options, config, hardware="h100-80g", store=path)
    needed = estimation().estimate().device_bytes

    def certainty() -> str | None:
        return estimation(memory_limit_bytes=int(1.08 * needed)).estimate().certainty

    assert certainty() == "likely"
    add_lora(store)
    assert certainty() == "unsure"  # of the 8 % that are left, trials took 10 %


def test_what_was_compared_with_no_real_card_is_less_sure() -> None:
    """What is offloaded; and what little takes, where the context is a guess."""
    options = WorkloadOptions(model="llama-3.1-8b", seq_len=2048, global_batch=4)

    def estimate(hardware: str = "h100-80g", **values: object) -> Estimate:
        return Estimation.of(options, complete(values), hardware=hardware, store=None).estimate()

    def deviation(hardware: str = "h100-80g", **values: object) -> float:
        made = estimate(hardware, **values).memory_deviation
        assert made is not None
        return made.deviation

    large = {"method": "lora", "checkpointing": "full", "precision": "bf16"}
    assert deviation(**large) == ONE_CARD
    assert deviation(**large, compile=True) == ONE_CARD
    small = {"method": "qlora", "checkpointing": "full", "precision": "bf16", "loss": "chunked"}
    assert deviation(**small) == ONE_CARD, "an H100 has shown its context"
    for values, least in ((small, ONE_CARD), ({**large, "offload": "optimizer"}, UNKNOWN)):
        guessed = CONTEXT_ERROR / estimate("a100-40g", **values).device_bytes
        assert deviation("a100-40g", **values) == math.hypot(least, guessed) > 1.01 * least
