"""autofit: find, by measurement, the fastest LLM training configuration that fits a GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.client import Client
    from autofit.operations.calls import diagnose, estimate, frontier, recommend, search

__version__ = "0.1.0"
__all__ = ["Client", "__version__", "diagnose", "estimate", "frontier", "recommend", "search"]

# Two functions have the names of packages. Python binds a package here when it first loads it, which would hide the
# function: so both are loaded now, and unbound. They are empty but for what they contain.
for _name in ("estimate", "search"):
    import_module(f"autofit.{_name}")
    del globals()[_name]


def __getattr__(name: str) -> Any:
    """The functions, and the client: each is loaded when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("autofit.client" if name == "Client" else "autofit.operations.calls"), name)
    globals()[name] = value  # later look-ups bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
