"""`autofit spaces`: the search spaces that there are, and what stands in one."""

from __future__ import annotations

from typing import Annotated

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json

group = typer.Typer(rich_markup_mode=None)


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
