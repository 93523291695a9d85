"""What explains a diagnosis, one sentence each: of the run, of the error that it ended with, of the changes to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autofit.catalog.models import notes
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
        yield "trl is taken to be 1.7 or later: earlier ones compute all logits at once, which takes more"
    if case.run.config["sharding"] == "ddp":
        yield "every GPU holds everything (DDP); if your launcher shards it, say so, such as --also sharding=zero3"
    if failure is not None:
        yield from _on_failure(case, failure, case.step_bytes(estimate))


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


def _on_failure(case: Case, failure: ReportedOutOfMemory, expected: int) -> Iterator[str]:
    """What an error says beside the bytes `expected` of a step."""
    if failure.phase == "evaluation" and case.run.trainer != "axolotl":
        yield "if a compute_metrics keeps logits, eval_accumulation_steps moves them to the host as evaluation goes"
    if case.missed_bytes:
        needed, missed = format_bytes(expected + case.missed_bytes), format_bytes(case.missed_bytes)
        yield f"the error shows {needed}, where this file should take {format_bytes(expected)}"
        yield f"those {missed} more are counted in every figure here, as temporaries"
