"""Answers from the store: whose measurements count, and what is said where there is no answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import (
    HARDWARE,
    MADE,
    MODEL,
    OPTIONS,
    STACK,
    crashed,
    fill,
    fits,
    make_job,
    make_trial,
    out_of_memory,
)

from autofit import operations
from autofit.errors import EnvironmentLacks, NothingFits, UsageError
from autofit.hardware import Hardware
from autofit.operations.answers import find_hardware
from autofit.store import Store
from autofit.trial.site import detect
from autofit.units import GIB
from autofit.workload import Effect, Goal

A100 = replace(HARDWARE, name="a100-40g", device_name="NVIDIA A100-SXM4-40GB", memory_bytes=40 * GIB)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    with Store.open(str(tmp_path / "store.db")) as opened:
        yield opened


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with hand-made trials."""
    fill(store)
    return store


def add(store: Store, values: dict[str, object], outcome: object, hardware: Hardware = HARDWARE) -> None:
    store.add(make_trial(values, outcome, job=make_job(hardware=hardware)))  # type: ignore[arg-type]


def test_the_recommendation_is_the_fastest_of_the_most_faithful_method(filled: Store) -> None:
    answer = operations.recommend(OPTIONS, store=filled)
    assert answer.point.method == "full"
    assert answer.point.measurement.tokens_per_second == 4000.0
    assert (answer.memory_limit_bytes, answer.headroom_bytes) == (80 * GIB, 40 * GIB)
    assert answer.provenance == "measured"
    stored = filled.trial(answer.point.trial_id or 0)
    assert stored is not None and stored.config == answer.point.config


@pytest.mark.parametrize(
    ("goal", "limit", "speed"),
    [
        (Goal(), 40 * GIB, 4000.0),
        (Goal(), 40 * GIB - 1, 2000.0),
        (Goal(allow=Effect.EXACT), 80 * GIB, 2000.0),
        (Goal(method="lora"), 80 * GIB, 2600.0),
        (Goal(method="lora", min_rank=64), 80 * GIB, 2500.0),
        (Goal(method="qlora"), 80 * GIB, 700.0),
        (Goal(), 9 * GIB, 2600.0),
        (Goal(min_rank=64), 9 * GIB, 2500.0),
    ],
)
def test_goal_and_limit_decide(filled: Store, goal: Goal, limit: int, speed: float) -> None:
    answer = operations.recommend(OPTIONS, goal=goal, memory_limit_bytes=limit, store=filled)
    assert answer.point.measurement.tokens_per_second == speed


def test_the_frontier_counts_every_trial(filled: Store) -> None:
    found = operations.frontier(OPTIONS, store=filled)
    assert (found.trials, found.out_of_memory) == (len(MADE), 1)
    assert [p.measurement.device_bytes // GIB for p in found.points] == [2, 3, 8, 10, 20, 40]


def test_the_frontier_within_a_goal(filled: Store) -> None:
    found = operations.frontier(OPTIONS, goal=Goal(method="full", allow=Effect.EXACT), store=filled)
    assert [p.measurement.device_bytes // GIB for p in found.points] == [10, 20]
    # A dominated config comes back where what beats it is not allowed.
    found = operations.frontier(OPTIONS, goal=Goal(method="lora", min_rank=64), store=filled)
    assert [p.config["rank"] for p in found.points] == [64]


def test_the_newest_stack_that_measured_answers(filled: Store) -> None:
    newer = replace(STACK, torch="2.14.0")
    fill(filled, [({"method": "full"}, fits(30, 3000))], job=make_job(stack=newer))
    found = operations.frontier(OPTIONS, store=filled)
    assert (found.stack.torch, len(found.points)) == ("2.14.0", 1)


def test_what_is_not_measured_says_which_search_would(filled: Store) -> None:
    asked = replace(OPTIONS, seq_len=256)
    with pytest.raises(EnvironmentLacks) as lacking:
        operations.recommend(asked, store=filled)
    text = str(lacking.value)
    assert "smollm2-135m with seq-len 256 and global-batch 4 is not measured on h100-80g yet" in text
    assert "(measured: seq-len 128 global-batch 4)" in text
    assert lacking.value.remedy == f"run: autofit search --model {MODEL} --seq-len 256 --global-batch 4"


def test_the_advised_search_is_for_the_very_workload(filled: Store) -> None:
    with pytest.raises(EnvironmentLacks) as lacking:
        operations.frontier(replace(OPTIONS, seed=3, lora_dropout=0.1), store=filled)
    assert "--seed 3" in lacking.value.remedy
    assert "--lora-dropout 0.1" in lacking.value.remedy


def test_what_was_measured_of_a_folders_model_is_said(store: Store, tmp_path: Path) -> None:
    import json

    from jobs import tiny_model

    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(tiny_model().config))
    options = replace(OPTIONS, model=str(tmp_path / "small"))
    fill(store, [({}, fits(3, 100))], job=make_job(options))
    assert operations.frontier(options, store=store).trials == 1
    with pytest.raises(EnvironmentLacks, match="measured: seq-len 128 global-batch 4"):
        operations.frontier(replace(options, seq_len=64), store=store)


def test_an_empty_store_says_what_to_run(store: Store) -> None:
    here, _ = detect()
    with pytest.raises(
        EnvironmentLacks, match=rf"not measured on {here.name} yet \(run: autofit search --model {MODEL}"
    ):
        operations.recommend(OPTIONS, store=store)


def test_nothing_that_fits_says_what_came_closest(filled: Store) -> None:
    with pytest.raises(NothingFits) as nothing:
        operations.recommend(OPTIONS, memory_limit_bytes=GIB, store=filled)
    assert nothing.value.exit_code == 3
    assert "nothing that was measured fits 1.00 GiB: the closest takes 2.00 GiB (" in str(nothing.value)
    assert "method=qlora" in str(nothing.value)


def test_what_came_closest_is_of_the_method_asked(filled: Store) -> None:
    with pytest.raises(NothingFits, match=r"closest takes 10.00 GiB .*method=full"):
        operations.recommend(OPTIONS, memory_limit_bytes=9 * GIB, goal=Goal(method="full"), store=filled)


def test_nothing_fits_says_which_lever_would_help(filled: Store) -> None:
    """Exit code 3 promises what came closest and which lever would help: here another method."""
    with pytest.raises(NothingFits, match=r"--method"):
        operations.recommend(OPTIONS, memory_limit_bytes=9 * GIB, goal=Goal(method="full"), store=filled)


@pytest.mark.parametrize("goal", [Goal(method="qlora"), Goal(method="lora", min_rank=16)])
def test_a_goal_that_was_never_measured_is_not_called_out_of_memory(store: Store, goal: Goal) -> None:
    add(store, {"method": "lora"}, fits(8, 2600))
    with pytest.raises((EnvironmentLacks, NothingFits)) as told:
        operations.recommend(OPTIONS, goal=goal, store=store)
    assert "every trial ran out of memory" not in str(told.value)


def test_crashes_are_not_called_out_of_memory(store: Store) -> None:
    add(store, {"method": "full"}, crashed())
    with pytest.raises(NothingFits) as told:
        operations.recommend(OPTIONS, store=store)
    assert "every trial ran out of memory" not in str(told.value)


def test_out_of_memory_alone_is_called_that(store: Store) -> None:
    add(store, {"method": "full"}, out_of_memory())
    with pytest.raises(NothingFits, match="every trial ran out of memory"):
        operations.recommend(OPTIONS, store=store)


def test_hardware_that_is_here_is_meant_first(filled: Store) -> None:
    here, stack = detect()
    filled.add(make_trial({"method": "full"}, fits(1, 100), job=make_job(hardware=here, stack=stack)))
    assert find_hardware("auto", filled) == here
    assert operations.frontier(OPTIONS, store=filled).hardware == here


def test_hardware_that_alone_was_measured_is_meant_elsewhere(filled: Store) -> None:
    assert find_hardware("auto", filled).name == "h100-80g"


def test_of_several_measured_elsewhere_none_is_meant(filled: Store) -> None:
    add(filled, {"method": "full"}, fits(12, 900), A100)
    here, _ = detect()
    assert find_hardware("auto", filled) == here
    with pytest.raises(EnvironmentLacks) as lacking:
        operations.frontier(OPTIONS, store=filled)
    # The user cannot guess that the answer is one --hardware away.
    assert "h100-80g" in str(lacking.value) and "a100-40g" in str(lacking.value)


@pytest.mark.parametrize("name", ["a100-40g", "A100-40G"])
def test_hardware_by_name(filled: Store, name: str) -> None:
    add(filled, {"method": "full"}, fits(12, 900), A100)
    assert operations.frontier(OPTIONS, hardware=name, store=filled).hardware.name == "a100-40g"


def test_hardware_that_nothing_was_measured_on(filled: Store) -> None:
    with pytest.raises(UsageError, match=r"unknown hardware with measurements 'h100-80': did you mean h100-80g\?"):
        operations.frontier(OPTIONS, hardware="h100-80", store=filled)


def test_a_card_of_the_catalog_without_measurements_is_no_unknown_name(filled: Store) -> None:
    """The name is right; what lacks is a search there."""
    with pytest.raises(EnvironmentLacks, match="not measured on a100-40g"):
        operations.frontier(OPTIONS, hardware="a100-40g", store=filled)


def test_one_devices_memory_is_the_limit_where_none_is_given(store: Store) -> None:
    add(store, {"method": "full"}, fits(39, 900), A100)
    answer = operations.recommend(OPTIONS, store=store)
    assert (answer.memory_limit_bytes, answer.headroom_bytes) == (40 * GIB, GIB)
