"""Answers from the store: whose measurements count, and what is said where there is no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from jobs import model_in
from unit.operations.made_trials import (
    HARDWARE,
    OPTIONS,
    STACK,
    crashed,
    fill,
    fits,
    make_job,
    make_prediction,
    make_trial,
    out_of_memory,
)

from autofit import operations
from autofit.api.routes.query import named_hardware
from autofit.core.device.hardware import Hardware
from autofit.core.errors import EnvironmentLacks, NothingFits, NotMeasured, Shortfall, UsageError
from autofit.core.units import GIB
from autofit.core.workload import Effect, Goal
from autofit.operations.hardware_compared import compare_hardware
from autofit.operations.recommendation import find_hardware
from autofit.store import Store
from autofit.techniques import complete
from autofit.trial.machine.detection import detect

A100 = replace(HARDWARE, name="a100-40g", device_name="NVIDIA A100-SXM4-40GB", memory_bytes=40 * GIB)


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with hand-made trials."""
    fill(store)
    return store


def add(store: Store, values: dict[str, object], outcome: object, hardware: Hardware = HARDWARE) -> None:
    store.add(make_trial(values, outcome, job=make_job(hardware=hardware)))  # type: ignore[arg-type]


def test_the_newest_stack_that_measured_answers(filled: Store) -> None:
    newer = replace(STACK, torch="2.14.0")
    fill(filled, [({"method": "full"}, fits(30, 3000))], job=make_job(stack=newer))
    result = operations.frontier(OPTIONS, store=filled)
    assert (result.stack.torch, len(result.points)) == ("2.14.0", 1)


def test_failures_under_a_newer_stack_hide_nothing_that_an_older_one_measured(filled: Store) -> None:
    newer = replace(STACK, torch="2.14.0")
    fill(filled, [({"method": "full"}, crashed())], job=make_job(stack=newer))
    assert operations.recommend(OPTIONS, store=filled).stack == STACK
    assert operations.frontier(OPTIONS, store=filled).stack == STACK
    fill(filled, [({"method": "lora", "rank": 8}, fits(10, 1000))], job=make_job(stack=newer))
    full, lora = Goal(method="full"), Goal(method="lora")
    for answer in (operations.recommend, operations.frontier):
        assert answer(OPTIONS, goal=full, store=filled).stack == STACK
        assert answer(OPTIONS, goal=lora, store=filled).stack == newer


def test_a_card_with_another_power_limit_is_found_by_the_cards_name(store: Store) -> None:
    limited = replace(HARDWARE, name=f"{HARDWARE.name}-500w")
    add(store, {"method": "full"}, fits(30, 3000), hardware=limited)
    add(store, {"method": "full"}, fits(30, 3000), hardware=replace(HARDWARE, name="emulated-l4"))
    assert find_hardware(HARDWARE.name, store) == limited
    with pytest.raises(NotMeasured):
        find_hardware("l4", store)
    weaker = replace(limited, name=f"{HARDWARE.name}-400w")
    add(store, {"method": "full"}, fits(30, 2000), hardware=weaker)
    with pytest.raises(UsageError, match=f"was measured as {weaker.name}, {limited.name}: name one of them"):
        find_hardware(HARDWARE.name, store)
    assert find_hardware(weaker.name, store) == weaker


def test_what_is_not_measured_names_every_option_that_sets_it_apart(store: Store) -> None:
    fill(store, [({}, fits(3, 100))], job=make_job(replace(OPTIONS, seed=3)))
    with pytest.raises(EnvironmentLacks) as error:
        operations.frontier(replace(OPTIONS, lora_dropout=0.1, devices=2), store=store)
    text = str(error.value)
    assert "with seq-len 128 and global-batch 4 and lora-dropout 0.1 and devices 2 has not been measured" in text
    assert "(measured: seq-len 128 global-batch 4 seed 3)" in text


def test_what_was_measured_of_a_folders_model_is_said(store: Store, tmp_path: Path) -> None:
    options = replace(OPTIONS, model=str(model_in(tmp_path / "a small one")))
    fill(store, [({}, fits(3, 100))], job=make_job(options))
    assert operations.frontier(options, store=store).trials == 1
    with pytest.raises(EnvironmentLacks, match=rf"measured: seq-len 128 global-batch 4.*--model '{options.model}'"):
        operations.frontier(replace(options, seq_len=64), store=store)


@pytest.mark.parametrize(("allow", "rank"), [(Effect.EXACT, 8), (Effect.NUMERICS, 8), (Effect.TRAINING, 64)])
def test_a_higher_rank_is_for_who_lets_the_training_change(store: Store, allow: Effect, rank: int) -> None:
    add(store, {"method": "lora"}, fits(8, 2000))
    add(store, {"method": "lora", "rank": 64}, fits(7, 4000))
    answer = operations.recommend(OPTIONS, goal=Goal(method="lora", allow=allow), store=store)
    assert answer.point.config["rank"] == rank
    higher = "rank=64 instead of 8 changes the training itself"
    assert answer.changes_training == ((higher,) if rank == 64 else ())
    result = operations.frontier(OPTIONS, goal=Goal(allow=allow), store=store)
    assert {p.config["rank"] for p in result.points} == {rank}


def test_the_lowest_rank_that_was_measured_answers_and_what_it_changes_is_said(store: Store) -> None:
    add(store, {"method": "lora", "rank": 16}, fits(8, 2000))
    add(store, {"method": "lora", "rank": 64}, fits(7, 4000))
    answer = operations.recommend(OPTIONS, goal=Goal(method="lora"), store=store)
    assert answer.point.config["rank"] == 16
    assert answer.changes_training == ("rank=16 instead of 8 changes the training itself",)
    asked = operations.recommend(OPTIONS, goal=Goal(method="lora", min_rank=16), store=store)
    assert (asked.point, asked.changes_training) == (answer.point, ())


def test_a_method_that_was_asked_for_changes_nothing(filled: Store) -> None:
    asked = operations.recommend(OPTIONS, goal=Goal(method="lora"), store=filled)
    chosen = operations.recommend(OPTIONS, memory_limit_bytes=9 * GIB, store=filled)
    assert chosen.point.config == asked.point.config
    assert asked.changes_training == ()
    assert chosen.changes_training == ("method=lora instead of full changes the training itself",)


def test_nothing_that_fits_says_what_came_closest(filled: Store) -> None:
    with pytest.raises(NothingFits) as error:
        operations.recommend(OPTIONS, memory_limit_bytes=GIB, store=filled)
    assert error.value.exit_code == 3
    assert "nothing that was measured fits 1.00 GiB: the closest takes 2.00 GiB (" in str(error.value)
    assert "method=qlora" in str(error.value)
    # Every lever is pulled already but these.
    levers = str(error.value).partition("what would help: ")[2].split(", ")
    higher = "a higher --memory-limit (h100-80g has 80.00 GiB)"
    assert levers[:4] == [higher, "--space offload", "--allow training", "--seq-len 64"]
    assert levers[4].startswith("a card such as ") and len(levers) == 5


def test_what_ran_out_in_evaluation_is_told_to_evaluate_fewer(store: Store) -> None:
    options = replace(OPTIONS, eval_batch=16)
    ran_out = replace(out_of_memory(), phase="evaluation")
    store.add(make_trial({"method": "lora"}, ran_out, job=make_job(options), limit=4 * GIB))
    with pytest.raises(NothingFits, match=r"out of memory in evaluation: .*what would help: --eval-batch 8, "):
        operations.recommend(options, memory_limit_bytes=4 * GIB, store=store)


def test_out_of_memory_alone_is_called_that(store: Store) -> None:
    add(store, {"method": "full", "micro_batch": 4}, out_of_memory())
    add(store, {"method": "full", "micro_batch": 2}, out_of_memory())
    add(store, {"method": "full", "micro_batch": 4, "checkpointing": "full"}, out_of_memory())
    with pytest.raises(Shortfall, match=r"every trial ran out of memory, the closest under 80.00 GiB: ") as error:
        operations.recommend(OPTIONS, store=store)
    closest = error.value.to_json()["closest"]
    assert closest["config"] == complete({"method": "full", "micro_batch": 2}).to_json()
    assert (closest["outcome"], closest["requested_bytes"], closest["provenance"]) == (
        *("out_of_memory", 2 * GIB, "measured"),
    )
    assert str(complete({"method": "full", "micro_batch": 2})) in str(error.value)
    assert "--seq-len 64" in str(error.value) and "a card such as " in str(error.value)


def test_where_results_contradict_each_other_alone_that_is_said(store: Store) -> None:
    for outcome in (fits(10, 1000), out_of_memory()):
        store.add(make_trial({"method": "full"}, outcome))
    with pytest.raises(
        NothingFits, match=r"that fitted has also failed.*1 config has contradictory results.*as out of memory"
    ):
        operations.recommend(OPTIONS, store=store)


def test_what_ran_out_under_the_lowest_limit_is_known_to_need_least(store: Store) -> None:
    store.add(make_trial({"method": "full", "micro_batch": 1}, out_of_memory(), limit=40 * GIB))
    store.add(make_trial({"method": "full", "micro_batch": 4}, out_of_memory(), limit=30 * GIB))
    with pytest.raises(Shortfall, match=r"the closest under 30.00 GiB") as error:
        operations.recommend(OPTIONS, memory_limit_bytes=20 * GIB, goal=Goal(method="full"), store=store)
    assert error.value.to_json()["closest"]["trial_limit_bytes"] == 30 * GIB
    # What would hold more than is known to be too little, with a margin: the next card, of 31.36 GiB, might not.
    assert "--method any" in str(error.value) and "a card such as a100-40g (39.49 GiB)" in str(error.value)


def test_what_ran_out_says_what_was_predicted_for_it(store: Store) -> None:
    """The next cards above the limit would not hold it either."""
    for micro_batch, gib in ((4, 60), (1, 44), (2, 50)):
        trial = make_trial({"method": "full", "micro_batch": micro_batch}, out_of_memory(), limit=15 * GIB)
        store.add(replace(trial, prediction=make_prediction(gib, seconds=None)))
    with pytest.raises(Shortfall, match=r"predicted to need 44\.00 GiB") as error:
        operations.recommend(OPTIONS, memory_limit_bytes=15 * GIB, store=store)
    assert "a card such as h100-pcie-80g " in str(error.value)  # an a40 has hardly more than is predicted
    closest = error.value.to_json()["closest"]
    assert (closest["predicted_bytes"], closest["over_limit_bytes"]) == (44 * GIB, 29 * GIB)
    assert closest["config"] == complete({"method": "full", "micro_batch": 1}).to_json()


@pytest.mark.parametrize("host", [True, False])
def test_a_prediction_that_a_trial_has_refuted_is_not_repeated(store: Store, host: bool) -> None:
    """What a host lacked says nothing of the device."""
    outcome = replace(out_of_memory(), host=host)
    prediction = make_prediction(90 if host else 20, seconds=None)
    store.add(replace(make_trial({"method": "full"}, outcome, limit=30 * GIB), prediction=prediction))
    with pytest.raises(Shortfall) as error:
        operations.recommend(OPTIONS, memory_limit_bytes=20 * GIB, store=store)
    assert "predicted" not in str(error.value) and "a card such as a100-40g " in str(error.value)
    closest = error.value.to_json()["closest"]
    assert (closest["predicted_bytes"], closest["over_limit_bytes"]) == (None, None)


def test_where_nothing_ran_out_the_last_failure_came_closest(store: Store) -> None:
    add(store, {"method": "full"}, crashed())
    with pytest.raises(
        Shortfall, match=r"of 1 trials none has fitted, the closest under 80.00 GiB: crashed: "
    ) as error:
        operations.recommend(OPTIONS, store=store)
    assert error.value.to_json()["closest"]["outcome"] == "crashed"
    assert "`autofit doctor`" in str(error.value) and "what would help" not in str(error.value)


def test_what_was_never_tried_within_the_goal_says_which_search_would(store: Store) -> None:
    add(store, {"method": "lora"}, fits(8, 2600))
    goal = Goal(method="qlora", min_rank=16, allow=Effect.EXACT)
    with pytest.raises(EnvironmentLacks, match=r"none of the 1 trials .* is within --method qlora") as error:
        operations.recommend(OPTIONS, goal=goal, store=store)
    assert error.value.remedy.endswith("--global-batch 4 --method qlora --min-rank 16 --allow exact")


def test_hardware_that_is_here_is_meant_first(filled: Store) -> None:
    here, stack = detect()
    filled.add(make_trial({"method": "full"}, fits(1, 100), job=make_job(hardware=here, stack=stack)))
    assert find_hardware("auto", filled) == here
    assert operations.frontier(OPTIONS, store=filled).hardware == here


def test_of_several_measured_elsewhere_none_is_meant(filled: Store) -> None:
    add(filled, {"method": "full"}, fits(12, 900), A100)
    here, _ = detect()
    assert find_hardware("auto", filled) == here
    with pytest.raises(EnvironmentLacks) as error:
        operations.frontier(OPTIONS, store=filled)
    # The user cannot guess that the answer is one --hardware away.
    assert "h100-80g" in str(error.value) and "a100-40g" in str(error.value)


@pytest.mark.parametrize("name", ["a100-40g", "A100-40G"])
def test_hardware_by_name(filled: Store, name: str) -> None:
    add(filled, {"method": "full"}, fits(12, 900), A100)
    assert operations.frontier(OPTIONS, hardware=name, store=filled).hardware.name == "a100-40g"


def test_an_emulated_card_and_the_real_one_answer_each_for_itself(filled: Store) -> None:
    emulated = replace(HARDWARE, name=f"emulated-{HARDWARE.name}")
    add(filled, {"method": "full"}, fits(1, 99_000), emulated)
    for hardware, speed in ((HARDWARE, 4000.0), (emulated, 99_000.0)):
        answer = operations.recommend(OPTIONS, hardware=hardware.name, store=filled)
        assert (answer.hardware.name, answer.point.measurement.tokens_per_second) == (hardware.name, speed)


def test_an_emulated_card_never_answers_where_no_card_is_named(store: Store) -> None:
    emulated = replace(HARDWARE, name=f"emulated-{HARDWARE.name}")
    add(store, {"method": "full"}, fits(1, 99_000), emulated)
    assert find_hardware("auto", store).kind == "cpu", "this machine's own"
    with pytest.raises(UsageError, match=f"name the hardware: {emulated.name}"):
        named_hardware("auto", store)
    add(store, {"method": "full"}, fits(1, 900), A100)
    assert find_hardware("auto", store) == A100


def test_part_of_a_name_means_what_was_measured(filled: Store) -> None:
    """The catalog has three H100s, the store one."""
    assert operations.frontier(OPTIONS, hardware="H100", store=filled).hardware.name == "h100-80g"


def test_one_devices_memory_is_the_limit_where_none_is_given(store: Store) -> None:
    add(store, {"method": "full"}, fits(39, 900), A100)
    answer = operations.recommend(OPTIONS, store=store)
    assert (answer.memory_limit_bytes, answer.headroom_bytes) == (40 * GIB, GIB)
    for ask in (operations.recommend, operations.frontier):
        with pytest.raises(UsageError, match=r"memory-limit 41.00 GiB is more than the 40.00 GiB of a100-40g"):
            ask(OPTIONS, memory_limit_bytes=41 * GIB, store=store)
    (row,) = compare_hardware(OPTIONS, memory_limit_bytes=41 * GIB, store=store)
    assert row.recommendation is not None, "cards are compared under one limit, and it is above this one's memory"
