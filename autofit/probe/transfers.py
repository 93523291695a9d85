"""How fast bytes go between an accelerator and its host's pinned memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from autofit.core.device.probe import WAYS, transfer
from autofit.core.units import MIB
from autofit.probe.bench import Bench


def measure(bench: Bench) -> Iterator[dict[str, float]]:
    """Bytes per second each way, as figures."""
    size = 128 * MIB
    on_device = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    for way, (into, source) in zip(WAYS, ((on_device, on_host), (on_host, on_device)), strict=True):
        copy = partial(into.copy_, source, non_blocking=True)
        yield {transfer(way): size / bench.seconds(copy, most=0.1)}
