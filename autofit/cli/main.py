"""The `autofit` program: its commands, and the exit codes that scripts rely on."""

from __future__ import annotations

import gc
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Annotated, NoReturn

import typer

from autofit import __version__
from autofit.cli.commands import (
    answer,
    bench,
    db,
    diagnose,
    doctor,
    estimate,
    listing,
    run,
    serve,
    token,
    track,
)
from autofit.cli.output import FULL, warn
from autofit.core.distribution import not_installed, stranger
from autofit.core.errors import AutofitError

app = typer.Typer(
    name="autofit",
    help="Find, by measurement, the fastest LLM training configuration that fits your GPU.",
    epilog="Exit codes: 0 done; 2 wrong usage; 3 nothing fits; 4 the environment lacks something; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    *(run.search, run.trial, estimate.estimate, diagnose.diagnose, answer.frontier, answer.recommend),
    *(listing.models, listing.hardware, doctor.doctor, listing.axes, doctor.probe),
    *(serve.serve, serve.runner, track.track),
):
    app.command()(command)
for name, group in {"spaces": listing.group, "token": token.group, "db": db.group, "bench": bench.group}.items():
    app.add_typer(group, name=name)

OF_VALUES = ("--config", "--explain", "--also")
"""Options that take axis=value,...; a few commands have a file there."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Find, by measurement, the fastest LLM training configuration that fits your GPU."""
    if (error := stranger()) is not None:
        warn(str(error))


def with_commas(error: str, arguments: Sequence[str]) -> str | None:
    """The option as it should have been written, where click's `error` is about values separated by spaces."""
    extra = re.search(r"unexpected extra argument.*?\((?P<values>[^()]+)\)$", error)
    if extra is None:
        return None
    values = extra["values"].split()
    before = arguments[: arguments.index(values[0])] if values[0] in arguments else []
    *_, option, first = ("", "", *before)
    joined = [first, *values]
    is_list = option == "--hardware" or (option in OF_VALUES and all("=" in part for part in joined))
    return f"{option} {','.join(joined)}" if is_list and not first.startswith("-") else None


def _interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line; every foreseen failure is one line on standard error and its exit code."""
    # With Python's 700 new objects the collector would pass a hundred times over everything that a command imports.
    gc.set_threshold(100_000)
    try:
        _run()
    finally:
        gc.freeze()  # keeps the interpreter from collecting all of it at exit, too


def _run() -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which is what nohup sets
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        code = app(standalone_mode=False)
        if code == 130:  # click has caught the interrupt itself
            raise KeyboardInterrupt
        if sys.stdout is not None:  # None where the shell has closed it (>&-)
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except (AutofitError, ModuleNotFoundError) as raised:
        error = not_installed(raised) if isinstance(raised, ModuleNotFoundError) else raised
        if not isinstance(error, AutofitError):
            raise
        with suppress(OSError):
            print(f"autofit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        with suppress(OSError):  # a terminal that has gone
            print("autofit: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone: nobody is left to tell
        sys.exit(0)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer has caught it itself
            sys.exit(0)
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"autofit: nothing more can be written: {error.strerror} (free some space)", file=sys.stderr)
        with suppress(OSError):
            sys.stdout.close()  # so that exit does not try again to flush what could not be written
        sys.exit(4)
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # click's own: unknown option, missing value
            error.show()
            if separated := with_commas(str(error), sys.argv):
                print(f"Separate several values with commas: {separated}", file=sys.stderr)
            sys.exit(error.exit_code)
        raise


if __name__ == "__main__":
    main()
