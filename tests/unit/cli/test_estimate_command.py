"""`autofit estimate` as a user runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from unit.cli.conftest import Autofit
from unit.operations.made_trials import HARDWARE

from autofit.cli.arguments import _config_values, prices
from autofit.core.errors import UsageError
from autofit.estimate.tracing import traces
from autofit.store import Store
from tests import tiny
from tests.jobs import model_in, tiny_model

CONTRACT = {
    "config", "hardware", "fits", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes",
    "memory_limit_bytes", "breakdown", "phase_peaks", "tokens_per_second", "step_seconds", "mfu", "seconds_to_estimate",
    "provenance", "headroom_bytes", "advice", "lightest", "certainty", "memory_deviation", "stand_in",
}  # fmt: skip
PARTS = {
    "weights", "gradients", "optimizer", "activations", "logits_and_loss", "temporaries", "fragmentation", "context",
}  # fmt: skip


ESTIMATE = "estimate --model smollm2-135m"
SMALL = "method=lora,precision=bf16"
"""What three tests ask about, on sequences of one length: most of their time goes into traces, which they share."""


def test_an_estimate_is_the_contracts_document(autofit: Autofit) -> None:
    done = autofit(f"{ESTIMATE} --config {SMALL},checkpointing=full,micro_batch=2 --seq-len 256 --hardware l4 --json")
    assert done.code == 0, done.err
    document = done.document
    assert document.keys() >= CONTRACT
    assert document["breakdown"].keys() == PARTS
    assert sum(document["breakdown"].values()) == document["device_bytes"] < document["memory_limit_bytes"]
    assert document["phase_peaks"].keys() == {"forward", "backward", "optimizer", "saving"}
    assert document["calibrated_on"] == 0
    assert document["provenance"] == "predicted"
    assert document["headroom_bytes"] == document["memory_limit_bytes"] - document["device_bytes"]
    assert {role for advice in document["advice"] for role in advice["roles"]} == {"smallest", "fastest", "safest"}
    for advice in document["advice"]:
        assert advice["change"].items() <= advice["estimate"]["config"].items()
        assert advice["effect"] == "exact"
        assert advice["estimate"]["fits"]
        assert advice["estimate"]["tokens_per_second"] > 1.03 * document["tokens_per_second"]


def test_what_is_left_out_is_what_the_model_has(autofit: Autofit, tmp_path: Path) -> None:
    """Here softcaps, which no fused kernel computes."""
    command = f"estimate --model {model_in(tmp_path, tiny.GEMMA2.config)} --seq-len 64 --hardware l4 --no-advice --json"
    assert autofit(f"{command} --config method=lora").document["config"]["attention"] == "eager"
    stated = autofit(f"{command} --config method=lora,attention=sdpa")
    assert (stated.code, "attention=eager" in stated.err) == (2, True)


def test_what_does_not_fit_ends_with_3_and_says_by_how_much(autofit: Autofit) -> None:
    done = autofit(f"{ESTIMATE} --config method=full,micro_batch=64 --hardware l4 --memory-limit 4GiB --no-advice")
    assert done.code == 3
    assert done.out.startswith("does not fit l4: needs ") and " of 4.00 GiB, " in done.out
    assert "fits with" not in done.out
    assert "no trial yet" in done.out


def test_what_is_not_counted_of_a_models_file_is_said(autofit: Autofit, tmp_path: Path) -> None:
    classifier = {**tiny_model().config, "architectures": ["LlamaForSequenceClassification"]}
    command = f"estimate --model {model_in(tmp_path, classifier)} --seq-len 64 --hardware l4 --no-advice --json"
    done = autofit(f"{command} --config method=lora,micro_batch=1")
    assert done.document["fits"] and "LlamaForSequenceClassification" in done.err


def test_several_cards_have_no_advice_to_leave_out(autofit: Autofit) -> None:
    done = autofit(f"{ESTIMATE} --config method=lora,micro_batch=1 --seq-len 64 --hardware l4,t4 --no-advice --json")
    assert (done.code, {card["hardware"] for card in done.document["cards"]}) == (0, {"l4", "t4"}), done.err


def test_what_only_may_fit_ends_with_3(autofit: Autofit) -> None:
    command = f"{ESTIMATE} --config method=full --hardware l4 --no-advice --json"
    needed = autofit(command).document["device_bytes"]
    done = autofit(f"{command} --memory-limit {int(needed * 1.02)}B")
    assert (done.document["fits"], done.document["certainty"], done.code) == (True, "unsure", 3)


def test_what_does_not_fit_is_told_what_helps_and_drawn(autofit: Autofit, tmp_path: Path) -> None:
    page = tmp_path / "memory.html"
    config = f"--config {SMALL},micro_batch=8 --seq-len 256"
    done = autofit(f"{ESTIMATE} {config} --hardware l4 --memory-limit 3GiB --html {page}")
    assert done.code == 3
    lines = done.out.partition("\nfits with\n")[2].splitlines()
    assert lines and all("(exact: trains the same)" in line and " left, " in line for line in lines)
    assert "peak: " in page.read_text()


def test_cards_are_compared_the_smallest_that_it_fits_first(autofit: Autofit) -> None:
    config = f"--config {SMALL},micro_batch=8 --seq-len 256"
    command = f"{ESTIMATE} {config} --hardware h100-80g,t4,l4 --price l4=0.7 --price h100-80g=2.5"
    done = autofit(command)
    assert done.code == 0
    verdict, _, *rows = done.out.splitlines()
    assert verdict.startswith("l4 is the smallest that it fits. ")
    assert [row.split()[0] for row in rows] == ["card", "l4", "h100-80g", "t4"]
    assert "precision=bf16 is only emulated on t4" in rows[-1]
    cards = autofit(f"{command} --memory-limit 2GiB --json").document["cards"]
    assert [card["hardware"] for card in cards] == ["h100-80g", "l4", "t4"], "the largest that it does not fit first"
    assert [card["cost_per_million_tokens"] for card in cards] == [None, None, None]
    wrong = autofit(f"{command} --verbose")
    assert wrong.code == 2 and "leave --verbose out" in wrong.err


def test_prices_of_a_file_are_those_of_the_cards_compared_unless_another_is_given(tmp_path: Path) -> None:
    listed = tmp_path / "prices.yaml"
    listed.write_text("l4: 0.7\nh100-80g: 2.50\na10g: 1\n")
    assert prices(["l4=0.6"], ["l4", "h100-80g"], listed) == {"l4": 0.6, "h100-80g": 2.5}
    assert prices([], ["all"], listed) == {"l4": 0.7, "h100-80g": 2.5, "a10g": 1.0}
    for text, words in (
        ("[1]", "must map"),
        ("l4: free", "'free' is not understood"),
        ("l5: 1", "l5"),
        ("{", "read"),
        ("h100-80g: 2.50\nl4 0.7\n", "from line 2 on: write one a line"),
    ):
        listed.write_text(text)
        with pytest.raises(UsageError, match=words):
            prices([], ["all"], listed)
    with pytest.raises(UsageError, match="name several"):
        prices([], ["l4"], listed)


def test_hardware_that_no_catalog_has_may_have_a_price(tmp_path: Path) -> None:
    listed, path = tmp_path / "prices.yaml", str(tmp_path / "store.db")
    listed.write_text("my-card: 0.5\nl4: 0.7\n")
    assert prices([], ["my-card", "l4"], listed, path) == {"my-card": 0.5, "l4": 0.7}, "it is compared"
    with pytest.raises(UsageError, match="unknown hardware 'my-card'"):
        prices([], ["all"], listed, path)
    with Store.open(path) as store:
        store.queue.announce(replace(HARDWARE, name="my-card"))
    assert prices(["My-Card=0.4"], ["all"], listed, path) == {"my-card": 0.4, "l4": 0.7}
    assert prices([], ["l4", "h100-80g"], listed, path) == {"l4": 0.7}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--config method=full --hardware mi300x", "estimates are for NVIDIA cards"),
        ("--config method=full,micro_batch=7 --hardware l4", "does not divide"),
        ("--config method=full --hardware l4 --memory-limit 80GiB", "more than the"),
        ("--config method=full,colour=red --hardware l4", "colour"),
        ("--config method=full --explain method=lora --exact --hardware l4", "--exact"),
        ("--config method=full --explain sharding=fsdp --hardware l4", "several devices"),
    ],
)
def test_what_cannot_be_estimated_is_one_clear_line(autofit: Autofit, options: str, words: str) -> None:
    done = autofit(f"{ESTIMATE} {options}")
    assert done.code == 2
    assert words in done.err
    assert done.err.count("\n") == 1
    assert done.out == ""


def test_a_model_that_cannot_be_traced_is_estimated_but_not_drawn(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise ValueError("the data decides")

    monkeypatch.setattr(traces, "trace_decoder", fails)
    page = tmp_path / "memory.html"
    done = autofit(f"{ESTIMATE} --config method=lora --hardware l4 --no-advice --html {page}")
    assert done.code == 2
    assert "50% (by formula" in done.out and "speed not predicted" in done.out
    assert "there is no memory timeline" in done.err and "ValueError: the data decides" in done.err
    assert not page.exists()


def test_explain_says_where_the_difference_comes_from(autofit: Autofit) -> None:
    before, after = "method=full,checkpointing=full", "method=lora,checkpointing=full"
    done = autofit(f"{ESTIMATE} --config {before} --explain {after} --hardware l4 --json")
    assert done.code == 0, done.err
    document = done.document
    differences = [part["difference"] for part in document["parts"].values()]
    assert sum(differences) == document["difference_bytes"] < 0
    assert set(document["before"]) >= CONTRACT


def test_explain_without_a_method_changes_the_first_config(autofit: Autofit) -> None:
    done = autofit(
        f"{ESTIMATE} --config method=qlora,rank=8,precision=bf16 --explain micro_batch=2 --hardware l4 --json"
    )
    assert done.code == 0, done.err
    before, after = done.document["before"]["config"], done.document["after"]["config"]
    assert after == before | {"micro_batch": 2}


def test_a_config_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"method": "full"}', encoding="utf-8-sig")
    assert _config_values(str(path)) == {"method": "full"}
