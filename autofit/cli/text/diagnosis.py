"""A diagnosis as text for people: the verdict, where the bytes are, and the changes, as diffs of the user's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.cli.text.phrases import EFFECTS, total_text
from autofit.cli.text.predicted import advice_rows, change_rows, memory_text, share_rows, verdict_text
from autofit.core.lattice import Config
from autofit.core.units import format_bytes

if TYPE_CHECKING:
    from autofit.operations.diagnosing.diagnosis import Diagnosis, Remedy
    from autofit.trainers.out_of_memory import ReportedOutOfMemory

MEMORY_EFFECTS = {"more": "needs more memory", "less": "needs less memory", "unknown": "changes memory either way"}
"""How a setting that no estimate covers changes memory, in words, by its effect."""
PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the update",
    "evaluation": "in evaluation",
}

NEXT = """\
How much each saves: add --config with your trainer's own file. If all is in a script, describe it:
  autofit estimate --model MODEL --hardware CARD --config method=lora,micro_batch=8"""


def error_text(failure: ReportedOutOfMemory) -> str:
    """The answer where an error's text is all there is."""
    rows = [("what helps", ""), *((f"  {EFFECTS[effect]}", what) for effect, what in failure.what_helps.items())]
    next_step = () if failure.on_host else (NEXT,)
    return "\n\n".join((failure_text(failure), columns(rows), *next_step))


def diagnosis_text(diagnosis: Diagnosis, *, verbose: bool = False) -> str:
    """The verdict, and what explains it; `verbose` adds what was assumed."""
    estimate = diagnosis.estimate
    more = [part.key for part in diagnosis.run.not_counted if part.effect == "more"]
    unknown = [key.key for key in diagnosis.run.unknown]
    left_out = [f"without what {', '.join(more)} adds"] if more and estimate.fits else []
    left_out += [f"unknown key: {', '.join(unknown)}"] if unknown else []
    without = f" ({'; '.join(left_out)}: see below)" if left_out else ""
    parts = [diagnosis.emulated] if diagnosis.emulated else []
    parts.append(f"{verdict_text(estimate)}{without}\n{_request(diagnosis)}")
    if diagnosis.failure is not None:
        parts.append(failure_text(diagnosis.failure))
    largest_first = sorted(estimate.breakdown.items(), key=lambda part: -part[1])
    parts.append(columns([("at the peak", PHASES[estimate.peak_phase]), *share_rows(estimate, largest_first)]))
    if not_covered := _not_covered(diagnosis, verbose=verbose):
        parts.append(columns(not_covered))
    return "\n\n".join(parts)


def changes_text(diagnosis: Diagnosis, *, verbose: bool = False) -> str:
    """What helps, below what `diagnosis_text` prints; `verbose` adds all diffs but the first."""
    parts = []
    if diagnosis.in_script:
        first = Config.of(next(iter(diagnosis.in_script.values())).values)
        say_so = ("", f"once your script does so, say it, such as --also {first}")
        parts.append(columns([*change_rows("fits with, in your script", diagnosis.in_script), say_so]))
    parts.append(columns([*_changes(diagnosis), *(("note", note) for note in diagnosis.notes_on_changes)]))
    parts += [_edit_text(remedy) for remedy in (diagnosis.remedies if verbose else diagnosis.remedies[:1])]
    if len(diagnosis.remedies) > 1 and not verbose:
        every = "both" if len(diagnosis.remedies) == 2 else "all three"
        parts.append(f"The diff is of the first change; --verbose prints {every}.")
    return "\n\n".join(parts)


def _edit_text(remedy: Remedy) -> str:
    if remedy.diff is not None:
        return remedy.diff.rstrip("\n")
    settings = remedy.settings.items()
    return "set " + ", ".join(f"without {key}" if value is None else f"{key}: {value}" for key, value in settings)


def failure_text(failure: ReportedOutOfMemory) -> str:
    """What an error's text says, and what that means."""
    sizes = {
        "asked for": failure.requested_bytes,
        "in use": failure.allocated_bytes,
        "reserved, unused": failure.unallocated_bytes,
        "free": failure.free_bytes,
        "the card": failure.capacity_bytes,
    }
    figures = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None)
    return "\n".join(["the error: " + (figures or "out of memory, without figures"), *failure.findings])


def _request(diagnosis: Diagnosis) -> str:
    """What the file asks for, in a line."""
    options, config = diagnosis.options, diagnosis.run.config
    adapters = "" if config["method"] == "full" else f" of rank {config['rank']}"
    step = f"{config['micro_batch']} x {diagnosis.run.accumulation} sequences of {options.seq_len:,} tokens"
    on_each_gpu = "" if options.devices == 1 else f" on each of {options.devices} GPUs"
    speed, error = diagnosis.estimate.tokens_per_second, diagnosis.estimate.relative_error
    at_speed = ""
    if diagnosis.fits and speed is not None and error is not None:
        at_speed = f", {total_text(speed, options.devices)}, give or take {error:.0%}"
    return f"{diagnosis.run.trainer}: {options.model}, {config['method']}{adapters}, {step}{on_each_gpu}{at_speed}"


def _not_covered(diagnosis: Diagnosis, *, verbose: bool) -> list[tuple[str, str]]:
    """What the estimate does not cover, and keys that the trainer does not have."""
    rows = [
        ("not counted", f"{part.key} {MEMORY_EFFECTS[part.effect]}: {part.because}")
        for part in diagnosis.run.not_counted
    ]
    for key in diagnosis.run.unknown:
        remark = (
            f"did you mean {' or '.join(key.nearest)}?" if key.nearest else f"{diagnosis.run.trainer} has no such key"
        )
        rows.append(("unknown key", f"{key.key}: {remark}"))
    rows += [("note", note) for note in diagnosis.notes]
    if verbose:
        rows += [("assumed", sentence) for sentence in (*diagnosis.run.assumed, *diagnosis.estimate.assumptions)]
        rows.append(("memory", memory_text(diagnosis.estimate)))
    return rows


def _changes(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The changes that help, the smallest first."""
    failed_but_fits = diagnosis.fits and diagnosis.failure is not None
    if diagnosis.remedies:
        heading = "to try" if failed_but_fits else "faster with" if diagnosis.fits else "fits with"
        changes = {", ".join(remedy.change.roles): remedy.change for remedy in diagnosis.remedies}
        return change_rows(heading, changes, diagnosis.estimate.relative_error if diagnosis.fits else None)
    if failed_but_fits:
        return [("to try", "what the error says: by its figures this file fits as it is")]
    if diagnosis.fits:
        return [("faster with", "nothing near it that this file can say")]
    of = " that this file can say"
    rows = advice_rows(diagnosis.estimate, of=of) or [("to fit", f"no small change{of} is enough")]
    return [*rows, ("", "autofit estimate looks beyond the file: at other methods, and at states on the host")]
