"""What a user can find out from the program itself, and what it says of words that are not its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from unit.cli.conftest import Autofit

from autofit.catalog.hardware import card, cards
from autofit.core.device.hardware import Hardware
from autofit.core.errors import UsageError
from autofit.core.units import GIB
from autofit.operations import doctor
from autofit.planning.lattices import load_space
from autofit.prediction.calibration import not_estimated
from autofit.prediction.estimation import site
from autofit.techniques import AXES
from autofit.trial.machine.detection import detect, requested_card

ASKED = ("--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4")


def test_the_axes_are_listed_each_with_its_values_in_order(autofit: Autofit) -> None:
    listed = autofit("axes").out
    assert all(axis.name in listed and axis.does in listed for axis in AXES)
    assert "offload, full, save-attention, every-2, every-4, selective, budget-25, budget-50, budget-75, none" in listed
    axes = {axis["name"]: axis for axis in autofit("axes", "--json").document}
    assert list(axes) == [axis.name for axis in AXES]
    assert [v["value"] for v in axes["compile"]["values"]] == [False, True]


def test_one_axis_in_full(autofit: Autofit) -> None:
    document = autofit("axes", "optimizer", "--json").document
    assert document["default"] == "adamw"
    assert {v["value"]: v["changes"] for v in document["values"]}["adamw-8bit"] == "numerics"
    assert all(v["does"] for v in document["values"])
    text = autofit("axes", "optimizer").out
    assert "optim=adamw_torch_fused" in text
    assert "default" in text
    assert "lora_r" in autofit("axes", "rank").out


def test_a_space_is_shown_as_written_and_can_be_used_as_shown(autofit: Autofit, tmp_path: Path) -> None:
    text = autofit("spaces", "show", "smoke").out
    document = autofit("spaces", "show", "smoke", "--json").document
    assert document["text"] in text
    assert document["purpose"] in text.splitlines()[0]
    assert str(document["configs"]) in text
    copy = tmp_path / "own.yaml"
    copy.write_text(text)
    assert load_space(str(copy)).axes == load_space("smoke").axes
    assert autofit("spaces", "show", "own.yaml", "--json").document["configs"] == document["configs"]


def test_hardware_says_what_can_be_done_with_each_card(autofit: Autofit) -> None:
    supports = {c["name"]: c["supports"] for c in autofit("hardware", "--json").document["cards"]}
    assert (supports["l4"], supports["mi300x"], supports["apple-m3-max"]) == (["estimate", "search"], ["search"], [])
    for each in cards():
        device, _ = site(each.name)
        assert ("estimate" in each.supports) == (not_estimated(device) is None)


def test_a_quick_doctor_says_what_it_has_not_looked_at(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    for lasting in ("_trial", "_ray"):
        monkeypatch.setattr(doctor, lasting, lambda *arguments: pytest.fail("was run"))
    done = autofit("doctor", "--device", "cpu", "--quick", "--json")
    assert done.code == 0
    assert {c["name"] for c in done.document if c["state"] == "skipped"} == {"trial", "ray"}


def test_a_size_in_powers_of_ten_is_told_from_one_in_powers_of_two(autofit: Autofit, filled: Path) -> None:
    question = ("frontier", *ASKED, "--memory-limit")
    assert "24,000,000,000 bytes" in autofit(*question, "24gb").err
    assert "bytes" not in autofit(*question, "24GiB").err


@pytest.mark.parametrize(("hardware", "precision"), [("t4", "fp16-mixed"), ("l4", "bf16-mixed")])
def test_what_a_config_leaves_out_is_in_a_format_that_the_card_has(
    autofit: Autofit, hardware: str, precision: str
) -> None:
    question = ("estimate", "--model", "smollm2-135m", "--seq-len", "64", "--no-advice", "--json")
    done = autofit(*question, "--hardware", hardware, "--config", "method=lora")
    assert done.document["config"]["precision"] == precision
    assert ("fp16-mixed" in done.err) == (precision == "fp16-mixed")
    refused = autofit(*question, "--hardware", "t4", "--config", "precision=bf16-mixed")
    assert (refused.code, refused.out) == (2, "")


def test_a_dry_run_says_that_its_precision_is_not_bf16(autofit: Autofit) -> None:
    question = ("--model", "smollm2-135m", "--seq-len", "64", "--global-batch", "1", "--space", "smoke", "--dry-run")
    done = autofit("search", *question, "--hardware", "t4", "--json")
    assert {p["config"]["precision"] for p in done.document["frontier"]} == {"fp16-mixed"}
    assert "fp16-mixed" in done.err


REFUSED = """
import sys
from autofit.cli import main
sys.argv = ["autofit", *sys.argv[1:]]
try:
    main.main()
finally:
    print(*{"torch", "transformers", "sqlalchemy"} & set(sys.modules))
"""


@pytest.mark.parametrize("arguments", [("estimate", "--config", "method=lora"), ("search",), ("search", "--dry-run")])
def test_wrong_hardware_is_refused_before_anything_heavy_is_imported(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", REFUSED, *arguments, "--model", "llama-3.1-8b", "--hardware", "h1000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (2, "")
    assert "h1000" in done.stderr


def test_this_machines_own_device_has_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    device, stack = detect("cpu")
    assert requested_card("auto") is None
    assert requested_card(device.name, "cpu") is None
    assert requested_card("RTX 4090") == card("rtx-4090")
    gpu = Hardware(name="a-card-16g", kind="cuda", device_name="A Card", memory_bytes=16 * GIB)
    monkeypatch.setattr("autofit.trial.machine.detection.detect", lambda device: (gpu, stack))
    assert requested_card("gpu") is None
    strange = replace(gpu, device_name="NVIDIA GeForce RTX 4070")
    monkeypatch.setattr("autofit.trial.machine.detection.detect", lambda device: (strange, stack))
    assert requested_card("RTX 4070") is None
    with pytest.raises(UsageError, match="4070 Super"):
        requested_card("4070 Super")
