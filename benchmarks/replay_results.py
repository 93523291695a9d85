"""The page of results: search methods replayed over recorded tables, judged, drawn and written down by one command.

    python benchmarks/replay_results.py [--table FILE[@LIMIT|@SHARE] ...] [--methods a,b] [--seeds 20]
                                        [--jobs N] [--keep FOLDER] [--also FILE ...] [--store URL]
                                        [--out FILE] [--page FILE]
    python benchmarks/replay_results.py --from FILE [--page FILE]

Writes RESULTS.md, its plots in a folder `plots` beside it, and the figures as JSON (`--out`), from which `--from` makes
the page and the plots again. `FILE@16GiB` replays a table under a limit below its own; `FILE@25%` those problems of it
of which fewer than 25 % of the configs run out of memory, each under the limit at which 25 % do. A limit that is not
below a table's own is left out. Tables replayed under
one limit, or one such rule, may learn from each other (`autofit-warm`). Without `--table`, all tables in recorded/ are
replayed, each under its own limit. `make results` is the whole command, with the packages that only the other methods
need.

Searches are saved in the folder `--keep` as they end and are not run again: an interrupted replay resumes, and more
seeds or methods are added to those that are there. They run on all cores (`--jobs`). Optuna's two Gaussian processes,
which take up to minutes per search, run only if `--methods` names them; everything else takes seconds. `--also` takes
methods that this run leaves out from the figures (`--out`) of another one, where it ran them over the same table; one
with other seeds or libraries is left out, and the page says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replay_fitted import fitted_to
from replay_page import PLOTS, is_drawn, page, picture
from replay_plots import svg

from autofit.errors import AutofitError, Interrupted, UsageError
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.operations import SEEDS, replay
from autofit.operations.recorded_tables import is_table
from autofit.operations.replay_problems import RECORDED, Tables
from autofit.search.replay import ours
from autofit.search.replay.kept import OURS, RIVALS, code_of, installed
from autofit.search.replay.methods import SLOW, chosen
from autofit.trial.site import cores
from autofit.units import format_bytes, parse_bytes

HERE = Path(__file__).parent
KEEP = HERE / "recorded" / "searches"
OUT = HERE / "recorded" / "replay-results.json"
PAGE = HERE / "RESULTS.md"
SCHEMA = 1
SEARCH = ours.__name__
"""The module of our search, whose code decides what its searches do."""


def groups_of(named: Sequence[str], store: str | None) -> list[Tables]:
    """Tables named as `FILE`, `FILE@LIMIT` or `FILE@SHARE`, grouped by limit. A limit that is not below a table's own
    is left out: what would have fitted is not known. Raises `UsageError` if no table remains."""
    groups: dict[tuple[int | None, float | None], list[Path]] = {}
    for text in named:
        name, at, asked = text.rpartition("@")
        file = Path(name if at else text)
        share = _share(asked) if asked.endswith("%") else None
        limit = parse_bytes(asked) if at and share is None else None
        own = None if limit is None or not is_table(file) else header_of(file)["memory_limit_bytes"]
        if limit is not None and own is not None and limit >= own:
            _said(f"{file}: not replayed under {asked}, which is not below the {format_bytes(own)} of its trials")
            continue
        groups.setdefault((limit, share), []).append(file)
    if not groups:
        raise UsageError("no table is left to replay: give limits below those under which tables were recorded")
    return [
        Tables(files=tuple(files), memory_limit_bytes=limit, out_of_memory=share, store=store)
        for (limit, share), files in groups.items()
    ]


def _share(text: str) -> float:
    """The share that `25%` spells. Raises `UsageError`."""
    number = text.removesuffix("%")
    if not number.isdecimal() or not 0 < int(number) < 100:
        raise UsageError(f"{text!r} is no share of configs: write a whole number between 0 and 100, such as 25%")
    return int(number) / 100


def document_of(
    groups: Sequence[Tables],
    methods: Sequence[str],
    *,
    seeds: int,
    keep: Path,
    jobs: int,
    command: str,
) -> dict[str, Any]:
    """The figures of all tables as one JSON object. Searches that `keep` lacks are run."""
    files = {file.stem: file for tables in groups for file in tables.paths()}
    headers = {name: header_of(file) for name, file in files.items()}
    problems, left_out = _problems_of(groups, methods, headers, seeds=seeds, keep=keep, jobs=jobs)
    for problem in (problem for problem in problems if not is_drawn(problem)):
        for method in problem["methods"]:
            if method["score"] is not None:
                del method["score"]["trajectory"]  # nothing is drawn from these
    return {
        "schema": SCHEMA,
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "seeds": seeds,
        "code": code_here(),
        "libraries": libraries_here(),
        "tables": headers,
        "fitted": fitted_to(files.values(), RECORDED, code_of(SEARCH)),
        "problems": problems,
        "left_out": left_out,
    }


def difference(document: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """In what another run differs from this one, so that its searches would not compare; None if in nothing."""
    if other["seeds"] != document["seeds"]:
        return f"made with other seeds: {other['seeds']} instead of {document['seeds']}"
    here, there = document["libraries"], other["libraries"]
    changed = [name for name in sorted({*here, *there}) if _release(name, here) != _release(name, there)]
    said = ", ".join(f"{name} {there.get(name)} instead of {here.get(name)}" for name in changed)
    return f"made with other libraries: {said}" if changed else None


def _release(name: str, versions: Mapping[str, str | None]) -> str | None:
    """A library's version; of Python, whose patch releases compute the same, its first two numbers."""
    found = versions.get(name)
    return found.rpartition(".")[0] if name == "python" and found is not None else found


def libraries_here() -> dict[str, str | None]:
    """The versions of all libraries that a method uses; None for one that is not installed."""
    every = sorted({*OURS, *(library for used in RIVALS.values() for library in used)})
    return {"python": ".".join(map(str, sys.version_info[:3])), **{library: installed(library) for library in every}}


def with_methods_of(document: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, Any]:
    """`document` with the methods that only another run has, for each problem of a table that both have replayed, and
    with a note on that run. `name` is its file's; one that would not compare is noted as left out."""
    made = {"recorded_at": other["recorded_at"], "revision": other.get("code", {}).get("revision")}
    why = difference(document, other)
    if why is not None:
        return _noted(document, {"file": name, "methods": [], "left_out": why, **made})
    digests = {table: said["sha256"] for table, said in document["tables"].items()}
    same = {table for table, said in other["tables"].items() if digests.get(table) == said["sha256"]}
    theirs = {(p["name"], p["memory_limit_bytes"]): p["methods"] for p in other["problems"] if p["table"] in same}
    problems, taken = [], dict[str, None]()
    for problem in document["problems"]:
        methods = {method["name"]: method for method in problem["methods"]}
        for method in theirs.get((problem["name"], problem["memory_limit_bytes"]), []):
            if method["name"] not in methods or methods[method["name"]]["score"] is None:
                methods[method["name"]] = method
                taken[method["name"]] = None
        problems.append({**problem, "methods": list(methods.values())})
    return _noted({**document, "problems": problems}, {"file": name, "methods": [*taken], "left_out": None, **made})


def _noted(document: dict[str, Any], also: dict[str, Any]) -> dict[str, Any]:
    return {**document, "also": [*document.get("also", ()), also]}


def code_here() -> dict[str, Any]:
    """What the searches are run by: the checkout's revision, the estimator's version, and a digest of our search."""
    return {"revision": _revision(), "estimator": ESTIMATOR_VERSION, "search": code_of(SEARCH)}


def _revision() -> str:
    """The checkout's commit, with a word on changes to the package since."""

    def git(*asked: str) -> str:
        done = subprocess.run(["git", *asked], cwd=HERE.parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = ", with changes" if git("status", "--porcelain", "--", "autofit", "search_spaces") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed


def _problems_of(
    groups: Sequence[Tables], methods: Sequence[str], headers: dict[str, Any], *, seeds: int, keep: Path, jobs: int
) -> tuple[list[Any], list[str]]:
    """The problems in which something fits, and the names of the others."""
    problems: list[Any] = []
    left_out: list[str] = []
    for tables in groups:
        found = replay(
            tables.files,
            methods=methods,
            seeds=seeds,
            memory_limit_bytes=tables.memory_limit_bytes,
            out_of_memory=tables.out_of_memory,
            store=tables.store,
            keep=keep,
            jobs=jobs,
            report=_said,
        ).to_json()
        for problem in found["problems"]:
            own = headers[problem["table"]]["memory_limit_bytes"]
            problems.append({**problem, "table_limit_bytes": own, "lowered_to": tables.out_of_memory})
        limit = tables.memory_limit_bytes
        left_out += [name if limit is None else f"{name} under {format_bytes(limit)}" for name in found["left_out"]]
    return problems, left_out


def header_of(file: Path) -> dict[str, Any]:
    """What a table's first line says about how it was made, and a digest of all its lines."""
    text = file.read_bytes()
    header = json.loads(text.splitlines()[0])
    said = {name: header[name] for name in ("space", "memory_limit_bytes", "recorded_at")}
    return {**said, "sha256": hashlib.sha256(text).hexdigest()}


def read(file: Path) -> dict[str, Any]:
    """The figures that an earlier run wrote. Raises `UsageError` for any other file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or "problems" not in found:
        raise UsageError(f"{file} does not hold results of this script with schema {SCHEMA}")
    return found


def write(document: dict[str, Any], file: Path) -> list[Path]:
    """Write the page and its plots, and remove plots of an earlier page that this one lacks; returns the files."""
    drawn = []
    folder = file.parent / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    for problem in document["problems"]:
        for kind in PLOTS if is_drawn(problem) else ():
            drawn.append(file.parent / picture(problem, kind))
            drawn[-1].write_bytes(svg(problem, kind))
    for old in {old for kind in PLOTS for old in folder.glob(f"*-{kind}.svg")} - set(drawn):
        old.unlink()
    file.write_text(page(document, present=code_of(SEARCH)), encoding="utf-8")
    return [file, *drawn]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the searches that are missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="append", default=[], metavar="FILE[@LIMIT|@SHARE]")
    parser.add_argument("--methods", help=f"comma-separated; default: all but {', '.join(SLOW)}")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=cores())
    parser.add_argument("--keep", type=Path, default=KEEP, metavar="FOLDER")
    parser.add_argument("--also", action="append", default=[], type=Path, metavar="FILE")
    parser.add_argument("--store")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE")
    asked = parser.parse_args(arguments)
    try:
        document = (
            read(asked.source) if asked.source else _replayed(asked, sys.argv[1:] if arguments is None else arguments)
        )
    except AutofitError as error:
        print(f"replay_results: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    for file in write(document, asked.page):
        print(file)


def _replayed(asked: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Replay everything asked for, and write the figures as JSON."""
    names = asked.table or [str(file) for file in sorted(RECORDED.glob("*.jsonl")) if is_table(file)]
    groups = groups_of(names, asked.store)
    methods = list(chosen([name.strip() for name in asked.methods.split(",")] if asked.methods else ()))
    others = [(file.name, read(file)) for file in asked.also]
    command = shlex.join(["python", "benchmarks/replay_results.py", *arguments])
    try:
        document = document_of(groups, methods, seeds=asked.seeds, keep=asked.keep, jobs=asked.jobs, command=command)
        for name, other in others:
            document = with_methods_of(document, other, name)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted; finished searches are saved in {asked.keep}: run the same command again to continue"
        ) from None
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n", encoding="utf-8")
    return document


def _said(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
