"""The result of a search, as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.cli.text.measured import frontier_text, recommendation_text
from autofit.cli.text.phrases import EMULATED, cheapest_text, on_each, total_text
from autofit.core.units import counted, format_bytes, format_duration
from autofit.operations.searching.over_devices import NEAR
from autofit.techniques.short_text import short

if TYPE_CHECKING:
    from autofit.operations import OverDevices, OverHardware, SearchResult
    from autofit.operations.searching.result import Disturbed


WIDE = 0.5
"""The most regret, as a share of the best speed, that is given as a figure."""
WHY_WIDE = (
    "That is so much because trials were noisy, or because configs that may be faster were left untried as likelier "
    "to run out of memory than to fit, which --thorough tries."
)


def result_text(result: SearchResult, remarks: Sequence[str] = ()) -> str:
    """The result in brief, the frontier, the recommendation with `remarks`, and what else the search has seen."""
    best = result.recommendation
    m, devices = best.point.measurement, best.workload.devices
    notes = (
        *([] if result.regret_bound is None else [_regret(result.regret_bound)]),
        *result.impractical,
        *result.emulated,
        f"{counted(result.answered_from_store, 'config')} from the store, "
        f"{result.ruled_out} ruled out without running.",
        *_disturbed(result.disturbed),
        *_left_out(result),
    )
    parts = (
        f"Recommended: {short(best.point.config)}: {total_text(m.tokens_per_second, devices)}, "
        f"{format_bytes(m.device_bytes)} of {format_bytes(best.memory_limit_bytes)}{on_each(devices)}.\n"
        f"{counted(result.trials, 'trial')} ({result.out_of_memory} out of memory) in "
        f"{format_duration(result.seconds)}; stopped because {result.stopped_because}.",
        frontier_text(result.frontier, memory_limit_bytes=best.memory_limit_bytes),
        recommendation_text(best, remarks),
        "\n".join(notes),
    )
    return "\n\n".join(parts)


def _left_out(result: SearchResult) -> list[str]:
    """What the space has that was not searched, a line for each of the three most frequent reasons."""
    reasons = sorted(result.unsupported.items(), key=lambda item: -item[1])
    rest = sum(count for _, count in reasons[3:])
    lines = [f"{result.beyond_goal} go beyond --method, --min-rank or --allow"] if result.beyond_goal else []
    lines += [f"{count} cannot work here: {reason}" for reason, count in reasons[:3]]
    lines += [f"{rest} cannot work here for other reasons, which --dry-run lists"] if rest else []
    return ["Left out of the space:", *(f"  {line}" for line in lines)] if lines else []


def _disturbed(disturbed: Disturbed) -> list[str]:
    """A line about nodes that are slower than their type, and one about trials that met a busy or throttled device."""
    trials = [f"{disturbed.repeated} {_trials(disturbed.repeated)} repeated"] if disturbed.repeated else []
    if disturbed.believed:
        trials.append(f"{disturbed.believed} {_trials(disturbed.believed)} believed all the same")
    aside = f": {disturbed.set_aside} {_trials(disturbed.set_aside)} set aside" if disturbed.set_aside else ""
    nodes = [f"Left out: {', '.join(disturbed.slow_nodes)}{aside}."] if disturbed.slow_nodes else []
    busy = [f"The device was not free: {', '.join(trials)} (the last: {disturbed.reason})."] if trials else []
    return nodes + busy


def _trials(count: int) -> str:
    return "trial was" if count == 1 else "trials were"


def _regret(bound: float) -> str:
    """What the search may have missed, told as a gain over what was found."""
    if bound > WIDE:
        return f"The best config of this method may be more than twice as fast (95 % confidence). {WHY_WIDE}"
    gain = f"{1 / (1 - bound) - 1:.1%}"
    if gain == "0.0%":
        return "No config of this method is faster (95 % confidence)."
    return f"You may be missing up to {gain} (95 % confidence)."


def over_hardware_text(searches: OverHardware, prices: Mapping[str, float]) -> str:
    """What each kind of hardware gives and costs, after the fastest and the cheapest."""
    rows = [("hardware", "tokens/s", "memory of each", "per million tokens", "config")]
    costs = {row.name: cost for row in searches.rows if (cost := searches.cost(row, prices)) is not None}
    for row in searches.rows:
        if row.recommendation is None:
            rows.append((row.name, "", "", "", row.reason or ""))
            continue
        point = row.recommendation.point
        price = f"{costs[row.name]:,.4g}" if row.name in costs else ""
        speed = f"{point.tokens_per_second:,.0f}"
        rows.append((row.name, speed, format_bytes(point.device_bytes), price, short(point.config)))
    answered = [(row, row.recommendation) for row in searches.rows if row.recommendation is not None]
    first, fastest = answered[0]  # there is one, else the search would have raised
    sentences = [f"{first.name} is the fastest: {fastest.point.tokens_per_second:,.0f} tokens/s."]
    sentences += cheapest_text(costs)
    remarks = [
        f"{row.name}: what earlier trials have shown; its search did not succeed: {row.reason}"
        for row, _ in answered
        if row.reason is not None
    ]
    remarks += [EMULATED] if any(answer.hardware.is_emulated for _, answer in answered) else []
    return "\n\n".join([" ".join(sentences), columns(rows, right=frozenset({1, 2, 3})), *remarks])


def over_devices_text(searches: OverDevices, remarks: Sequence[str] = ()) -> str:
    """Which number of devices to take, what each achieves, then the best of them in full."""
    rows = [("devices", "memory of each", "tokens/s", "of each", "config")]
    for devices in sorted({*searches.results, *searches.unanswered}):
        if devices in searches.unanswered:
            rows.append((str(devices), "", "", "", str(searches.unanswered[devices])))
            continue
        point = searches.results[devices].recommendation.point
        memory, speed = format_bytes(point.device_bytes), point.tokens_per_second
        rows.append((str(devices), memory, f"{speed:,.0f}", f"{speed / devices:,.0f}", short(point.config)))
    best, fewest = searches.best, searches.fewest
    sentences = [f"Fastest with {best.recommendation.point.method}: {_devices_and_speed(best)}."]
    sentences += [] if fewest is best else [f"Fewest within {NEAR:.0%} of it: {_devices_and_speed(fewest)}."]
    parts = [" ".join(sentences), columns(rows, right=frozenset({0, 1, 2, 3}))]
    if searches.left_out:
        batch, numbers = searches.best.frontier.workload.global_batch, ", ".join(map(str, searches.left_out))
        parts.append(f"Left out, because the global batch of {batch} is not a multiple of them: {numbers} devices")
    return "\n\n".join([*parts, result_text(searches.best, remarks)])


def _devices_and_speed(result: SearchResult) -> str:
    devices, speed = result.frontier.workload.devices, result.recommendation.point.tokens_per_second
    return f"{counted(devices, 'device')}, {total_text(speed, devices)}"
