"""Recommendations in the formats that trainers read, one module per target; none imports the library it targets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from autofit.core.errors import UsageError, unknown
from autofit.core.frontier import Recommendation
from autofit.export.accelerate_format import export_accelerate
from autofit.export.axolotl_format import export_axolotl
from autofit.export.deepspeed_format import export_deepspeed
from autofit.export.document import Export as Export
from autofit.export.document import Recommended
from autofit.export.llamafactory_format import export_llamafactory
from autofit.export.transformers_format import export_transformers
from autofit.export.trl_format import export_trl
from autofit.techniques.habits import TRAINERS
from autofit.trial.program.command import Command


def _export_json(task: Recommended) -> Export:
    """The whole recommendation for programs, as the contract defines it, without the task's source. With a user's
    program it also has the `command` that runs it."""
    recommendation, source = task.recommendation, task.source
    run = {} if recommendation.workload.program is None else {"command": command_line(recommendation, source)}
    return Export(text=json.dumps({**recommendation.to_json(), **run}, indent=2) + "\n")


def command_line(recommendation: Recommendation, source: str) -> str:
    """The shell command that runs the user's program with the recommended config."""
    program = recommendation.workload.program
    assert program is not None
    return Command.parse(program).line(recommendation.point.config, recommendation.workload, source)


FORMATS: Mapping[str, Callable[[Recommended], Export]] = {
    "json": _export_json,
    "transformers": export_transformers,
    "trl": export_trl,
    "accelerate": export_accelerate,
    "deepspeed": export_deepspeed,
    "axolotl": export_axolotl,
    "llamafactory": export_llamafactory,
}
"""Each format's name and its exporter, a pure function of its task. A trainer's format has the trainer's name."""


def formats_for(trainer: str | None, program: str | None = None) -> list[str]:
    """The formats that fit what was measured with a trainer's habits; without a trainer, all. A program reads only its
    command line, which the JSON has."""
    if program is not None:
        return ["json"]
    return [name for name in FORMATS if trainer is None or name == trainer or name not in TRAINERS]


def check_format(name: str) -> None:
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)


def export(recommendation: Recommendation, *, format: str, source: str) -> Export:
    """`recommendation` in `format`, for training the model at `source` (hub id or folder).

    Raises `UsageError` for a format that does not exist, for one of another trainer than the recommendation is for, for
    a model that can no longer be read, and for one that the format's trainer does not have.
    """
    check_format(format)
    trainer, program = recommendation.workload.trainer, recommendation.workload.program
    if program is not None and format != "json":
        run = command_line(recommendation, source)
        raise UsageError(f"this was measured with a program of yours: run {run}, or use --format json")
    if format not in formats_for(trainer):
        raise UsageError(f"this was measured as {trainer} trains: use --format {trainer}, or leave --for out")
    return FORMATS[format](Recommended.of(recommendation, source))


def check_memory(exported: Export, format: str, *, trainer: str | None = None) -> None:
    """Raise `UsageError` if training with what was exported is known to need more memory than was measured, with the
    habits of `trainer` if one is given."""
    if exported.needs_more:
        reasons = "; ".join(exported.needs_more)
        remedy = f"search with --for {format}, " if format in TRAINERS and trainer is None else ""
        raise UsageError(f"this needs more memory as {format} than was measured ({reasons}): {remedy}or add --anyway")
