"""`autofit axes`: what a config is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json
from autofit.core.errors import spelled

if TYPE_CHECKING:
    from autofit.core.lattice import Axis


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
        print_json([_document(axis) for axis in AXES]) if as_json else print(_list(AXES))
        return
    if name not in AXIS:
        raise not_an_axis(name, "", AXIS)
    print_json(_document(AXIS[name])) if as_json else print(_in_full(AXIS[name]))


def _document(axis: Axis) -> dict[str, Any]:
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


def _list(every: tuple[Axis, ...]) -> str:
    rows = [("axis", "changes", "what it does, and its values, lightest in memory first")]
    for axis in every:
        values = ", ".join(map(spelled, axis.values)) or f"whole numbers; {axis.where}"
        rows += [(axis.name, _changes(axis), axis.does), ("", "", values)]
    return f"{columns(rows)}\n\n{CHANGES}"


def _in_full(axis: Axis) -> str:
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


CHANGES = (
    "changes: exact, nothing but the order of rounding; numerics, the number formats; training, the training itself.\n"
    "A search goes as far as --allow, by default numerics."
)
