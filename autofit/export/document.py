"""What every exporter is made of: a table from axis to settings, and the text that comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autofit.frontier import Recommendation
from autofit.lattice import Value


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


Emit = Callable[[Value, Recommendation], Settings]
"""From an axis's value to what it becomes; the recommendation gives the workload and the other axes."""

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


def collect(table: Mapping[str, Emit], recommendation: Recommendation) -> Settings:
    """What the table makes of the config. An axis that either of them lacks becomes a note: none is lost."""
    config = recommendation.point.config
    parts = []
    for axis, emit in table.items():
        value = config.get(axis)
        if value is not None:
            parts.append(emit(value, recommendation))
        elif axis not in NOT_IN_EVERY_CONFIG:
            parts.append(settings(f"{axis}: the config does not name it; the trainer's own default applies"))
    for axis in config:
        if axis not in table:
            parts.append(settings(f"{axis}={config[axis]}: this format has no line for it; set it by hand"))
    return merge(*parts)
