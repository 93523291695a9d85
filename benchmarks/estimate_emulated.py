"""The estimator held to emulated cards: what is allocated, what is reserved, and what fits.

    python benchmarks/estimate_emulated.py FOLDER [--cards h100-80g,...] [--configs 3000] [--ranks 1] [--seed 0]
                                           [--compile] [--evaluate] [--trainers] [--processes 2]
                                           [--home .venv/emulated-card] [--again | --pairs]

`make emulated-card` builds what it runs on (tests/emulated_card/README.md). Draws configs at random over all axes,
models, sequence lengths and cards, predicts each, trains it as `autofit trial` does, and writes both into FOLDER, a
file per card; what is there already is not run again, so an interrupted run goes on. A quarter is drawn without
expandable segments, and half under a limit within 4 % of what is predicted, where the allocator gives back what it
keeps and fit is decided. What is predicted to take more than one and a half times the card is drawn anew. With
`--compile`, each is compiled, which takes half a minute; with `--evaluate`, each also evaluates 1 to 64 sequences at a
time between steps; with `--trainers`, each trains as one of the known trainers does. `--again` runs nothing: it
predicts anew what the folder holds, whose files may be compressed (gzip), and writes the figures beside them
(`figures.json`), as recorded and as found now, which are the tables of README.md.

`--pairs` draws nothing: it trains every value of every axis alone and in pairs, each pair at least once, and says which
the card refuses. The words must be those for the catalog's card, which are compared.

Prints the figures beside their targets, then the configs that are farthest off. Exits with 0 only if every target is
reached. Times on such a card mean nothing, and none is shown. About 4 s of a core per config.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autofit.catalog.models import load, positions
from autofit.core.device.hardware import EMULATED as PREFIX
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import UsageError
from autofit.core.lattice import Config, Value
from autofit.core.outcome import Fits
from autofit.core.units import MIB
from autofit.estimate.bound import bounded
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.estimating import site as catalog_site
from autofit.techniques import AXES, Job, complete, unsupported
from autofit.techniques.axes.precision import mixed_precision
from autofit.techniques.habits import TRAINERS
from autofit.training.prerequisites.requirements import cannot_here
from autofit.trial.limits.segments import ALLOCATOR, EXPANDABLE
from autofit.trial.machine.detection import detect
from autofit.trial.process.group_runner import GroupRunner
from autofit.trial.request import TrialRequest

EMULATED = Path(__file__).parents[1] / "tests" / "emulated_card" / "cards.py"
CARDS = ("t4", "a10g", "rtx-4090", "a100-40g", "a100-80g", "h100-80g", "h200", "b200")
MODELS = (
    *("pythia-160m", "smollm2-360m", "gemma-3-1b", "llama-3.2-1b", "qwen2.5-1.5b", "gemma-2-2b"),
    *("qwen3-4b", "llama-3.1-8b", "phi-4", "qwen3-30b-a3b"),
)
"""Dense and mixture of experts, with sliding windows and without, tied and untied, fused projections and not."""
SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
VALUES: dict[str, tuple[Value, ...]] = {
    "method": ("full", "lora", "qlora"),
    "rank": (8, 16, 64, 256),
    "targets": ("attention", "all-linear"),
    "precision": ("bf16", "bf16-mixed", "fp16-mixed", "tf32", "fp32"),
    "micro_batch": (1, 2, 4, 8),
    "checkpointing": ("full", "save-attention", "every-2", "every-4", "selective", "none", "offload"),
    "optimizer": (
        *("sgd", "adafactor", "lion-8bit", "adamw-8bit", "paged-adamw-8bit", "lion", "adamw", "adamw-foreach"),
    ),
    "attention": ("sdpa", "efficient", "eager"),
    "kernels": ("liger", "torch"),
    "loss": ("fused", "chunked", "full"),
}
PAIRED = WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4)
"""What pairs are trained on, with so many sequences of each rank."""
NUMBERS: dict[str, tuple[Value, ...]] = {"rank": (8, 64), "micro_batch": (1, 2, 4)}
"""Values for the axes that list none."""
SHARDINGS: tuple[Value, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-no-reshard")
BATCHES = (4, 8)
EVAL_BATCHES = (1, 8, 16, 32, 64)
DECODERS, ALIKE = 2, 5
"""How many values of the axes that make a decoder are drawn for one workload, and of the others for each of these: a
decoder is traced once."""
OF_ONE_DECODER = ("micro_batch", "optimizer", "loss")
DRAWS = 10
"""Attempts to draw one config that can work and may fit, before another decoder is drawn."""
HOPELESS = 1.5
"""What is predicted to take more than so many times the card's memory is not run."""
WITHOUT_SEGMENTS, CLOSE, CLOSENESS = 0.25, 0.5, 0.04
SIZES = ("peak_allocated_bytes", "peak_reserved_bytes")


PLAIN = {("compile", False), ("offload", "none"), ("sharding", "none"), ("attention", "sdpa")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One config, predicted and trained."""

    card: str
    job: dict[str, Any]
    """Model, sequence length, global batch, ranks, and whether there were expandable segments."""
    config: dict[str, Value]
    limit: int
    predicted: dict[str, Any]
    outcome: str
    reason: str | None
    measured: dict[str, Any] | None

    def error(self, size: str) -> float | None:
        """Predicted over measured, minus one."""
        return None if self.measured is None else self.predicted[size] / self.measured[size] - 1.0

    @property
    def phase_errors(self) -> list[float]:
        """How far off what is allocated is in each phase that was measured. Without expandable segments blocks are
        larger than what is asked for, which a prediction says of the whole step only."""
        measured = self.measured["phases"] if self.measured and self.job["segments"] else {}
        return [abs(self.predicted["phases"][phase] / size - 1.0) for phase, size in measured.items()]

    @property
    def farthest(self) -> float:
        """How far off it is, for an order: an error of what is allocated counts tenfold, as its target is a tenth."""
        return max(weight * abs(self.error(size) or 0.0) for weight, size in zip((10.0, 1.0), SIZES, strict=True))

    @property
    def judged(self) -> bool:
        """Whether it fitted, or ran out of memory on the device: what else became of it says nothing of memory."""
        return self.outcome in ("fits", "out_of_memory")

    @property
    def misjudged(self) -> bool:
        """Whether it fitted unforeseen, or ran out of memory unforeseen."""
        return self.judged and self.predicted["fits"] != (self.outcome == "fits")

    def __str__(self) -> str:
        both = [self.predicted, self.measured or {}]
        mib = [f"{found[size] / MIB:9.1f}" if found else f"{'-':>9}" for found in both for size in SIZES]
        errors = [f"{e:+7.2%}" for size in SIZES if (e := self.error(size)) is not None]
        about = " ".join(str(value) for value in self.job.values())
        config = ",".join(f"{k}={v}" for k, v in self.config.items() if (k, v) not in PLAIN)
        wrong = f" MISJUDGED: {self.outcome}, limit {self.limit / MIB:.0f}" if self.misjudged else ""
        return f"{self.card:9} {about:36} {' '.join(mib)} {' '.join(errors)}{wrong} {config}"


class Drawing:
    """Configs drawn for one workload on this machine's card, each predicted and trained."""

    def __init__(
        self, site: tuple[Hardware, Stack], seed: str, ranks: int, *, compiles: bool, evaluates: bool, trained: bool
    ) -> None:
        self._random = random.Random(seed)
        self._fixed: dict[str, Value] = {"compile": True, "kernels": "torch"} if compiles else {}
        longest: int | None = 0
        while longest is not None and longest < SEQ_LENS[0]:
            model = self._random.choice(MODELS)
            longest = positions(load(model))
        seq_len = self._random.choice([s for s in SEQ_LENS if longest is None or s <= longest])
        batch = self._random.choice(BATCHES)
        self._about: dict[str, Any] = {"model": model, "seq_len": seq_len, "global_batch": batch * ranks}
        if evaluates:
            self._about["eval_batch"] = self._random.choice(EVAL_BATCHES)
        if trained:
            self._about["trainer"] = self._random.choice(sorted(TRAINERS))
        self._ranks = ranks
        self._job = WorkloadOptions(**self._about, devices=ranks).job(site)

    def rows(self, runners: Mapping[bool, GroupRunner]) -> Iterator[dict[str, Any]]:
        """The lines of a group's configs; the runners are those with expandable segments and without."""
        estimators = {on: Estimator(replace(self._job, expandable_segments=on), None) for on in runners}
        memory = self._job.hardware.memory_bytes
        decoder: dict[str, Value] = {}
        for number in range(DECODERS * ALIKE):
            if number % ALIKE == 0:
                decoder = {axis: self._random.choice(v) for axis, v in VALUES.items() if axis not in OF_ONE_DECODER}
            segments = self._random.random() >= WITHOUT_SEGMENTS
            close = self._random.random() < CLOSE
            share = 1.0 + self._random.uniform(-CLOSENESS, CLOSENESS)
            found = self._drawn(estimators[segments], decoder)
            if found is not None:
                limit = min(memory, int(found.device_bytes * share)) if close else memory
                said = estimators[segments].estimate(found.config, memory_limit_bytes=limit)
                job = {**self._about, "ranks": self._ranks, "segments": segments}
                yield {"job": job, **_trained(runners[segments], estimators[segments].job, said)}

    def _drawn(self, estimator: Estimator, decoder: Mapping[str, Value]) -> Estimate | None:
        """A config with this decoder that can work and may fit, predicted; None where there seems to be none."""
        memory = self._job.hardware.memory_bytes
        for _ in range(DRAWS):
            config = self._one(decoder)
            if cannot_here(config, self._job):
                continue
            by_formula = bounded(config, self._job, memory_limit_bytes=memory, reason="")
            if by_formula.device_bytes <= HOPELESS * memory:
                found = estimator.estimate(config, memory_limit_bytes=memory)
                if found.device_bytes <= HOPELESS * memory:
                    return found
        return None

    def _one(self, decoder: Mapping[str, Value]) -> Config:
        drawn = dict(decoder) | {axis: self._random.choice(VALUES[axis]) for axis in OF_ONE_DECODER}
        if drawn["method"] == "full":
            del drawn["rank"], drawn["targets"]
        while int(drawn["micro_batch"]) > self._job.workload.batch_per_device:
            drawn["micro_batch"] = self._random.choice(VALUES["micro_batch"])
        if self._ranks > 1:
            drawn["sharding"] = self._random.choice(SHARDINGS)
        return complete(drawn | self._fixed)


def _trained(runner: GroupRunner, job: Job, said: Estimate) -> dict[str, Any]:
    request = TrialRequest(job=job, config=said.config, memory_limit_bytes=said.memory_limit_bytes, timing_seconds=0.0)
    outcome = runner.attempt(request).outcome
    return {
        "config": said.config.to_json(),
        "limit": said.memory_limit_bytes,
        "predicted": _figures(said) | {"fits": said.fits},
        "outcome": outcome.kind,
        "reason": getattr(outcome, "reason", None),
        "measured": _figures(outcome.measurement) if isinstance(outcome, Fits) else None,
    }


def _figures(found: Any) -> dict[str, Any]:
    return {size: getattr(found, size) for size in (*SIZES, "device_bytes")} | {"phases": dict(found.phase_peaks)}


def every_pair(job: Job, seed: int) -> tuple[list[Config], dict[str, int]]:
    """Configs with every value of every axis, alone beside plain ones and in every pair, as far as that can be trained;
    of what cannot, the reasons with how often. Compiled ones, which take long, come last. Raises `ValueError` if the
    catalog's card is refused something else."""
    of_catalog = replace(job, hardware=catalog_site(job.hardware.name.removeprefix(PREFIX))[0])
    # Every sequence is full, which leaves nothing to batch otherwise.
    axes = [axis for axis in AXES if axis.name != "batching"]
    # What goes without saying is beside every other value.
    values = [(axis.name, v) for axis in axes for v in axis.values or NUMBERS[axis.name] if axis.says(v)]
    found, missing, refused = dict[Config, None](), dict[frozenset[tuple[str, Value]], None](), Counter[str]()
    for chosen in [*((one,) for one in values), *itertools.combinations(values, 2)]:
        if len(dict(chosen)) < len(chosen) or (config := _made(dict(chosen), job)) is None:
            continue
        reason, said = (unsupported(config, one) or "" for one in (job, of_catalog))
        if reason.replace(PREFIX, "") != said:
            raise ValueError(f"{config} is refused otherwise: {reason!r}, and of the catalog's card {said!r}")
        if reason := cannot_here(config, job) or "":
            refused[reason] += 1
        elif len(chosen) == 1:
            found[config] = None
        else:
            missing[frozenset(chosen)] = None

    def covered(config: Config) -> list[frozenset[tuple[str, Value]]]:
        return [pair for two in itertools.combinations(config.items, 2) if (pair := frozenset(two)) in missing]

    chance = random.Random(seed)
    for pair in [pair for config in found for pair in covered(config)]:
        missing.pop(pair, None)
    while missing:
        fixed = dict(next(iter(missing)))
        for name, value in chance.sample(values, len(values)):
            old, new = _made(fixed, job), None if name in fixed else _made(fixed | {name: value}, job)
            assert old is not None
            if new is not None and not cannot_here(new, job) and len(covered(new)) > len(covered(old)):
                fixed[name] = value
        config = _made(fixed, job)
        assert config is not None
        found[config] = None
        for pair in covered(config):
            del missing[pair]
    return sorted(found, key=lambda config: config["compile"] is True), dict(refused)


def _made(values: Mapping[str, Value], job: Job) -> Config | None:
    """A config with these values, and plain ones that go with them; None where full training has no such axis."""
    alone = "ddp" if values.get("offload", "none") == "none" else "zero3"
    plain = {"precision": mixed_precision(job.hardware), "sharding": "none" if job.workload.devices == 1 else alone}
    method: dict[str, Value] = {"method": "lora"} if {"rank", "targets"} & values.keys() else {}
    with suppress(UsageError):
        return complete(method | dict(values), plain)
    return None


def record_pairs(file: Path, seed: int, ranks: int) -> None:
    """On this machine's emulated card: train each config of `every_pair` that the file lacks."""
    site = detect("cuda")
    asked = replace(PAIRED, global_batch=PAIRED.global_batch * ranks, devices=ranks)
    about = {name: getattr(asked, name) for name in ("model", "seq_len", "global_batch")}
    job = asked.job(site)
    configs, refused = every_pair(job, seed)
    if unbuilt := [reason for reason in refused if "--build-ops" in reason]:
        raise SystemExit(f"{site[0].name}: {unbuilt[0]}")
    if not file.exists():
        _begin(file, site, seed=seed, refused=refused)
    done = [line["config"] for line in read(file)[1:]]
    estimator = Estimator(job, None)
    with GroupRunner(kind="cuda", ranks=ranks) as runner:
        for number, config in enumerate(configs, 1):
            if config.to_json() not in done:
                said = estimator.estimate(config, memory_limit_bytes=job.hardware.memory_bytes)
                _add(file, {"job": {**about, "ranks": ranks, "segments": True}, **_trained(runner, job, said)})
                print(f"{site[0].name}: {number} of {len(configs)}", file=sys.stderr, flush=True)


def record(file: Path, configs: int, seed: int, ranks: int, **extras: bool) -> None:
    """On this machine's emulated card: draw, predict and train until the file has so many configs."""
    site = detect("cuda")
    done = read(file)[1:] if file.exists() else []
    if not done:
        _begin(file, site, seed=seed)
    groups, have = len({line["group"] for line in done}), len(done)
    with ExitStack() as opened:
        runners = {}
        for segments in (True, False):
            os.environ.update(dict.fromkeys(ALLOCATOR, f"{EXPANDABLE}:{segments}"))
            runners[segments] = opened.enter_context(GroupRunner(kind="cuda", ranks=ranks))
        while have < configs:
            drawing = Drawing(site, f"{seed} {site[0].name} {groups}", ranks, **extras)
            for row in itertools.islice(drawing.rows(runners), configs - have):
                _add(file, {"group": groups, **row})
                have += 1
            groups += 1
            print(f"{site[0].name}: {have} of {configs}", file=sys.stderr, flush=True)


def _begin(file: Path, site: tuple[Hardware, Stack], **more: Any) -> None:
    file.unlink(missing_ok=True)
    _add(file, {"hardware": site[0].to_json(), "stack": site[1].to_json(), **more})


def _add(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(line, separators=(",", ":")) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, compressed or not, of which the first says where it was made; a last one that was cut off is
    left out."""
    found = []
    for line in (gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()).splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def rows_of(file: Path) -> list[Row]:
    """The rows of a file."""
    card = file.name.partition(".")[0]
    return [Row(card=card, **{k: v for k, v in line.items() if k != "group"}) for line in read(file)[1:]]


def again(site: tuple[Hardware, Stack], rows: Sequence[Row]) -> list[Row]:
    """Rows of one job, predicted anew."""
    asked = {name: value for name, value in rows[0].job.items() if name not in ("ranks", "segments")}
    job = WorkloadOptions(**asked, devices=rows[0].job["ranks"]).job(site)
    estimator = Estimator(replace(job, expandable_segments=rows[0].job["segments"]), None)
    found = []
    for row in rows:
        said = estimator.estimate(Config.from_json(row.config), memory_limit_bytes=row.limit)
        found.append(replace(row, predicted=_figures(said) | {"fits": said.fits}))
    return found


def all_again(files: Sequence[Path], processes: int) -> list[Row]:
    """The rows of all files, predicted anew; one estimator predicts all that train the same."""
    tasks = []
    for file in files:
        about, jobs = read(file)[0], defaultdict(list)
        for row in rows_of(file):
            jobs[json.dumps(row.job)].append(row)
        site = Hardware.from_json(about["hardware"]), Stack.from_json(about["stack"])
        tasks += [(site, rows) for rows in jobs.values()]
    found: list[Row] = []
    with ProcessPoolExecutor(processes) as pool:
        for number, rows in enumerate(pool.map(again, *zip(*tasks, strict=True)), 1):
            found += rows
            print(f"{number} of {len(tasks)} jobs", file=sys.stderr, flush=True)
    return found


def figures(rows: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Each figure's name, value and target, the most that it may be."""
    errors = ([abs(error) for row in rows if (error := row.error(size)) is not None] or [0.0] for size in SIZES)
    allocated, reserved = map(sorted, errors)
    phases = sorted(error for row in rows for error in row.phase_errors) or [0.0]
    fixed = sorted(abs(row.error(SIZES[1]) or 0.0) for row in rows if not row.job["segments"]) or [0.0]
    judged = [row.misjudged for row in rows if row.judged]
    margins = (abs(row.predicted["device_bytes"] / row.limit - 1.0) for row in rows if row.misjudged)
    return [
        ("allocated, median error", statistics.median(allocated), 0.0005),
        ("allocated, largest error", allocated[-1], 0.005),
        ("each phase with expandable segments, median error", statistics.median(phases), 0.0005),
        ("each phase with expandable segments, largest error", phases[-1], 0.005),
        ("reserved, median error", statistics.median(reserved), 0.005),
        ("reserved, 95th percentile", _late(reserved), 0.02),
        ("reserved without expandable segments, 95th percentile", _late(fixed), 0.02),
        ("fit misjudged", statistics.fmean(judged or [0.0]), 0.003),
        ("margin of what was misjudged", max(margins, default=0.0), 0.01),
        ("ended in another way", 1.0 - len(judged) / len(rows), 0.0),
    ]


def _late(errors: Sequence[float]) -> float:
    """The 95th percentile of sorted numbers."""
    return errors[int(0.95 * len(errors))]


def compared(recorded: Sequence[Row], now: Sequence[Row]) -> dict[str, Any]:
    """What `figures.json` holds: the figures as they were when the rows were recorded, and of this estimator."""
    both = zip(figures(recorded), figures(now), strict=True)
    return {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "estimator": ESTIMATOR_VERSION,
        "configs": len(now),
        "trained": sum(row.measured is not None for row in now),
        "figures": {name: {"target": most, "recorded": old, "now": new} for (name, old, most), (_, new, _) in both},
    }


def table_of(found: Mapping[str, Any]) -> str:
    """The table of README.md that `compared` makes."""

    def said(value: float, most: float) -> str:
        return f"{float(f'{100 * value:.2g}'):g} %" + (", **missed**" if value > most else "")

    lines = [f"| figure | target | as recorded | estimator {found['estimator']} |", "|---|---|---|---|"]
    for name, one in found["figures"].items():
        target = one["target"]
        lines.append(f"| {name} | {100 * target:g} % | {said(one['recorded'], target)} | {said(one['now'], target)} |")
    return "\n".join(lines) + "\n"


def judge(rows: Sequence[Row]) -> bool:
    """Print the figures and what is farthest off; returns whether every target is reached."""
    trained = sum(row.measured is not None for row in rows)
    print(f"{len(rows)} configs, of which {trained} trained")
    found = figures(rows)
    for name, value, most in found:
        print(f"{name:53} {value:8.3%}, target {most:.2%}{'' if value <= most else '  MISSED'}")
    worst = sorted(rows, key=lambda row: (row.misjudged, row.farthest), reverse=True)
    print("farthest off: predicted allocated and reserved MiB, measured, errors")
    for row in worst[:20]:
        print(row)
    for row in rows:
        if not row.judged:
            print(f"{row}: {row.outcome}: {row.reason}")
    return all(value <= most for _, value, most in found)


def main() -> int:
    """Record what is missing, then judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--configs", type=int, default=3000, help="of all cards together")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--home", default=".venv/emulated-card")
    parser.add_argument("--compile", action="store_true", help="every config with compile=true")
    parser.add_argument("--evaluate", action="store_true", help="also evaluate between steps")
    parser.add_argument("--trainers", action="store_true", help="train as the known trainers do")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--again", action="store_true")
    what.add_argument("--pairs", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here and asked.pairs:
        record_pairs(asked.folder, asked.seed, asked.ranks)
        return 0
    if asked.here:
        extras = {"compiles": asked.compile, "evaluates": asked.evaluate, "trained": asked.trainers}
        record(asked.folder, asked.configs, asked.seed, asked.ranks, **extras)
        return 0
    if not asked.again:
        asked.folder.mkdir(parents=True, exist_ok=True)
        cards = asked.cards.split(",")

        def on(card: str) -> None:
            machine = [str(EMULATED), "--home", asked.home, ",".join([card] * asked.ranks), sys.executable]
            program = [__file__, str(asked.folder / f"{card}.jsonl"), "--here"]
            numbers = {"--configs": asked.configs // len(cards), "--seed": asked.seed, "--ranks": asked.ranks}
            options = [str(word) for pair in numbers.items() for word in pair]
            flags = [f"--{name}" for name in ("pairs", "compile", "evaluate", "trainers") if getattr(asked, name)]
            subprocess.run([sys.executable, *machine, *program, *options, *flags], check=True)

        with ThreadPoolExecutor(asked.processes) as threads:
            list(threads.map(on, cards))
    files = sorted(asked.folder.glob("*.jsonl*"))
    rows = [row for file in files for row in rows_of(file)]
    if asked.again:
        recorded, rows = rows, all_again(files, asked.processes)
        found = compared(recorded, rows)
        (asked.folder / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
        print(table_of(found))
    return 0 if judge(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
