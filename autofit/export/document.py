"""What every exporter is built from: a table from axis to settings, and the text that results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autofit.catalog.architecture_file import is_path
from autofit.catalog.models import Model, architecture, load, names
from autofit.frontier import Recommendation
from autofit.lattice import Config, Value
from autofit.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to export: a recommendation, and where its trainer loads the weights from."""

    recommendation: Recommendation
    source: str
    """Hub id or folder of the weights."""

    @property
    def config(self) -> Config:
        """The recommended config."""
        return self.recommendation.point.config

    @property
    def workload(self) -> Workload:
        """The workload that it was measured for."""
        return self.recommendation.workload

    def model(self) -> Model:
        """The architecture that was measured; raises what `catalog.models.load` raises."""
        # A folder may have the same name as a model of the catalog.
        of_catalog = self.workload.model in names() and not is_path(self.source)
        return load(self.workload.model if of_catalog else self.source)

    def laid_out(self) -> Any:
        """The model on the meta device; not to be modified. Imports torch and transformers, which takes seconds."""
        import torch
        from transformers import AutoModelForCausalLM

        model = self.model()
        if model.digest not in _LAID_OUT:
            _LAID_OUT.clear()
            with torch.device("meta"):
                _LAID_OUT[model.digest] = AutoModelForCausalLM.from_config(architecture(model))
        return _LAID_OUT[model.digest]


_LAID_OUT: dict[str, Any] = {}
"""The model that was laid out last, by its digest: several axes of one export need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A recommendation in the format that a trainer reads."""

    text: str
    suffix: str
    """The file name extension that readers of the format expect, including the dot."""
    notes: tuple[str, ...] = ()
    """What the format cannot express, or does differently from what was measured; one sentence each."""


class Code(str):
    """Python source that stands for a value: its repr is the source itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one or several axes translate to in a target format."""

    sections: Mapping[str, Mapping[str, object]]
    """Keys and values of each section of the document."""
    notes: tuple[str, ...] = ()


Emit = Callable[[Value, Task], Settings]
"""Translates the value of an axis; the task gives the workload, the architecture and the other axes."""

NOT_IN_EVERY_CONFIG = frozenset({"rank", "targets"})
"""Axes that a config of method `full` does not have."""


def settings(*notes: str, **sections: Mapping[str, object]) -> Settings:
    """Settings of the named sections, with notes on what they cannot express."""
    return Settings(sections=sections, notes=notes)


def merge(*parts: Settings) -> Settings:
    """All settings of `parts`; asserts that no key is set twice to different values."""
    sections: dict[str, dict[str, object]] = {}
    for part in parts:
        for section, values in part.sections.items():
            known = sections.setdefault(section, {})
            for key, value in values.items():
                assert known.get(key, value) == value, f"{section}.{key} is set to two values"
                known[key] = value
    return Settings(sections=sections, notes=tuple(note for part in parts for note in part.notes))


def collect(table: Mapping[str, Emit], task: Task) -> Settings:
    """The table applied to the config. An axis missing from either becomes a note, so that none is lost."""
    config = task.config
    parts = []
    for axis, emit in table.items():
        value = config.get(axis)
        if value is not None:
            parts.append(emit(value, task))
        elif axis not in NOT_IN_EVERY_CONFIG:
            parts.append(settings(f"{axis}: the config does not name it; the trainer's own default applies"))
    for axis in config:
        if axis not in table:
            parts.append(settings(f"{axis}={config[axis]}: this format has no line for it; set it by hand"))
    return merge(*parts)


def collect_known(table: Mapping[str, Emit], task: Task) -> Settings:
    """Like `collect`, for a format that launches a training script: one note lists what the script itself must set."""
    config = task.config
    parts = [emit(value, task) for axis, emit in table.items() if (value := config.get(axis)) is not None]
    absent = [axis for axis in table if axis not in config]
    parts += [settings(f"{axis}: the config does not name it; the library's own default applies") for axis in absent]
    others = ", ".join(f"{axis}={config[axis]}" for axis in config if axis not in table)
    if others:
        parts.append(settings(f"{others}: this format has no line for them; the training script sets them"))
    return merge(*parts)
