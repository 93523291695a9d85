"""The memory of a training step as a chart: the bytes alive at every event, by category, with the peak marked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autofit.units import GIB, format_bytes

if TYPE_CHECKING:
    from autofit.estimate.estimate import Estimate
    from autofit.estimate.timeline import Timeline
    from autofit.workload import Workload

COLOURS = {
    "weights": "#0072B2",
    "gradients": "#D55E00",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "logits_and_loss": "#CC79A7",
    "temporaries": "#56B4E9",
}
"""From Okabe and Ito's palette, which colour-blind readers can tell apart."""
SHADES = {"forward": "#FFFFFF", "backward": "#DDDDDD", "optimizer": "#BBBBBB"}
POINTS = 1500
"""Approximate number of points per curve: each is the highest of its stretch of events, so that no peak is lost."""
LIMIT_IN_SIGHT = 2.0
"""The memory limit is drawn if it is at most this many times the peak; otherwise it would flatten everything else."""


@dataclass(frozen=True, slots=True)
class Course:
    """The memory of the optimizer step that contains the peak."""

    events: NDArray[np.int64]
    """Indices of the events that are drawn, counted from the first event of the step."""
    levels: dict[str, NDArray[np.int64]]
    """Bytes alive after each of these events, by category."""
    phases: tuple[tuple[str, int, int], ...]
    """(phase, first event, one past the last event), in order."""
    peak: int
    """Index of the event with the peak."""

    @property
    def totals(self) -> NDArray[np.int64]:
        """Bytes alive after each event that is drawn, over all categories."""
        summed: NDArray[np.int64] = np.stack(list(self.levels.values())).sum(axis=0)
        return summed

    @property
    def peak_phase(self) -> str:
        """The phase that the peak is in."""
        return next(phase for phase, first, end in self.phases if first <= self.peak < end)


def course(line: Timeline, found: Estimate) -> Course:
    """The step with the peak, from a timeline of two steps. Library workspaces, which no event allocates, count as
    temporaries."""
    from autofit.estimate.events import PHASES
    from autofit.estimate.tape import Category

    signed = np.zeros((len(Category), len(line.sizes)), dtype=np.int64)
    signed[line.categories, np.arange(len(line.sizes))] = line.sizes
    levels = signed.cumsum(axis=1)
    levels[Category.TEMPORARIES] += sum(found.breakdown[name] for name in COLOURS) - line.peak()
    first, end = _step_of_the_peak(line)
    totals = line.totals[first:end]
    drawn = _highest(totals)
    edges = [0, *(np.flatnonzero(np.diff(line.phases[first:end])) + 1).tolist(), end - first]
    return Course(
        events=drawn,
        levels={category.name.lower(): levels[category, first:end][drawn] for category in Category},
        phases=tuple((PHASES[line.phases[first + a]], a, b) for a, b in itertools.pairwise(edges)),
        peak=int(totals.argmax()),
    )


def _step_of_the_peak(line: Timeline) -> tuple[int, int]:
    """The step's first event and one past its last. Loading the weights, before the first step, is not part of it."""
    from autofit.estimate.events import PHASES
    from autofit.estimate.tape import Category

    updating = line.phases == PHASES.index("optimizer")
    start = max(int(np.argmax(line.categories != Category.WEIGHTS)) - 1, 0)
    edges = [start, *(np.flatnonzero(updating[:-1] & ~updating[1:]) + 1).tolist(), len(line.sizes)]
    peak = int(line.totals.argmax())
    return next((a, b) for a, b in itertools.pairwise(edges) if peak < b)


def _highest(totals: NDArray[np.int64]) -> NDArray[np.int64]:
    """The event with the most bytes in each of about `POINTS` stretches, and the first and last events."""
    edges = np.unique(np.linspace(0, len(totals), POINTS + 1).astype(np.int64))
    highest = [a + int(totals[a:b].argmax()) for a, b in itertools.pairwise(edges.tolist())]
    return np.unique([0, *highest, len(totals) - 1])


def title(found: Estimate, workload: Workload) -> str:
    """The chart's title."""
    return (
        f"Predicted memory of an optimizer step: {workload.model}, {workload.seq_len} tokens x "
        f"{workload.global_batch} sequences, on {found.hardware}"
    )


def html(line: Timeline, found: Estimate, workload: Workload) -> str:
    """A self-contained HTML page: it opens without a network."""
    import plotly.graph_objects as go

    drawn = course(line, found)
    figure = go.Figure()
    for name, level in drawn.levels.items():
        figure.add_scatter(
            name=name.replace("_", " "),
            x=drawn.events.tolist(),
            y=np.round(level / GIB, 4).tolist(),
            stackgroup="alive",
            mode="lines",
            line={"width": 0.5, "color": COLOURS[name]},
            hovertemplate="%{y:.2f} GiB<extra>%{fullData.name}</extra>",
        )
    for phase, first, end in drawn.phases:
        figure.add_vrect(
            x0=first,
            x1=end,
            fillcolor=SHADES[phase],
            layer="below",
            line_width=0,
            annotation_text=phase,
            annotation_position="top left",
        )
    highest = int(drawn.totals.max())
    figure.add_annotation(
        x=drawn.peak,
        y=highest / GIB,
        text=f"peak: {format_bytes(highest)}, {drawn.peak_phase}",
        arrowhead=2,
        bgcolor="white",
        bordercolor="black",
    )
    top = highest
    if found.memory_limit_bytes <= LIMIT_IN_SIGHT * highest:
        top = max(highest, found.memory_limit_bytes)
        figure.add_hline(
            y=found.memory_limit_bytes / GIB,
            line_dash="dash",
            annotation_text=f"memory limit: {format_bytes(found.memory_limit_bytes)}",
            annotation_position="bottom right",
        )
    figure.update_layout(
        title={"text": title(found, workload), "subtitle": {"text": subtitle(found)}},
        xaxis_title="allocations and frees, in order",
        yaxis_title="alive, GiB",
        yaxis_range=[0, 1.15 * top / GIB],
        template="simple_white",
        hovermode="x unified",
        legend_traceorder="reversed",
    )
    page: str = figure.to_html(include_plotlyjs=True, full_html=True)
    return page


def subtitle(found: Estimate) -> str:
    """The config, and what the device holds on top of the bytes that are alive."""
    beyond = found.breakdown["fragmentation"] + found.breakdown["context"]
    return (
        f"{found.config}<br>with {format_bytes(beyond)} of fragmentation and context "
        f"{format_bytes(found.device_bytes)} on the device"
    )
