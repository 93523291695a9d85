"""One config on several cards: predicted, or as a trial has shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import OPTIONS, STACK, fits, make_job, make_trial, out_of_memory

from autofit.cli.text.cards import cards_text
from autofit.core.units import GIB
from autofit.operations.hardware_compared import OnCard, estimate_cards
from autofit.store import Store
from autofit.techniques import complete

CONFIG = complete({"method": "lora", "micro_batch": 2})
CARDS = {"h100-80g": CONFIG, "l4": CONFIG}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An own store."""
    monkeypatch.setenv("AUTOFIT_STORE", str(tmp_path / "store.db"))
    return str(tmp_path / "store.db")


def compared() -> dict[str, OnCard]:
    return {row.name: row for row in estimate_cards(OPTIONS, CARDS)}


def test_what_was_measured_stands_in_for_what_is_predicted(place: str) -> None:
    before = compared()
    assert [before[name].trial for name in CARDS] == [None, None]
    with Store.open(place) as opened:
        opened.add(make_trial(CONFIG, fits(5, 1234.5)))
        opened.add(make_trial(CONFIG.replace(micro_batch=4), out_of_memory()))
    after = compared()
    measured, predicted = after["h100-80g"], after["l4"]
    assert (measured.tokens_per_second, measured.device_bytes, measured.fits) == (1234.5, 5 * GIB, True)
    assert measured.cost(3600.0) == pytest.approx(1e6 / 1234.5)
    assert measured.seconds(12345) == pytest.approx(10.0)
    assert (predicted.trial, predicted.device_bytes) == (None, before["l4"].device_bytes)
    assert [after[name].to_json()["provenance"] for name in CARDS] == ["measured", "predicted"]
    lines = cards_text(list(after.values()), {"h100-80g": 3600.0}, 10**9).splitlines()
    heading, of_card = lines[2], next(line for line in lines if line.startswith("h100-80g "))
    assert heading.split()[-3:] == ["tokens", "time", "cost"]
    assert "has trained" in of_card and "measured" in of_card and of_card.endswith("9.4 d  8.1e+05")


def test_what_has_run_out_of_memory_does_not_fit(place: str) -> None:
    undivided, one = replace(OPTIONS, global_batch=1), CONFIG.replace(micro_batch=1)

    def compared(limit: int | None = None) -> OnCard:
        return estimate_cards(undivided, {"h100-80g": one}, memory_limit_bytes=limit)[0]

    with Store.open(place) as opened:
        opened.add(make_trial(one, out_of_memory(), limit=20 * GIB, job=make_job(undivided)))
        opened.add(make_trial(one, fits(30, 1000), limit=40 * GIB, job=make_job(undivided)))
    short, enough = compared(20 * GIB), compared()
    assert not short.fits and "took too much" in cards_text([short], {})
    assert enough.fits
    with Store.open(place) as opened:
        opened.add(make_trial(one, out_of_memory(), limit=20 * GIB, job=make_job(undivided)))
    again = compared(20 * GIB)
    assert (again.fits, again.tokens_per_second) == (False, None)
    assert "ran out of memory" in cards_text([again], {})


def test_a_card_that_trains_in_another_format_says_so() -> None:
    cards = {**CARDS, "t4": CONFIG.replace(precision="fp16-mixed")}
    text = cards_text(estimate_cards(OPTIONS, cards), {})
    assert [", in " in line for line in text.splitlines()[3:]] == [
        line.startswith("t4 ") for line in text.splitlines()[3:]
    ]
    assert "fits, in fp16-mixed" in text
    alone = cards_text(estimate_cards(OPTIONS, {"t4": cards["t4"]}), {})
    assert ", in " not in alone


def test_where_the_host_limits_the_speed_is_said() -> None:
    small, large = (
        estimate_cards(
            replace(OPTIONS, seq_len=seq_len),
            {name: config.replace(micro_batch=4) for name, config in CARDS.items()},
        )
        for seq_len in (8, 4096)
    )
    held_up = [row.name for row in small if row.estimate is not None and row.estimate.waits_for_launches]
    assert "h100-80g" in held_up
    assert "The host, which launches operations, limits the speed of" in cards_text(small, {})
    assert not any(row.estimate is not None and row.estimate.waits_for_launches for row in large)
    assert "The host" not in cards_text(large, {})


def test_the_newest_libraries_that_have_run_it_answer(place: str) -> None:
    older = make_job(stack=replace(STACK, torch="2.11.0"))
    with Store.open(place) as opened:
        opened.add(make_trial(CONFIG, fits(6, 900), job=older))
    assert compared()["h100-80g"].tokens_per_second == 900
    with Store.open(place) as opened:
        opened.add(make_trial(CONFIG, fits(5, 1000)))
    assert compared()["h100-80g"].tokens_per_second == 1000


def test_where_one_card_does_not_hold_it_the_fewest_that_do_are_named() -> None:
    full = complete({"method": "full", "micro_batch": 1, "checkpointing": "full"})
    alone = estimate_cards(OPTIONS, {"h100-80g": full})[0]
    assert (alone.devices, alone.fits) == (1, True)
    assert alone.device_bytes is not None
    limit = alone.device_bytes * 7 // 8

    (several,) = estimate_cards(OPTIONS, {"h100-80g": full}, memory_limit_bytes=limit)
    assert several.estimate is not None
    assert several.fits and several.devices == 2 and several.estimate.config["sharding"] == "fsdp"
    hourly = several.cost(1.0)
    assert hourly is not None and several.tokens_per_second is not None
    assert hourly == pytest.approx(several.devices / 3600 / several.tokens_per_second * 1e6)
    text = cards_text([several], {})
    assert text.startswith(f"No card is sure to hold it alone: {several.devices} x h100-80g with sharding=fsdp do.")

    (asked_for,) = estimate_cards(
        replace(OPTIONS, devices=2), {"h100-80g": full.replace(sharding="ddp")}, memory_limit_bytes=limit
    )
    assert (asked_for.devices, asked_for.fits) == (2, False), "of two that were asked for, no more are tried"
    (alone_only,) = estimate_cards(OPTIONS, {"h100-80g": full}, memory_limit_bytes=limit, spreads=False)
    assert (alone_only.devices, alone_only.fits) == (1, False)
    (none,) = estimate_cards(OPTIONS, {"h100-80g": full}, memory_limit_bytes=2**28)
    assert (none.devices, none.fits) == (1, False)


@pytest.mark.parametrize(
    ("global_batch", "micro_batch", "reason"),
    [
        (3, 1, "global-batch 3 is not a multiple of 2 devices"),
        (
            4,
            4,
            "micro_batch 4 does not divide the 2 sequences of a step on one device (see --global-batch): 1 or 2 does",
        ),
        (4, 1, None),
    ],
)
def test_where_several_cards_cannot_share_the_batch_the_row_says_why(
    global_batch: int, micro_batch: int, reason: str | None
) -> None:
    full = {"h100-80g": complete({"method": "full", "micro_batch": micro_batch, "checkpointing": "full"})}
    options = replace(OPTIONS, global_batch=global_batch)
    (alone,) = estimate_cards(options, full)
    assert alone.device_bytes is not None and alone.reason is None
    (row,) = estimate_cards(options, full, memory_limit_bytes=alone.device_bytes * 3 // 4)
    assert (row.fits, row.reason) == (reason is None, reason and f"several cannot share it: {reason}")
    if reason is not None:
        assert f"does not fit, several cannot share it: {reason}" in cards_text([row], {})
