"""How fast bytes go between an accelerator and its host, from pinned memory and from any other."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autofit.probe.bench import Bench

MOVED_BYTES = 128 * 1024**2
MOST_SECONDS = 0.1


def measure(bench: Bench) -> Iterator[dict[str, float]]:
    """Bytes per second each way, as figures: what a step waits for is still taken from data sheets."""
    on_device = torch.zeros(MOVED_BYTES, dtype=torch.uint8, device=bench.device)
    for name, pinned in (("pinned", True), ("not pinned", False)):
        on_host = torch.zeros(MOVED_BYTES, dtype=torch.uint8, pin_memory=pinned)
        for way, into, source in (("to the device", on_device, on_host), ("to the host", on_host, on_device)):
            taken = bench.seconds(lambda i=into, s=source: i.copy_(s, non_blocking=True), most=MOST_SECONDS)  # type: ignore[misc]
            yield {f"{way}, {name}, bytes per second": MOVED_BYTES / taken}
