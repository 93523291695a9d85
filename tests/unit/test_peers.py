"""A device that is clearly slower than its type is told by its rates, whatever it is called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import make_probe

from autofit.core.device.probe import Probe, ProbePart
from autofit.core.device.state import CardState, DeviceState
from autofit.workers.slots.speeds import SLOW, shortfall

RECORDED = Path(__file__).parents[2] / "benchmarks" / "recorded"


def probed(products: float, memory: float = 1.0, **state: object) -> Probe:
    """A device with these speeds, where 1 is the type's."""
    speeds = {"products in bf16": products, "memory-bound operations in bf16": memory}
    parts = (
        ProbePart(name=name, seconds=1.0, seconds_per={kind: work / speed for kind, work in (("a", 2.0), ("b", 5.0))})
        for name, speed in speeds.items()
    )
    return make_probe(*parts, state=DeviceState(seconds=1.0, cards=(CardState(uuid="GPU-a", **state),)))  # type: ignore[arg-type]


def test_of_two_nodes_the_slower_is_named_with_how_far_and_what_its_state_says() -> None:
    capped = probed(0.61, throttle_mask=0x20)
    assert shortfall(capped, "n1", [("n2", probed(1.0))]) == (
        "products in bf16 run there at 61% of the speed usual for h100-80g here (throttled: heat)"
    )
    assert shortfall(probed(1.0), "n2", [("n1", capped)]) is None
    assert (shortfall(probed(1.0, memory=0.5), "n1", [("n2", probed(1.0))]) or "").startswith("memory-bound operations")


def test_what_the_others_do_not_show_is_no_reason() -> None:
    """A state without slow rates, a node alone, one that measured nothing, differences among sound devices."""
    assert shortfall(probed(1.0, throttle_mask=0x20), "n1", [("n2", probed(1.0))]) is None
    assert shortfall(probed(0.5), "n1", []) is None
    assert shortfall(probed(0.5), "n1", [("n2", replace(probed(1.0), parts=()))]) is None
    assert shortfall(replace(probed(1.0), parts=()), "n1", [("n2", probed(1.0))]) is None
    assert shortfall(probed(SLOW + 0.01), "n1", [("n2", probed(1.0))]) is None


def test_the_middle_node_is_the_type() -> None:
    """One that is fast by mistake condemns nobody; and a node of many slow cards does not outvote the others."""
    sound = [(f"n{number}", probed(1.0)) for number in range(3)]
    assert shortfall(probed(1.0), "n9", [("odd", probed(2.0)), *sound]) is None
    rack = [("n9", probed(0.6))] * 7
    assert "60%" in (shortfall(probed(0.6), "n9", [*rack, ("n1", probed(1.0))]) or "")
    assert "60%" in (shortfall(probed(0.6), "n9", [("n9", probed(1.0))]) or ""), "one card of a sound node"


def test_recorded_probes_of_one_card_agree_far_better_than_the_threshold() -> None:
    """On which it stands."""
    by_key: dict[tuple[str, str, str], dict[str, Probe]] = {}
    for file in RECORDED.glob("h[12]00/*.jsonl"):
        with file.open() as lines:
            body = json.loads(next(lines)).get("probe")
        if body is not None:
            probe = Probe.from_json(body)
            by_key.setdefault((probe.hardware.key, probe.stack.key, probe.shapes_key), {})[probe.recorded_at] = probe
    repeated = [tuple(probes.values()) for probes in by_key.values() if len(probes) > 1]
    assert sum(map(len, repeated)) >= 6
    for probes in repeated:
        for one in probes:
            usual = ("products in bf16", "memory-bound operations in bf16")
            slowed = replace(one, parts=tuple(part for part in one.parts if part.name in usual))
            assert shortfall(slowed, "n1", [("n2", other) for other in probes if other is not one]) is None


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_a_recorded_card_at_a_lower_clock_would_be_named(share: float) -> None:
    """Its products slow down with its clock, its memory does not."""
    with (RECORDED / "h100" / "every-axis-llama-3.1-8b.jsonl").open() as lines:
        card = Probe.from_json(json.loads(next(lines))["probe"])
    parts = [
        replace(part, seconds_per={kind: rate / share for kind, rate in part.seconds_per.items()})
        for part in card.parts
        if part.name == "products in bf16"
    ]
    assert f"{share:.0%}" in (shortfall(replace(card, parts=tuple(parts)), "n1", [("n2", card)]) or "")
