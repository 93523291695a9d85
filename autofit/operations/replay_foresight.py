"""What a replayed search knows before its first trial: the estimator's predictions, either uncorrected or corrected by
the trials of other tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.catalog.models import load
from autofit.estimate.estimate import Estimate
from autofit.lattice import Config
from autofit.operations.allocator_shown import shown
from autofit.operations.calibration import LATEST, calibrated_for
from autofit.operations.estimate_cache import readable
from autofit.operations.predicting import estimate_all
from autofit.operations.probing import rates_of
from autofit.operations.recorded_tables import RecordedTable
from autofit.outcome import Trial
from autofit.techniques import Job
from autofit.trial.site import installed_stack

if TYPE_CHECKING:
    # Imported where it is used: Optuna takes a quarter of a second.
    from autofit.estimate.speed import Rates
    from autofit.search.foresight import Foresight

Estimates = Mapping[Config, Estimate]


class ReplayForesight:
    """The foresight of searches over several tables. Each table is estimated once, which may take minutes."""

    def __init__(
        self,
        tables: Sequence[RecordedTable],
        *,
        store: str | None,
        report: Callable[[str], None],
    ) -> None:
        """`store` is the URL of a store that keeps estimates."""
        self._tables = tables
        self._store = store
        self._report = report
        self._found: dict[Path, tuple[Job, Estimates]] = {}

    def cold(self, table: RecordedTable) -> Foresight:
        """The foresight on a machine where nothing has been measured yet."""
        return self._foresight(table, _guess(table))

    def warm(self, table: RecordedTable) -> Foresight | None:
        """The foresight on a machine whose store has the trials of all other tables of this hardware; None if there are
        none."""
        from autofit.search.foresight import learned

        others = [t for t in self._tables if t is not table and t.hardware.key == table.hardware.key]
        guess = _guess(table)
        if not others:
            return None
        earlier = [trial for other in others for trial in self._predicted(other)]
        latest = sorted(earlier, key=lambda trial: trial.recorded_at, reverse=True)[:LATEST]
        rates = None if guess is None else calibrated_for(table.workload.key, guess, latest)
        return replace(self._foresight(table, rates), memory_error=learned(earlier))

    def _foresight(self, table: RecordedTable, rates: Rates | None) -> Foresight:
        from autofit.search.foresight import Foresight

        job, estimates = self._estimates(table)
        found = {config: estimate.timed(job, rates) for config, estimate in estimates.items()}
        return Foresight(predictions={config: estimate.prediction for config, estimate in found.items()})

    def _predicted(self, table: RecordedTable) -> list[Trial]:
        """The table's trials, each with its prediction."""
        predictions = self.cold(table).predictions
        return [replace(trial, prediction=predictions.get(trial.config)) for trial in table.trials]

    def _estimates(self, table: RecordedTable) -> tuple[Job, Estimates]:
        if table.file not in self._found:
            self._found[table.file] = self._estimated(table)
        return self._found[table.file]

    def _estimated(self, table: RecordedTable) -> tuple[Job, Estimates]:
        # Traced with the libraries installed here, for the device, driver and optional kernels of the recording.
        there = table.stack
        stack = replace(
            installed_stack(),
            cuda=there.cuda,
            driver=there.driver,
            flash_attn=there.flash_attn,
            liger_kernel=there.liger_kernel,
        )
        model = load(table.workload.model)
        job = Job(model=model, workload=table.workload, hardware=table.hardware, stack=stack)
        job = shown(job, reversed(table.trials))
        configs = [trial.config for trial in table.trials]

        def told(done: int, total: int) -> None:
            self._report(f"{table.name}: {done} of {total} configs estimated")

        with readable(self._store, create=True) as kept:
            # What is predicted is the same under every limit.
            limit = table.memory_limit_bytes
            return job, estimate_all(job, configs, memory_limit_bytes=limit, store=kept, report=told)


def _guess(table: RecordedTable) -> Rates | None:
    """What is known of the speed before the first trial: the probe's rates where one was taken."""
    from autofit.estimate.speed import prior

    guess = prior(table.hardware)
    return guess if table.probe is None or guess is None else rates_of(table.probe, guess)
