"""Nothing fits: why, what came closest and what would help, as a line for people and as a document for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autofit.catalog.hardware import Card, fitting
from autofit.core.device.hardware import Hardware
from autofit.core.frontier import Point
from autofit.core.lattice import Config
from autofit.core.outcome import EVALUATION, Fits, OutOfMemory, Trial
from autofit.core.units import GIB, format_bytes
from autofit.core.workload import Effect, Goal, Workload
from autofit.estimate.memory.deviation import NOTHING_COMPARED
from autofit.techniques import AXIS

USUAL_RANK = Goal().min_rank
WITH_OFFLOAD = "--space offload"
MEMORY_LEVERS = (
    *("method", "sharding", "offload", "micro_batch", "checkpointing"),
    *("loss", "precision", "optimizer", "rank"),
)
"""Axes by their usual effect on memory, the largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closest:
    """What came closest to fitting."""

    text: str
    """For people."""
    document: Mapping[str, Any] | None
    """For programs; None if nothing was tried."""
    beyond_bytes: int
    """It needs more than this, as far as is known."""


def lightest(point: Point, memory_limit_bytes: int) -> Closest:
    """A measured config that exceeds the limit, and by how much."""
    needed = point.measurement.device_bytes
    document = {**point.to_json(), "provenance": "measured", "over_limit_bytes": needed - memory_limit_bytes}
    text = f"the closest takes {format_bytes(needed)} ({point.config})"
    return Closest(text=text, document=document, beyond_bytes=needed - 1)


def of_failures(trials: Sequence[Trial], memory_limit_bytes: int) -> Closest:
    """What came closest when nothing has fitted: the trial out of memory that needs the least, or the last that failed.

    It needs more than its limit or, if that is higher, what was predicted. Ties go to the config lightest by its axes.
    """
    failed = [t for t in trials if not isinstance(t.outcome, Fits)]
    if not failed:
        return Closest(text="no trial has ended", document=None, beyond_bytes=memory_limit_bytes)
    ran_out = [t for t in failed if isinstance(t.outcome, OutOfMemory)]
    closest = min(ran_out, key=lambda t: (_beyond_bytes(t), _memory_order(t.config))) if ran_out else failed[-1]
    predicted_bytes = _predicted_bytes(closest)
    prediction = "" if predicted_bytes is None else f", predicted to need {format_bytes(predicted_bytes)}"
    return Closest(
        text=f"the closest {_failure(closest)}{prediction}",
        document={
            "config": closest.config.to_json(),
            **closest.outcome.to_json(),
            "trial_id": closest.trial_id,
            "provenance": "measured",
            "trial_limit_bytes": closest.memory_limit_bytes,
            "predicted_bytes": predicted_bytes,
            "over_limit_bytes": max(0, (predicted_bytes or 0) - memory_limit_bytes) or None,
        },
        beyond_bytes=max(memory_limit_bytes, _beyond_bytes(closest)),
    )


def _predicted_bytes(trial: Trial) -> int | None:
    """What a trial that ran out of device memory was predicted to need; None unless that exceeds the trial's limit."""
    if trial.prediction is None or not trial.ran_out_on_device:
        return None
    device_bytes = trial.prediction.device_bytes
    return device_bytes if device_bytes > trial.memory_limit_bytes else None


def _beyond_bytes(trial: Trial) -> int:
    """The most device memory that is known to be too little for a failed trial."""
    predicted_bytes = _predicted_bytes(trial)
    return trial.memory_limit_bytes if predicted_bytes is None else predicted_bytes - 1


def how_all_failed(trials: Sequence[Trial]) -> str:
    """How the trials ended, in a few words, when they leave no config that fits."""
    if trials and all(isinstance(t.outcome, OutOfMemory) for t in trials):
        return "every trial ran out of memory"
    if any(isinstance(t.outcome, Fits) for t in trials):
        return "every config that fitted has also failed"
    return f"of {len(trials)} trials none has fitted"


def _failure(trial: Trial) -> str:
    assert not isinstance(trial.outcome, Fits)
    kind, reason = trial.outcome.kind.replace("_", " "), " ".join(trial.outcome.reason.split())
    kind += " in evaluation" if getattr(trial.outcome, "phase", None) == EVALUATION else ""
    return f"under {format_bytes(trial.memory_limit_bytes)}: {kind}: {reason} ({trial.config})"


def levers(goal: Goal, workload: Workload, hardware: Hardware, *, beyond_bytes: int) -> str:
    """What would help if more than `beyond_bytes` are needed, the smallest change to the training first."""
    options = []
    if workload.eval_batch is not None and workload.eval_batch > 1:
        options.append(f"--eval-batch {workload.eval_batch // 2}")
    if beyond_bytes < hardware.memory_bytes:
        options.append(f"a higher --memory-limit ({hardware.name} has {format_bytes(hardware.memory_bytes)})")
    options += further_memory(workload, hardware)
    options += [option for option, _ in wider(goal)]
    if goal.min_rank > USUAL_RANK and goal.method != "full":
        options.append(f"--min-rank {USUAL_RANK}")
    if workload.seq_len >= 4:
        options.append(f"--seq-len {workload.seq_len // 2}")
    card = smallest_card(beyond_bytes + 1, hardware)
    if card is not None:
        options.append(f"a card such as {card.name} ({format_bytes(card.memory_bytes)})")
    return f"what would help: {', '.join(options) or 'a smaller --model'}"


def further_memory(workload: Workload, hardware: Hardware) -> list[str]:
    """The options that would let a search use more memory than one accelerator's without changing the training."""
    if hardware.kind == "cpu":
        return []
    options = [WITH_OFFLOAD] if workload.devices == 1 else []
    device_counts = [n for n in range(workload.devices + 1, hardware.count + 1) if workload.global_batch % n == 0]
    return [*options, f"--devices {device_counts[-1]}"] if device_counts else options


def wider(goal: Goal) -> list[tuple[str, Goal]]:
    """The options that would let a search try lighter configs than `goal` does, each with the resulting goal."""
    effects = [effect for effect in Effect if effect > goal.allow]
    options = [(f"--allow {effect.label}", replace(goal, allow=effect)) for effect in effects]
    if "qlora" not in goal.methods:
        options.append(("--method any", replace(goal, method="any")))
    return options


def smallest_card(needed_bytes: int, hardware: Hardware | None = None) -> Card | None:
    """The smallest card that trials can run on and that likely holds what takes `needed_bytes` on `hardware`, with room
    for the error of a card where nothing was compared; None if there is none."""
    # Unless a CUDA device needed it: the driver's context, libraries' workspaces, and a dequantised matrix or gradient.
    needed = needed_bytes + (0 if hardware is not None and hardware.kind == "cuda" else 3 * GIB // 2)
    cards = (card for card in fitting(needed) if card.kind == "cuda")
    return next((c for c in cards if NOTHING_COMPARED.certainty(needed, c.memory_bytes) != "unsure"), None)


def holder(needed_bytes: int, hardware: Hardware | None = None) -> str:
    """`smallest_card` in words."""
    card = smallest_card(needed_bytes, hardware)
    if card is None:
        return "no card of the catalog could hold it"
    return f"the smallest card that could hold it is {card.name} ({format_bytes(card.memory_bytes)})"


def _memory_order(config: Config) -> tuple[int, ...]:
    """Orders configs roughly by memory, as a user expects but the lattice's order does not claim."""
    return tuple(AXIS[name].place(config.get(name)) for name in MEMORY_LEVERS)
