"""One config on several cards: predicted, or as a trial has shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import OPTIONS, STACK, fits, make_job, make_trial, out_of_memory

from autofit.cli.text.cards import cards_text
from autofit.core.units import GIB
from autofit.operations.hardware_compared import OnCard, estimate_each
from autofit.store import Store
from autofit.techniques import complete

CONFIG = complete({"method": "lora", "micro_batch": 2})
CARDS = {"h100-80g": CONFIG, "l4": CONFIG}


def compared(store: str, **asked: int) -> dict[str, OnCard]:
    return {row.name: row for row in estimate_each(OPTIONS, CARDS, store=store, **asked)}


def test_what_was_measured_stands_in_for_what_is_predicted(tmp_path: Path) -> None:
    place = str(tmp_path / "store.db")
    before = compared(place)
    assert [before[name].trial for name in CARDS] == [None, None]
    with Store.open(place) as opened:
        opened.add(make_trial(CONFIG, fits(5, 1234.5)))
        opened.add(make_trial(CONFIG.replace(micro_batch=4), out_of_memory()))
    after = compared(place)
    measured, predicted = after["h100-80g"], after["l4"]
    assert (measured.tokens_per_second, measured.device_bytes, measured.fits) == (1234.5, 5 * GIB, True)
    assert measured.cost(3600.0) == pytest.approx(1e6 / 1234.5)
    assert measured.seconds(12345) == pytest.approx(10.0)
    assert (predicted.trial, predicted.device_bytes) == (None, before["l4"].device_bytes)
    assert [after[name].to_json()["provenance"] for name in CARDS] == ["measured", "predicted"]
    said = cards_text(list(after.values()), {"h100-80g": 3600.0}, 10**9).splitlines()
    heading, of_card = said[2], next(line for line in said if line.startswith("h100-80g "))
    assert heading.split()[-3:] == ["tokens", "time", "cost"]
    assert "has trained" in of_card and "measured" in of_card and of_card.endswith("9.4 d  8.1e+05")


def test_what_has_run_out_of_memory_does_not_fit(tmp_path: Path) -> None:
    place = str(tmp_path / "store.db")
    with Store.open(place) as opened:
        opened.add(make_trial(CONFIG, out_of_memory(), limit=20 * GIB))
        opened.add(make_trial(CONFIG, fits(30, 1000), limit=40 * GIB))
    short, enough = compared(place, memory_limit_bytes=20 * GIB), compared(place)
    assert not short["h100-80g"].fits and "took too much" in cards_text([short["h100-80g"]], {})
    assert enough["h100-80g"].fits
    with Store.open(place) as opened:
        opened.add(make_trial(CONFIG, out_of_memory(), limit=20 * GIB))
    again = compared(place, memory_limit_bytes=20 * GIB)["h100-80g"]
    assert (again.fits, again.tokens_per_second) == (False, None)
    assert "ran out of memory" in cards_text([again], {})


def test_the_newest_libraries_that_have_run_it_answer(tmp_path: Path) -> None:
    place = str(tmp_path / "store.db")
    older = make_job(stack=replace(STACK, torch="2.11.0"))
    with Store.open(place) as opened:
        opened.add(make_trial(CONFIG, fits(6, 900), job=older))
    assert compared(place)["h100-80g"].tokens_per_second == 900
    with Store.open(place) as opened:
        opened.add(make_trial(CONFIG, fits(5, 1000)))
    assert compared(place)["h100-80g"].tokens_per_second == 1000
