"""LLaMA-Factory's and axolotl's own classes take every file that is exported, and have the keys that tests go by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_samples import make_recommendation, sample
from own_environments import built

from autofit.export import export
from autofit.techniques.habits import TRAINERS
from autofit.trainers.keys import known_keys

KNOWN = json.loads((Path(__file__).parents[1] / "unit" / "export" / "trainers_keys.json").read_text())
OWN = {
    "llamafactory": {"dataset": "mine", "template": "empty"},
    "axolotl": {"datasets": [{"path": "mine", "type": "alpaca"}]},
}
"""What is the user's own in a file, beside the learning rate."""


def documents(trainer: str) -> list[dict[str, Any]]:
    """Files of configs that cover many pairs of values, on one device."""
    configs = [config.replace(sharding="none", offload="none") for config in sample()[::2]]
    files = [export(make_recommendation(config), format=trainer, source="org/model").text for config in configs]
    return [{**yaml.safe_load(text), **OWN[trainer], "learning_rate": 1e-4} for text in files]


@pytest.fixture(scope="module", params=OWN)
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A trainer, and what its classes say of the files."""
    environment = built(request.param)
    file = tmp_path_factory.mktemp(request.param) / "documents.json"
    file.write_text(json.dumps(documents(request.param)))
    result: dict[str, Any] = json.loads(environment.run("read_files.py", file).splitlines()[-1])
    return request.param, result


def test_every_file_is_read(said: tuple[str, dict[str, Any]]) -> None:
    trainer, result = said
    refused = [
        f"{wrong}\n{document}" for wrong, document in zip(result["wrong"], documents(trainer), strict=True) if wrong
    ]
    assert not refused, "\n\n".join(refused[:5])


def test_its_keys_are_those_that_are_known(said: tuple[str, dict[str, Any]]) -> None:
    trainer, result = said
    assert result["version"] == KNOWN[trainer]["version"]
    assert result["version"].startswith(TRAINERS[trainer].release)
    assert set(result["keys"]) == set(KNOWN[trainer]["keys"])
    assert set(result["keys"]) <= known_keys(trainer).all
