"""What it costs the host to launch one operation, as eager transformers with PEFT pays it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autofit.catalog.models import Model
from autofit.core.device.work_kinds import LAUNCH
from autofit.core.lattice import Config
from autofit.core.workload import Workload
from autofit.probe.bench import Bench
from autofit.techniques import Job, complete
from autofit.training.build import build

TINY = Model(
    name="tiny-llama",
    config={
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 256,
    },
    source="a decoder whose operations have next to nothing to do",
    parameters=None,
)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that a trace counts: all but views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


def measure(bench: Bench, job: Job) -> Iterator[dict[str, float]]:
    """Seconds per operation of a decoder too small to take any time itself, with adapters on every layer."""
    workload = Workload(model=TINY.name, model_digest=TINY.digest, seq_len=8, global_batch=1)
    tiny = Job(model=TINY, workload=workload, hardware=job.hardware, stack=job.stack)
    config = complete({"method": "lora", "precision": "fp32", "micro_batch": 1, "checkpointing": "none"})
    yield {LAUNCH: per_operation(tiny, config, bench.device, bench.timed)}


def per_operation(
    tiny: Job, config: Config, device: torch.device, seconds: Callable[[Callable[[], None]], float]
) -> float:
    """Seconds per operation of the fastest of a dozen micro-steps of 8 tokens; `seconds` times one."""
    step = build(config, tiny, device)
    tokens = torch.randint(step.vocabulary, (1, 8), device=device)
    ((inputs, labels),) = step.split(tokens)

    def micro_step() -> None:
        step.micro_step(inputs, labels, 8, last=True)

    micro_step()
    counter: _Counter
    with _Counter() as counter:  # type: ignore[no-untyped-call]
        micro_step()
    fastest = min(seconds(micro_step) for _ in range(12))
    return fastest / counter.count
