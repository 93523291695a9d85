"""`autofit search --dry-run`: the frontier that is predicted, of hardware that need not be here."""

from __future__ import annotations

from pathlib import Path

from unit.cli.conftest import Autofit
from unit.operations.made_world import World

from autofit.store import Store

ASKED = ("--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "2", "--space", "smoke")


def test_the_predicted_frontier_of_a_card_that_is_not_here(autofit: Autofit, world: World, store_file: Path) -> None:
    done = autofit("search", *ASKED, "--hardware", "h100-80g", "--dry-run")
    assert done.code == 0
    assert done.out.startswith("Predicted frontier of h100-80g for smollm2-135m (nothing is run):\n")
    assert "predicted and not measured" in done.out
    assert "not calibrated" in done.out
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
    asked = ("search", *ASKED, "--hardware", "l4", "--memory-limit", "450MiB", "--dry-run", "--json")
    done = autofit(*asked)
    assert done.code == 3
    assert done.document["outcome"] == "nothing_fits"
    assert done.document["closest"]["provenance"] == "predicted"
    assert "is predicted to fit 450 MiB" in done.err


def test_hardware_that_nobody_sells_is_refused(autofit: Autofit, world: World) -> None:
    done = autofit("search", *ASKED, "--hardware", "h1000", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert "unknown hardware 'h1000'" in done.err
    # Only a dry run needs no device.
    assert autofit("search", *ASKED, "--hardware", "h100-80g").code == 4
