"""`autofit search --dry-run`: the frontier that is predicted, of hardware that need not be here."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.cli.conftest import Autofit
from unit.operations.made_world import World

from autofit.core.units import MIB
from autofit.store import Store

ASKED = ("--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "2", "--space", "smoke")


def test_the_predicted_frontier_of_a_card_that_is_not_here(autofit: Autofit, world: World, store_file: Path) -> None:
    done = autofit("search", *ASKED, "--hardware", "h100-80g", "--dry-run")
    assert done.code == 0
    heading = "Predicted frontier of h100-80g for smollm2-135m, 128 tokens x 2 sequences a step, within 79.19 GiB"
    assert done.out.startswith(f"{heading} (nothing is run):\n")
    assert "predicted and not measured" in done.out
    assert "(no trial yet)" in done.out
    headings = [line.split() for line in done.out.splitlines() if line.strip().startswith("memory  tokens/s")]
    assert headings == [["memory", "tokens/s", "full"], ["memory", "tokens/s", "lora"]]
    assert world.pools == []
    with Store.open(str(store_file)) as store:
        assert store.count() == 0


def test_the_same_as_one_document(autofit: Autofit, world: World) -> None:
    done = autofit("search", *ASKED, "--hardware", "l4", "--method", "lora", "--dry-run", "--json")
    assert done.code == 0
    body = done.document
    assert (body["provenance"], body["hardware"]["name"], body["space"]) == ("predicted", "l4", "smoke")
    assert body["configs"] == body["fitting"] == 4
    assert {p["config"]["method"] for p in body["frontier"]} == {"lora"}
    assert body["recommendation"]["provenance"] == "predicted"
    assert body["recommendation"]["headroom_bytes"] > 0


def test_where_nothing_is_predicted_to_fit_the_exit_code_is_3(autofit: Autofit, world: World) -> None:
    arguments = ("search", *ASKED, "--hardware", "l4", "--memory-limit", "450MiB", "--dry-run", "--json")
    done = autofit(*arguments)
    assert done.code == 3
    assert done.document["outcome"] == "nothing_fits"
    closest = done.document["closest"]
    assert closest["provenance"] == "predicted"
    assert closest["over_limit_bytes"] == closest["estimate"]["device_bytes"] - 450 * MIB > 0
    assert "is predicted to fit 450 MiB" in done.err


def test_what_no_card_has_is_refused(autofit: Autofit, world: World) -> None:
    done = autofit("search", *ASKED, "--hardware", "l4", "--memory-limit", "100GiB", "--dry-run")
    assert (done.code, "memory-limit" in done.err) == (2, True)
    done = autofit("search", *ASKED, "--hardware", "h1000", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert "unknown hardware 'h1000'" in done.err
    # Only a dry run needs no device.
    assert autofit("search", *ASKED, "--hardware", "h100-80g").code == 4


def test_on_several_devices_memory_is_of_each_and_speed_in_total_and_of_each(
    autofit: Autofit, world: World, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text("axes:\n  method: [full]\n  micro_batch: [1]\n  sharding: [ddp]\n")
    arguments = ("search", *ASKED[:-1], "own.yaml", "--hardware", "h100-80g", "--devices", "2", "--dry-run")
    done = autofit(*arguments)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("Predicted frontier of 2 x h100-80g for smollm2-135m, 128 tokens x 2 sequences a step, ")
    assert lines[0].endswith(" GiB on each (nothing is run):")
    heading, row = lines[2:4]
    assert heading.split() == ["memory", "of", "each", "tokens/s", "of", "each", "full"]
    total, each = (float(word.replace(",", "")) for word in row.split()[2:4])
    assert each == pytest.approx(total / 2, abs=1)
    assert "a step, on 2 x h100-80g, predicted and not measured:" in done.out
    assert " on each: " in done.out


def test_a_dry_run_says_which_options_it_makes_no_use_of(autofit: Autofit, world: World) -> None:
    arguments = ("search", *ASKED, "--hardware", "l4", "--dry-run")
    done = autofit(*arguments, "--fresh", "--max-trials", "3", "--seed", "1")
    assert done.code == 0
    assert "--fresh, --max-trials" in done.err and "--seed" not in done.err
    assert "--time-budget" not in autofit(*arguments).err


def test_a_dry_run_is_for_one_number_of_devices(autofit: Autofit, world: World) -> None:
    arguments = ("search", *ASKED, "--hardware", "h100-80g", "--devices", "2", "--fewer-devices", "--dry-run")
    done = autofit(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "--dry-run predicts one number of devices at a time: leave --fewer-devices out" in done.err
