"""Commands that list what the catalog has: `autofit models` and `autofit hardware`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json, warn
from autofit.core.errors import EnvironmentLacks, unknown
from autofit.core.units import format_bytes

SUPPORT = {
    ("estimate", "search"): "estimate, search",
    ("search",): "search, not estimate",
    (): "nothing yet: listed only",
}
"""What autofit can do for a card, in words."""


Part = Annotated[str, typer.Argument(help="Only those with this in their names.", show_default=False)]
Entry = TypeVar("Entry")


def _named(part: str, kind: str, entries: Mapping[str, Entry]) -> list[Entry]:
    """The entries with `part` in their names; raises `UsageError` if there are none."""
    of_part = [entry for name, entry in entries.items() if part.lower() in name]
    if not of_part:
        raise unknown(kind, part, entries)
    return of_part


def models(part: Part = "", as_json: options.Json = False) -> None:
    """List the models of the catalog. Any folder with a config.json works too.

    \b
    Examples:
      autofit models
      autofit models llama
      autofit models --json
    """
    from autofit.catalog.models import listing

    entries = _named(part, "model", {m["name"]: m for m in listing()})
    if as_json:
        print_json(entries)
        return
    rows = [("model", "parameters", "source")]
    rows += [(m["name"], f"{m['parameters']:,}" if m["parameters"] else "unknown", m["source"]) for m in entries]
    print(columns(rows, right=frozenset({1})))
    print()
    for entry in entries:
        if entry["note"]:
            print(f"{entry['name']}: {entry['note']}")


def hardware(part: Part = "", as_json: options.Json = False) -> None:
    """List the cards of the catalog, and what this machine has.

    \b
    Examples:
      autofit hardware
      autofit hardware h100
      autofit hardware --json
    """
    from autofit.catalog.hardware import cards
    from autofit.trial.machine.detection import detect

    listed = _named(part, "hardware", {card.name: card for card in cards()})
    try:
        site, lacks = detect(), None
    except EnvironmentLacks as error:
        site, lacks = None, error  # the catalog can still be listed
    if as_json:
        machine = None if site is None else {"hardware": site[0].to_json(), "stack": site[1].to_json()}
        print_json({"here": machine, "cards": [c.to_json() for c in listed]})
        if lacks is not None:
            warn(f"this machine: {lacks}")
        return
    rows = [("card", "memory", "bandwidth", "bf16 dense", "autofit can", "source")]
    for card in listed:
        peak = card.training_peak_flops
        rows.append(
            (
                card.name,
                format_bytes(card.memory_bytes),
                f"{card.bandwidth_bytes_per_second / 1e12:.2f} TB/s",
                f"{peak / 1e12:.0f} TFLOP/s" if peak else "-",
                SUPPORT[card.supports],
                card.source,
            )
        )
    print(columns(rows, right=frozenset({1, 2, 3})))
    description = str(lacks)
    if site is not None:
        device, stack = site
        description = f"{device.name} ({device.device_name}, {format_bytes(device.memory_bytes)}), torch {stack.torch}"
    print(f"\nThis machine: {description}")
