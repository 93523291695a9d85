"""Charts of a frontier: a page that needs no network, and a picture."""

from __future__ import annotations

import struct
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from unit.operations.made_trials import MADE, make_job, make_trial

from autofit.export import charts
from autofit.frontier import Frontier, Point
from autofit.outcome import Fits
from autofit.workload import METHODS


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


class Page(HTMLParser):
    """What a page refers to, and the scripts that it holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [str(value) for name, value in attrs if name in ("src", "href", "data", "action")]


@pytest.mark.parametrize("name", FRONTIERS)
def test_a_page_needs_nothing_from_elsewhere(name: str) -> None:
    text = charts.html(FRONTIERS[name])
    page = Page(text)
    assert page.references == []
    assert page.tags[0] == "html"
    assert "script" in page.tags
    assert "link" not in page.tags and "iframe" not in page.tags
    assert len(text) > 1_000_000, "the plotting library is inside"


@pytest.mark.parametrize("name", FRONTIERS)
def test_a_page_shows_every_point_of_every_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FRONTIERS[name]
    shown = traces(found, monkeypatch)
    assert [t["name"] for t in shown] == [m for m in METHODS if any(p.method == m for p in found.points)]
    assert sum(len(t["x"]) for t in shown) == len(found.points)
    for trace in shown:
        own = [p for p in found.points if p.method == trace["name"]]
        assert list(trace["x"]) == [p.measurement.device_bytes / 2**30 for p in own]
        assert list(trace["y"]) == [p.measurement.tokens_per_second for p in own]
        assert all(str(p.config["checkpointing"]) in text for p, text in zip(own, trace["text"], strict=True))
        assert list(trace["error_y"]["array"]) == [charts.half_spread(p) for p in own]


def test_of_several_devices_a_page_shows_the_speed_of_all_and_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = FRONTIERS["several devices"]
    (trace,) = traces(found, monkeypatch)
    assert list(trace["customdata"]) == [p.measurement.tokens_per_second / 4 for p in found.points]
    assert "%{customdata:,.0f} of each device" in trace["hovertemplate"]
    assert "of each" not in traces(FRONTIERS["one method"], monkeypatch)[0]["hovertemplate"]
    assert charts.axis_titles(found) == ("peak memory of each device, GiB", "tokens per second of all 4 devices")


def traces(found: Frontier, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The traces of the page's figure."""
    import plotly.graph_objects as go

    figures: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(go.Figure, "to_html", lambda figure, **options: figures.append(figure) or "")
        charts.html(found)
    return list(figures[0].to_dict()["data"])


def test_a_models_name_cannot_break_the_page() -> None:
    text = charts.html(frontier("lora", model="</script><script>alert(1)</script>"))
    assert "<script>alert(1)" not in text


@pytest.mark.parametrize("name", FRONTIERS)
def test_a_picture_is_a_png(name: str) -> None:
    data = charts.png(FRONTIERS[name])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-12:] == b"\x00\x00\x00\x00IEND\xaeB`\x82"
    assert struct.unpack(">II", data[16:24]) == (1600, 1000)
    assert len(data) > 10_000


def test_pictures_of_different_frontiers_differ() -> None:
    assert len({charts.png(found) for found in FRONTIERS.values()}) == len(FRONTIERS)


def test_the_title_says_what_is_shown() -> None:
    assert charts.title(FRONTIERS["one method"]) == "smollm2-135m, 128 tokens x 4 sequences a step, on h100-80g"
    assert charts.title(FRONTIERS["several devices"]).endswith(", on 4 x h100-80g")


def test_charts_leave_no_trace_in_matplotlib() -> None:
    """A server that draws must not collect figures."""
    import matplotlib.pyplot as plt

    charts.png(FRONTIERS["several methods"])
    assert plt.get_fignums() == []
