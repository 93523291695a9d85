"""Values as JSON objects of their fields, and back.

Written here because pydantic takes 0.13 s to load and to learn these types, a fifth of what an answer from the store
takes. Where types must be checked, as those of imported trials, pydantic does it (`store.exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Document:
    """What dataclasses inherit whose JSON object has their fields, in their order."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises `TypeError` for a field that is missing or does not exist."""
        return read(cls, data)


class LastingDocument(Document):
    """What stores hold for years: fields that another version has written, and this one does not have, are left out."""

    __slots__ = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`, also of another version's. Raises `TypeError` for a field that is missing."""
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]  # each is a dataclass
        return read(cls, {name: value for name, value in data.items() if name in names})


def read(cls: type[T], data: Mapping[str, Any]) -> T:
    """A dataclass from the JSON values of its fields."""
    readers = _readers(cls)  # type: ignore[arg-type]  # types are hashable
    return cls(**{name: readers[name](value) if name in readers else value for name, value in data.items()})


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(element) for key, element in value.items()}
    return [_plain(element) for element in value] if isinstance(value, tuple) else value


@cache
def _readers(cls: type) -> dict[str, Callable[[Any], Any]]:
    """A reader for each field whose values have another form in JSON."""
    kinds = get_type_hints(cls)
    readers = {field.name: reader(kinds[field.name]) for field in fields(cls)}
    return {name: read_value for name, read_value in readers.items() if read_value is not None}


def reader(kind: Any) -> Callable[[Any], Any] | None:
    """A reader of this type's values; None if JSON has them as they are, and for a choice between several."""
    if hasattr(kind, "from_json"):
        from_json: Callable[[Any], Any] = kind.from_json
        return from_json
    inner = [reader(argument) for argument in get_args(kind) if argument not in (type(None), ...)]
    if len(inner) != 1:
        return tuple if get_origin(kind) is tuple else None
    (read_element,) = inner
    if get_origin(kind) is tuple:
        return tuple if read_element is None else lambda values: tuple(map(read_element, values))
    return None if read_element is None else lambda value: None if value is None else read_element(value)
