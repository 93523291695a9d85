"""autofit: find, by measurement, the fastest LLM training configuration that fits a GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autofit.client import Client
    from autofit.operations.calls import diagnose, estimate, frontier, recommend, search
    from autofit.operations.trainer_callback.callback import TrainerCallback
    from autofit.trial.program.reporter import step

__version__ = "0.1.0"
__all__ = [
    "Client",
    "TrainerCallback",
    "__version__",
    "diagnose",
    "estimate",
    "frontier",
    "recommend",
    "search",
    "step",
]
_ELSEWHERE = {
    "Client": "autofit.client",
    "TrainerCallback": "autofit.operations.trainer_callback.callback",
    "step": "autofit.trial.program.reporter",
}
"""Where a name is found that is no command."""

# Two functions have the names of packages. Python binds a package here when it first loads it, which would hide the
# function: so both are loaded now, and unbound. They are empty but for what they contain.
for _name in ("estimate", "search"):
    import_module(f"autofit.{_name}")
    del globals()[_name]


def __getattr__(name: str) -> Any:
    """Everything that the package offers: each is loaded when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_ELSEWHERE.get(name, "autofit.operations.calls")), name)
    globals()[name] = value  # later look-ups bypass this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
