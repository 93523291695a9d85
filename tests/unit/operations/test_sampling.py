"""The sampler for a user's own Optuna study: the search's lattice, limit and predictions behind it."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from autofit.core.errors import NothingFits
from autofit.core.lattice import Config
from autofit.core.units import GIB, MIB
from autofit.operations import SearchRequest, WorkloadOptions, lattice_sampler
from autofit.prediction.predictions import Predictions
from autofit.search.acquisition.acquisition import Acquisition


def request_of(folder: Path, limit: int) -> SearchRequest:
    return SearchRequest(
        workload=WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4),
        space="smoke",
        device="cpu",
        memory_limit_bytes=limit,
        store=str(folder / "store.db"),
    )


def test_a_study_of_ones_own_walks_the_searchs_lattice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Predictions] = []
    use = Acquisition.use
    monkeypatch.setattr(Acquisition, "use", lambda self, said: (told.append(said), use(self, said))[1])
    sampler = lattice_sampler(request_of(tmp_path, GIB))
    ran: list[Config] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        ran.append(sampler.config(trial))
        return 800.0 * MIB, 400.0 if ran[-1]["checkpointing"] == "none" else 300.0

    optuna.create_study(directions=["minimize", "maximize"], sampler=sampler).optimize(objective)
    (predictions,) = told
    assert len(predictions.by_config) == 4, "weights, gradients and states of full training exceed the limit"
    assert 0 < len(ran) <= 4 and {config["method"] for config in ran} == {"lora"}
    assert ran[0]["checkpointing"] == "none", "the fastest by prediction comes first"


def test_where_nothing_can_fit_there_is_no_sampler(tmp_path: Path) -> None:
    with pytest.raises(NothingFits, match="cannot fit"):
        lattice_sampler(request_of(tmp_path, 50 * MIB))
