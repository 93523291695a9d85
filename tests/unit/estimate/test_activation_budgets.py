"""What compiled layers keep within a budget: in a step that really runs, and as it is predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.core.lattice import Config
from autofit.estimate.memory.symbolic_sizes import SymbolicSizes
from autofit.estimate.tracing import trace as tracing
from autofit.estimate.tracing import traces as traces_of
from autofit.estimate.tracing.traces import Traces
from autofit.techniques import complete
from autofit.techniques.axes.checkpointing import within_budget
from autofit.techniques.axes.compilation import missing_tool
from autofit.techniques.selective import BUDGETS
from autofit.training.build import build
from tests.tiny import CPU, CUDA_HARDWARE, job, model

WIDE = model("llama", hidden_size=64, intermediate_size=224, num_hidden_layers=1, num_attention_heads=4, head_dim=16)
BATCH, TOKENS = 4, 96
HERE = job(WIDE, seq_len=TOKENS, global_batch=BATCH)
LACKING = missing_tool("cpu")


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def really_kept(config: Config) -> int:
    """Bytes that compiled layers hold after a forward for their backward, weights left aside."""
    torch.manual_seed(0)
    step = build(config, HERE, CPU)
    inputs, labels = next(step.split(torch.randint(512, (BATCH, TOKENS))))
    with step.precision():
        loss = step.engine.root(inputs, labels)
    weights = {parameter.untyped_storage().data_ptr() for parameter in step.module.parameters()}
    kept: dict[int, int] = {}
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        for tensor in node.saved_tensors if "Compiled" in node.name() else ():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
    return sum(kept.values())


def predicted_to_be_kept(config: Config, traces: Traces) -> int:
    """Bytes that a forward keeps for its backward: of a trace's two, one."""
    trace = traces.decoder(config, None, accumulates=False).events.trace
    kept = [s for s in trace.storages if s.allocated and s.freed and s.freed.phase == "backward"]
    sizes = SymbolicSizes.of(s.bytes for s in kept if s.allocated and s.allocated.phase == "forward")
    return int(sizes.at(config.number("micro_batch"), int(config.get("rank") or 1)).sum()) // 2


def in_order(values: dict[str, Any]) -> list[Config]:
    """A config with each budget, the largest first, after one without."""
    base = complete({"micro_batch": BATCH, "loss": "chunked", **values, "compile": True})
    return [base, *(base.replace(checkpointing=value) for value in BUDGETS)]


@pytest.mark.slow
@pytest.mark.skipif(LACKING is not None, reason=f"nothing is compiled without {LACKING}")
@pytest.mark.parametrize(
    "values",
    [
        {"method": "full", "precision": "fp32"},
        {"method": "full", "precision": "bf16-mixed"},
        {"method": "lora", "precision": "fp32", "rank": 8},
    ],
    ids=str,
)
def test_the_less_a_budget_leaves_the_less_is_kept_and_it_is_predicted_to_the_byte(values: dict[str, Any]) -> None:
    plain, *budgeted = in_order(values)
    traces = Traces(HERE)
    kept, predicted = really_kept(plain), predicted_to_be_kept(plain, traces)
    saved = [kept - really_kept(config) for config in budgeted]
    assert 0 < saved[0] < saved[1] < saved[2]
    assert saved[2] > 0.5 * kept
    assert saved == [predicted - predicted_to_be_kept(config, traces) for config in budgeted]


def test_a_budget_is_kept_at_the_micro_batch_and_rank_of_the_config() -> None:
    """A trace at the primes, of which a rank is one, takes an adapter's products for the larger part."""
    plain, *_, least = in_order({"method": "lora", "rank": 8})
    traces = Traces(HERE)
    for micro_batch in (BATCH, 1):
        kept, whole = (predicted_to_be_kept(c.replace(micro_batch=micro_batch), traces) for c in (least, plain))
        assert kept < 0.5 * whole


@pytest.mark.parametrize(("precision", "micro_batch"), [("bf16", 1), ("fp32", BATCH)])
def test_a_card_is_predicted_to_keep_what_it_would_of_a_trace_at_the_configs_own_sizes(
    monkeypatch: pytest.MonkeyPatch, precision: str, micro_batch: int
) -> None:
    """Its attention kernels have several results, some of which are of one size at every micro-batch: of 16 bits flash
    attention, of fp32 the efficient one. Sequences are longer than layers are wide, so that attention is worth much."""
    on_card = job(WIDE, hardware=CUDA_HARDWARE, seq_len=4 * TOKENS, global_batch=BATCH)
    _, *budgeted = in_order({"method": "lora", "precision": precision, "rank": 8, "micro_batch": micro_batch})
    at_primes = [predicted_to_be_kept(config, Traces(on_card)) for config in budgeted]
    for module in (tracing, traces_of):
        monkeypatch.setattr(module, "at_primes", lambda config, job: config)
    assert at_primes == [predicted_to_be_kept(config, Traces(on_card)) for config in budgeted]


def test_a_budget_is_in_force_while_a_graph_is_divided_and_at_no_other_time() -> None:
    config: Any = torch._functorch.config
    seen = []

    def backend(graph: Any, operands: Any) -> Any:
        seen.append(config.activation_memory_budget)
        return graph

    for share in (0.25, 1.0):
        torch._dynamo.reset()
        torch.compile(torch.sin, backend=within_budget(share, backend))(torch.ones(2))
        assert config.activation_memory_budget == 1.0
    assert seen == [0.25, 1.0]
