"""The chart of a step's memory: what is drawn is what the estimate says."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tiny import CUDA_HARDWARE, job, model
from unit.operations.test_charts import Page

from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.export import memory_chart
from autofit.operations import Estimation
from autofit.operations.memory_deviations import memory_deviations
from autofit.techniques import complete, parse
from autofit.units import GIB, format_bytes

CONFIGS = {
    "accumulated": "method=full,precision=bf16-mixed,micro_batch=2,checkpointing=full,loss=full",
    "whole batch": "method=full,precision=bf16,micro_batch=8,checkpointing=none,loss=chunked",
    "the peak in the update": "method=full,precision=bf16,micro_batch=8,checkpointing=full,loss=chunked,"
    "optimizer=adamw-foreach",
    "adapters": "method=lora,precision=bf16,micro_batch=4,checkpointing=none,loss=full",
}
BATCH = 8


@cache
def asked(name: str) -> Estimation:
    of = model("llama", num_hidden_layers=6, hidden_size=128, vocab_size=1024)
    made = Estimator(job(of, hardware=CUDA_HARDWARE, seq_len=64, global_batch=BATCH), None)
    return Estimation(
        estimator=made,
        config=complete(parse(CONFIGS[name])),
        memory_limit_bytes=GIB,
        deviations=memory_deviations(CUDA_HARDWARE, None),
    )


@cache
def estimate(name: str) -> Estimate:
    return asked(name).estimate()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_course_has_the_estimates_peak_and_what_it_holds(name: str) -> None:
    found = estimate(name)
    drawn = memory_chart.course(asked(name).timeline(), found)
    at = int(np.flatnonzero(drawn.events == drawn.peak)[0])
    assert drawn.totals.max() == drawn.totals[at] == found.peak_allocated_bytes
    assert {n: int(level[at]) for n, level in drawn.levels.items()} == {
        n: size for n, size in found.breakdown.items() if n in memory_chart.COLOURS
    }
    assert drawn.peak_phase == max(found.phase_peaks, key=lambda phase: found.phase_peaks[phase])
    assert min(level.min() for level in drawn.levels.values()) >= 0


@pytest.mark.parametrize("name", CONFIGS)
def test_the_course_is_one_step(name: str) -> None:
    drawn = memory_chart.course(asked(name).timeline(), estimate(name))
    micro_steps = 1 if asked(name).config["micro_batch"] == BATCH else 2
    assert [phase for phase, _, _ in drawn.phases] == ["forward", "backward"] * micro_steps + ["optimizer"]
    assert drawn.phases[0][1] == drawn.events[0] == 0
    assert drawn.phases[-1][2] == drawn.events[-1] + 1
    assert all(end == first for (_, _, end), (_, first, _) in zip(drawn.phases, drawn.phases[1:], strict=False))
    # A step begins with what outlives steps, and its activations and gradients are gone at its end.
    assert drawn.levels["weights"][0] == drawn.levels["weights"][-1] > 0
    assert drawn.levels["activations"][-1] == drawn.levels["gradients"][-1] == 0


def test_few_points_are_enough_and_none_is_lost() -> None:
    totals = np.random.default_rng(0).integers(0, 1000, size=20_000)
    drawn = memory_chart._highest(totals)
    assert len(drawn) <= memory_chart.POINTS + 2
    assert totals[drawn].max() == totals.max()
    assert (drawn[0], drawn[-1]) == (0, len(totals) - 1)
    assert memory_chart._highest(totals[:5]).tolist() == [0, 1, 2, 3, 4]


def figure(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's figure."""
    import plotly.graph_objects as go

    figures: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(go.Figure, "to_html", lambda figure, **options: figures.append(figure) or "")
        memory_chart.html(asked(name).timeline(), estimate(name), asked(name).workload)
    return dict(figures[0].to_dict())


@pytest.mark.parametrize("name", ["accumulated", "whole batch"])
def test_the_page_stacks_what_is_alive_and_marks_the_peak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = estimate(name)
    shown = figure(name, monkeypatch)
    assert [t["name"].replace(" ", "_") for t in shown["data"]] == list(memory_chart.COLOURS)
    assert {t["stackgroup"] for t in shown["data"]} == {"alive"}
    stacked = np.sum([t["y"] for t in shown["data"]], axis=0)
    assert stacked.max() == pytest.approx(found.peak_allocated_bytes / GIB, abs=1e-3)
    (peak,) = (a for a in shown["layout"]["annotations"] if a["text"].startswith("peak"))
    assert format_bytes(found.peak_allocated_bytes) in peak["text"]
    assert peak["y"] == pytest.approx(stacked.max(), abs=1e-3)
    assert stacked[list(shown["data"][0]["x"]).index(peak["x"])] == stacked.max()
    phases = [a["text"] for a in shown["layout"]["annotations"] if a is not peak]
    assert {"forward", "backward", "optimizer"} <= set(phases)


def test_a_page_needs_nothing_from_elsewhere() -> None:
    text = memory_chart.html(asked("adapters").timeline(), estimate("adapters"), asked("adapters").workload)
    page = Page(text)
    assert page.references == []
    assert "link" not in page.tags and "iframe" not in page.tags
    assert "<script>alert(1)" not in text
    assert len(text) > 1_000_000, "the plotting library is inside"
