"""Configs trained on emulated cards, each beside its prediction, for estimate_emulated.py.

    python benchmarks/draw_emulated.py FOLDER [--cards h100-80g,...] [--configs 3000] [--ranks 1] [--seed 0]
                                       [--compile] [--evaluate] [--trainers] [--pairs]
                                       [--processes 2] [--home .venv/emulated-card]

`make emulated-card` builds what it runs on (tests/emulated_card/README.md). Draws configs at random over all axes,
models, sequence lengths and cards, predicts each, trains it as `autofit trial` does, and writes both into FOLDER, a
file per card; what is there already is not run again, so an interrupted run goes on. A quarter is drawn without
expandable segments, and half under a limit within 4 % of what is predicted, where the allocator gives back what it
keeps and fit is decided. What is predicted to take more than one and a half times the card is drawn anew. With
`--compile`, each is compiled, which takes half a minute; with `--evaluate`, each also evaluates 1 to 64 sequences at a
time between steps; with `--trainers`, each trains as one of the known trainers does.

`--pairs` draws nothing: it trains every value of every axis alone and in pairs, each pair at least once, and says which
the card refuses. The words must be those for the catalog's card, which are compared.

Then it prints and exits as estimate_emulated.py does, of the predictions recorded with the configs. Times on such a
card mean nothing, and none is shown. Two cores draw some 17 configs a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from estimate_emulated import compared, judge, read, rows_of, sizes_of

from autofit.catalog.models import load, positions
from autofit.core.device.hardware import EMULATED as PREFIX
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.errors import UsageError
from autofit.core.lattice import Config, Value
from autofit.core.outcome import Fits
from autofit.core.units import GIB
from autofit.estimate.bound import bounded
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.estimation import site as catalog_site
from autofit.techniques import AXES, Job, complete, unsupported
from autofit.techniques.axes.precision import mixed_precision
from autofit.techniques.habits import TRAINERS
from autofit.training.prerequisites.requirements import why_not_trainable
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
    "mlp": ("tiled", "whole"),
    "update": ("in-backward", "after-backward"),
    "offload": ("optimizer", "params", *["none"] * 6),
    # Not padding-free: whether a row has several sequences a model asks the device, whose kernels compute nothing, and
    # would train without the mask.
    "batching": ("packed", "grouped", "padded"),
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
OF_ONE_DECODER = ("micro_batch", "optimizer", "update", "loss")
DRAWS = 10
"""Attempts to draw one config that can work and may fit, before another decoder is drawn."""
HOPELESS = 1.5
"""What is predicted to take more than so many times the card's memory is not run."""
WITHOUT_SEGMENTS, CLOSE, CLOSENESS = 0.25, 0.5, 0.04
OWN_LENGTHS, LENGTHS = 0.25, 24
"""The share of workloads whose sequences differ in length, and how many lengths those have."""
MOST_ON_HOST = 5 * GIB
"""What is offloaded takes real memory of this machine, where several such configs may be trained at once."""


class Drawing:
    """Configs drawn for one workload on this machine's card, each predicted and trained."""

    def __init__(self, site: tuple[Hardware, Stack], seed: str, asked: argparse.Namespace) -> None:
        self._random, self._ranks = random.Random(seed), asked.ranks
        self._fixed: dict[str, Value] = {"compile": True, "kernels": "torch"} if asked.compile else {}
        longest: int | None = 0
        while longest is not None and longest < SEQ_LENS[0]:
            model = self._random.choice(MODELS)
            longest = positions(load(model))
        seq_len = self._random.choice([s for s in SEQ_LENS if longest is None or s <= longest])
        batch = self._random.choice(BATCHES)
        self._about: dict[str, Any] = {"model": model, "seq_len": seq_len, "global_batch": batch * asked.ranks}
        if self._random.random() < OWN_LENGTHS:
            shares = (self._random.lognormvariate(-1.5, 0.8) for _ in range(LENGTHS))
            self._about["lengths"] = [max(2, min(seq_len, int(share * seq_len))) for share in shares]
        if asked.evaluate:
            self._about["eval_batch"] = self._random.choice(EVAL_BATCHES)
        if asked.trainers:
            self._about["trainer"] = self._random.choice(sorted(TRAINERS))
        self._job = WorkloadOptions.of(**self._about, devices=asked.ranks).job(site)

    def rows(self, runners: Mapping[bool, GroupRunner]) -> Iterator[dict[str, Any]]:
        """The lines of a group's configs; the runners are those with expandable segments and without."""
        estimators = {on: Estimator(replace(self._job, expandable_segments=on), None) for on in runners}
        memory = self._job.hardware.memory_bytes
        decoder: dict[str, Value] = {}
        seen: set[tuple[Config, bool, int]] = set()
        for number in range(DECODERS * ALIKE):
            if number % ALIKE == 0:
                decoder = {axis: self._random.choice(v) for axis, v in VALUES.items() if axis not in OF_ONE_DECODER}
            segments = self._random.random() >= WITHOUT_SEGMENTS
            close = self._random.random() < CLOSE
            share = 1.0 + self._random.uniform(-CLOSENESS, CLOSENESS)
            found = self._drawn(estimators[segments], decoder)
            if found is not None:
                limit = min(memory, int(found.device_bytes * share)) if close else memory
                if (found.config, segments, limit) in seen:
                    continue
                seen.add((found.config, segments, limit))
                said = estimators[segments].estimate(found.config, memory_limit_bytes=limit)
                job = {**self._about, "ranks": self._ranks, "segments": segments}
                yield {"job": job, **_trained(runners[segments], estimators[segments].job, said)}

    def _drawn(self, estimator: Estimator, decoder: Mapping[str, Value]) -> Estimate | None:
        """A config with this decoder that can work and may fit, predicted; None where there seems to be none."""
        memory = self._job.hardware.memory_bytes
        for _ in range(DRAWS):
            config = self._one(decoder)
            if why_not_trainable(config, self._job):
                continue
            by_formula = bounded(config, self._job, memory_limit_bytes=memory, reason="")
            if self._runs_here(by_formula):
                found = estimator.estimate(config, memory_limit_bytes=memory)
                if self._runs_here(found):
                    return found
        return None

    def _runs_here(self, found: Estimate) -> bool:
        memory = self._job.hardware.memory_bytes
        return found.device_bytes <= HOPELESS * memory and found.host_bytes <= MOST_ON_HOST

    def _one(self, decoder: Mapping[str, Value]) -> Config:
        drawn = dict(decoder) | {axis: self._random.choice(VALUES[axis]) for axis in OF_ONE_DECODER}
        if drawn["method"] == "full":
            del drawn["rank"], drawn["targets"]
        if self._job.workload.lengths is None:
            del drawn["batching"]
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
        "predicted": sizes_of(said) | {"fits": said.fits},
        "outcome": outcome.kind,
        "reason": getattr(outcome, "reason", None),
        "measured": sizes_of(outcome.measurement) if isinstance(outcome, Fits) else None,
    }


def every_pair(job: Job, seed: int) -> tuple[list[Config], dict[str, int]]:
    """Configs with every value of every axis, alone beside plain ones and in every pair, as far as that can be trained;
    of what cannot, the reasons with how often. Compiled ones, which take long, come last. Raises `ValueError` if the
    catalog's card is refused something else."""
    of_catalog = replace(job, hardware=catalog_site(job.hardware.name.removeprefix(PREFIX))[0])
    # Every sequence is full, which leaves nothing to batch otherwise.
    axes = [axis for axis in AXES if axis.name != "batching"]
    # What goes without saying is beside every other value.
    values = [(axis.name, v) for axis in axes for v in axis.values or NUMBERS[axis.name] if axis.is_stated(v)]
    found, missing, refused = dict[Config, None](), dict[frozenset[tuple[str, Value]], None](), Counter[str]()
    for chosen in [*((one,) for one in values), *itertools.combinations(values, 2)]:
        if len(dict(chosen)) < len(chosen) or (config := _made(dict(chosen), job)) is None:
            continue
        reason, said = (unsupported(config, one) or "" for one in (job, of_catalog))
        if reason.replace(PREFIX, "") != said:
            raise ValueError(f"{config} is refused otherwise: {reason!r}, and of the catalog's card {said!r}")
        if reason := why_not_trainable(config, job) or "":
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
            if new is not None and not why_not_trainable(new, job) and len(covered(new)) > len(covered(old)):
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


def why_not_offloaded(job: Job) -> str | None:
    """Why nothing that offloads can be trained here, if DeepSpeed's operations are not compiled."""
    config = _made({"offload": "optimizer"}, job)
    reason = None if config is None else why_not_trainable(config, job)
    return reason if reason is not None and "--build-ops" in reason else None


def record_pairs(file: Path, asked: argparse.Namespace) -> None:
    """On this machine's emulated card: train each config of `every_pair` that the file lacks."""
    site, ranks = detect("cuda"), asked.ranks
    paired = replace(PAIRED, global_batch=PAIRED.global_batch * ranks, devices=ranks)
    about = {name: getattr(paired, name) for name in ("model", "seq_len", "global_batch")}
    job = paired.job(site)
    configs, refused = every_pair(job, asked.seed)
    if reason := why_not_offloaded(job):
        raise SystemExit(f"{job.hardware.name}: {reason}")
    if not file.exists():
        _begin(file, site, seed=asked.seed, refused=refused)
    done = [line["config"] for line in read(file)[1:]]
    estimator = Estimator(job, None)
    with GroupRunner(kind="cuda", ranks=ranks) as runner:
        for number, config in enumerate(configs, 1):
            if config.to_json() not in done:
                said = estimator.estimate(config, memory_limit_bytes=job.hardware.memory_bytes)
                _add(file, {"job": {**about, "ranks": ranks, "segments": True}, **_trained(runner, job, said)})
                print(f"{site[0].name}: {number} of {len(configs)}", file=sys.stderr, flush=True)


def record(file: Path, configs: int, asked: argparse.Namespace) -> None:
    """On this machine's emulated card: draw, predict and train until the file has so many configs."""
    site = detect("cuda")
    if reason := why_not_offloaded(PAIRED.job(site)):
        print(f"{site[0].name}: no config offloads, because {reason}", file=sys.stderr)
    done = read(file)[1:] if file.exists() else []
    if not done:
        _begin(file, site, seed=asked.seed)
    groups, have = max((line["group"] for line in done), default=-1) + 1, len(done)
    with ExitStack() as opened:
        runners = {}
        for segments in (True, False):
            os.environ.update(dict.fromkeys(ALLOCATOR, f"{EXPANDABLE}:{segments}"))
            runners[segments] = opened.enter_context(GroupRunner(kind="cuda", ranks=asked.ranks))
        while have < configs:
            drawing = Drawing(site, f"{asked.seed} {site[0].name} {groups}", asked)
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


def main() -> int:
    """Record what is missing on each card, then judge."""
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
    parser.add_argument("--pairs", action="store_true", help="every value and every pair")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    cards = asked.cards.split(",")
    if asked.here:
        record_pairs(asked.here, asked) if asked.pairs else record(asked.here, asked.configs // len(cards), asked)
        return 0
    asked.folder.mkdir(parents=True, exist_ok=True)

    def on(card: str) -> None:
        """This program once more, where there is the card."""
        machine = [str(EMULATED), "--home", asked.home, ",".join([card] * asked.ranks), sys.executable]
        here = [*sys.argv, "--here", str(asked.folder / f"{card}.jsonl")]
        subprocess.run([sys.executable, *machine, *here], check=True)

    with ThreadPoolExecutor(asked.processes) as threads:
        list(threads.map(on, cards))
    rows = rows_of(*sorted(asked.folder.glob("*.jsonl*")))
    return 0 if judge(rows, compared(rows, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
