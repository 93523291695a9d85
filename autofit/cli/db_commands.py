"""Commands on the store itself: upgrade, check, export, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json

File = Annotated[Path, typer.Argument(help="JSON lines file.")]


def register(app: typer.Typer) -> None:
    """Add the group to the program."""
    group = typer.Typer(help="The store of trials.", no_args_is_help=True, rich_markup_mode=None)
    group.command("upgrade", help="Bring a store of an older version to this one.")(upgrade)
    group.command("check", help="Check the store's schema and integrity, and count what it holds.")(check)
    group.command("export", help="Write every trial to FILE, one JSON object per line.")(export)
    group.command("import", help="Add the trials of FILE that the store does not have.")(import_)
    app.add_typer(group, name="db")


def upgrade(store: options.Store = None) -> None:
    """Migrate the store."""
    from autofit.store import upgrade as migrate

    print(f"the store is at schema {migrate(store)}")


def check(store: options.Store = None, as_json: options.Json = False) -> None:
    """Check the store."""
    from autofit.store import check as examine

    report = examine(store).to_json()
    if as_json:
        print_json(report)
    else:
        print(columns([("store", "state"), *((str(k), str(v)) for k, v in report.items())]))


def export(file: File, store: options.Store = None) -> None:
    """Write every trial to a file."""
    from autofit.cli.answer_commands import write
    from autofit.store import Store, export_lines

    with Store.open(store) as opened:
        lines = list(export_lines(opened))
    write(file, "".join(line.rstrip("\n") + "\n" for line in lines).encode())
    print(f"{len(lines) - 1} trials written to {file}")


def import_(file: File, store: options.Store = None) -> None:
    """Add the trials of a file."""
    from autofit.errors import UsageError
    from autofit.store import Store, import_lines

    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    with Store.open(store) as opened:
        report = import_lines(opened, lines)
    print(f"{report.added} trials added, {report.repeated} were there already")
