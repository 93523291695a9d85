"""Commands that list what there is: `autofit models`, `hardware`, `axes` and `spaces`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json, warn
from autofit.core.errors import EnvironmentLacks, spelled, unknown
from autofit.core.units import format_bytes

if TYPE_CHECKING:
    from autofit.core.lattice import Axis

SUPPORT = {
    ("estimate", "search"): "estimate, search",
    ("search",): "search, not estimate",
    (): "nothing yet: listed only",
}
"""What autofit can do for a card, in words."""
CHANGES = (
    "changes: exact, nothing but the order of rounding; numerics, the number formats; training, the training itself.\n"
    "A search goes as far as --allow, by default numerics."
)
group = typer.Typer(rich_markup_mode=None)

Part = Annotated[str, typer.Argument(help="Only those with this in their names.", show_default=False)]
Entry = TypeVar("Entry")


def _named(part: str, kind: str, entries: Mapping[str, Entry]) -> list[Entry]:
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


def axes(
    name: Annotated[
        str | None, typer.Argument(help="One axis, to be shown in full.", autocompletion=options.completing("axes"))
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the axes of a config: what each decides, and its values, lightest in memory first.

    \b
    Examples:
      autofit axes
      autofit axes checkpointing                       its values one by one, and what trainers call it
      autofit axes --json
    """
    from autofit.techniques import AXES, AXIS
    from autofit.techniques.trainer_names import not_an_axis

    if name is None:
        print_json([_axis_document(axis) for axis in AXES]) if as_json else print(_axes_text(AXES))
        return
    if name not in AXIS:
        raise not_an_axis(name, "", AXIS)
    print_json(_axis_document(AXIS[name])) if as_json else print(_axis_text(AXIS[name]))


def _axis_document(axis: Axis) -> dict[str, Any]:
    """An axis as a JSON object. `values` is empty where values are whole numbers."""
    from autofit.techniques.trainer_names import names_of

    return {
        "name": axis.name,
        "does": axis.does,
        "where": axis.where,
        "default": axis.recipe,
        "changes": _changes(axis),
        "values": [
            {"value": value, "does": axis.meanings[value], "changes": axis.effect(value).label} for value in axis.values
        ],
        "trainers": [{"keys": list(name.keys), "values": name.values} for name in names_of(axis.name)],
    }


def _changes(axis: Axis) -> str:
    """The most that a value of the axis changes: `exact`, `numerics` or `training`."""
    from autofit.techniques import most_effect

    return most_effect(axis).label


def _axes_text(every: tuple[Axis, ...]) -> str:
    rows = [("axis", "changes", "what it does, and its values, lightest in memory first")]
    for axis in every:
        values = ", ".join(map(spelled, axis.values)) or f"whole numbers; {axis.where}"
        rows += [(axis.name, _changes(axis), axis.does), ("", "", values)]
    return f"{columns(rows)}\n\n{CHANGES}"


def _axis_text(axis: Axis) -> str:
    from autofit.techniques.trainer_names import names_of

    names = names_of(axis.name)
    rows = [("valid", axis.where), ("default", spelled(axis.recipe)), ("changes", _changes(axis))]
    rows.append(("in trainers", ", ".join(key for name in names for key in name.keys)))
    parts = [f"{axis.name}: {axis.does}", columns(rows), CHANGES]
    if axis.values:
        described = [("value, lightest first", "changes", "what it does, and what it needs", "in trainers")]
        for value in axis.values:
            settings = filter(None, (name.theirs(spelled(value)) for name in names))
            changes, does = axis.effect(value).label, axis.meanings[value]
            described.append((spelled(value), changes, does, ", ".join(settings) or "-"))
        parts.insert(1, columns(described))
    return "\n\n".join(parts)


@group.callback(invoke_without_command=True)
def spaces(context: typer.Context, global_batch: options.GlobalBatch = 64, as_json: options.Json = False) -> None:
    """List the search spaces, with how many valid configs each has.

    \b
    Examples:
      autofit spaces
      autofit spaces --json
      autofit spaces show single-gpu > own.yaml        a copy to edit, for --space own.yaml
    """
    if context.invoked_subcommand is not None:
        return
    from autofit.planning.lattices import space_summaries

    summaries = space_summaries(global_batch)
    if as_json:
        print_json(summaries)
        return
    rows = [("space", "devices", "configs", "purpose")]
    rows += [(str(s["name"]), str(s["devices"]), f"{s['configs']:,}", str(s["purpose"])) for s in summaries]
    print(columns(rows, right=frozenset({1, 2})))
    print(
        f"\nconfigs: valid ones at --global-batch {global_batch} on so many devices, before this hardware rules any out"
    )


@group.command()
def show(
    name: Annotated[
        str, typer.Argument(help="A built-in space, or a YAML file.", autocompletion=options.completing("spaces"))
    ],
    global_batch: options.GlobalBatch = 64,
    as_json: options.Json = False,
) -> None:
    """Print a search space as it is written, with its purpose and how many valid configs it has.

    \b
    Examples:
      autofit spaces show single-gpu
      autofit spaces show own.yaml --global-batch 16
    """
    from pathlib import Path

    from autofit.planning.lattices import load_space, summary

    space = load_space(name)
    document = summary(space, global_batch)
    text = Path(space.path).read_text(encoding="utf-8-sig")
    if as_json:
        print_json({**document, "text": text})
        return
    # As comments, so that what is printed is a space itself.
    on = f"{document['devices']} devices" if document["devices"] != 1 else "one device"
    print(f"# {space.name}: {space.purpose}")
    print(f"# {document['configs']:,} valid configs at --global-batch {global_batch} on {on}")
    print(f"\n{text}", end="" if text.endswith("\n") else "\n")
