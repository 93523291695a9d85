"""The short probe by which devices of one type are compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from unit.operations.made_trials import HARDWARE, STACK, make_probe

from autofit.core.device.probe import Probe, ProbePart
from autofit.core.device.state import CardState, DeviceState
from autofit.probe import short

BUSY = DeviceState(seconds=1.0, cards=(CardState(uuid="GPU-a", others_share=0.5),))


def made(seconds: float, state: DeviceState | None = None) -> Probe:
    part = ProbePart(name="products in bf16", seconds=0.1, seconds_per={"product/bf16/nt": seconds})
    return make_probe(part, state=state)


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
    probe = short.short_probe(HARDWARE, STACK)
    assert probe.parts[0].seconds_per == {"product/bf16/nt": best} and pauses == waited
    assert next(probes, None) is None
