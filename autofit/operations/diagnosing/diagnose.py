"""What `autofit diagnose` answers: whether a trainer's own file fits, and the changes to it that help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from autofit.catalog.hardware import cards_of_size
from autofit.core.errors import UsageError
from autofit.core.units import format_bytes
from autofit.core.workload import Effect, check_count
from autofit.operations.diagnosing.case import Case
from autofit.operations.diagnosing.diagnosis import Diagnosis, DiagnosisRequest
from autofit.operations.diagnosing.notes import notes_on_adapters, notes_on_run, notes_on_versions
from autofit.operations.diagnosing.remedies import in_script, remedies
from autofit.operations.diagnosing.run_reader import RunReader
from autofit.techniques.axes.precision import has_bf16
from autofit.trainers.run import Run, Where
from autofit.trainers.source_file import SourceFile
from autofit.trainers.trainer import recognised, trainer_named
from autofit.trial.machine.detection import detect, requested_card


def diagnose(path: Path, user: DiagnosisRequest) -> Diagnosis:
    """Whether the run that a trainer's file asks for fits a card, and what helps. Raises what `read_case` raises."""
    return advised(read_case(path, user))


def read_case(path: Path, user: DiagnosisRequest) -> Case:
    """A trainer's file on a card, read.

    Raises `UsageError` for what is unclear or cannot be trained, `EnvironmentLacks` for a model that is not here.
    """
    if user.devices is not None:
        check_count("devices", user.devices)
    user, notes = _with_reported_card(user)
    file = SourceFile.read(path)
    trainer = recognised(file.values) if user.trainer is None else trainer_named(user.trainer)
    card = requested_card(user.hardware)
    where = Where(folder=path.parent, devices=user.devices, bf16=has_bf16(card or detect()[0]))
    if missing := [*_missing(user, trainer.read(file.values, where))]:
        raise UsageError("; ".join(missing))
    reader = RunReader(trainer=trainer, request=user, where=where, notes=notes)
    return Case(file, reader).on_card()


def verdict(case: Case) -> Diagnosis:
    """Whether it fits, and what explains that; what helps takes longer."""
    estimate, failure = case.whole(case.estimate), case.request.failure
    return Diagnosis(
        run=case.run,
        options=case.options,
        estimate=estimate,
        notes=(*case.reader.notes, *notes_on_run(case, case.estimate)),
        failure=failure and replace(failure, lacking_bytes=max(0, -estimate.headroom_bytes)),
        emulated=case.emulated,
    )


def advised(case: Case, report: Callable[[int], None] = lambda done: None) -> Diagnosis:
    """The verdict with what helps. `report` is called with how many configs have been predicted."""
    estimate = case.advised(report)
    whole, helping = case.whole(estimate), remedies(case, estimate, report)
    trains_else = all(remedy.change.effect is Effect.TRAINING for remedy in helping)
    scripted = dict(in_script(case)) if trains_else and not whole.likely_fits else {}
    needs_words = not (whole.likely_fits or helping or scripted)
    return replace(
        verdict(case),
        estimate=whole,
        remedies=tuple(helping),
        in_script=scripted,
        notes_on_changes=(*(notes_on_adapters(case) if needs_words else ()), *notes_on_versions(helping)),
    )


def _with_reported_card(user: DiagnosisRequest) -> tuple[DiagnosisRequest, tuple[str, ...]]:
    """The request with the card and limit of the error's text, where the user names none; and notes on them."""
    notes, failure = [], user.failure
    if failure is not None and failure.capacity_bytes is not None:
        similar, memory = cards_of_size(failure.capacity_bytes), format_bytes(failure.capacity_bytes)
        if user.hardware == "auto" and similar:
            user = replace(user, hardware=similar[0].name)
            others = f", and could be {' or '.join(card.name for card in similar[1:])}" if similar[1:] else ""
            notes.append(f"the error's card has {memory}: taken for {similar[0].name}{others}")
        named = requested_card(user.hardware)
        is_card_of_error = named is None or named in similar
        if not is_card_of_error:
            notes.append(f"the error is of another card, with {memory}")
        if user.memory_limit_bytes is None and is_card_of_error:
            card = named or detect()[0]
            free = min(failure.capacity_bytes, card.memory_bytes)  # the text rounds to two decimals
            user = replace(user, memory_limit_bytes=free - failure.elsewhere_bytes)
    return user, tuple(notes)


def _missing(user: DiagnosisRequest, run: Run) -> Iterator[str]:
    if requested_card(user.hardware) is None and detect()[0].kind == "cpu":
        yield "there is no GPU here: name the card with --hardware (`autofit hardware` lists them)"
    if user.model is None and run.model is None:
        yield "the file names no model: say it with --model"
    if user.seq_len is None and run.seq_len is None:
        yield "the file does not say how long sequences are: say it with --seq-len"
