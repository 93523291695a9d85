"""Keys of kept estimates: another one for whatever changes an estimate, the same for what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.operations.made_trials import OPTIONS, make_job

from autofit.estimate import identity
from autofit.estimate.identity import EstimateKeys
from autofit.techniques import Job, complete

CONFIG = complete({"method": "lora", "rank": 8})
Change = Callable[[Job], Job]


def key(job: Job) -> str:
    return EstimateKeys(job).of(CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        lambda job: make_job(replace(OPTIONS, model="smollm2-360m")),
        lambda job: replace(job, workload=replace(job.workload, seq_len=256)),
        lambda job: replace(job, workload=replace(job.workload, global_batch=8)),
        lambda job: replace(job, workload=replace(job.workload, lora_dropout=0.1)),
        lambda job: replace(job, workload=replace(job.workload, devices=2)),
        lambda job: replace(job, hardware=replace(job.hardware, name="a100-80g")),
        lambda job: replace(job, hardware=replace(job.hardware, capability="8.0")),
        lambda job: replace(job, hardware=replace(job.hardware, peak_flops=None)),
        lambda job: replace(job, stack=replace(job.stack, torch="2.14.0")),
        lambda job: replace(job, stack=replace(job.stack, liger_kernel="0.9.0")),
        lambda job: replace(job, expandable_segments=False),
    ],
)
def test_what_changes_an_estimate_changes_its_key(change: Change) -> None:
    job = make_job()
    assert key(change(job)) != key(job)


@pytest.mark.parametrize(
    "change",
    [
        lambda job: replace(job, workload=replace(job.workload, seed=1)),
        lambda job: replace(job, workload=replace(job.workload, model="a copy of it")),
        lambda job: replace(job, hardware=replace(job.hardware, memory_bytes=1, host_memory_bytes=1)),
        lambda job: replace(job, expandable_segments=True),
    ],
)
def test_what_changes_no_estimate_changes_no_key(change: Change) -> None:
    job = make_job()
    assert key(change(job)) == key(job)


def test_ranks_that_share_a_host_have_other_estimates_than_those_that_do_not() -> None:
    job = make_job()
    two = replace(job, workload=replace(job.workload, devices=2))
    apart, together = (
        replace(two, hardware=replace(job.hardware, host_memory_bytes=1, count=count)) for count in (1, 2)
    )
    assert key(apart) != key(together)


def test_configs_and_versions_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job()
    keys = EstimateKeys(job)
    found = {
        keys.of(complete({"method": "lora", "rank": rank, "compile": on})) for rank in (8, 16) for on in (True, False)
    }
    monkeypatch.setattr(identity, "ESTIMATOR_VERSION", identity.ESTIMATOR_VERSION + 1)
    found.add(key(job))
    assert len(found) == 5
    assert all(len(one) == 64 and set(one) <= set("0123456789abcdef") for one in found)
