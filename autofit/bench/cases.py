"""The searches of a benchmark on made devices: named, run in worker processes, and kept in a file as they end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import autofit
from autofit.bench.ablation import LAYERS
from autofit.bench.made_device import MadeDevice
from autofit.bench.made_search import OURS, searched
from autofit.operations.replay_at_once import each, problems_of
from autofit.operations.replay_problems import Report, Tables
from autofit.search.replay.kept import code_of

DEVICE_CODE = ("bench/made_device.py", "bench/made_search.py", "search/replay/timeline.py", "search/replay/oracle.py")
"""What decides what a rival sees on a made device, and how it is judged, beside its own code."""
REPORTED_EVERY = 50

Row = Mapping[str, Any]
"""A search: a case's fields with `made_search.Searched.figures`, or the `error` that it raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One search on one made device."""

    problem: str
    device: str
    seed: int
    search: str = OURS
    layer: str | None = None
    """The layer that is with it or without; None for the search as it is."""
    present: bool = True
    """Whether the layer is there."""


def run_lacking(
    tables: Tables, cases: Iterable[Case], *, budget: float, jobs: int, keep: Path | None, report: Report
) -> list[Row]:
    """The rows of the cases. Those that the file `keep` lacks are run, and appended to it as they end."""
    wanted = list(dict.fromkeys(cases))
    codes = {search: _code(search) for search in {case.search for case in wanted}}
    ran = {case: row for case, row in _kept(keep, codes, budget) if case in set(wanted)}
    lacking = [case for case in wanted if case not in ran]
    began = time.monotonic()
    done = each(partial(_run, tables, budget), lacking, jobs) if lacking else ()
    for number, (case, figures) in enumerate(done, start=1):
        ran[case] = {**asdict(case), **figures, "budget": budget, "code": codes[case.search]}
        if keep is not None:
            with keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(ran[case], allow_nan=False) + "\n")
        if number % REPORTED_EVERY == 0 or number == len(lacking):
            report(f"{number} of {len(lacking)} searches after {time.monotonic() - began:.0f} s")
    return [ran[case] for case in wanted]


def _run(tables: Tables, budget: float, case: Case) -> dict[str, Any]:
    """One search in a worker."""
    device, recorded = MadeDevice.of(case.device), problems_of(tables)[case.problem]
    began = time.process_time()
    try:
        if case.layer is None:
            figures = searched(recorded, device, case.search, case.seed, budget or None).figures()
        else:
            layer = LAYERS[case.layer]
            with layer.applied(device, present=case.present):
                found = searched(recorded, device, case.search, case.seed, budget or None, workers=layer.workers)
            figures = found.figures()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {**figures, "computing_seconds": round(time.process_time() - began, 4)}


def _kept(file: Path | None, codes: Mapping[str, str], budget: float) -> Iterator[tuple[Case, Row]]:
    """What this very code has run before."""
    if file is None or not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
        except (ValueError, KeyError):
            continue  # cut off, or of an older program: it is run again
        if row["code"] == codes.get(case.search) and row["budget"] == budget:
            yield case, row


@cache
def _code(search: str) -> str:
    """A digest of what a search's figures depend on: of all the package for ours."""
    if search == OURS:
        return code_of("autofit.search.replay.ours")
    package = Path(autofit.__file__).parent
    own = "".join((package / file).read_text(encoding="utf-8") for file in DEVICE_CODE)
    return code_of("autofit.search.replay.rivals_optuna")[:8] + sha256(own.encode()).hexdigest()[:8]
