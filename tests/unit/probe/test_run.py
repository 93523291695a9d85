"""A probe in a process of its own: the real measurements on tiny shapes, and parts that fail, hang or end it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import tiny_job, tiny_model
from tiny import STACK
from unit.probe import children

from autofit.catalog.models import load, shape
from autofit.core.device.probe import COLLECTIVES, OUT_OF_TIME, UPDATE_ON_HOST, Probe, ProbePart, collective
from autofit.core.device.work_kinds import KINDS, product
from autofit.core.errors import EnvironmentLacks
from autofit.core.lattice import Config
from autofit.estimate.time.guessed_rates import prior
from autofit.estimate.time.roofline import seconds
from autofit.prediction.probing import rates_of
from autofit.probe import bench as bench_module
from autofit.probe import ranks, real_step, updates
from autofit.probe import run as run_module
from autofit.probe.bench import Bench
from autofit.probe.products import _tensors_like, fitted, roofline
from autofit.probe.real_step import LEAST_ROUNDS, MOST_SECONDS, _enough
from autofit.probe.run import run
from autofit.techniques import Job
from autofit.trial.machine.detection import cpu

HERE = cpu()


def test_every_part_measures_what_predictions_need() -> None:
    """Real products, kernels and training steps, of a Llama so small that they take no time."""
    probe = run(tiny_model(layers=4), HERE, STACK)
    assert [part.failure for part in probe.parts] == [None] * len(probe.parts)
    assert set(KINDS) - set(probe.seconds_per) == {"update/8bit"}, "one kernel on accelerators only"
    assert all(rate > 0 for rate in probe.seconds_per.values())
    assert [step.layers for step in probe.steps] == [4, 2]
    guess = prior(HERE)
    assert guess is not None
    rates = rates_of(probe, guess)
    for step in probe.steps:
        assert step.work is not None and seconds(step.work, rates) > 0
    assert probe.device_state is not None and probe.device_state.processor is not None
    assert probe.device_state.processor.own_seconds > 0.0, "what the process used was read before it was gone"
    assert Probe.from_json(probe.to_json()) == probe


def test_a_part_that_fails_hangs_or_ends_the_process_is_reported_and_the_rest_goes_on() -> None:
    probe = run(tiny_model(), HERE, STACK, child=children.probe, silent_seconds=5.0)
    assert {part.name: part.failure for part in probe.parts} == {
        "first": None,
        "hangs": "its process ended: nothing was heard of it for 5 s",
        "dies": "its process ended: the driver has gone away",
        "fails": "RuntimeError: no such kernel",
        "last": None,
    }
    assert probe.seconds_per["launch/hangs"] == 1.0, "what it had measured counts"


def test_a_part_in_which_the_process_is_killed_may_be_measured_again() -> None:
    probe = run(tiny_model(), HERE, STACK, parts=["first"], child=children.killed)
    (part,) = probe.parts
    assert part.failure is not None and "it was killed" in part.failure
    assert probe.cut_short == ("first",)


@pytest.mark.parametrize(
    "failure",
    ["MemoryError: ", "RuntimeError: could not create a memory object", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc"],
)
def test_parts_that_ran_out_of_memory_may_be_measured_again(failure: str) -> None:
    part = ProbePart(name="first", seconds=1.0, failure=failure)
    made = replace(run(tiny_model(), HERE, STACK, parts=["first"], child=children.probe), parts=(part,))
    assert made.cut_short == ("first",)
    assert replace(made, parts=(replace(part, failure="RuntimeError: no such kernel"),)).cut_short == ()


def test_operands_begin_where_kernels_take_them() -> None:
    """torch's memory-efficient attention refuses others in fp16, for one."""
    bench = Bench(torch.device("cpu"))
    taken = [bench.take(torch.float16, bench.size // 5 + odd) for odd in (1, 3, 8, 30, 64, 101)]
    assert len({operand.data_ptr() for operand in taken}) > 3
    assert all(operand.data_ptr() % 16 == 0 for operand in taken)


def test_operands_are_those_of_another_layer_and_none_is_made_meanwhile() -> None:
    bench = Bench(torch.device("cpu"))
    small, large = bench.take(torch.float32, 64), bench.take(torch.float32, bench.size // 4)
    another, same = _tensors_like(bench, small), _tensors_like(bench, large)
    assert another().data_ptr() != another().data_ptr() and another().shape == small.shape
    assert same() is large


def test_the_buffer_is_larger_than_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "cache_bytes", lambda: 100 * 1024**2)
    monkeypatch.setattr(Bench, "room", lambda self: 1e12)
    assert Bench(torch.device("cpu")).size == 300 * 1024**2
    monkeypatch.setattr(Bench, "room", lambda self: 1e9)
    assert Bench(torch.device("cpu")).size == 96 * 1024**2, "no more memory than there is"


def test_a_process_that_ends_between_two_parts_costs_none() -> None:
    probe = run(tiny_model(), HERE, STACK, child=children.between)
    assert [(part.name, part.failure) for part in probe.parts] == [(name, None) for name in children.NAMES]


def leap(monkeypatch: pytest.MonkeyPatch, at: Callable[[object], bool]) -> None:
    """The clock leaps a day ahead at a report."""
    leapt, noted = [0.0], run_module._Progress._note

    def note(progress: run_module._Progress, report: Any) -> None:
        noted(progress, report)
        leapt[0] = 86400.0 if at(report) else leapt[0]

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + leapt[0]))
    monkeypatch.setattr(run_module._Progress, "_note", note)


def test_libraries_that_load_slowly_leave_the_parts_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    leap(monkeypatch, lambda report: isinstance(report, list))
    probe = run(tiny_model(), HERE, STACK, child=children.between, most_seconds=3600.0, loading_seconds=86400.0)
    assert [(part.name, part.failure) for part in probe.parts] == [(name, None) for name in children.NAMES]


def test_what_is_left_when_the_time_is_over_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    leap(monkeypatch, lambda report: getattr(report, "name", None) == children.NAMES[1])
    probe = run(tiny_model(), HERE, STACK, child=children.endless, most_seconds=3600.0)
    first, second, *others = probe.parts
    assert first.failure is None and second.failure == f"its process ended: {OUT_OF_TIME}"
    assert {part.failure for part in others} == {OUT_OF_TIME}
    assert [part.name for part in probe.parts] == children.NAMES


def test_a_device_on_which_nothing_can_begin_is_an_error() -> None:
    with pytest.raises(EnvironmentLacks, match=r"cannot be probed: .*No module named"):
        run(tiny_model(), HERE, STACK, child=children.absent)


def test_a_real_step_has_as_many_tokens_and_layers_as_there_is_room_for() -> None:
    model = shape(load("llama-3.1-8b"))
    (config,) = real_step.configs_for({}, accelerator=False)
    whole, fewer, least = (real_step.bytes_of(model, 1024, config, layers) for layers in (8, 4, 2))
    # 0.218 billion weights in a layer and 1.05 billion beside them, 1.5 GiB of logits, and what the layers keep.
    assert whole == pytest.approx(2 * (8 * 0.218e9 + 1.05e9) + 12 * 1024 * 128256 + 8 * 0.218e9, rel=0.01)
    for room, depths in ((1e12, [8, 2]), (whole - 1, [4, 1]), (fewer - 1, [2, 1])):
        assert real_step.sizes_for(model, (1024,), [config], room)[0] == (config, 1024, depths)
    with pytest.raises(MemoryError, match="out of memory: it takes"):
        real_step.sizes_for(model, (1024,), [config], least - 1)
    assert real_step.sizes_for(replace(model, layers=1), (1024,), [config], 1e12) == [(config, 1024, [1])]
    of_a_t4 = {product("bf16", "nt"): 2.0, product("fp32", "nt"): 1.0, product("fp16", "nt"): 0.1}
    mixed, _ = real_step.configs_for(of_a_t4, accelerator=True)
    assert mixed["precision"] == "fp16-mixed"
    assert real_step.bytes_of(model, 0, mixed, 8) > 2.4 * real_step.bytes_of(model, 0, config, 8)
    full, adapters = both = real_step.configs_for({}, accelerator=True)
    assert adapters == config
    # Gradients, and the head's once more.
    assert real_step.bytes_of(model, 0, full, 8) == pytest.approx(2 * (2 * (8 * 0.218e9 + 1.05e9) + 0.525e9), rel=0.01)
    many = real_step.bytes_of(model, 4096, full, 2)
    assert real_step.sizes_for(model, (4096, 1024), both, many)[0] == (full, 4096, [2, 1])
    assert real_step.sizes_for(model, (4096, 1024), both, many - 1)[0] == (full, 1024, [4, 1]), "fewer tokens"
    least = real_step.bytes_of(model, 1024, full, 2)
    assert real_step.sizes_for(model, (4096, 1024), both, least - 1)[0][0] == adapters, "as on a T4"


def test_a_real_step_that_runs_out_of_memory_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[int]] = []

    def measured(bench: Bench, job: Job, config: Config, depths: list[int]) -> Iterator[dict[str, float]]:
        tried.append(depths)
        yield {}
        if len(tried) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(real_step, "_measure", measured)
    monkeypatch.setattr(real_step, "TOKENS", ((128, 64), ()))
    bench, job = Bench(torch.device("cpu")), tiny_job(tiny_model(layers=8))
    (config,) = configs = real_step.configs_for({}, accelerator=False)
    assert list(real_step.measure(bench, job, configs)) == [{}, {}, {}]
    assert tried == [[8, 2], [4, 1], [2, 1]]
    tried.clear()
    monkeypatch.setattr(real_step, "sizes_for", lambda *arguments: [(config, 128, [8, 2]), (config, 64, [2, 1])])
    with pytest.raises(torch.OutOfMemoryError):
        list(real_step.measure(bench, job, configs))


def test_a_slow_step_is_run_once_and_a_fast_one_until_its_time_is_known() -> None:
    slow, usual, fast = [10.0, 3.0], [MOST_SECONDS / 2, 0.2], [0.01, 0.005]
    rounds = {name: next(n for n in range(20) if _enough([each] * n, 8)) for name, each in
              {"slow": slow, "usual": usual, "fast": fast}.items()}  # fmt: skip
    assert rounds == {"slow": 1, "usual": 1 + LEAST_ROUNDS, "fast": 9}


def test_rates_of_products_are_those_that_explain_the_times_and_never_nothing() -> None:
    samples = [(flops, moved, 1e-11 * flops + 1e-10 * moved) for flops, moved in ((1e9, 1e6), (1e8, 1e6), (1e7, 3e6))]
    assert fitted(samples) == pytest.approx((1e-11, 1e-10))
    assert roofline([(1e12, 1e8, 2e-3), (1e11, 1e8, 3e-4), (1e8, 1e8, 4e-5)]) == pytest.approx((2e-15, 4e-13))
    for noise in ((1.0, 2.0, 3.0), (3.0, 1.0, 0.1), (1.0, 1.0, 1.0)):
        rates = fitted([(f, b, by * 1e-3) for (f, b, _), by in zip(samples, noise, strict=True)])
        assert min(rates) > 0
    assert fitted(samples[:1])[0] > 0


def test_ranks_reduce_and_gather_and_one_that_fails_is_named() -> None:
    bench = Bench(torch.device("cpu"))
    rates = {name: rate for one in ranks.measure(bench, [dict(os.environ)] * 2) for name, rate in one.items()}
    assert set(rates) == {collective(name) for name in COLLECTIVES} and min(rates.values()) > 0
    with pytest.raises(RuntimeError, match=r"rank 1: .*the ranks cannot meet"):  # and not after its deadline
        list(ranks.measure(bench, [dict(os.environ), {**os.environ, "GLOO_DEVICE_TRANSPORT": "none"}]))


def test_the_hosts_update_is_measured() -> None:
    [(name, rate)] = next(updates.measure_on_host()).items()
    assert name == UPDATE_ON_HOST and rate > 0


def test_a_call_that_is_slow_once_is_as_fast_as_it_is_later(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, calls, now = Bench(torch.device("cpu")), iter([0.3]), [0.0]

    def call() -> None:
        now[0] += next(calls, 0.001)

    monkeypatch.setattr(bench_module, "clock", lambda: now[0])
    assert bench.seconds(call, most=0.01) == pytest.approx(0.001)
