"""What is remembered of an operation is what it gives: formats, aliases, and nothing where data decides."""

from __future__ import annotations

import pytest
import torch
from test_trace import GQA, MIXTURE, history, traced

from autofit.catalog.models import Model
from autofit.estimate.kernels.scratch import Held
from autofit.estimate.memory.memory_trace import MemoryTrace
from autofit.estimate.tracing import results
from autofit.estimate.tracing.recorder import Recorder, without_data
from autofit.techniques import complete, parse


def all_of(trace: MemoryTrace) -> object:
    return history(trace), trace.work, trace.labels.keys(), trace.outside_allocator


@pytest.mark.parametrize(
    ("of", "text"),
    [
        (GQA, "method=qlora,precision=bf16,checkpointing=selective"),
        (GQA, "method=lora,precision=bf16,checkpointing=offload,attention=eager"),
        (MIXTURE, "method=full,precision=bf16,checkpointing=every-2"),
    ],
)
def test_a_trace_from_what_is_remembered_is_the_trace(of: Model, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, layers = complete(parse(text)), (0, 1, 2)
    monkeypatch.setattr(results, "_repeats", lambda func, operands: False)
    monkeypatch.setattr(results, "_KNOWN", {})
    plain = traced(config, of, layers)
    assert not results._KNOWN
    monkeypatch.undo()
    monkeypatch.setattr(results, "_KNOWN", {})
    first = traced(config, of, layers)
    remembered = len(results._KNOWN)
    again = traced(config, of, layers)
    assert 0 < remembered == len(results._KNOWN)
    assert all_of(plain) == all_of(first) == all_of(again)


def test_views_share_their_operands_storage_and_own_results_share_none() -> None:
    with without_data():
        base = torch.empty(6, 4)
        with Recorder(lambda name, args: Held()):
            views = [base.t()[1:] for _ in range(2)]
            sums = [base + 1 for _ in range(2)]
            in_place = [base.add_(1) for _ in range(2)]
    for view in views:
        assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
        assert (view.shape, view.stride(), view.storage_offset()) == ((3, 6), (1, 4), 1)
    assert len({t.untyped_storage()._cdata for t in (base, *sums)}) == 3
    assert all(result is base for result in in_place)


def test_what_data_decides_is_not_remembered() -> None:
    with without_data():
        mask, values = torch.empty(8, dtype=torch.bool), torch.empty(8)
        with (
            Recorder(lambda name, args: Held()),
            pytest.raises(Exception, match=r"nonzero|index|dynamic"),
        ):
            values[mask]
    assert not any(key[0] is torch.ops.aten.nonzero.default for key in results._KNOWN)


def test_equal_numbers_of_other_types_are_other_operands() -> None:
    with without_data():
        count = torch.empty(4, dtype=torch.long)
        with Recorder(lambda name, args: Held()):
            dtypes = [(count * factor).dtype for factor in (2, 2.0, 2, 2.0)]
    assert dtypes == [torch.int64, torch.float32] * 2
