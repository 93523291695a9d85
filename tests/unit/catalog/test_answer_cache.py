"""What was found out about a config.json is not asked of transformers again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import tiny_model

from autofit.catalog import answer_cache as module
from autofit.catalog import models
from autofit.catalog.answer_cache import cache_folder, cached_answer


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_SHAPES", {})  # what this process knows by now


def test_the_second_process_reads_a_users_model_without_transformers(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(tiny_model().config))
    first = models.load(str(tmp_path / "mine"))
    counts = models.shape(first)
    program = (
        "import sys; from autofit.catalog import models; model = models.load(sys.argv[1]);"
        "print(model.digest, models.shape(model).parameters, *{'torch', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "mine")]
    words = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.split()
    assert words == [first.digest, str(counts.parameters)]


def test_it_is_asked_again_for_another_text_another_question_and_another_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions: list[str] = []

    def answer(question: str, text: str) -> dict[str, int]:
        return cached_answer(
            question, text, lambda: questions.append(f"{question} of {text}") or {"asked": len(questions)}
        )

    assert [answer("shape", "a"), answer("shape", "a"), answer("shape", "b"), answer("text", "a")] == [
        {"asked": 1}, {"asked": 1}, {"asked": 2}, {"asked": 3}
    ]  # fmt: skip
    monkeypatch.setattr(module, "installed", lambda package: "99.0")
    assert answer("shape", "a") == {"asked": 4}


@pytest.mark.parametrize("spoilt", ["", "[1]", '{"cut off'])
def test_a_spoilt_cache_costs_the_question_alone(spoilt: str) -> None:
    cached_answer("shape", "a", lambda: {"layers": 1})
    (file,) = (cache_folder() / "models").iterdir()
    file.write_text(spoilt)
    assert cached_answer("shape", "a", lambda: {"layers": 2}) == {"layers": 2} == json.loads(file.read_text())


def test_a_folder_that_cannot_be_written_costs_the_question_alone(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert cached_answer("shape", "a", lambda: {"layers": 1}) == {"layers": 1}
