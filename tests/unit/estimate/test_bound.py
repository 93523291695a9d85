"""Memory by formula: how far it is from the trace where there is one, and what it says where there is none."""

from __future__ import annotations

import pytest
from tiny import CUDA_HARDWARE, STACK

from autofit.catalog.models import load
from autofit.estimate.bound import MEMORY_ERROR, bounded
from autofit.estimate.estimator import Estimator
from autofit.estimate.recorder import NotTraced
from autofit.techniques import Job, complete, parse
from autofit.units import GIB
from autofit.workload import Workload


def job(name: str) -> Job:
    of = load(name)
    workload = Workload(model=of.name, model_digest=of.digest, seq_len=2048, global_batch=8)
    return Job(model=of, workload=workload, hardware=CUDA_HARDWARE, stack=STACK)


@pytest.mark.parametrize("name", ["smollm2-360m", "qwen2.5-1.5b", "llama-3.1-8b"])
@pytest.mark.parametrize(
    "text",
    [
        "method=full,precision=bf16,checkpointing=none,micro_batch=2",
        "method=full,precision=bf16,checkpointing=full,micro_batch=4",
        "method=lora,precision=bf16,checkpointing=none,micro_batch=2",
        "method=qlora,precision=bf16,checkpointing=full,micro_batch=4",
    ],
)
def test_the_formula_errs_by_no_more_than_it_says(name: str, text: str) -> None:
    config, of = complete(parse(text)), job(name)
    traced = Estimator(of, None).estimate(config, memory_limit_bytes=80 * GIB)
    formula = bounded(config, of, memory_limit_bytes=80 * GIB, reason="a test")
    assert formula.device_bytes == sum(formula.breakdown.values())
    assert traced.device_bytes == pytest.approx(formula.device_bytes, rel=MEMORY_ERROR)


def test_what_cannot_be_followed_is_estimated_by_formula_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*arguments: object) -> None:
        tried.append(arguments)
        raise ValueError("the data decides")

    monkeypatch.setattr("autofit.estimate.estimator.trace_decoder", fails)
    estimator = Estimator(job("smollm2-360m"), None)
    config = complete(parse("method=full,precision=bf16,micro_batch=1"))
    with pytest.raises(NotTraced, match="the data decides"):
        estimator.trace(config)
    found = estimator.estimate(config, memory_limit_bytes=80 * GIB)
    assert found.memory_error == MEMORY_ERROR
    assert "ValueError: the data decides" in found.assumptions[0]
    assert found.tokens_per_second is None
    limit = int(found.device_bytes * (1 + MEMORY_ERROR / 2))
    assert not estimator.estimate(config, memory_limit_bytes=limit).fits
    assert len(tried) == 1
