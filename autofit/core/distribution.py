"""The distribution that holds this package: what installs what it lacks, and a stranger of the package's name."""

from __future__ import annotations

from importlib import metadata

from autofit.core.errors import EnvironmentLacks

NAME = "autofit-llm"
"""`autofit` on PyPI is PyAutoFit."""


def install(extra: str = "", *, options: str = "") -> str:
    """The command that installs what is required, or the packages of an extra. `options` are pip's, with a space
    behind."""
    return f"pip install {options}" + (f"'{NAME}[{extra}]'" if extra else NAME)


def not_installed(error: ModuleNotFoundError, *, otherwise: str = "") -> Exception:
    """The error to raise for a required package that is not installed; `otherwise` is a way to do without it. Where
    only a submodule of a package is missing it is `error` itself: installing would not help."""
    if not error.name or "." in error.name:
        return error
    return EnvironmentLacks(f"{error.name} is not installed here", remedy=install() + otherwise)


def stranger() -> EnvironmentLacks | None:
    """The error to report where PyAutoFit is installed, too: its package has this one's name and place."""
    try:
        other = metadata.distribution("autofit")
    except metadata.PackageNotFoundError:
        return None
    if "autofit.cli.main" in (other.read_text("entry_points.txt") or ""):
        return None  # this package, installed under its former name
    return EnvironmentLacks(
        f"PyAutoFit {other.version} is installed here, too: its package is called autofit like this one, and each "
        "overwrites files of the other",
        remedy=f"pip uninstall --yes autofit && pip install --force-reinstall --no-deps {NAME}",
    )
