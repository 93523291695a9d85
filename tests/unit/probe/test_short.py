"""The short probe by which devices of one type are compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autofit.core.device.probe import Probe, ProbePart
from autofit.core.device.state import CardState, DeviceState
from autofit.probe import short
from tests.tiny import CUDA_HARDWARE, STACK

BUSY = DeviceState(seconds=1.0, cards=(CardState(uuid="GPU-a", others_share=0.5),))


def made(seconds: float, state: DeviceState | None = None) -> Probe:
    part = ProbePart(name="products in bf16", seconds=0.1, seconds_per={"product/bf16/nt": seconds})
    return Probe(
        hardware=CUDA_HARDWARE,
        stack=STACK,
        model="m",
        shapes_key="0" * 16,
        parts=(part,),
        steps=(),
        seconds=1.0,
        recorded_at="2026-11-28T00:00:00+00:00",
        device_state=state,
    )


@pytest.mark.parametrize(
    ("measured", "waited", "best"),
    [
        ([made(1.0)], [], 1.0),
        ([made(2.0, BUSY), made(1.0)], [5.0], 1.0),
        ([made(2.0, BUSY), made(3.0, BUSY), made(1.5, BUSY)], [5.0, 20.0], 1.5),
    ],
)
def test_what_comes_and_goes_makes_no_device_slow(
    monkeypatch: pytest.MonkeyPatch, measured: list[Probe], waited: list[float], best: float
) -> None:
    pauses: list[float] = []
    probes: Iterator[Probe] = iter(measured)
    monkeypatch.setattr(short.time, "sleep", pauses.append)
    monkeypatch.setattr(short, "_measured", lambda hardware, stack: next(probes))
    probe = short.short_probe(CUDA_HARDWARE, STACK)
    assert probe.parts[0].seconds_per == {"product/bf16/nt": best} and pauses == waited
    assert next(probes, None) is None
