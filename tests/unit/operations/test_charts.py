"""Charts of a frontier: an interactive figure, and a picture."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from unit.operations.made_trials import MADE, make_job, make_trial

from autofit.core.frontier import Frontier, Point
from autofit.core.outcome import Fits
from autofit.core.workload import METHODS
from autofit.export.charts import frontier_chart


def frontier(*methods: str, model: str | None = None, devices: int = 1) -> Frontier:
    """The hand-made frontier of some methods."""
    job = make_job()
    trials = [make_trial(values, outcome) for values, outcome in MADE]
    workload = job.workload if model is None else type(job.workload)(model=model, model_digest="0" * 16)
    workload = replace(workload, devices=devices)
    return Frontier.of(
        [
            Point(config=t.config, measurement=t.outcome.measurement, trial_id=i)
            for i, t in enumerate(trials)
            if isinstance(t.outcome, Fits) and t.config["method"] in methods
        ],
        hardware=job.hardware,
        workload=workload,
        stack=job.stack,
        trials=len(trials),
        out_of_memory=1,
    )


FRONTIERS = {
    "one method": frontier("lora"),
    "several methods": frontier(*METHODS),
    "one point": frontier("qlora"),
    "nothing": frontier(),
    "several devices": frontier("lora", devices=4),
}


@pytest.mark.parametrize("name", FRONTIERS)
def test_a_figure_shows_every_point_of_every_method(name: str) -> None:
    result = FRONTIERS[name]
    drawn = traces(result)
    assert [t["name"] for t in drawn] == [m for m in METHODS if any(p.method == m for p in result.points)]
    assert sum(len(t["x"]) for t in drawn) == len(result.points)
    for trace in drawn:
        points = [p for p in result.points if p.method == trace["name"]]
        assert list(trace["x"]) == [p.measurement.device_bytes / 2**30 for p in points]
        assert list(trace["y"]) == [p.measurement.tokens_per_second for p in points]
        assert all(str(p.config["checkpointing"]) in text for p, text in zip(points, trace["text"], strict=True))
        assert list(trace["error_y"]["array"]) == [p.tokens_per_second * (p.relative_spread or 0.0) / 2 for p in points]


def test_of_several_devices_a_figure_shows_the_speed_of_all_and_of_each() -> None:
    result = FRONTIERS["several devices"]
    (trace,) = traces(result)
    assert list(trace["customdata"]) == [p.measurement.tokens_per_second / 4 for p in result.points]
    assert "%{customdata:,.0f} of each device" in trace["hovertemplate"]
    assert "of each" not in traces(FRONTIERS["one method"])[0]["hovertemplate"]
    assert frontier_chart.axis_titles(result) == (
        "peak memory of each device, GiB",
        "tokens per second of all 4 devices",
    )


def traces(found: Frontier) -> list[dict[str, Any]]:
    return list(frontier_chart.figure(found).to_dict()["data"])


@pytest.mark.parametrize("name", FRONTIERS)
def test_a_picture_is_a_png(name: str) -> None:
    data = frontier_chart.png(FRONTIERS[name])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-12:] == b"\x00\x00\x00\x00IEND\xaeB`\x82"
    assert struct.unpack(">II", data[16:24]) == (1600, 1000)
    assert len(data) > 10_000


def test_pictures_of_different_frontiers_differ() -> None:
    assert len({frontier_chart.png(result) for result in FRONTIERS.values()}) == len(FRONTIERS)


def test_the_title_says_what_is_shown() -> None:
    assert frontier_chart.title(FRONTIERS["one method"]) == "smollm2-135m, 128 tokens x 4 sequences a step, on h100-80g"
    assert frontier_chart.title(FRONTIERS["several devices"]).endswith(", on 4 x h100-80g")


def test_charts_leave_no_trace_in_matplotlib() -> None:
    """A server that draws must not collect figures."""
    import matplotlib.pyplot as plt

    frontier_chart.png(FRONTIERS["several methods"])
    assert plt.get_fignums() == []
