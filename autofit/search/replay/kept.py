"""Completed searches, kept in files: an interrupted replay resumes, and no search runs twice.

A search is determined by what its method is told, by its seed, and by the answers that it gets. So it is kept as its
asks in order and a digest of the answers, in a file named after the rest. To use it, the oracle is asked the same once
more, which takes no time: if it answers and ends as it did then, the method would do the same again. If it does not,
say because the table was recorded again, the search is run again.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import autofit
from autofit.lattice import Config
from autofit.outcome import Fits, Trial, outcome_from_json, outcome_to_json
from autofit.search.replay.method import SearchMethod
from autofit.search.replay.oracle import Answer, Cut, Enough, Oracle
from autofit.search.replay.problem import Problem, place
from autofit.search.replay.recorded import Recorded
from autofit.search.replay.trace import Stated, Trace
from autofit.techniques import AXES
from autofit.workload import digest

SCHEMA = 1
PACKAGE = Path(autofit.__file__).parent
FACES = ("api", "cli", "export")
"""Folders of the package that no search uses."""
RIVALS: Mapping[str, tuple[str, ...]] = {
    "autofit.search.replay.rivals_optuna": ("numpy", "optuna", "scipy", "torch"),
    "autofit.search.replay.rivals_deepspeed": ("deepspeed", "numpy", "xgboost"),
    "autofit.search.replay.rivals_of_practice": ("accelerate",),
}
"""By module, the libraries whose versions matter to these rivals. Of autofit they use only that module and the problem,
so they need not run again when something else changes; some of them take hours."""
OURS = ("numpy", "optuna", "peft", "torch", "transformers")
"""The same for every other method, which may use all of the package."""
DISTRIBUTIONS = {"xgboost": ("xgboost", "xgboost-cpu")}
"""Names under which a library may be installed, where its own is not the only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One ask of a search."""

    config: Config
    again: bool = False
    """Whether it asked for a second run."""
    cut: Answer | None = None
    """How the trial ended where it was not let run to its end."""

    def end(self, trial: Trial) -> Trial:
        """The trial as it ended."""
        return trial if self.cut is None else replace(trial, outcome=self.cut.outcome, seconds=self.cut.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One search of one method on one problem."""

    seed: int
    asked: tuple[Asked, ...]
    answers: str
    """A digest of the oracle's answers."""
    stopped: bool
    """Whether the method ended by itself."""
    stated: Stated | None = None
    """What it stated then."""


class _Noting(Oracle):
    """An oracle that notes what it was asked and what it answered."""

    def __init__(self, recorded: Recorded, seed: int) -> None:
        super().__init__(recorded, seed)
        self._asked: list[Asked] = []
        self._said: list[list[Any]] = []

    def ask(self, config: Config, cut: Cut = lambda trial: trial) -> Answer:
        return self._noted(config, False, cut, super().ask)

    def run_again(self, config: Config, cut: Cut = lambda trial: trial) -> Answer:
        return self._noted(config, True, cut, super().run_again)

    def kept(self, seed: int, *, stopped: bool) -> Kept:
        """What was noted."""
        stated = self.trace(stopped=stopped).stated
        return Kept(seed=seed, asked=tuple(self._asked), answers=digest(self._said), stopped=stopped, stated=stated)

    def _noted(self, config: Config, again: bool, cut: Cut, run: Callable[[Config, Cut], Answer]) -> Answer:
        ended: list[Answer] = []

        def watched(trial: Trial) -> Trial:
            shown = cut(trial)
            if shown != trial:
                ended.append(Answer(shown.outcome, shown.seconds))
            return shown

        answer = run(config, watched)
        self._asked.append(Asked(config=config, again=again, cut=ended[0] if ended else None))
        said = [answer.outcome.kind, answer.seconds]
        if isinstance(answer.outcome, Fits):
            measured = answer.outcome.measurement
            said += [measured.device_bytes, measured.tokens_per_second]
        self._said.append(said)
        return answer


def searched(recorded: Recorded, method: SearchMethod, seed: int) -> tuple[Kept, Trace]:
    """Run one search of one method. Raises `CannotRun` if something that it needs is missing here."""
    oracle = _Noting(recorded, seed)
    try:
        method(recorded.problem, oracle, seed)
    except Enough:
        return oracle.kept(seed, stopped=False), oracle.trace(stopped=False)
    return oracle.kept(seed, stopped=True), oracle.trace(stopped=True)


def once_more(recorded: Recorded, kept: Kept) -> Trace | None:
    """The trace of a search that was kept; None if it would go differently today."""
    oracle = _Noting(recorded, kept.seed)
    try:
        for asked in kept.asked:
            (oracle.run_again if asked.again else oracle.ask)(asked.config, asked.end)
    except Enough:
        return None
    if kept.stated is not None:
        oracle.hear(kept.stated)
    trace = oracle.trace(stopped=kept.stopped)
    same = oracle.kept(kept.seed, stopped=kept.stopped) == kept
    return trace if same and (kept.stopped or _is_over(oracle, recorded)) else None


def _is_over(oracle: Oracle, recorded: Recorded) -> bool:
    try:
        oracle.ask(recorded.problem.configs[0])
    except Enough:
        return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSearches:
    """The searches of one method on one problem, in one file: what determines them, then one search per line."""

    recorded: Recorded
    identity: Mapping[str, Any]
    """What determines the searches, as a JSON object."""
    folder: Path

    @classmethod
    def of(cls, folder: Path, recorded: Recorded, name: str, method: SearchMethod) -> KeptSearches:
        """The searches of the method of this name."""
        return cls(recorded=recorded, identity=identity(recorded.problem, name, method), folder=folder)

    @property
    def file(self) -> Path:
        """The file, which exists once something was kept."""
        names = [str(self.identity[field]) for field in ("table", "method", "search")]
        return self.folder / ".".join([*names, digest(self.identity), "jsonl"])

    def traces(self) -> dict[int, Trace]:
        """The traces by seed; of a search that was kept twice, the last."""
        found: dict[int, Trace] = {}
        for kept in self._read():
            trace = once_more(self.recorded, kept)
            if trace is not None:
                found[kept.seed] = trace
        return found

    def add(self, kept: Kept) -> None:
        """Append another search. A line that was cut off earlier stays on its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.file.open("a+b") as file:
            file.seek(0)
            before = file.read()
            lines = b"" if before.endswith(b"\n") or not before else b"\n"
            if not before:
                lines += _line({"schema": SCHEMA, **self.identity})
            file.write(lines + _line(_to_json(kept, self.recorded.problem)))
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> Iterator[Kept]:
        if not self.file.exists():
            return
        for line in self.file.read_text(encoding="utf-8").splitlines()[1:]:
            try:
                yield _from_json(json.loads(line), self.recorded.problem)
            except (ValueError, KeyError, IndexError, TypeError):
                continue  # cut off: it is run again


def identity(problem: Problem, name: str, method: SearchMethod) -> dict[str, Any]:
    """What determines the searches of a method on a problem, apart from their seeds and the answers."""
    module = method.__module__
    libraries = RIVALS.get(module, OURS)
    return {
        "table": problem.table,
        "method": problem.method,
        "search": name,
        "memory_limit_bytes": problem.memory_limit_bytes,
        "told": _told(problem, everything=module not in RIVALS),
        "code": code_of(module),
        "libraries": {
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            **{library: installed(library) for library in libraries},
        },
    }


def installed(library: str) -> str | None:
    """The version of a library; None if it is not installed."""
    for distribution in DISTRIBUTIONS.get(library, (library,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _told(problem: Problem, *, everything: bool) -> str:
    """A digest of what a method may look at before it asks."""
    values = {axis.name: [(value, place(axis, value)) for value in problem.values(axis)] for axis in AXES}
    seen: list[Any] = [
        [config.to_json() for config in problem.configs],
        values,
        problem.workload.to_json(),
        problem.hardware.to_json(),
    ]
    if everything:
        seen += [repr(getattr(problem, field.name)) for field in fields(problem) if field.compare]
    return digest(seen)


@cache
def code_of(module: str) -> str:
    """A digest of the code of the methods in this module: it and the problem that it is told or, for ours, the whole
    package."""
    files = [Path(str(sys.modules[name].__file__)) for name in (module, Problem.__module__)]
    if module not in RIVALS:
        own = sorted(PACKAGE.rglob("*.py"))
        files += [file for file in own if file.relative_to(PACKAGE).parts[0] not in FACES]
    return digest([_bare(file.read_text(encoding="utf-8")) for file in files])


def _bare(source: str) -> str:
    """Code without comments and docstrings, which change nothing."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            said = [s for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
            vars(node)["body"] = [statement for statement in body if statement not in said]
    return ast.dump(tree)


def _to_json(kept: Kept, problem: Problem) -> dict[str, Any]:
    """A config of the problem is written as its number there; any other as the number of its value on each axis, or in
    full where that does not describe it."""
    numbers = {config: number for number, config in enumerate(problem.configs)}
    values = {axis.name: problem.values(axis) for axis in problem.axes}
    stated = kept.stated

    def entry(config: Config) -> Any:
        if config in numbers:
            return numbers[config]
        if all(config.get(axis) in some for axis, some in values.items()):
            places = [some.index(config[axis]) for axis, some in values.items()]
            if _spelled(places, problem) == config:
                return places
        return config.to_json()

    return {
        "seed": kept.seed,
        "asked": [entry(asked.config) for asked in kept.asked],
        "again": [place for place, asked in enumerate(kept.asked) if asked.again],
        "cut": {
            str(place): [outcome_to_json(asked.cut.outcome), asked.cut.seconds]
            for place, asked in enumerate(kept.asked)
            if asked.cut is not None
        },
        "answers": kept.answers,
        "stopped": kept.stopped,
        "stated": None if stated is None else [entry(stated.config), stated.regret_bound],
    }


def _from_json(data: Mapping[str, Any], problem: Problem) -> Kept:
    again: Sequence[int] = data["again"]
    cut = {int(n): Answer(outcome_from_json(outcome), seconds) for n, (outcome, seconds) in data.get("cut", {}).items()}
    stated = data["stated"]

    def config(entry: Any) -> Config:
        if isinstance(entry, int):
            return problem.configs[entry]
        return _spelled(entry, problem) if isinstance(entry, list) else Config.from_json(entry)

    return Kept(
        seed=data["seed"],
        asked=tuple(Asked(config=config(e), again=n in again, cut=cut.get(n)) for n, e in enumerate(data["asked"])),
        answers=data["answers"],
        stopped=data["stopped"],
        stated=None if stated is None else Stated(config=config(stated[0]), regret_bound=stated[1]),
    )


def _spelled(places: Sequence[int], problem: Problem) -> Config:
    """The config with the values of these numbers on the axes on which the problem's configs differ."""
    chosen = zip(problem.axes, places, strict=True)
    return problem.config({axis.name: problem.values(axis)[number] for axis, number in chosen})


def _line(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n").encode()
