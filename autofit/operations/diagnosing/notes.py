"""What explains a diagnosis, one sentence each: of the run, of the error that it ended with, of the changes to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autofit.catalog.models import notes
from autofit.core.outcome import PHASES
from autofit.core.units import format_bytes
from autofit.estimate.estimate import Estimate
from autofit.estimate.saving import too_much
from autofit.export.trainer_arguments import SYNC_EACH_BATCH
from autofit.operations.diagnosing.beyond import notes_on_formats
from autofit.operations.diagnosing.case import Case
from autofit.operations.diagnosing.diagnosis import Remedy
from autofit.techniques import complete
from autofit.trainers.edits import newest_keys
from autofit.trainers.out_of_memory import ReportedOutOfMemory

DOUBTFUL = 0.15
"""Share of a prediction above which an error that contradicts it may be another run's. A guess, above what emulated
cards have shown predictions to be off by (12 %, benchmarks/README.md)."""
DOUBT = ": is the error of this run?"
OF_A_LOGIT = 12
"""Bytes: a logit and its gradient, both in 16 bits and in fp32 (`ForCausalLMLoss` of transformers widens them)."""


def notes_on_run(case: Case, estimate: Estimate) -> Iterator[str]:
    """What explains the verdict; `estimate` is that of the config alone."""
    model, failure = case.estimation.job.model, case.request.failure
    yield from notes(model)
    yield from case.run.notes
    if case.only_bf16 is not None:
        yield f"bf16 is emulated on {case.estimation.job.hardware.name}, which is slow: {case.only_bf16}"
    yield from notes_on_formats(case.run, model)
    if estimate.cannot_save and estimate.host_memory_bytes is not None and not case.run.saves_in_shards:
        yield f"checkpoints: {too_much(estimate.config, estimate.saving_host_bytes, estimate.host_memory_bytes)}"
    if case.beyond["gradients"] > 0:
        held = f"takes {format_bytes(case.beyond['gradients'])} more"
        yield f"gradients stay whole until the last micro-batch, which {held}, unless {SYNC_EACH_BATCH[-1]} is set"
    if case.run.trainer == "trl" and case.run.config["loss"] == "chunked":
        earlier = "earlier ones compute all logits at once, which takes some"
        logits_bytes = OF_A_LOGIT * case.reader.logits(case.run)
        yield f"trl is taken to be 1.7 or later: {earlier} {format_bytes(logits_bytes)} more"
    if case.run.config["sharding"] == "ddp":
        yield "every GPU holds everything (DDP); if your launcher shards it, say so, such as --also sharding=zero3"
    if failure is not None:
        of_figures = _on_figures(case, failure, case.step_bytes(estimate))
        yield from _asking_once((*of_figures, *_on_earlier_phases(case, failure, estimate)))


def notes_on_versions(remedies: Sequence[Remedy]) -> Iterator[str]:
    """What the changes to the file need of transformers."""
    keys = {key for remedy in remedies for key in newest_keys({(name,): v for name, v in remedy.settings.items()})}
    if keys:
        yield f"{' and '.join(sorted(keys))} need{'s' * (len(keys) == 1)} transformers 5.17 or later"


def notes_on_adapters(case: Case) -> Iterator[str]:
    """The option with which the user can say that the script makes adapters."""
    if case.run.config["method"] == "full":
        adapters = complete({**case.run.config.to_json(), "method": "lora"})
        if case.nearest_expressible(adapters) is None:
            yield "the file has no words for adapters: if your script makes them, add --also method=lora"


def _on_figures(case: Case, failure: ReportedOutOfMemory, expected: int) -> Iterator[str]:
    """What an error's figures say beside the bytes `expected` of a step."""
    if failure.phase == "evaluation" and case.run.trainer != "axolotl":
        yield "if a compute_metrics keeps logits, eval_accumulation_steps moves them to the host as evaluation goes"
    if failure.requested_bytes and case.reader.shows_logits(case.run):
        has_them = case.run.config["loss"] == "full"
        advice = ": a fused loss has none" if has_them else f", which this run never has{DOUBT}"
        yield f"what was asked for, {format_bytes(failure.requested_bytes)}, are all logits at once{advice}"
    if case.missed_bytes:
        needed, missed = format_bytes(expected + case.missed_bytes), format_bytes(case.missed_bytes)
        ask = DOUBT if case.missed_bytes > DOUBTFUL * expected else ""
        yield f"the error shows {needed}, where this file should take {format_bytes(expected)}{ask}"
        yield f"those {missed} more are counted in every figure here, as temporaries"
    elif failure.allocated_bytes is not None and failure.allocated_bytes > (1 + DOUBTFUL) * expected:
        held = format_bytes(failure.allocated_bytes)
        yield f"{held} were in use, where this file should take {format_bytes(expected)}{DOUBT}"


def _on_earlier_phases(case: Case, failure: ReportedOutOfMemory, estimate: Estimate) -> Iterator[str]:
    """Where the error came after a phase of the step that this file should not get through."""
    if failure.phase not in PHASES:
        return
    # In a first step, gradients and states have yet to be made.
    not_yet = estimate.breakdown["gradients"] + estimate.breakdown["optimizer"]
    for phase in PHASES[: PHASES.index(failure.phase)]:
        least = estimate.phase_peaks[phase] - not_yet
        if (1 - DOUBTFUL) * least > case.estimation.memory_limit_bytes:
            earlier = f"the {phase} phase before it should take {format_bytes(least)}"
            yield f"the error came in the {failure.phase} phase, but {earlier}{DOUBT}"
            if case.run.config["checkpointing"] == "none":
                key = "disable_gradient_checkpointing: false"
                key = key if case.run.trainer == "llamafactory" else "gradient_checkpointing: true"
                in_script = "if your script checkpoints activations, add --also checkpointing=full"
                in_file = f"this file checkpoints no activations: the run of the error may have had {key}"
                yield in_script if case.run.trainer == "transformers" else in_file
            return


def _asking_once(sentences: Iterable[str]) -> Iterator[str]:
    """The notes, of which only the first that doubts the error asks whose it is."""
    has_asked = False
    for sentence in sentences:
        yield sentence.removesuffix(DOUBT) if has_asked else sentence
        has_asked = has_asked or sentence.endswith(DOUBT)
