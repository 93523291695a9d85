"""The small stack must show every layer between the neighbours that it has, and be as small as that allows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autofit.estimate.tracing.pattern import representatives


def contexts(kinds: list[object]) -> list[tuple[object, object, object]]:
    around = ["end", *kinds, "end"]
    return [(around[i - 1], around[i], around[i + 1]) for i in range(1, len(around) - 1)]


def test_three_layers_stand_for_a_uniform_stack() -> None:
    kept, stand_ins = representatives(["a"] * 32)
    assert len(kept) == 3
    assert stand_ins == (0, *[1] * 30, 2)


def test_alternating_and_periodic_stacks_take_their_period() -> None:
    assert len(representatives(["a", "b"] * 13)[0]) == 4
    sliding = (["local"] * 5 + ["global"]) * 4 + ["local"] * 2
    assert len(representatives(sliding)[0]) == 6


def test_a_first_layer_of_its_own_is_kept() -> None:
    kept, stand_ins = representatives(["first", *["a"] * 11])
    assert len(kept) == 4
    assert stand_ins[:3] == (0, 1, 2)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=24))
def test_every_layer_is_stood_for_by_one_in_the_same_context(kinds: list[object]) -> None:
    kept, stand_ins = representatives(kinds)
    small, full = contexts([kinds[i] for i in kept]), contexts(kinds)
    assert set(small) == set(full)
    assert [small[i] for i in stand_ins] == full
    assert list(kept) == sorted(kept)
