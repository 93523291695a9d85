"""Postpones the import of a library that is installed but must not be loaded yet."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Refusal(MetaPathFinder, Loader):
    """Finds the library, so that a check whether it is installed succeeds, but refuses to load it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or PathFinder.find_spec(fullname, path, target) is None:
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        raise ImportError(f"the import of {self._name} is postponed", name=self._name)


@contextmanager
def import_postponed(name: str) -> Iterator[None]:
    """Within this context, importing `name` raises `ImportError`, while it still counts as installed."""
    refusal = _Refusal(name)
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)
