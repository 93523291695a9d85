"""Recommendations in the formats that trainers read, one module per target; none imports the library it targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autofit.errors import UsageError, unknown
from autofit.export.accelerate_format import export_accelerate
from autofit.export.deepspeed_format import export_deepspeed
from autofit.export.document import Export, Task
from autofit.export.json_format import export_json
from autofit.export.transformers_format import export_transformers
from autofit.export.trl_format import export_trl
from autofit.frontier import Recommendation

FORMATS: Mapping[str, Callable[[Task], Export]] = {
    "json": export_json,
    "transformers": export_transformers,
    "trl": export_trl,
    "accelerate": export_accelerate,
    "deepspeed": export_deepspeed,
}
"""Each format's name and its exporter, a pure function of its task."""

LATER = ("axolotl", "llamafactory", "torchtune")
"""Formats that are planned."""


def check_format(name: str) -> None:
    """Raises `UsageError` for a format that does not exist, or does not exist yet."""
    if name in LATER:
        raise UsageError(f"format {name!r} comes with a later release: use {', '.join(FORMATS)}")
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)


def export(recommendation: Recommendation, *, format: str, source: str) -> Export:
    """`recommendation` in `format`, for training the model at `source` (hub id or folder).

    Raises `UsageError` for a format that does not exist, or does not exist yet, and for a model that can no longer be
    read.
    """
    check_format(format)
    return FORMATS[format](Task(recommendation=recommendation, source=source))


__all__ = ["FORMATS", "LATER", "Export", "check_format", "export"]
