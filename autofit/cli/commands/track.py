"""The command that copies trials to an experiment tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autofit import operations
from autofit.cli import options
from autofit.cli.waiting import Waiting
from autofit.core.units import counted


def track(
    tracker: Annotated[
        str, typer.Argument(help="mlflow, wandb or optuna.", autocompletion=options.completing("trackers"))
    ],
    model: Annotated[
        str | None, options.completed("--model", "models", "Only trials of this model. Default: of all models.")
    ] = None,
    hardware: Annotated[
        str | None, options.completed("--hardware", "hardware", "Only trials on this hardware. Default: on any.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="The journal of optuna, for optuna-dashboard; it may exist.")
    ] = Path("autofit-journal.log"),
    store: options.Store = None,
) -> None:
    """Copy trials to MLflow, to Weights & Biases, or to a file that optuna-dashboard opens.

    What is there already is not copied again.

    \b
    Examples:
      MLFLOW_TRACKING_URI=http://localhost:5000 autofit track mlflow
      WANDB_MODE=offline autofit track wandb --model llama-3.1-8b
      autofit track optuna --out trials.log            then: optuna-dashboard trials.log
    """
    from autofit.store import Store

    with Store.open(store, create=False) as opened, Waiting("trials copied") as waiting:
        copied = operations.track(tracker, model=model, hardware=hardware, out=out, store=opened, report=waiting)
    print(f"{counted(copied.trials, 'trial')} in {copied.place}: {copied.added:,} new")
    if copied.note is not None:
        print(copied.note)
