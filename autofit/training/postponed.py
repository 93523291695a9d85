"""Postpones the import of a library that is installed but must not, or need not, be loaded yet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from unittest.mock import patch


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


@contextmanager
def compiler_postponed() -> Iterator[None]:
    """Within this context, what is given to `torch.compile` is compiled, and Inductor loaded, when it is first called.

    bitsandbytes compiles functions as it is imported, which hardly any trial calls. Without Inductor, a fork server on
    a CPU starts with 3.6 s of a core in place of 4.6 s, and with 359 MiB in place of 394 MiB (torch 2.13).
    """
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:
            return partial(compile_later, **options)
        compiled = cache(partial(compile_now, function, **options))

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return called

    with patch.object(torch, "compile", compile_later):
        yield
