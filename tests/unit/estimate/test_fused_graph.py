"""What compiled code would allocate, on graphs small enough to be worked out by hand."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.core.lattice import Config
from autofit.estimate.assumptions import UNCOMPILED
from autofit.estimate.compiled import layers
from autofit.estimate.compiled.fused_graph import FusedGraph
from autofit.estimate.compiled.fusion import LONGEST_IN_REGISTERS
from autofit.estimate.estimator import Estimator
from autofit.estimate.kernels.scratch import common_scratch
from autofit.estimate.memory.memory_trace import MemoryTrace
from autofit.estimate.tracing.recorder import NotTraced, Recorder, RecorderOfCompiled, without_data
from autofit.estimate.tracing.traces import LOG, Traces
from autofit.techniques import complete
from tests.tiny import CUDA_HARDWARE, GPT2, LLAMA, QWEN2, QWEN3_MOE, job

ROWS, WIDTH = 32, 64
ACTIVATION = ROWS * WIDTH * 4
"""Bytes of a tensor in fp32."""
FULL: dict[str, Any] = {"method": "full", "micro_batch": 2, "precision": "fp32"}


def run(
    function: Callable[..., Any], *shapes: tuple[int, ...], beside: AbstractContextManager[Any] | None = None
) -> tuple[MemoryTrace, Any]:
    """What running the compiled function on operands of these shapes records, and its results; `beside` the recorder
    there may be another mode."""
    with without_data():
        operands = [torch.empty(shape) for shape in shapes]
        graph = make_fx(function)(*operands)
        recorder = Recorder(common_scratch)
        fused = FusedGraph(graph, recorder)
        with recorder, beside or nullcontext():
            recorder.move("forward-1", 0)
            results = fused(operands)
            recorder.close()
        assert not operands
    return recorder.trace, results


def made(trace: MemoryTrace) -> list[int]:
    """The bytes of every storage, in the order of allocation."""
    return [trace.storages[event.storage].bytes for _, event in trace.events() if event.allocates]


def peak(trace: MemoryTrace) -> int:
    used = most = 0
    for _, event in trace.events():
        size = trace.storages[event.storage].bytes
        used += size if event.allocates else -size
        most = max(most, used)
    return most


def test_what_is_between_two_products_is_written_over_the_first() -> None:
    trace, (result,) = run(
        lambda x, a, b: (torch.mm(torch.sigmoid(torch.mm(x, a) * 2.0) + 1.0, b),),
        *((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)),
    )
    assert made(trace) == [ACTIVATION, ACTIVATION]  # of each product; four operations between them make none
    assert result.shape == (ROWS, WIDTH)
    (work,) = [cost for costs in trace.work.values() for cost in costs if not cost.flops]
    assert work.moved == (ACTIVATION, ACTIVATION)


def test_a_checkpoint_around_compiled_code_sees_its_attention_and_not_its_products() -> None:
    """So trials with transformers before 5.23, whose checkpoints are around the layer: of what is to be kept, attention
    alone is."""

    def function(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = torch.mm(x, a).view(1, 1, ROWS, WIDTH)
        return (torch.ops.aten._scaled_dot_product_flash_attention(heads, heads, heads)[0],)

    class Checkpoint(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    trace, _ = run(function, (ROWS, WIDTH), (WIDTH, WIDTH), beside=Checkpoint())
    assert torch.ops.aten._scaled_dot_product_flash_attention.default in seen
    assert torch.ops.aten.mm.default not in seen
    assert made(trace)[0] == ACTIVATION and len(made(trace)) > 1, "the recorder sees both"


def test_what_leaves_the_graph_is_not_written_over() -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = torch.mm(x, a)
        return torch.mm(torch.relu(kept), b), kept

    trace, _ = run(function, (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))
    assert made(trace) == 3 * [ACTIVATION]


def test_results_that_read_the_same_come_from_one_kernel_which_overwrites_none_of_its_operands() -> None:
    """The operand is still read for the second result when the first is written."""

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        between = torch.mm(x, a)
        return torch.mm(torch.relu(between), b), torch.mm(torch.tanh(between), b)

    trace, _ = run(function, (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH))
    kernels = [cost for costs in trace.work.values() for cost in costs if not cost.flops]
    assert len(kernels) == 1
    assert peak(trace) == 3 * ACTIVATION  # the two that it makes, beside the one that it reads
    assert made(trace) == 5 * [ACTIVATION]


@pytest.mark.parametrize(("width", "stored"), [(LONGEST_IN_REGISTERS, False), (2 * LONGEST_IN_REGISTERS, True)])
def test_a_long_row_that_is_read_after_its_sum_is_stored(width: int, stored: bool) -> None:
    """The sum of six operands is costly to compute twice: a kernel that loops over a row reads it again."""

    def function(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = xs[0] + xs[1] + xs[2] + xs[3] + xs[4] + xs[5]
        product = total * total.sum(-1, keepdim=True)
        return torch.ops.prims.convert_element_type(product, torch.float16), *xs  # which may not be written over

    trace, _ = run(function, *6 * [(ROWS, width)])
    assert made(trace) == [ROWS * width * 4] * stored + [ROWS * width * 2]


def test_a_part_of_a_split_product_lives_as_long_as_the_product() -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = torch.mm(x, a).split(WIDTH // 2, -1)
        return (torch.mm(torch.sigmoid(gate) * up, b),)

    trace, (result,) = run(function, (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH // 2, WIDTH))
    assert made(trace) == [ACTIVATION, ACTIVATION // 2, ACTIVATION]
    assert peak(trace) == 3 * ACTIVATION // 2
    assert result.shape == (ROWS, WIDTH)


def test_what_is_not_known_to_allocate_is_not_traced() -> None:
    from torch._higher_order_ops import cond

    with without_data():
        operands = [torch.empty(ROWS, WIDTH)]
        graph = make_fx(lambda x: (cond(x.sum() > 0, torch.sin, torch.cos, (x,)),), tracing_mode="fake")(*operands)
        recorder = Recorder(common_scratch)
        fused = FusedGraph(graph, recorder)
        with recorder, pytest.raises(NotTraced, match="cond, whose memory is not known"):
            fused(operands)


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What was said of layers that torch could not compile: nothing, where a test does not expect it."""
    caplog.set_level(logging.INFO, logger=LOG.name)
    expected: list[str] = []
    yield expected
    said = [record.getMessage() for record in caplog.get_records("call")]
    said = [message for message in said if "is predicted as without compilation" in message]
    assert len(said) == len(expected) and all(map(operator.contains, said, expected)), said


def activations(config: Config, model: Any) -> int:
    """Bytes that a forward keeps for its backward, by the trace of every layer."""
    trace = Traces(job(model), exact=True).decoder(config, None, accumulates=False).events.trace
    return sum(
        storage.bytes
        for storage in trace.storages
        if storage.allocated
        and storage.freed
        and (storage.allocated.phase, storage.freed.phase) == ("forward", "backward")
    )


@pytest.mark.parametrize("model", [LLAMA, QWEN2, GPT2], ids=lambda model: model.name)
def test_a_compiled_layer_keeps_less(model: Any) -> None:
    eager, compiled = (activations(complete({**FULL, "compile": on}), model) for on in (False, True))
    assert 0.4 * eager < compiled < 0.95 * eager


def test_a_cards_rules_are_gone_when_a_processors_layers_are_compiled() -> None:
    """Softmax has a rule of its own on CUDA: the router of a mixture of experts uses it."""
    eager, compiled = (complete({**FULL, "compile": on}) for on in (False, True))
    Traces(replace(job(QWEN3_MOE), hardware=CUDA_HARDWARE)).decoder(compiled, None, accumulates=False)
    assert activations(compiled, QWEN3_MOE) < 0.95 * activations(eager, QWEN3_MOE)


def test_what_is_recomputed_is_not_kept_by_compiled_layers_either() -> None:
    kept, full = (
        activations(complete({**FULL, "compile": True, "checkpointing": value}), LLAMA) for value in ("none", "full")
    )
    assert full < 0.4 * kept


def test_layers_of_a_kind_are_alike_when_compiled_too() -> None:
    config = complete({**FULL, "compile": True})
    every, few = (Traces(job(LLAMA), exact=exact).decoder(config, None, accumulates=True) for exact in (True, False))
    assert sorted(made(every.events.trace)) == sorted(made(few.events.trace))


def test_where_torch_cannot_compile_a_layer_it_runs_as_it_is(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no graph")

    eager, compiled = (complete({**FULL, "compile": on}) for on in (False, True))
    expected = made(Traces(job(LLAMA)).decoder(eager, None, accumulates=True).events.trace)
    monkeypatch.setattr(layers, "FusedGraph", fails)
    assert made(Traces(job(LLAMA)).decoder(compiled, None, accumulates=True).events.trace) == expected
    for config in (eager, compiled):
        found = Estimator(job(LLAMA), None).estimate(config, memory_limit_bytes=1)
        assert found.uncompiled == (UNCOMPILED in found.assumptions) == (config is compiled)
    told += 2 * ["RuntimeError: no graph"]


@pytest.mark.parametrize(
    ("values", "uncompiled"),
    [({}, False), ({"compile": False}, False), ({"kernels": "liger"}, True), ({"sharding": "zero3"}, True)],
    ids=str,
)
def test_an_estimate_says_that_it_was_made_of_layers_as_they_are(values: dict[str, Any], uncompiled: bool) -> None:
    config = complete({**FULL, "compile": True, **values})
    two = replace(job(LLAMA), workload=replace(job(LLAMA).workload, devices=2)) if "sharding" in values else job(LLAMA)
    found = Estimator(two, None).estimate(config, memory_limit_bytes=1)
    assert found.memory_error == 0.0
    assert found.uncompiled == (UNCOMPILED in found.assumptions) == uncompiled


def test_the_recorder_is_not_compiled_with_what_it_records() -> None:
    assert RecorderOfCompiled.ignore_compile_internals() and not Recorder.ignore_compile_internals()
