"""The optimizer's part: layers that stand for others change no byte, and flat buffers hold no parameters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_trace import GQA, MIXTURE, TIED, history, job

from autofit.catalog.models import Model, shape
from autofit.estimate.kernels.cuda_kernels import cuda_scratch
from autofit.estimate.memory.events import Updates
from autofit.estimate.memory.memory_trace import Category
from autofit.estimate.memory.symbolic_sizes import RANK, SymbolicSizes
from autofit.estimate.time.op_costs import Works
from autofit.estimate.tracing.update import trace_updates
from autofit.techniques import complete, parse
from autofit.techniques.axes.optimizer import OPTIMIZERS

MODELS = {"gqa": GQA, "tied": TIED, "mixture": MIXTURE}
CASES = [
    ("gqa", "method=full,precision=bf16-mixed,optimizer=adamw"),
    ("gqa", "method=full,precision=bf16,optimizer=adamw-8bit"),
    ("gqa", "method=qlora,precision=bf16,optimizer=paged-adamw-8bit"),
    ("tied", "method=full,precision=bf16,optimizer=adafactor"),
    ("tied", "method=lora,precision=bf16-mixed,optimizer=adamw-foreach,targets=attention"),
    ("mixture", "method=full,precision=bf16,optimizer=lion-8bit"),
]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_layers_that_stand_for_others_give_the_update_of_them_all(name: str, text: str) -> None:
    def traced(of: Model, *, exact: bool) -> object:
        trace = trace_updates(complete(parse(text)), job(of), cuda_scratch, exact=exact)
        return history(trace), [len(w) for w in trace.work.values()], trace.outside_allocator

    assert traced(MODELS[name], exact=False) == traced(MODELS[name], exact=True)


def states_and_peak(text: str, flat: float | None) -> tuple[int, int]:
    """Bytes of the states, and the most that an update with states takes beside them."""
    found = Updates.of(trace_updates(complete(parse(text)), job(GQA), cuda_scratch, flat=flat))
    later, sizes = found.second, found.storages.sizes.at(1, 1)
    states = int(sizes[found.storages.categories == Category.OPTIMIZER].sum())
    return states, int(np.cumsum(later.signs * sizes[later.storages]).max(initial=0))


def test_a_flat_buffer_has_no_embeddings_with_states_of_their_own() -> None:
    parameters = shape(GQA).parameters
    states, _ = states_and_peak("method=full,precision=bf16,optimizer=adamw-8bit", math.inf)
    assert states == pytest.approx(2 * (1 + 4 / 256) * parameters, abs=1024)
    apart, _ = states_and_peak("method=full,precision=bf16,optimizer=adamw-8bit", None)
    assert apart > states + 5 * shape(GQA).embedding_parameters


def test_flat_buffers_are_updated_one_after_another() -> None:
    text, parameters = "method=full,precision=bf16,optimizer=adamw-foreach", shape(GQA).parameters
    one_states, one_peak = states_and_peak(text, math.inf)
    states, peak = states_and_peak(text, parameters / 4)
    assert states == pytest.approx(one_states, rel=1e-3) and one_states == pytest.approx(4 * parameters, rel=1e-3)
    assert peak == pytest.approx(one_peak / 4, rel=0.01)


@pytest.mark.parametrize("optimizer", [name for name, kind in OPTIMIZERS.items() if kind.by_element])
@pytest.mark.parametrize("rank", [1, 24, 256])
def test_of_optimizers_that_go_by_element_one_trace_serves_every_rank(optimizer: str, rank: int) -> None:
    config = complete(parse(f"method=lora,precision=bf16-mixed,optimizer={optimizer},rank={rank}"))
    of_rank = trace_updates(config, job(GQA), cuda_scratch)
    of_all = trace_updates(config.replace(rank=RANK), job(GQA), cuda_scratch)
    exact, found = Updates.of(of_rank), Updates.of(of_all, SymbolicSizes.of)
    assert found.storages.sizes.at(1, rank).tolist() == exact.storages.sizes.at(1, 1).tolist()
    for name in ("first", "second"):
        assert [getattr(found, name).storages.tolist(), getattr(found, name).signs.tolist()] == [
            getattr(exact, name).storages.tolist(),
            getattr(exact, name).signs.tolist(),
        ]
    assert found.storages.categories.tolist() == exact.storages.categories.tolist()
    (by_rank,), (by_all,) = ([Works.of(w) for w in trace.work.values()][1:] for trace in (of_rank, of_all))
    for amounts in ("flops", "bytes", "made", "kinds"):
        of_costs = getattr(by_all.at(1, rank), amounts), getattr(by_rank.at(1, 1), amounts)
        assert of_costs[0].tolist() == of_costs[1].tolist(), amounts
