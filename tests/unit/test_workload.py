"""Workloads: what is refused, and when two of them are one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import UsageError
from autofit.core.workload import METHODS, Effect, Goal, Workload, digest

BASE = Workload(model="tiny", model_digest="0123456789abcdef")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    devices = draw(st.integers(1, 8))
    return Workload(
        model=draw(st.text(max_size=10)),
        model_digest=draw(st.text("0123456789abcdef", min_size=16, max_size=16)),
        seq_len=draw(st.integers(2, 10**6)),
        global_batch=devices * draw(st.integers(1, 512)),
        lora_dropout=draw(st.floats(0, 1, exclude_max=True)),
        devices=devices,
        seed=draw(st.integers(0, 2**32)),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_len": 0}, "seq-len is 0: it must be at least 1"),
        ({"seq_len": -5}, "seq-len is -5"),
        ({"seq_len": 1}, "needs at least 2 tokens"),
        ({"global_batch": 0}, "global-batch is 0: it must be at least 1"),
        ({"devices": 0}, "devices is 0"),
        ({"lora_dropout": -0.1}, "lora-dropout is -0.1"),
        ({"lora_dropout": 1.0}, "below 1"),
        ({"lora_dropout": float("nan")}, "lora-dropout is nan"),
        ({"global_batch": 6, "devices": 4}, "global-batch 6 is not a multiple of 4 devices"),
    ],
)
def test_an_impossible_workload_is_refused_by_the_option_that_is_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(BASE, **fields)


def test_the_batch_is_shared_out_among_devices() -> None:
    workload = replace(BASE, seq_len=128, global_batch=12, devices=4)
    assert workload.batch_per_device == 3
    assert workload.tokens_per_step == 128 * 12


@given(workloads())
def test_a_workload_survives_json_unchanged(workload: Workload) -> None:
    text = json.dumps(workload.to_json(), allow_nan=False)
    again = Workload.from_json(json.loads(text))
    assert again == workload
    assert again.key == workload.key


@given(workloads(), workloads())
def test_keys_are_equal_exactly_for_equal_workloads(a: Workload, b: Workload) -> None:
    assert (a.key == b.key) == (a == b)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "other"},
        {"model_digest": "f" * 16},
        {"seq_len": 4096},
        {"global_batch": 32},
        {"lora_dropout": 0.05},
        {"devices": 2},
        {"seed": 1},
    ],
)
def test_every_field_is_part_of_the_key(fields: dict[str, Any]) -> None:
    assert replace(BASE, **fields).key != BASE.key


@pytest.mark.parametrize("zero", [0, -0.0])
def test_a_number_written_otherwise_is_the_same_workload(zero: float) -> None:
    written = replace(BASE, lora_dropout=zero)
    assert written == BASE
    assert written.key == BASE.key


@given(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.booleans(), st.text(max_size=5)), max_size=6))
def test_a_digest_does_not_depend_on_the_order_of_keys(data: dict[str, Any]) -> None:
    assert digest(data) == digest(dict(reversed(data.items())))
    assert len(digest(data)) == 16


def test_effects_are_ordered_by_how_much_they_change() -> None:
    assert Effect.EXACT < Effect.NUMERICS < Effect.TRAINING
    assert [effect.label for effect in Effect] == ["exact", "numerics", "training"]


def test_a_goal_of_any_method_searches_the_most_faithful_first() -> None:
    assert Goal().methods == METHODS == ("full", "lora", "qlora")
    assert Goal(method="lora").methods == ("lora",)
    assert Goal().allow is Effect.NUMERICS
