"""The plots of a replay's results: how every method approaches the best of a problem, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from replay_page import PLOTS
from replay_verdicts import JSON, OURS, scores
from replay_words import name_of

COLOURS = {OURS: "#D55E00", "optuna": "#0072B2", "deepspeed": "#009E73", "": "#AA4499"}
"""A method's colour by how its name begins: Okabe and Ito's, with a purple darker than theirs for the rules of
practice. Colour-blind readers can tell them apart, and every line is labelled."""
DASHES = (
    "solid",
    (0, (5, 1.5)),
    (0, (1, 1.2)),
    (0, (4, 1.2, 1, 1.2)),
    (0, (8, 2)),
    (0, (2, 2)),
    (0, (6, 1, 1, 1, 1, 1)),
)
"""They tell methods of one colour apart."""
LEAST = 0.005
"""Smaller distances are drawn as this one: the axis is logarithmic, and the best itself is at distance 0."""
MISSING = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, LEAST)
NEAR = 0.01
"""The target, drawn as a line."""
STEPS = (1, 2, 5)
"""Ticks within each power of ten."""
LABEL_GAP = 0.062
"""Least distance between two names, as a share of the axes' height."""
SETTINGS = {
    "svg.hashsalt": "autofit",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial"],
    "font.size": 8,
}
"""They make the same picture the same file, and keep text as text."""
LONG = re.compile(r"\d+\.\d{3,}")
"""Numbers more exact than a picture needs, which would be half of the file."""


def svg(problem: JSON, kind: str) -> bytes:
    """One plot, `kind` being one of `PLOTS`, of a problem that some method has run."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        drawn(problem, kind).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return LONG.sub(lambda long: f"{float(long[0]):.2f}", buffer.getvalue().decode()).encode()


def drawn(problem: JSON, kind: str) -> Figure:
    """The same plot as a figure, before it is written."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    ways = {name: _way(score["trajectory"], kind) for name, score in scores(problem).items()}
    dressed = _dressed(ways)
    for name, (places, band) in ways.items():
        colour, dash = dressed[name]
        at, (median,) = _where_it_changes(places, [band["median"]])
        own = name == OURS
        axes.step(at, median, where="post", color=colour, linestyle=dash, lw=_width(name), zorder=4 if own else 3)
        if own:
            at, between = _where_it_changes(places, [band["p10"], band["p90"]])
            axes.fill_between(at, *between, step="post", color=colour, alpha=0.15, linewidth=0, zorder=2)
    _scales(axes, next(iter(ways.values()))[0], kind)
    _labels(axes, {name: band["median"] for name, (_, band) in ways.items()}, dressed)
    axes.set_title(f"{name_of(problem)}: {PLOTS[kind][0].lower()}{PLOTS[kind][1:]}", loc="left", fontsize=10)
    return figure


def _way(trajectory: JSON, kind: str) -> tuple[Sequence[float], Mapping[str, Sequence[float]]]:
    """Places on the horizontal axis, and the shares there."""
    if kind == "seconds":
        return trajectory["seconds"], trajectory["speed_by_seconds"]
    band = trajectory[kind]
    return range(1, len(band["median"]) + 1), band


def _missing(share: float) -> float:
    return max(LEAST, 1.0 - share)


def _where_it_changes(
    places: Sequence[float], bands: Sequence[Sequence[float]]
) -> tuple[list[float], list[list[float]]]:
    """The first place, the last, and those in between where a band steps; with what is missing there in each band."""
    columns = list(zip(*([_missing(share) for share in band] for band in bands), strict=True))
    last = len(places) - 1
    kept = [n for n, column in enumerate(columns) if n in (0, last) or column != columns[n - 1]]
    return [places[n] for n in kept], [[columns[n][band] for n in kept] for band in range(len(bands))]


def _width(name: str) -> float:
    return 2.8 if name == OURS else 1.6 if name.startswith(OURS) else 1.1


def _dressed(names: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Colour and dash of every method."""
    used: dict[str, int] = {}
    dressed = {}
    for name in names:
        family = next(start for start in COLOURS if name.startswith(start))
        number = used[family] = used.get(family, -1) + 1
        dressed[name] = COLOURS[family], DASHES[number % len(DASHES)]
    return dressed


def _scales(axes: Axes, places: Sequence[float], kind: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(places[0], places[-1])
    axes.set_ylim(1.15, 0.9 * LEAST)
    powers = range(-3, 9)
    ticks = [step * 10.0**power for power in powers for step in STEPS if places[0] <= step * 10.0**power <= places[-1]]
    if kind != "seconds" and places[-1] not in ticks:
        ticks.append(places[-1])
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_major_locator(FixedLocator(MISSING))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.axhline(NEAR, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    axes.grid(alpha=0.3)
    axes.set_xlabel("seconds of trials" if kind == "seconds" else "trials")
    axes.set_ylabel(
        "missing share of the frontier's hypervolume" if kind == "hypervolume" else "slower than the table's best"
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _percent(missing: float, _: object) -> str:
    return f"\N{LESS-THAN OR EQUAL TO} {LEAST:.1%}" if missing == LEAST else f"{missing:.0%}"


def _labels(axes: Axes, medians: Mapping[str, Sequence[float]], dressed: Mapping[str, tuple[str, Any]]) -> None:
    """Every method's name beside the end of its line, with a sample of the line; of methods that end together, the one
    that got there earlier is higher."""
    order = sorted(medians, key=lambda name: (-medians[name][-1], -sum(medians[name])))
    ends = [_height(axes, medians[name][-1]) for name in order]
    for name, end, height in zip(order, ends, spread_out(ends), strict=True):
        colour, dash = dressed[name]
        beside = {"transform": axes.transAxes, "color": colour, "clip_on": False}
        axes.plot([1.0, 1.03], [end, height], linewidth=0.4, **beside)
        axes.plot([1.03, 1.09], [height, height], linestyle=dash, linewidth=_width(name), **beside)
        weight = "bold" if name == OURS else "normal"
        axes.text(1.1, height, name, va="center", color=colour, fontweight=weight, transform=axes.transAxes)


def _height(axes: Axes, share: float) -> float:
    """The height of a share in the axes, from 0 at the bottom to 1 at the top."""
    point = axes.transData.transform((axes.get_xlim()[0], _missing(share)))
    return float(axes.transAxes.inverted().transform(point)[1])


def spread_out(heights: Sequence[float], gap: float = LABEL_GAP) -> list[float]:
    """Heights, from the highest down, moved just enough to keep `gap` between them and the lowest at 0 or above."""
    placed: list[float] = []
    for height in heights:
        placed.append(min(height, placed[-1] - gap) if placed else height)
    lowest = 0.0
    for number in reversed(range(len(placed))):
        placed[number] = max(placed[number], lowest)
        lowest = placed[number] + gap
    assert all(above - below >= gap - 1e-9 for above, below in pairwise(placed))
    return placed
