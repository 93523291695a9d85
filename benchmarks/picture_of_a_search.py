"""The picture docs/search.svg of README.md and docs/internals/search.md: one search over a recorded table.

    python benchmarks/picture_of_a_search.py [--table FILE] [--method full] [--memory-limit 2GiB] [--svg FILE]

The configs' true figures are the table's; the numbers are the order of the search's own trials.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from autofit.operations.replay_problems import Tables
from autofit.outcome import Fits
from autofit.search.replay import ours
from autofit.search.replay.kept import searched
from autofit.search.replay.recorded import Recorded
from autofit.search.replay.trace import Trace
from autofit.units import GIB, format_bytes, parse_bytes

HERE = Path(__file__).parent
# Okabe and Ito's colours, which colour-blind readers tell apart.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#9a9a9a"


def search(table: Path, method: str, limit: int | None) -> tuple[Recorded, Trace]:
    """The table's problem for one method, and one search over it."""
    tables = Tables(files=(table,), memory_limit_bytes=limit)
    problems = tables.problems(lambda line: print(line, file=sys.stderr, flush=True))
    recorded = next(found for found in problems if found.problem.method == method)
    return recorded, searched(recorded, ours.search, seed=0)[1]


def picture(recorded: Recorded, trace: Trace) -> Figure:
    """All configs, the frontier, and the search's trials numbered in order."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    limit = recorded.problem.memory_limit_bytes / GIB
    points = recorded.points
    axes.plot(*_corners([_place(p.measurement) for p in points]), "o", ms=4, color=GREY, mec="none", label="fits")
    front = [_place(p.measurement) for p in recorded.frontier]
    axes.step(*_corners([*front, (limit, front[-1][1])]), where="post", color=BLUE, lw=1.2, zorder=1)
    _beside(axes, "frontier of all configs", (limit, front[-1][1]), 5, BLUE)
    order: dict[object, list[int]] = {}
    for number, run in enumerate(trace.runs, start=1):
        order.setdefault(run.config, []).append(number)
    ran_out: list[str] = []
    for config, numbers in order.items():
        outcome = recorded.trials[config].outcome
        said = ", ".join(map(str, numbers))
        if isinstance(outcome, Fits):
            place = _place(outcome.measurement)
            axes.plot(*place, "o", ms=6, color=ORANGE, mec="white", mew=0.6)
            axes.annotate(said, place, (0, 5), textcoords="offset points", ha="center", fontsize=8, color=ORANGE)
        else:
            ran_out.append(said)
    if ran_out:
        _beside(axes, f"out of memory: {', '.join(ran_out)}", (limit, 0.0), 5, ORANGE)
    top = 1.2 * front[-1][1]
    axes.axvline(limit, color="black", lw=0.8, ls=":")
    size = format_bytes(recorded.problem.memory_limit_bytes)
    _beside(axes, f"limit {size}; {recorded.out_of_memory} configs need more", (limit, top), -11, "black")
    axes.set(xlabel="device memory, GiB", ylabel="tokens/s", ylim=(0, top))
    axes.set_title(f"{len(trace.runs)} trials of {len(recorded.trials)} configs", fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _beside(axes: Axes, text: str, place: tuple[float, float], above: int, colour: str) -> None:
    """A line of text that ends just left of a place, `above` points above it."""
    axes.annotate(text, place, (-4, above), textcoords="offset points", ha="right", fontsize=8, color=colour)


def _place(measured: object) -> tuple[float, float]:
    return measured.device_bytes / GIB, measured.tokens_per_second  # type: ignore[attr-defined]


def _corners(places: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in places], [y for _, y in places]


def main() -> None:
    """Search and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=HERE / "recorded" / "cpu-2c-smollm2-135m.jsonl")
    parser.add_argument("--method", default="full")
    parser.add_argument("--memory-limit", type=parse_bytes)
    parser.add_argument("--svg", type=Path, default=HERE.parent / "docs" / "search.svg")
    arguments = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "autofit"  # the same picture is the same file
    recorded, trace = search(arguments.table, arguments.method, arguments.memory_limit)
    FigureCanvasSVG(picture(recorded, trace)).print_svg(arguments.svg, metadata={"Date": None})
    print(f"{arguments.svg}: {len(trace.runs)} trials")


if __name__ == "__main__":
    main()
