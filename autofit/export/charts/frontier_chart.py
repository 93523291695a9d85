"""The frontier as a chart: an interactive figure, and a PNG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from autofit.core.frontier import Frontier, by_method
from autofit.core.units import GIB, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = {"full": "#0072B2", "lora": "#D55E00", "qlora": "#009E73"}
"""From Okabe and Ito's palette, which colour-blind readers can tell apart."""


def title(frontier: Frontier) -> str:
    w = frontier.workload
    devices = "" if w.devices == 1 else f"{w.devices} x "
    return f"{w.model}, {w.sequence} x {w.global_batch} sequences a step, on {devices}{frontier.hardware.name}"


def axis_titles(frontier: Frontier) -> tuple[str, str]:
    """Titles of the memory and throughput axes. With several devices, memory is per device and throughput the total."""
    devices = frontier.workload.devices
    if devices == 1:
        return "peak device memory, GiB", "tokens per second"
    return "peak memory of each device, GiB", f"tokens per second of all {devices} devices"


def figure(frontier: Frontier) -> Figure:
    """Throughput against memory, a line for each method."""
    from plotly.graph_objects import Figure

    figure, devices = Figure(), frontier.workload.devices
    memory_title, speed_title = axis_titles(frontier)
    per_device = "" if devices == 1 else " (%{customdata:,.0f} of each device)"
    for method, points in by_method(frontier.points).items():
        figure.add_scatter(
            name=method,
            x=[p.measurement.device_bytes / GIB for p in points],
            y=[p.measurement.tokens_per_second for p in points],
            mode="lines+markers",
            line={"shape": "hv", "color": COLOURS[method]},
            marker={"size": 9},
            error_y={
                "type": "data",
                "array": [p.tokens_per_second * (p.relative_spread or 0.0) / 2 for p in points],
                "thickness": 1,
            },
            text=[str(p.config).replace(",", "<br>") for p in points],
            customdata=[p.measurement.tokens_per_second / devices for p in points],
            hovertemplate=(
                f"%{{y:,.0f}} tokens/s{per_device} at %{{x:.2f}} GiB<br><br>%{{text}}<extra>%{{fullData.name}}</extra>"
            ),
        )
    figure.update_layout(
        title=title(frontier),
        xaxis_title=memory_title,
        yaxis_title=speed_title,
        template="simple_white",
        hovermode="closest",
    )
    return figure


def png(frontier: Frontier) -> bytes:
    """This chart as a PNG of 1600 x 1000 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for method, points in by_method(frontier.points).items():
        memory = [p.measurement.device_bytes / GIB for p in points]
        speed = [p.measurement.tokens_per_second for p in points]
        axes.step(memory, speed, where="post", color=COLOURS[method], linewidth=1, alpha=0.6)
        axes.scatter(memory, speed, color=COLOURS[method], label=method, s=22, zorder=3)
        best = points[-1]
        axes.annotate(
            f"{best.measurement.tokens_per_second:,.0f} tokens/s\n{format_bytes(best.measurement.device_bytes)}",
            (memory[-1], speed[-1]),
            textcoords="offset points",
            xytext=(6, -4),
            fontsize=7,
        )
    axes.set_title(title(frontier), fontsize=10)
    memory_title, speed_title = axis_titles(frontier)
    axes.set_xlabel(memory_title)
    axes.set_ylabel(speed_title)
    axes.margins(x=0.15)
    axes.set_ylim(bottom=0)
    if frontier.workload.devices > 1:
        devices: Any = frontier.workload.devices  # Any: the functions are applied to arrays, too
        per_device = axes.secondary_yaxis(
            "right", functions=(lambda speed: speed / devices, lambda speed: speed * devices)
        )
        per_device.set_ylabel("tokens per second of each device")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
