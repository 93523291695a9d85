"""One config on several cards, as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.cli.text.phrases import cheapest_text, devices_text
from autofit.cli.text.predicted import fit_text
from autofit.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from autofit.estimate.estimate import Estimate
    from autofit.operations.hardware_compared import OnCard


def cards_text(cards: list[OnCard], prices: Mapping[str, float], tokens: int | None = None, devices: int = 1) -> str:
    """The smallest card that fits and the cheapest, then a line for each, with the time of `tokens`."""
    rows: list[tuple[str, ...]] = [
        ("card", "memory", "verdict", "tokens/s", "error", "per million tokens", "time", "cost")
    ]
    costs: dict[str, float] = {}
    formats = Counter(row.estimate.config["precision"] for row in cards if row.estimate).most_common()
    for row in cards:
        e = row.estimate
        if e is None:
            rows.append((row.name, "", row.reason or "", *[""] * 5))
            continue
        cost, seconds = row.cost(prices.get(row.name)), row.seconds(tokens)
        name = _card_name(row, devices)
        if cost is not None and row.fits:
            costs[name] = cost
        trains = row.fits or (row.trial is None and e.fits)
        error = "measured" if row.trial is not None else "" if e.relative_error is None else f"{e.relative_error:.0%}"
        speed = row.tokens_per_second
        figures = [
            "" if speed is None else f"{speed:,.0f}",
            error,
            "" if cost is None else f"{cost:,.4g}",
            "" if seconds is None else format_duration(seconds),
            "" if cost is None or tokens is None else f"{cost * tokens / 1e6:,.4g}",
        ]
        memory = f"{format_bytes(row.device_bytes or 0)} of {format_bytes(e.memory_limit_bytes)}"
        precision = e.config["precision"]
        verdict = _verdict_of(row, e, devices) + (f", in {precision}" if precision != formats[0][0] else "")
        rows.append((name, memory, verdict, *(figures if trains else [""] * 5)))
    return f"{' '.join(_verdict(cards, costs, devices))}\n\n{columns(rows, right=frozenset(range(3, 8)))}"


def _card_name(row: OnCard, devices: int) -> str:
    return row.name if row.devices == devices else devices_text(row.name, row.devices)


def _verdict_of(row: OnCard, estimate: Estimate, devices: int) -> str:
    shared = "" if row.devices == devices else f", sharding={estimate.config['sharding']}"
    if row.trial is None:
        return fit_text(estimate) + (f", {row.reason}" if row.reason else shared)
    if row.trial.measurement is None:
        return "ran out of memory"
    return f"has trained{shared}" if row.fits else "took too much"


def _verdict(cards: list[OnCard], costs: Mapping[str, float], devices: int) -> list[str]:
    fit = [row for row in cards if row.fits]
    if not fit:
        return ["No card is sure to hold it."]
    first = fit[0]
    sure = next((r for r in fit if r.trial or (r.estimate and r.estimate.certainty in ("sure", None))), None)
    sentences = [f"{first.name} is the smallest that it {'fits' if first is sure else 'likely fits'}."]
    if first is not sure and sure is not None and sure.devices == devices:
        sentences = [f"{sentences[0][:-1]}, {sure.name} the smallest that it fits for sure."]
    if first.devices != devices:
        sharding = first.estimate.config["sharding"] if first.estimate else ""
        sentences = [f"No card is sure to hold it alone: {_card_name(first, devices)} with sharding={sharding} do."]
    launch_bound = [row for row in fit if row.trial is None and row.estimate and row.estimate.waits_for_launches]
    if launch_bound:
        names = "all of them" if 1 < len(launch_bound) == len(fit) else ", ".join(row.name for row in launch_bound)
        sentences.append(f"The host, which launches operations, limits the speed of {names}: try a larger micro_batch.")
    return sentences + cheapest_text(costs)
