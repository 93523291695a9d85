"""What every exporter is made of: a table from axis to settings, and the text that comes out."""

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
    """What is exported: a recommendation, and what its trainer loads."""

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
        # A folder may be called as a model of the catalog is.
        of_catalog = self.workload.model in names() and not is_path(self.source)
        return load(self.workload.model if of_catalog else self.source)

    def laid_out(self) -> Any:
        """The model without storage, to read only. Imports torch and transformers, which takes seconds."""
        import torch
        from transformers import AutoModelForCausalLM

        model = self.model()
        if model.digest not in _LAID_OUT:
            _LAID_OUT.clear()
            with torch.device("meta"):
                _LAID_OUT[model.digest] = AutoModelForCausalLM.from_config(architecture(model))
        return _LAID_OUT[model.digest]


_LAID_OUT: dict[str, Any] = {}
"""By its digest, the model that was laid out last: several axes of one export ask for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A recommendation in the format that a trainer reads."""

    text: str
    suffix: str
    """The file name's ending that the format's readers expect, dot included."""
    notes: tuple[str, ...] = ()
    """What the format cannot express, or does otherwise than it was measured; one sentence each."""


class Code(str):
    """Python source that stands for a value: its repr is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one or several axes become in a target format."""

    sections: Mapping[str, Mapping[str, object]]
    """Section of the document to its keys and values."""
    notes: tuple[str, ...] = ()


Emit = Callable[[Value, Task], Settings]
"""From an axis's value to what it becomes; the task gives the workload, the architecture and the other axes."""

NOT_IN_EVERY_CONFIG = frozenset({"rank", "targets"})
"""Axes that a config of method `full` rightly lacks."""


def settings(*notes: str, **sections: Mapping[str, object]) -> Settings:
    """Settings of the named sections, with what they cannot express."""
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
    """What the table makes of the config. An axis that either of them lacks becomes a note: none is lost."""
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
    """As `collect`, for a format that starts a training script: what the script must say itself is one note."""
    config = task.config
    parts = [emit(value, task) for axis, emit in table.items() if (value := config.get(axis)) is not None]
    absent = [axis for axis in table if axis not in config]
    parts += [settings(f"{axis}: the config does not name it; the library's own default applies") for axis in absent]
    others = ", ".join(f"{axis}={config[axis]}" for axis in config if axis not in table)
    if others:
        parts.append(settings(f"{others}: this format has no line for them; the training script sets them"))
    return merge(*parts)
