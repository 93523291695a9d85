"""When a trial's time is in doubt: what others took of its device, and what slowed that down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autofit.core.device.hardware import Hardware
from autofit.core.device.state import CardState, DeviceState, ProcessorState, together
from autofit.core.units import GIB

CPU = Hardware(name="cpu-of-tests", kind="cpu", device_name="Some CPU", memory_bytes=2**35, cores=4)
H100 = Hardware(name="h100-80g", kind="cuda", device_name="NVIDIA H100", memory_bytes=80 * 2**30)
QUIET = ProcessorState(cores=4, threads=4, busy_seconds=40.5, own_seconds=39.5, stolen_seconds=0.1)
"""Of ten seconds."""
A_TICK_OFF = replace(QUIET, busy_seconds=0.2, own_seconds=0.16, stolen_seconds=0.04)
"""Of a twentieth of a second: what the counters may be off by."""
COOL = CardState(
    uuid="GPU-a",
    sm_clock_mhz=1400,
    sm_clock_max_mhz=1980,
    power_limit_watts=700.0,
    power_limit_default_watts=700.0,
    throttle_mask=0x4,
    others_bytes=2**30,
    others_share=0.0,
)
"""As a large product leaves a healthy card: at its power limit."""


def of_processor(**changed: object) -> DeviceState:
    return DeviceState(seconds=10.0, processor=replace(QUIET, **changed))  # type: ignore[arg-type]


def of_card(**changed: object) -> DeviceState:
    launching = replace(QUIET, busy_seconds=25.0, own_seconds=1.0)  # others leave the host more than a core
    return DeviceState(seconds=10.0, processor=launching, cards=(replace(COOL, **changed),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (of_processor(), None),
        (of_processor(own_seconds=22.45), "other processes took 45%"),
        (of_processor(own_seconds=10.0, threads=1), None),  # what others use of free cores does no harm
        (of_processor(own_seconds=5.0, threads=1), "other processes took"),
        (of_processor(busy_seconds=28.0, own_seconds=28.0, stolen_seconds=12.0), "steal 30%"),
        (of_processor(held_seconds=6.0), "quota"),
        (of_processor(heat_events=3), "heat"),
        (DeviceState(seconds=0.05, processor=A_TICK_OFF), None),
        (DeviceState(seconds=10.0), None),
    ],
)
def test_a_processor(state: DeviceState, word: str | None) -> None:
    doubts = state.doubts(CPU)
    assert (doubts == ()) if word is None else any(word in doubt for doubt in doubts)
    assert DeviceState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (of_card(), None),
        (of_card(throttle_mask=0x4 | 0x20), "throttled: heat"),
        (of_card(throttle_mask=0x80), "power brake"),
        (of_card(sm_clock_mhz=400), None),  # laptops run so at their usual power
        (of_card(power_limit_watts=400.0), "power limit of 400 W in place of 700 W"),
        (of_card(others_share=0.45), "another process used 45%"),
        (of_card(memory_errors=1), "ECC"),
        (of_card(others_share=None, throttle_mask=None), None),
        (of_card(others_share=None, others_bytes=1 * GIB), None),
        (of_card(others_share=None, others_bytes=30 * GIB), "another process held 30.00 GiB"),
        (of_card(others_share=0.0, others_bytes=30 * GIB), None),
        (of_card(power_limit_watts=800.0), "power limit of 800 W in place of 700 W"),
        (replace(of_card(), processor=replace(QUIET, heat_events=3)), None),
        (replace(of_card(), processor=replace(QUIET, own_seconds=1.0)), "the host launches late: other processes took"),
    ],
)
def test_a_card(state: DeviceState, word: str | None) -> None:
    doubts = state.doubts(H100)
    assert (doubts == ()) if word is None else any(word in doubt for doubt in doubts)
    assert DeviceState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_limit_that_is_part_of_the_hardware_is_no_surprise() -> None:
    assert of_card(power_limit_watts=400.0).doubts(replace(H100, power_limit_watts=400)) == ()


def test_ranks_of_one_processor_are_not_others_to_each_other() -> None:
    half = ProcessorState(cores=4, threads=2, busy_seconds=40.0, own_seconds=19.5, stolen_seconds=0.0)
    both = together([DeviceState(seconds=10.0, processor=half)] * 2)
    assert both is not None and both.processor is not None
    assert (both.processor.own_seconds, both.processor.threads) == (39.0, 4) and both.doubts(CPU) == ()


def test_one_disturbed_card_disturbs_its_group() -> None:
    group = together([of_card(), None, of_card(others_share=0.9)])
    assert group is not None and len(group.cards) == 2 and len(group.doubts(H100)) == 1
    assert together([None, None]) is None
