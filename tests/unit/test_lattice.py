"""Axes, configs and their partial order: one out-of-memory trial may rule out only what surely needs more."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.core.errors import UsageError
from autofit.core.lattice import Axis, Config, Lattice, Value, chain, closure
from autofit.techniques import AXES, AXIS, complete, holds, parse
from tests.tiny import job

NUMBERS: tuple[Value, ...] = (1, 2, 8, 16, 64)


def values_of(axis: Axis) -> tuple[Value, ...]:
    """All values of a named axis, some of a numeric one."""
    return axis.values or NUMBERS


def configs() -> st.SearchStrategy[Config]:
    """Any complete config of the real axes."""
    return st.fixed_dictionaries({axis.name: st.sampled_from(values_of(axis)) for axis in AXES}).map(_applicable)


@st.composite
def related(draw: st.DrawFn, count: int) -> tuple[Config, ...]:
    """Configs that differ on at most three axes: drawn apart, two configs are hardly ever comparable."""
    base = dict(draw(configs()).items)
    names = draw(st.lists(st.sampled_from(sorted(base)), max_size=3))
    drawn = []
    for _ in range(count):
        changed = {name: draw(st.sampled_from(values_of(AXIS[name]))) for name in names}
        drawn.append(_applicable({**{name: values_of(AXIS[name])[0] for name in AXIS}, **base, **changed}))
    return tuple(drawn)


def _applicable(values: dict[str, Value]) -> Config:
    absent = {"rank", "targets"} if values["method"] == "full" else set()
    return complete({name: value for name, value in values.items() if name not in absent})


JOB = job(seq_len=512, global_batch=16)
"""Tokens enough that adapters of the lowest ranks are no exception, and those of the highest are."""


def order(*configs: Config) -> Lattice:
    return Lattice(axes=AXES, configs=configs, holds=holds(JOB))


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_values_are_listed_lightest_first(axis: Axis) -> None:
    position = {value: index for index, value in enumerate(axis.values)}
    assert all(position[lighter] < position[heavier] for lighter, heavier in axis.lighter)


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_effects_and_recipe_are_valid_values(axis: Axis) -> None:
    assert set(axis.effects) <= set(axis.values)
    assert axis.recipe is not None
    assert axis.check(axis.recipe) == axis.recipe


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_an_axis_is_a_partial_order_with_absence_comparable_to_nothing(axis: Axis) -> None:
    among: list[Value | None] = [*values_of(axis), None]
    below = axis.is_lighter_or_equal
    assert all(below(a, a) for a in among)
    assert not any(below(a, b) and below(b, a) for a, b in itertools.permutations(among, 2))
    assert all(below(a, c) for a, b, c in itertools.product(among, repeat=3) if below(a, b) and below(b, c))
    assert not any(below(None, value) or below(value, None) for value in values_of(axis))


@given(related(2))
def test_two_configs_below_one_another_are_equal(pair: tuple[Config, Config]) -> None:
    a, b = pair
    assert order().is_lighter_or_equal(a, a)
    assert (order().is_lighter_or_equal(a, b) and order().is_lighter_or_equal(b, a)) == (a == b)


@settings(max_examples=300)
@given(related(3))
def test_the_order_is_transitive(three: tuple[Config, Config, Config]) -> None:
    for a, b, c in itertools.permutations(three):
        below = order().is_lighter_or_equal
        assert below(a, c) or not (below(a, b) and below(b, c))


def heavier_on_every_axis(light: Config, heavy: Config) -> bool:
    """What the axes claim, spelled out."""
    for axis in AXES:
        a, b = axis.of(light), axis.of(heavy)
        if a == b:
            continue
        if a is None or b is None:
            return False
        if axis.values:
            if (a, b) not in axis.lighter:
                return False
        elif not int(a) < int(b):
            return False
    return True


@settings(max_examples=300)
@given(st.lists(related(6), max_size=4), st.data())
def test_what_is_above_a_config_is_what_the_definition_says(
    groups: list[tuple[Config, ...]], data: st.DataObject
) -> None:
    listed = tuple(dict.fromkeys(itertools.chain.from_iterable(groups)))
    lattice = order(*listed)
    config = data.draw(st.sampled_from(listed)) if listed else data.draw(configs())
    assert lattice.above(config) == tuple(
        c for c in listed if c != config and heavier_on_every_axis(config, c) and lattice.holds(config, c)
    )


def test_a_larger_batch_and_less_checkpointing_are_above_and_a_smaller_batch_is_not() -> None:
    base = complete({"micro_batch": 4, "checkpointing": "every-2"})
    larger, lighter = base.replace(micro_batch=8, checkpointing="none"), base.replace(micro_batch=2)
    traded, sideways = base.replace(micro_batch=8, checkpointing="full"), base.replace(checkpointing="selective")
    lattice = order(base, larger, lighter, traded, sideways)
    assert lattice.above(base) == (larger,)
    assert lattice.above(lighter) == (base, larger)


def test_methods_with_and_without_adapters_are_not_compared() -> None:
    full, lora = complete({"method": "full"}), complete({"method": "lora"})
    assert not order().is_lighter_or_equal(lora, full)
    assert not order().is_lighter_or_equal(full, lora)


def claims(light: Config, **heavier: Value) -> bool:
    """Whether `light` is claimed to need no more than the same config with other values."""
    return order().is_lighter_or_equal(light, light.replace(**heavier))


def test_with_all_weights_trained_accumulation_is_not_below_the_whole_batch() -> None:
    base = complete({"method": "full", "micro_batch": 4, "checkpointing": "full"})
    assert claims(base, micro_batch=8)
    assert not claims(base, micro_batch=16)
    assert not claims(base, micro_batch=16, checkpointing="none")


@pytest.mark.parametrize(("rank", "claimed"), [(8, True), (256, False)])
def test_with_adapters_it_is_unless_their_gradients_outweigh_the_activations(rank: int, claimed: bool) -> None:
    assert claims(complete({"method": "lora", "rank": rank, "micro_batch": 8}), micro_batch=16) is claimed


def test_a_chunked_loss_is_below_a_full_one_where_nothing_else_waits_for_it() -> None:
    assert claims(complete({"method": "lora", "loss": "fused"}), loss="full")
    assert claims(complete({"method": "full", "loss": "chunked", "precision": "bf16"}), loss="full")
    assert not claims(complete({"method": "full", "loss": "chunked", "precision": "bf16-mixed"}), loss="full")
    assert not claims(complete({"method": "full", "loss": "fused", "precision": "bf16"}), loss="chunked")


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_is_below_none_where_nothing_is_compiled(compiled: bool) -> None:
    assert claims(complete({"checkpointing": "selective", "compile": compiled}), checkpointing="none") is not compiled


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_closure_is_the_smallest_transitive_relation_around_the_pairs(pairs: set[tuple[int, int]]) -> None:
    reached = {(a, b) for a in range(6) for b in _reachable(a, pairs)}
    assert closure(pairs) == reached


def _reachable(start: int, pairs: set[tuple[int, int]]) -> set[int]:
    reached: set[int] = set()
    waiting = [start]
    while waiting:
        node = waiting.pop()
        for a, b in pairs:
            if a == node and b not in reached:
                reached.add(b)
                waiting.append(b)
    return reached


@given(st.lists(st.integers(), unique=True, max_size=7))
def test_a_chain_relates_every_earlier_value_to_every_later_one(values: list[int]) -> None:
    assert chain(*values) == set(itertools.combinations(values, 2))
    assert closure(itertools.pairwise(values)) == chain(*values)


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis.values], ids=lambda axis: axis.name)
def test_every_value_of_an_axis_is_accepted_and_read_back_from_text(axis: Axis) -> None:
    for value in axis.values:
        assert axis.check(value) is value
        assert axis.parse(f" {str(value).upper()} ") is value


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("optimizer", "adam-8bit", "adamw-8bit"),
        ("optimizer", "AdamW", "adamw"),
        ("precision", "bf-16", "bf16"),
        ("checkpointing", "every-3", "every-2"),
        ("method", "LORA", "lora"),
        ("attention", "flash2", "flash"),
        ("compile", "treu", "true"),
        ("compile", 1, "false, true"),
        ("compile", "true", "true"),
        ("targets", None, "attention, all-linear"),
        ("rank", "eight", "a whole number of at least 1"),
        ("rank", 0, "a whole number of at least 1"),
        ("micro_batch", True, "a whole number of at least 1"),
        ("micro_batch", 2.0, "a whole number of at least 1"),
        ("micro_batch", -1, "a whole number of at least 1"),
    ],
)
def test_a_wrong_value_is_refused_with_the_nearest_ones(name: str, value: object, nearest: str) -> None:
    with pytest.raises(UsageError) as refusal:
        AXIS[name].check(value)
    assert f"unknown value of {name} {value!r}: " in str(refusal.value)
    assert nearest in str(refusal.value)


def test_a_number_that_no_tensor_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match="value of rank is 2147483648: it must be at most 2147483647"):
        AXIS["rank"].check(2**31)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1e3", "x", "1" * 5000, "³", "true"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="value of micro_batch"):
        AXIS["micro_batch"].parse(text)


@given(st.integers(1, 10**9 - 1))
def test_whole_numbers_are_read_from_text(number: int) -> None:
    assert AXIS["rank"].parse(str(number)) == number


@given(configs())
def test_a_config_survives_json_and_text_unchanged(config: Config) -> None:
    again = Config.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False)))
    assert again == config
    assert again.key == config.key
    assert complete(parse(str(config))) == config


def test_a_config_of_another_process_is_found() -> None:
    """Every process salts the hashes of strings: one that travelled along would find nothing here."""
    config = complete({"method": "lora", "rank": 16})
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(pickle.load(sys.stdin.buffer)))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(config), stdout=subprocess.PIPE, env=environment, check=True
    )
    assert pickle.loads(done.stdout) in {config: 1}


@given(related(2))
def test_keys_are_equal_exactly_for_equal_configs(pair: tuple[Config, Config]) -> None:
    a, b = pair
    assert (a.key == b.key) == (a == b)
    assert a != b or hash(a) == hash(b)


def test_a_value_that_goes_without_saying_has_its_place_in_the_order() -> None:
    liger, plain = (complete({"kernels": value, "micro_batch": 2}) for value in ("liger", "torch"))
    heavier = plain.replace(micro_batch=4)
    lattice = order(liger, plain, heavier)
    assert "kernels" not in plain and lattice.is_lighter_or_equal(liger, plain)
    assert lattice.above(liger) == (plain, heavier)
    assert lattice.below(plain) == (liger,)
    assert dict(lattice.values_of(plain))["kernels"] == "torch"


def test_a_config_answers_for_its_axes() -> None:
    config = complete({"method": "lora", "rank": 16, "compile": True})
    assert config["rank"] == config.get("rank") == config.number("rank") == 16
    assert config.text("method") == "lora"
    assert set(config) == set(AXIS) - {"batching", "kernels", "mlp", "update"}
    assert list(config) == sorted(config)
    assert config.replace(rank=32).number("rank") == 32
    assert config.number("rank") == 16
    full = complete({})
    assert full.get("rank") is None
    with pytest.raises(KeyError, match="rank"):
        full["rank"]
