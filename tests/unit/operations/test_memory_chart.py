"""The chart of a step's memory: what is drawn is what the estimate says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tiny import CPU_HARDWARE, CUDA_HARDWARE, STACK, job, model

from autofit.core.units import GIB, format_bytes
from autofit.estimate.estimate import Estimate
from autofit.export.charts import memory_chart
from autofit.operations import Estimation
from autofit.prediction.calibration import Calibration
from autofit.techniques import complete, parse
from autofit.techniques.axes.sharding import micro_steps_run

ACCUMULATED = "method=full,precision=bf16-mixed,micro_batch=2,checkpointing=full,loss=full"
ADAPTERS = "method=lora,precision=bf16,micro_batch=4,checkpointing=none,loss=full"
CASES = {
    "accumulated": (CUDA_HARDWARE, ACCUMULATED),
    "whole batch": (CUDA_HARDWARE, "method=full,precision=bf16,micro_batch=8,checkpointing=none,loss=chunked"),
    "the peak in the update": (
        CUDA_HARDWARE,
        "method=full,precision=bf16,micro_batch=8,checkpointing=full,loss=chunked,optimizer=adamw-foreach",
    ),
    "adapters": (CUDA_HARDWARE, ADAPTERS),
    "paged states": (CUDA_HARDWARE, f"{ACCUMULATED},optimizer=paged-adamw-8bit"),
    "a processor": (CPU_HARDWARE, ACCUMULATED),
    "adapters on a processor": (CPU_HARDWARE, ADAPTERS),
    "offloaded on a processor": (CPU_HARDWARE, f"{ACCUMULATED},offload=optimizer"),
}
"""Hardware and config."""
BATCH = 8


@cache
def asked(name: str) -> Estimation:
    # Wide enough for optimizer states in 8 bits, which smaller parameters do not have.
    of = model("llama", num_hidden_layers=6, hidden_size=128, vocab_size=1024)
    hardware, text = CASES[name]
    stack = replace(STACK, deepspeed="installed")
    return Estimation(
        calibration=Calibration.of(job(of, hardware=hardware, stack=stack, seq_len=64, global_batch=BATCH), None),
        config=complete(parse(text)),
        memory_limit_bytes=GIB,
    )


@cache
def estimate(name: str) -> Estimate:
    return asked(name).estimate()


def course(name: str) -> memory_chart.StepMemory:
    return memory_chart.course(asked(name).timeline(), estimate(name), of_heap=CASES[name][0] is CPU_HARDWARE)


@pytest.mark.parametrize("name", CASES)
def test_the_course_has_the_estimates_peak_and_what_it_holds(name: str) -> None:
    result, drawn = estimate(name), course(name)
    at = int(np.flatnonzero(drawn.events == drawn.peak)[0])
    held = {n: size for n, size in result.breakdown.items() if n in drawn.levels}
    assert {n: int(level[at]) for n, level in drawn.levels.items()} == held
    assert drawn.totals.max() == drawn.totals[at] == sum(held.values())
    assert result.phase_peaks[drawn.peak_phase] == max(result.phase_peaks.values())
    assert min(level.min() for level in drawn.levels.values()) >= 0


@pytest.mark.parametrize("name", CASES)
def test_nothing_on_the_device_is_left_out_but_what_no_event_shows(name: str) -> None:
    result, drawn = estimate(name), course(name)
    beyond = {"fragmentation", "context"} - set(drawn.levels)
    assert drawn.totals.max() == result.device_bytes - sum(result.breakdown[one] for one in beyond)
    if CASES[name][0] is CPU_HARDWARE:
        assert drawn.totals.max() == result.device_bytes == result.peak_allocated_bytes
        assert drawn.levels["fragmentation"].min() > 0
    else:
        paged = result.device_bytes - result.breakdown["context"] - result.peak_reserved_bytes
        assert drawn.totals.max() == result.peak_allocated_bytes + paged
        assert (paged > 0) == (name == "paged states")
        assert drawn.levels["optimizer"].min() >= paged, "small states beside the paged ones"


@pytest.mark.parametrize("name", CASES)
def test_the_course_is_one_step(name: str) -> None:
    drawn = course(name)
    micro_steps = 1 if asked(name).config["micro_batch"] == BATCH else 2
    assert [phase for phase, _, _ in drawn.phases] == ["forward", "backward"] * micro_steps + ["optimizer"]
    assert drawn.phases[0][1] == drawn.events[0] == 0
    assert drawn.phases[-1][2] == drawn.events[-1] + 1
    assert all(end == first for (_, _, end), (_, first, _) in zip(drawn.phases, drawn.phases[1:], strict=False))
    # A step begins with what outlives steps, and its activations and gradients are gone at its end, but for its tokens.
    assert drawn.levels["weights"][0] == drawn.levels["weights"][-1] > 0
    config, workload = asked(name).config, asked(name).job.workload
    micro_batch = config.number("micro_batch")
    rows = micro_batch * micro_steps_run(BATCH // micro_batch, config)
    assert drawn.levels["activations"][-1] == 8 * rows * workload.seq_len
    assert drawn.levels["gradients"][-1] == 0


def test_few_points_are_enough_and_none_is_lost() -> None:
    totals = np.random.default_rng(0).integers(0, 1000, size=20_000)
    drawn = memory_chart._highest(totals)
    assert len(drawn) <= 1502
    assert totals[drawn].max() == totals.max()
    assert (drawn[0], drawn[-1]) == (0, len(totals) - 1)
    assert memory_chart._highest(totals[:5]).tolist() == [0, 1, 2, 3, 4]


def figure(name: str) -> dict[str, Any]:
    result = asked(name)
    return dict(memory_chart.figure(result.timeline(), estimate(name), result.job).to_dict())


@pytest.mark.parametrize("name", ["accumulated", "paged states", "offloaded on a processor"])
def test_the_figure_stacks_what_is_held_and_marks_the_peak(name: str) -> None:
    drawn, shown = course(name), figure(name)
    assert [t["name"].replace(" ", "_") for t in shown["data"]] == list(drawn.levels)
    assert {t["stackgroup"] for t in shown["data"]} == {"alive"}
    stacked = np.sum([t["y"] for t in shown["data"]], axis=0)
    highest = int(drawn.totals.max())
    assert stacked.max() == pytest.approx(highest / GIB, abs=1e-3)
    (peak,) = (a for a in shown["layout"]["annotations"] if a["text"].startswith("peak"))
    assert format_bytes(highest) in peak["text"]
    assert peak["y"] == pytest.approx(stacked.max(), abs=1e-3)
    # Each category is rounded to 1e-4 GiB; unrounded, the peak's event is held to the estimate above.
    marked = stacked[list(shown["data"][0]["x"]).index(peak["x"])]
    assert marked == pytest.approx(stacked.max(), abs=5e-5 * len(drawn.levels))
    phases = [a["text"] for a in shown["layout"]["annotations"] if a is not peak]
    assert {"forward", "backward", "optimizer"} <= set(phases)


def test_a_figure_says_what_the_device_holds_beyond_what_is_drawn() -> None:
    for name, said in (("paged states", "of fragmentation and context"), ("a processor", None)):
        text = figure(name)["layout"]["title"]["subtitle"]["text"]
        whole = f"{format_bytes(estimate(name).device_bytes)} on the device"
        assert (said in text and text.endswith(whole)) if said else text == str(asked(name).config)
