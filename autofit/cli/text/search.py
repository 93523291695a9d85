"""The result of a search, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.cli.text.tables import devices_text, frontier_table, recommendation_text, short
from autofit.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from autofit.operations import OverDevices, SearchResult
    from autofit.operations.disturbed import Disturbed


LEAST_TOLD, WIDE, MOST_TOLD = 0.0005, 0.5, 0.9
"""Regret bounds, as shares of the best speed: below the first the regret is reported as none; above the second it is
also said what may have made it so wide; the third is the most that is told."""
MOST_REASONS = 3
"""Reasons why configs cannot work here that are told, the most frequent first."""
WHY_WIDE = (
    "That is so much because trials were noisy, or because configs that may be faster were left untried as likelier "
    "to run out of memory than to fit, which --thorough tries."
)


def result_text(result: SearchResult) -> str:
    """The frontier, the recommendation, and what the search cost."""
    frontier = result.frontier
    return (
        f"Frontier of {devices_text(frontier.hardware, frontier.workload)} for {frontier.workload.model}:\n\n"
        f"{frontier_table(frontier, memory_limit_bytes=result.recommendation.memory_limit_bytes)}\n\n"
        f"{recommendation_text(result.recommendation)}\n{_slow(result)}\n{_cost(result)}"
    )


def _slow(result: SearchResult) -> str:
    return "".join(f"  {sentence}\n" for sentence in (*result.impractical, *result.emulated))


def _cost(result: SearchResult) -> str:
    return (
        f"{result.trials} trials ({result.out_of_memory} out of memory), {result.answered_from_store} configs from the "
        f"store, {result.ruled_out} ruled out without running, in {format_duration(result.seconds)}; "
        f"{result.stopped_because}.{_regret(result.regret_bound)}{_disturbed(result.disturbed)}"
        f"{_left_out(result)}"
    )


def _left_out(result: SearchResult) -> str:
    """What the space has that was not searched, a line for each of the most frequent reasons."""
    reasons = sorted(result.unsupported.items(), key=lambda item: -item[1])
    rest = sum(count for _, count in reasons[MOST_REASONS:])
    lines = [f"{result.beyond_goal} go beyond --method, --min-rank or --allow"] if result.beyond_goal else []
    lines += [f"{count} cannot work here: {reason}" for reason, count in reasons[:MOST_REASONS]]
    lines += [f"{rest} cannot work here for other reasons, which --dry-run lists"] if rest else []
    return "\nLeft out of the space:" + "".join(f"\n  {line}" for line in lines) if lines else ""


def _disturbed(disturbed: Disturbed) -> str:
    """One line about trials that met a busy or throttled device; empty if none did."""
    done = [f"{disturbed.repeated} {_trials(disturbed.repeated)} repeated"] if disturbed.repeated else []
    if disturbed.believed:
        done.append(f"{disturbed.believed} {_trials(disturbed.believed)} believed all the same")
    return f"\nThe device was not free: {', '.join(done)} (the last: {disturbed.reason})." if done else ""


def _trials(count: int) -> str:
    return "trial was" if count == 1 else "trials were"


def _regret(bound: float | None) -> str:
    if bound is None:
        return ""
    if bound < LEAST_TOLD:
        return " With 95 % confidence no config of this method is faster."
    if bound <= WIDE:
        best = f"the best config of this method is less than {1 / (1 - bound) - 1:.1%} faster"
        return f" With 95 % confidence {best} (a bound, not an average)."
    if bound > MOST_TOLD:
        said = (
            f"For all that is known, the best config of this method is {1 / (1 - MOST_TOLD):.0f} times as fast or more"
        )
    else:
        best = f"the best config of this method is less than {1 / (1 - bound):.1f} times as fast"
        said = f"With 95 % confidence {best} (a bound, not an average)"
    return f" {said}. {WHY_WIDE}"


def over_devices_text(found: OverDevices) -> str:
    """What each number of devices achieves, then the best of them in full."""
    rows = [("devices", "memory of each", "tokens/s", "of each", "config")]
    for devices in sorted({*found.results, *found.unanswered}):
        if devices in found.unanswered:
            rows.append((str(devices), "", "", "", str(found.unanswered[devices])))
            continue
        point = found.results[devices].recommendation.point
        speed = point.measurement.tokens_per_second
        memory = format_bytes(point.measurement.device_bytes)
        rows.append((str(devices), memory, f"{speed:,.0f}", f"{speed / devices:,.0f}", short(point.config)))
    parts = [columns(rows, right=frozenset({0, 1, 2, 3}))]
    if found.left_out:
        batch, numbers = found.best.frontier.workload.global_batch, ", ".join(map(str, found.left_out))
        parts.append(f"Left out, because the global batch of {batch} is not a multiple of them: {numbers} devices")
    return "\n\n".join([*parts, result_text(found.best)])
