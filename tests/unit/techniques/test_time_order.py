"""Every claim about what cannot be faster, against the operations of real training steps. Against measured times:
test_recorded_time_order.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from unit.techniques.test_memory_order import BATCH, MANY, VOCABULARY, make_job

from autofit.core.lattice import Config
from autofit.techniques import AXES, complete, only_slower, unsupported
from autofit.techniques.selective import SELECTIVE
from autofit.training.build import build
from tests.tiny import CPU

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm}


class Operations(TorchDispatchMode):
    """Counts the operations that run, and the matrix products among them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["all"] += 1
        self.counts["products"] += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))


def operations(config: Config) -> Counter[str]:
    """What one optimizer step of `config` runs."""
    torch.manual_seed(0)
    step = build(config, make_job(MANY), CPU)
    with Operations() as counter:
        step.run(torch.randint(VOCABULARY, (BATCH, MANY)))
    return counter.counts


def test_what_is_claimed_to_be_slower_runs_more_operations() -> None:
    claimed = 0
    for axis in AXES:
        configs = [complete({"micro_batch": 2, axis.name: than}) for than in {b for _, b in axis.slower}]
        for config in [c for c in configs if unsupported(c, make_job(MANY)) is None]:
            less = operations(config)
            for slower in [c for c in only_slower(config) if unsupported(c, make_job(MANY)) is None]:
                more = operations(slower)
                assert more["all"] > less["all"] and more["products"] > less["products"], f"{slower} against {config}"
                claimed += 1
    assert claimed >= 4


def test_a_claim_is_of_one_axis_and_none_is_made_of_compiled_configs() -> None:
    plain = complete({"micro_batch": 2, "precision": "bf16"})
    result = only_slower(plain)
    assert {c["checkpointing"] for c in result} == {*("offload", "full", "every-2", "every-4"), *SELECTIVE, "none"}
    assert {c.replace(checkpointing="none") for c in result} == {plain, plain.replace(mlp="tiled")}
    assert len(result) == 7
    assert only_slower(plain.replace(compile=True)) == ()
    assert {c["checkpointing"] for c in only_slower(plain.replace(checkpointing="every-2"))}.isdisjoint(SELECTIVE)
    assert [c["checkpointing"] for c in only_slower(plain.replace(checkpointing="full"))] == ["offload", "full"]
