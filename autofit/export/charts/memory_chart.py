"""The memory of a training step as a chart: the bytes alive at every event, by category, with the peak marked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autofit.core.outcome import ALL_PHASES
from autofit.core.units import GIB, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from autofit.core.workload import Workload
    from autofit.estimate.estimate import Estimate
    from autofit.estimate.memory.timeline import Timeline
    from autofit.techniques import Job

COLOURS = {
    "weights": "#0072B2",
    "gradients": "#D55E00",
    "optimizer": "#009E73",
    "activations": "#E69F00",
    "logits_and_loss": "#CC79A7",
    "temporaries": "#56B4E9",
    "fragmentation": "#F0E442",
}
"""Colour of each category, lowest first; from Okabe and Ito's palette, which colour-blind readers can tell apart."""
SHADES = {"forward": "#FFFFFF", "backward": "#DDDDDD", "optimizer": "#BBBBBB", "evaluation": "#999999"}


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of the optimizer step, or of the evaluation, that contains the peak."""

    events: NDArray[np.int64]
    """Indices of the events that are drawn, counted from the first event of the step."""
    levels: dict[str, NDArray[np.int64]]
    """Bytes held after each of these events, by category; at the peak they are those of the estimate's breakdown."""
    phases: tuple[tuple[str, int, int], ...]
    """(phase, first event, one past the last event), in order."""
    peak: int
    """Index of the event with the peak."""

    @property
    def totals(self) -> NDArray[np.int64]:
        """Bytes held after each event that is drawn, over all categories."""
        summed: NDArray[np.int64] = np.stack(list(self.levels.values())).sum(axis=0)
        return summed

    @property
    def peak_phase(self) -> str:
        return next(phase for phase, first, end in self.phases if first <= self.peak < end)


def course(line: Timeline, estimate: Estimate, *, of_heap: bool) -> StepMemory:
    """The step with the peak, from a timeline of two steps.

    What no event allocates is there throughout, in the category in which the breakdown counts it: library workspaces,
    paged states and, on a CPU (`of_heap`), what is offloaded and what the C library keeps. There the peak is that of
    the heap, of which the freed part is drawn as fragmentation; on a card fragmentation is left out, because no event
    says when the caching allocator grows.
    """
    from autofit.estimate.memory import heap
    from autofit.estimate.memory.memory_trace import Category

    signed = np.zeros((len(Category), len(line.sizes)), dtype=np.int64)
    signed[line.categories, np.arange(len(line.sizes))] = line.sizes
    levels = {category.name.lower(): signed[category].cumsum() for category in Category}
    if of_heap:
        levels["fragmentation"] = heap.resident(line) - line.totals
    totals = np.stack(list(levels.values())).sum(axis=0)
    peak = line.ready + int(totals[line.ready :].argmax())
    levels = {name: level + estimate.breakdown[name] - level[peak] for name, level in levels.items()}
    first, end = _step_with(peak, line)
    events = _highest(totals[first:end])
    edges = [0, *(np.flatnonzero(np.diff(line.phases[first:end])) + 1).tolist(), end - first]
    return StepMemory(
        events=events,
        levels={name: level[first:end][events] for name, level in levels.items()},
        phases=tuple((ALL_PHASES[line.phases[first + a]], a, b) for a, b in itertools.pairwise(edges)),
        peak=peak - first,
    )


def _step_with(peak: int, line: Timeline) -> tuple[int, int]:
    """The first event of the step, or of the evaluation, with the event `peak`, and one past its last. What precedes
    the first step, such as loading the weights, is not part of it."""
    updating = line.phases == ALL_PHASES.index("optimizer")
    edges = [line.ready, *(np.flatnonzero(updating[:-1] & ~updating[1:]) + 1).tolist(), len(line.sizes)]
    return next((a, b) for a, b in itertools.pairwise(edges) if peak < b)


def _highest(totals: NDArray[np.int64]) -> NDArray[np.int64]:
    """The event with the most bytes in each of about 1,500 stretches, and the first and last events."""
    edges = np.unique(np.linspace(0, len(totals), 1500 + 1).astype(np.int64))
    highest = [a + int(totals[a:b].argmax()) for a, b in itertools.pairwise(edges.tolist())]
    return np.unique([0, *highest, len(totals) - 1])


def title(estimate: Estimate, workload: Workload) -> str:
    return (
        f"Predicted memory of an optimizer step: {workload.model}, {workload.sequence} x "
        f"{workload.global_batch} sequences, on {estimate.hardware}"
    )


def figure(line: Timeline, estimate: Estimate, job: Job) -> Figure:
    """The bytes alive over the step with the peak, by category, below the memory limit if that is in sight."""
    from plotly.graph_objects import Figure

    of_heap = job.hardware.kind == "cpu"
    step = course(line, estimate, of_heap=of_heap)
    figure = Figure()
    for name, level in step.levels.items():
        figure.add_scatter(
            name=name.replace("_", " "),
            x=step.events.tolist(),
            y=np.round(level / GIB, 4).tolist(),
            stackgroup="alive",
            mode="lines",
            line={"width": 0.5, "color": COLOURS[name]},
            hovertemplate="%{y:.2f} GiB<extra>%{fullData.name}</extra>",
        )
    for phase, first, end in step.phases:
        figure.add_vrect(
            x0=first,
            x1=end,
            fillcolor=SHADES[phase],
            layer="below",
            line_width=0,
            annotation_text=phase,
            annotation_position="top left",
        )
    highest = int(step.totals.max())
    figure.add_annotation(
        x=step.peak,
        y=highest / GIB,
        text=f"peak: {format_bytes(highest)}, {step.peak_phase}",
        arrowhead=2,
        bgcolor="white",
        bordercolor="black",
    )
    top = highest
    if estimate.memory_limit_bytes <= 2 * highest:  # a higher one would flatten everything else
        top = max(highest, estimate.memory_limit_bytes)
        figure.add_hline(
            y=estimate.memory_limit_bytes / GIB,
            line_dash="dash",
            annotation_text=f"memory limit: {format_bytes(estimate.memory_limit_bytes)}",
            annotation_position="bottom right",
        )
    figure.update_layout(
        title={"text": title(estimate, job.workload), "subtitle": {"text": subtitle(estimate, step)}},
        xaxis_title="allocations and frees, in order",
        yaxis_title="resident, GiB" if of_heap else "alive, GiB",
        yaxis_range=[0, 1.15 * top / GIB],
        template="simple_white",
        hovermode="x unified",
        legend_traceorder="reversed",
    )
    return figure


def subtitle(estimate: Estimate, step: StepMemory) -> str:
    """The config and, where the device holds more than is drawn, how much."""
    categories = [name for name in estimate.breakdown if name not in step.levels]
    bytes_beyond = sum(estimate.breakdown[name] for name in categories)
    if not bytes_beyond:
        return str(estimate.config)
    return (
        f"{estimate.config}<br>with {format_bytes(bytes_beyond)} of {' and '.join(categories)} "
        f"{format_bytes(estimate.device_bytes)} on the device"
    )
