"""Words that measured and predicted results share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from autofit.cli.output import columns
from autofit.core.frontier import Alternative, C
from autofit.core.lattice import Config
from autofit.core.lengths import mean
from autofit.core.units import format_bytes
from autofit.core.workload import Effect, Workload
from autofit.techniques.axes.batching import micro_batches, packs
from autofit.techniques.short_text import short

EMULATED = (
    "emulated: memory is real; time is a virtual clock's and no speed of a card; losses and gradients were not checked"
)
"""A remark on what was measured on a card that is not there."""
SPARES_PADDING = (
    "--allow training tries batching=packed, grouped and padding-free, too, which spare most of the padding"
)
EFFECTS = {
    Effect.EXACT: "exact: trains the same",
    Effect.NUMERICS: "numerics: rounds differently",
    Effect.TRAINING: "training: trains something else",
}


def devices_text(hardware: str, devices: int) -> str:
    """The hardware's name and, if there are several, the number of devices."""
    return hardware if devices == 1 else f"{devices} x {hardware}"


def on_each(devices: int) -> str:
    """What follows an amount of memory that each of several devices takes."""
    return " on each" if devices > 1 else ""


def total_text(tokens_per_second: float, devices: int, *, decimals: int = 0) -> str:
    """A speed in total and, with several devices, that of each."""
    per_device = f", {tokens_per_second / devices:,.{decimals}f} of each" if devices > 1 else ""
    return f"{tokens_per_second:,.{decimals}f} tokens/s{per_device}"


def frontier_heading(what: str, hardware: str, workload: Workload, memory_limit_bytes: int) -> str:
    where, limit = devices_text(hardware, workload.devices), format_bytes(memory_limit_bytes)
    return f"{what} of {where} for {workload.model}, {step_text(workload)}, within {limit}{on_each(workload.devices)}"


def points_table(points: Iterable[C], devices: int, more: Mapping[str, Callable[[C], str]]) -> str:
    """Memory, speed in total and, with several devices, of each, and `more` columns by their headings."""
    rows = [("memory of each", "tokens/s", "of each", *more) if devices > 1 else ("memory", "tokens/s", *more)]
    for point in points:
        speed = point.tokens_per_second
        speeds = ["?" if speed is None else f"{speed / ranks:,.0f}" for ranks in sorted({1, devices})]
        rows.append((format_bytes(point.device_bytes), *speeds, *(cell(point) for cell in more.values())))
    return columns(rows, right=frozenset(range(len(rows[0]) - 1)))


def alternative_line(alternative: Alternative[C], excess: str) -> str:
    """Another config beside the recommended one; `excess` says what it takes too much, if anything."""
    point = alternative.point
    speed = "?" if point.tokens_per_second is None else f"{point.tokens_per_second:,.0f}"
    memory = ", ".join(filter(None, (format_bytes(point.device_bytes), excess)))
    return f"  {alternative.role}: {speed} tokens/s ({alternative.speedup:.2f}x), {memory}: {short(point.config)}"


def training_lines(changes: Sequence[str], workload: Workload, config: Config) -> list[str]:
    """What a config changes about the training, and what padding costs it."""
    sentences = (*(changes or ("trains exactly as the plain recipe does",)), padding_text(workload, config))
    return [f"  {sentence}" for sentence in sentences if sentence]


def cheapest_text(costs: Mapping[str, float]) -> list[str]:
    """A sentence on what costs least for a million tokens; none where no price is known."""
    if not costs:
        return []
    cheapest = min(costs, key=lambda name: costs[name])
    return [f"{cheapest} is the cheapest: {costs[cheapest]:,.4g} per million tokens."]


def step_text(workload: Workload) -> str:
    habits = "" if workload.trainer is None else f", as {workload.trainer} trains"
    habits += "" if workload.program is None else ", by your program"
    lengths = workload.lengths
    tokens = "" if lengths is None else f"{mean(lengths):.0f} tokens in the mean, {workload.seq_len} at most,"
    evaluated = "" if workload.eval_batch is None else f", {workload.eval_batch} evaluated at a time"
    return f"{tokens or f'{workload.seq_len} tokens'} x {workload.global_batch} sequences a step{habits}{evaluated}"


def padding_text(workload: Workload, config: Config) -> str | None:
    """What padding costs, where sequences have lengths."""
    batches = micro_batches(config, workload)
    if batches is None or workload.lengths is None:
        return None
    share = 1.0 - mean(workload.lengths) / batches.tokens
    if packs(config):
        return f"rows have {workload.seq_len} tokens, of which {share:.0%} are padding; a row counts as one sequence"
    sentence = (
        f"{share:.0%} of what it computes is padding; memory is that of the longest sequences, all in one micro-batch"
    )
    return sentence if share < 0.2 or "batching" in config else f"{sentence}. {SPARES_PADDING}"
