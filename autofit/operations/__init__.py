"""The Python API: one function per thing a user can do. The command line and the server only call these.

Its names are those that the stub beside this file imports. Each is imported on first use, so that a recommendation from
the store does not wait for the training libraries.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULE_OF = {
    alias.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value  # later look-ups bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
