"""What the programs share that replay our search alone over recorded tables, and keep a table of it for README.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replay_results import code_here, header_of

from autofit.operations.replay_problems import RECORDED, Tables
from autofit.operations.replaying import SEEDS
from autofit.search.replay.recorded import Recorded

JUDGED = (
    "cpu-2c-smollm2-135m",
    "cpu-2c-pythia-160m",
    "cpu-zen5-2c-smollm2-135m",
    "cpu-zen5-2c-gemma-3-270m",
    "cpu-zen5-2c-smollm2-360m",
    "cpu-zen5-2c-qwen2.5-0.5b",
)
"""The tables that are replayed if none is named."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options that all of them have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--table", action="append", default=[], type=Path, metavar="FILE")
    made.add_argument("--seeds", type=int, default=SEEDS)
    made.add_argument("--store")
    made.add_argument("--out", type=Path, metavar="FILE")
    return made


def replay(
    asked: argparse.Namespace,
    figures: Callable[[Recorded], Sequence[Mapping[str, Any]]],
    table_of: Callable[[Mapping[str, Any]], str],
    **more: Any,
) -> None:
    """Replay every problem of the tables asked for, print the table, and write the figures where `--out` says.

    `figures` are those of a problem, a column each; `more` goes into the document, whose table `table_of` makes.
    """
    tables = asked.table or [RECORDED / f"{name}.jsonl" for name in JUDGED]
    begun = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds")}
    problems = [r for r in Tables(files=tuple(tables), store=asked.store).problems() if r.points]
    found = []
    for recorded in problems:
        print(recorded.problem.name, file=sys.stderr, flush=True)
        found.append({"name": recorded.problem.name, "figures": list(figures(recorded))})
    document = {
        **begun,
        "code": code_here(),
        "tables": {table.stem: header_of(table)["sha256"] for table in tables},
        "seeds": asked.seeds,
        **more,
        "problems": found,
    }
    print(table_of(document))
    if asked.out:
        asked.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
