"""Commands that act on the store itself: upgrade, check, export, import."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autofit.cli import options
from autofit.cli.output import STDOUT, columns, print_json, write
from autofit.core.errors import UsageError
from autofit.core.units import format_bytes

if TYPE_CHECKING:
    from autofit.core.verdict import Contradiction
    from autofit.store import StoreReport

File = Annotated[Path, typer.Argument(help="JSON lines file; - is standard output or input.")]

group = typer.Typer(help="The store of trials.", no_args_is_help=True, rich_markup_mode=None)


@group.command()
def upgrade(store: options.Store = None) -> None:
    """Migrate a store of an older version to the schema of this version.

    \b
    Examples:
      autofit db upgrade
      autofit db upgrade --store postgresql://autofit@db/autofit
    """
    from autofit.store import upgrade as migrate

    print(f"the store is at schema {migrate(store)}")


@group.command()
def check(
    store: options.Store = None,
    schema: Annotated[bool, typer.Option("--schema", help="Check the schema alone; no other table is read.")] = False,
    as_json: options.Json = False,
) -> None:
    """Check the store's schema and integrity.

    Counts what it holds, and lists the configs with contradictory results; exit code 4 unless it is sound.

    \b
    Examples:
      autofit db check
      autofit db check --store team.db --json
      autofit db check --schema
    """
    from autofit.store import check as examine
    from autofit.store import check_schema

    if schema:
        revision = check_schema(store)
        print_json({"revision": revision}) if as_json else print(f"the store is at schema {revision}")
        return
    report = examine(store)
    if as_json:
        print_json(report.to_json())
    else:
        print(columns(report_rows(report)))
        if report.contradictions:
            print(f"\n{contradictions_text(report.contradictions)}")
    if not report.sound:
        raise typer.Exit(4)


def report_rows(report: StoreReport) -> list[tuple[str, str]]:
    return [
        ("store", report.store),
        ("kind", report.kind),
        ("schema", f"{report.revision or 'none'}; this version uses {report.newest}"),
        *((table, f"{count:,}") for table, count in report.counts.items()),
        ("contradictions", str(len(report.contradictions))),
        ("sound", "yes" if report.sound else "no"),
        *(("problem", problem) for problem in report.problems),
    ]


def contradictions_text(contradictions: Sequence[Contradiction]) -> str:
    """The configs with contradictory results, each with the trials that contradict each other and their limits."""
    from autofit.core.verdict import MENDS

    rows = [("contradictory config", "job", "fits in (trial)", "out of memory under (trial)")]
    for contradiction in contradictions:
        first = contradiction.fitted[0]
        job = f"{first.workload.model} seq-len {first.workload.seq_len} on {first.hardware.name}"
        held = ", ".join(f"{format_bytes(m.device_bytes)} ({t.trial_id})" for t, m in contradiction.measured)
        failed = ", ".join(f"{format_bytes(t.memory_limit_bytes)} ({t.trial_id})" for t in contradiction.ran_out)
        rows.append((str(first.config), job, held, failed))
    return f"{columns(rows)}\n\nEach counts as out of memory under limits up to that one; to resolve this, {MENDS}."


@group.command()
def export(file: File, store: options.Store = None) -> None:
    """Write every trial to FILE, one JSON object per line.

    \b
    Examples:
      autofit db export trials.jsonl
      autofit db export - | gzip > trials.jsonl.gz
    """
    from autofit.store import Store, export_lines

    written = -1  # the first line is not a trial
    with Store.open(store, create=False) as opened:

        def chunks() -> Iterator[bytes]:
            nonlocal written
            for line in export_lines(opened):
                written += 1
                yield line.encode()

        write(file, chunks())
    print(f"{written} trials written to {file}", file=sys.stderr if str(file) == STDOUT else sys.stdout)


@group.command("import")
def import_(file: File, store: options.Store = None) -> None:
    """Add the trials of FILE that the store does not have.

    \b
    Examples:
      autofit db import trials.jsonl
      autofit db export --store laptop.db - | autofit db import --store team.db -
    """
    from autofit.store import Store, import_lines

    try:
        with sys.stdin if str(file) == STDOUT else file.open(encoding="utf-8") as lines, Store.open(store) as opened:
            report = import_lines(opened, lines)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    print(f"{report.added} trials added, {report.repeated} were there already")
