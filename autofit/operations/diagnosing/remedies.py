"""The edits of a trainer's file that help: what trains the same comes before what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autofit.core.errors import UsageError
from autofit.core.lattice import Value
from autofit.core.outcome import EVALUATION
from autofit.core.workload import Effect
from autofit.estimate.estimate import Change, Estimate
from autofit.export.trainer_arguments import TORCH_NAMES
from autofit.operations.diagnosing.beyond import of_whole_run
from autofit.operations.diagnosing.case import Case
from autofit.operations.diagnosing.diagnosis import Remedy
from autofit.prediction.helpful_changes import changed, effect_of
from autofit.techniques.axes.precision import is_mixed, product_format
from autofit.techniques.axes.sharding import has_own_mixed_precision
from autofit.trainers.edits import KeyPath, spelled_option

ROOM = 0.08
"""Share left to fragmentation and to the prediction's error before an evaluation counts as one that fits."""
IN_SCRIPT: Mapping[str, Mapping[str, Value]] = {
    "dtype=torch.bfloat16": {"precision": "bf16"},
    "LoRA": {"method": "lora"},
    "QLoRA": {"method": "qlora"},
}
"""What a script that makes the model may do, and the values of axes that stand for it."""


def remedies(case: Case, estimate: Estimate, report: Callable[[int], None]) -> Sequence[Remedy]:
    """What helps, of which `estimate` has the changes to the config. A file that fits as it was edited needs these
    edits; one that fits and has failed all the same may have failed in evaluation or saving."""
    fits = case.whole(estimate).likely_fits
    if fits and case.edited:
        return [case.remedy(Change(values={}, effect=Effect.EXACT, estimate=estimate, roles=("smallest",)))]
    if fits and case.has_failed:
        return _after(case, {**_half_as_many_evaluated(case), **_saved_in_shards(case)}, Effect.EXACT, report)
    of_config = map(case.remedy, estimate.advice)
    best: Sequence[Remedy] = [remedy for remedy in of_config if remedy.change.estimate.likely_fits]
    if fits:
        return best
    best = _more_faithful(_after(case, _edit(case.run.narrower), Effect.NUMERICS, report), best)
    if case.beyond["gradients"] > 0:
        best = _after(case, case.synchronising, Effect.EXACT, report) or best
    best = _after(case, _fewer_evaluated(case), Effect.EXACT, report) or best
    return _after(case, _edit(case.run.adapters), Effect.TRAINING, report) or best


def _edit(key_and_value: tuple[str, Any] | None) -> dict[KeyPath, Any]:
    return {} if key_and_value is None else {(key_and_value[0],): key_and_value[1]}


def _after(case: Case, edits: Mapping[KeyPath, Any], effect: Effect, report: Callable[[int], None]) -> Sequence[Remedy]:
    """The remedies that begin with these edits; none where the trainer or the card cannot do them."""
    if not edits:
        return ()
    try:
        edited = case.edited_by(edits, effect).on_card()
        return remedies(edited, edited.advised(report), report)
    except UsageError:
        return ()


def _more_faithful(some: Sequence[Remedy], others: Sequence[Remedy]) -> Sequence[Remedy]:
    """The remedies that change less of the training; the first ones if both change as much."""
    if not some or not others:
        return some or others
    return min(some, others, key=lambda remedies: max(remedy.change.effect for remedy in remedies))


def _fewer_evaluated(case: Case) -> dict[KeyPath, Any]:
    """The edit that evaluates as many sequences at once as fit; none if what the file asks for fits, or none would."""
    evaluates = case.run.evaluates
    if evaluates is None or _evaluation_fits(case, case.estimate):
        return {}
    powers = (1 << n for n in reversed(range(evaluates.sequences.bit_length())))
    for fewer in (power for power in powers if power < evaluates.sequences):
        estimation = case.estimation_of(replace(case.options, eval_batch=fewer), case.run.config)
        if _evaluation_fits(case, estimation.estimate()):
            return {(evaluates.key,): fewer}
    return {}


def _evaluation_fits(case: Case, estimate: Estimate) -> bool:
    """Whether evaluation alone stays within the limit, with room for the prediction's error."""
    outside_phase = estimate.breakdown["context"] + case.beyond["weights"]
    return estimate.phase_peaks[EVALUATION] * (1.0 + ROOM) + outside_phase <= case.estimation.memory_limit_bytes


def _half_as_many_evaluated(case: Case) -> dict[KeyPath, Any]:
    """The edit after which evaluation takes less, where it is what failed; none if it cannot take fewer."""
    failure, evaluates = case.request.failure, case.run.evaluates
    if failure is None or failure.phase != "evaluation" or evaluates is None or evaluates.sequences == 1:
        return {}
    return {(evaluates.key,): evaluates.sequences // 2}


def _saved_in_shards(case: Case) -> dict[KeyPath, Any]:
    """The edit after which FSDP gathers nothing to save it, where that is what failed and the file has the settings."""
    is_gathered = case.run.config.text("sharding").startswith("fsdp") and not case.run.saves_in_shards
    failed_so = case.request.failure is not None and case.request.failure.phase == "saving"
    if not (is_gathered and failed_so) or isinstance(case.values.get("fsdp_config"), str):
        return {}
    return {spelled_option(case.values, "state_dict_type"): "SHARDED_STATE_DICT"}


def in_script(case: Case) -> Iterator[tuple[str, Change]]:
    """Changes that are likely to fit, of what the script decides, each after what the script is to do."""
    before, job = case.run.config, case.estimation.job
    if case.edited or "method" in case.reader.trainer.table or before["method"] != "full":
        return
    converts = has_own_mixed_precision(before)  # the weights, whatever they were loaded in
    for script, values in IN_SCRIPT.items():
        config = changed(before, values)
        if "precision" in values and (converts or before["precision"] == "fp16-mixed"):
            continue  # the copies that are trained stay in fp32; loss scaling refuses gradients in bf16
        if values.get("method") == "lora" and is_mixed(config) and not converts:
            script = f"dtype=torch.{TORCH_NAMES[product_format(config)]} and {script}"
        with suppress(UsageError):  # it cannot be estimated here
            alone = case.estimation_of(case.options, config).estimate()
            whole = of_whole_run(alone, replace(case.run, config=config), case.estimation, case.missed_bytes)
            if whole.likely_fits and config != before:
                yield script, Change(values=values, effect=effect_of(before, config, job), estimate=whole)
