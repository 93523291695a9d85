"""What the recorder sees, and what it refuses to see."""

from __future__ import annotations

import pytest
import torch

from autofit.estimate.kernels.scratch import Held
from autofit.estimate.tracing.recorder import NotTraced, Recorder, without_data


def recorder() -> Recorder:
    return Recorder(lambda name, args: Held())


def test_an_operation_that_needs_data_is_named_and_not_run() -> None:
    library = torch.library.Library("autofit_test", "DEF")
    library.define("needs_data(Tensor x) -> Tensor")
    library.impl("needs_data", lambda x: x + 1, "CPU")
    with pytest.raises(NotTraced, match=r"autofit_test\.needs_data.*without data"), without_data(), recorder():
        torch.ops.autofit_test.needs_data(torch.empty(4))


def test_storages_live_from_their_operation_until_they_are_let_go() -> None:
    seen = recorder()
    with without_data():
        x = torch.empty(1000, 1000)
        seen.resident(x, None)
        with seen:
            seen.move("forward-1", 0)
            y = x + 1
            view = y[:10]
            del y
            z = x * 2
            del z
    assert [(s.bytes, s.freed is None) for s in seen.trace.storages] == [
        (4_000_000, True),
        (4_000_000, True),  # its view keeps it
        (4_000_000, False),
    ]
    del view


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_what_autocast_drops_is_freed_in_the_order_of_allocation(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: dict[int, torch.Tensor] = {}

    def clear() -> None:
        for number in order:
            del copies[number]

    monkeypatch.setattr(torch, "clear_autocast_cache", clear)
    seen = recorder()
    with without_data(), seen:
        seen.move("forward-1", 0)
        with torch.autocast("cpu", torch.bfloat16):
            copies |= {number: torch.empty(1000) for number in range(3)}
    assert [(event.storage, event.allocates) for _, event in seen.trace.events()] == [
        *((number, True) for number in range(3)),
        *((number, False) for number in range(3)),
    ]
    assert torch.clear_autocast_cache is clear


def test_a_fused_sgd_of_any_size_takes_nothing() -> None:
    seen = recorder()
    with without_data():
        parameter = torch.nn.Parameter(torch.empty(1 << 20, 1 << 14))  # 64 GiB, were it real
        optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
        parameter.grad = torch.empty_like(parameter)
        with seen:
            optimizer.step()
    assert sum(s.bytes for s in seen.trace.storages) < 1024
