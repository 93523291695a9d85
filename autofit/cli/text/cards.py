"""One config on several cards, as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.cli.text.predicted import fit_text
from autofit.core.units import format_bytes

if TYPE_CHECKING:
    from autofit.operations.hardware_compared import OnCard


def cards_text(found: list[OnCard], prices: Mapping[str, float]) -> str:
    """The smallest card that it fits and the cheapest; then all of them, a line each."""
    rows = [("card", "memory", "verdict", "tokens/s", "error", "per million tokens")]
    costs: dict[str, float] = {}
    for row in found:
        e = row.estimate
        if e is None:
            rows.append((row.name, "", row.reason or "", "", "", ""))
            continue
        cost = row.cost(prices.get(row.name))
        if cost is not None and row.fits:
            costs[row.name] = cost
        rows.append(
            (
                row.name,
                f"{format_bytes(e.device_bytes)} of {format_bytes(e.memory_limit_bytes)}",
                fit_text(e),
                "" if e.tokens_per_second is None or not e.fits else f"{e.tokens_per_second:,.0f}",
                "" if e.relative_error is None or not e.fits else f"{e.relative_error:.0%}",
                "" if cost is None or not e.fits else f"{cost:,.4g}",
            )
        )
    shown = rows if prices else [row[:-1] for row in rows]
    return f"{' '.join(_verdict(found, costs))}\n\n{columns(shown, right=frozenset({3, 4, 5}))}"


def _verdict(found: list[OnCard], costs: Mapping[str, float]) -> list[str]:
    fit = [row for row in found if row.fits]
    if not fit:
        return ["No card is sure to hold it."]
    said = [f"{fit[0].name} is the smallest that it fits with room to spare."]
    if costs:
        cheapest = min(costs, key=lambda name: costs[name])
        said.append(f"{cheapest} is the cheapest: {costs[cheapest]:,.4g} per million tokens.")
    return said
