"""Bad input: one clear line on standard error, the right exit code, nothing on standard output, nothing lost."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from jobs import tiny_model
from unit.cli.conftest import Autofit, Done
from unit.operations.made_trials import MADE

from autofit.core.workload import METHODS
from autofit.store import Store
from autofit.trial.machine.detection import detect

MODEL = "--model smollm2-135m"
JOB = f"{MODEL} --seq-len 128 --global-batch 4"
ON_CPU = f"{JOB} --device cpu"


def check(done: Done, code: int, *parts: str) -> None:
    """One line, and the exit code."""
    assert done.code == code, done.err
    assert done.out == ""
    lines = done.err.splitlines()
    assert len(lines) == 1, done.err
    assert lines[0].startswith("autofit: ")
    for part in parts:
        assert part in lines[0]


WRONG: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    # names
    "model": ("search --model smolm2-135m", 2, ("unknown model 'smolm2-135m'", "did you mean smollm2-135m")),
    "model of a frontier": ("frontier --model ''", 2, ("unknown model ''",)),
    "model of a trial": ("trial --model qwen-8b --config method=full", 2, ("unknown model 'qwen-8b'", "qwen3-8b")),
    "space": (f"search {ON_CPU} --space smok", 2, ("unknown search space 'smok'", "did you mean smoke")),
    "method": (f"search {ON_CPU} --method qlra", 2, ("unknown method 'qlra'", "did you mean qlora")),
    "allow": (f"search {ON_CPU} --allow numeric", 2, ("did you mean numerics",)),
    "device": (f"search {JOB} --device gpu", 2, ("unknown device 'gpu'",)),
    "hardware": (f"search {ON_CPU} --hardware h100", 2, ("hardware 'h100' may be", "h100-80g")),
    "hardware of an estimate": (
        f"estimate {JOB} --config method=lora --hardware rtx-4190",
        2,
        ("unknown hardware 'rtx-4190'", "rtx-4090"),
    ),
    "several of a card": (
        f"estimate {JOB} --config method=lora --hardware 4xl4",
        2,
        ("write --devices 4 with --hardware l4",),
    ),
    "several of a card, as clouds name them": (
        f"estimate {JOB} --config method=lora --hardware l4x4",
        2,
        ("write --devices 4 with --hardware l4",),
    ),
    "hardware that could be any": (f"search {ON_CPU} --hardware gpu", 2, ("rtx-4090",)),
    "method of a recommendation": (f"recommend {JOB} --method lara", 2, ("did you mean lora",)),
    "format": (f"recommend {JOB} --format jsn", 2, ("unknown format 'jsn'", "did you mean json")),
    "axis": (f"trial {JOB} --config microbatch=4", 2, ("unknown axis 'microbatch'", "did you mean micro_batch")),
    "a trainer's key": (f"trial {JOB} --config gradient_checkpointing=true", 2, ("checkpointing=full",)),
    "a trainer's key for an option": (f"trial {JOB} --config max_length=64", 2, ("--seq-len 64",)),
    "axes that nothing separates": (f"trial {JOB} --config 'method=lora rank=8'", 2, ("method=lora,rank=8",)),
    "no such model": ("models lamma-3", 2, ("unknown model 'lamma-3'", "did you mean llama-3")),
    "no such card": ("hardware h900", 2, ("unknown hardware 'h900'",)),
    "no such axis": ("axes optim", 2, ("optimizer",)),
    "no such space": ("spaces show smok", 2, ("smoke",)),
    "nothing to skip": ("doctor --quick --self-test", 2, ("--self-test",)),
    "nothing to cover": (f"bench record {JOB} --cover --out table.jsonl", 2, ("--max-trials",)),
    "value": (f"trial {JOB} --config optimizer=adam", 2, ("unknown value of optimizer 'adam'", "adamw")),
    "value that is no number": (f"trial {JOB} --config micro_batch=four", 2, ("micro_batch", "whole number")),
    "axis twice": (f"trial {JOB} --config method=full,method=lora", 2, ("names method twice",)),
    "axis that does not apply": (
        f"trial {JOB} --config method=full,rank=8",
        2,
        ("rank does not apply to method full",),
    ),
    "words that are no pairs": (f"trial {JOB} --config full,lora=1", 2, ("write axis=value",)),
    # units
    "limit without a unit": (f"search {ON_CPU} --memory-limit 2", 2, ("has no unit", "2GiB")),
    "limit of an unknown unit": (f"search {ON_CPU} --memory-limit 2Gigs", 2, ("'2Gigs' is not understood",)),
    "limit of a recommendation": (f"recommend {JOB} --memory-limit 24", 2, ("24GiB",)),
    "limit of a trial": (f"trial {JOB} --config method=full --memory-limit 2", 2, ("2GiB",)),
    "time without a unit": (f"search {ON_CPU} --time-budget 10", 2, ("has no unit", "10m")),
    "deadline": (f"trial {JOB} --config method=full --deadline 10", 2, ("has no unit",)),
    # numbers
    "sequence": (f"search {MODEL} --seq-len 1 --device cpu", 2, ("seq-len is 1",)),
    "a length to be found": (
        f"estimate {MODEL} --config method=lora --hardware l4 --seq-len 9 --longest",
        2,
        ("--longest finds the length, and no more: leave --seq-len out",),
    ),
    "a length on several cards": (
        f"estimate {MODEL} --config method=lora --hardware l4,t4 --longest",
        2,
        ("several cards are compared in a table: leave --longest out",),
    ),
    "sequence beyond the model": (f"search {MODEL} --seq-len 9000", 2, ("longer than the 8192 positions",)),
    "batch": (f"search {MODEL} --global-batch 0", 2, ("global-batch is 0",)),
    "batch and devices": (
        f"search {MODEL} --global-batch 6 --devices 4",
        2,
        ("global-batch 6 is not a multiple of 4 devices",),
    ),
    "dropout": (f"search {ON_CPU} --lora-dropout 1", 2, ("lora-dropout is 1.0",)),
    "rank": (f"search {ON_CPU} --min-rank 0", 2, ("min-rank is 0",)),
    "trials": (f"search {ON_CPU} --max-trials 0", 2, ("max-trials is 0",)),
    "workers": (f"search {ON_CPU} --workers 0", 2, ("workers is 0",)),
    "workers in place": (f"search {ON_CPU} --in-place --workers 2", 2, ("one trial at a time",)),
    "a cluster in place": (
        f"search {ON_CPU} --in-place --ray-address auto",
        2,
        ("--in-place runs trials here, without Ray", "--ray-address"),
    ),
    "a cluster's dry run": (
        f"search {ON_CPU} --dry-run --ray-address auto",
        2,
        ("--dry-run", "leave --ray-address out"),
    ),
    "a dry run without predictions": (
        f"search {ON_CPU} --dry-run --no-predict",
        2,
        ("--dry-run", "leave --no-predict out"),
    ),
    "batch of the spaces": ("spaces --global-batch 0", 2, ("global-batch is 0: it must be at least 1",)),
    "a store without a name": (f"frontier {JOB} --store ''", 2, ("the store's name is empty",)),
    "two charts in one file": (f"frontier {JOB} --html chart --png chart", 2, ("--html and --png both name chart",)),
    # what this machine cannot do
    "more memory than there is": (f"search {ON_CPU} --memory-limit 900TiB", 2, ("is more than the",)),
    "trial with more memory than there is": (
        f"trial {ON_CPU} --config method=full --memory-limit 900TiB",
        2,
        ("is more than the",),
    ),
    "a limit below the bare weights": (
        f"search {ON_CPU} --memory-limit 64MiB",
        3,
        (
            "smollm2-135m cannot fit 64 MiB",
            "the smallest config needs at least",
            "the smallest card that could hold it is ",
        ),
    ),
    "a model too big for the limit": (
        "search --model llama-3.1-70b --device cpu --memory-limit 2GiB",
        3,
        (
            "llama-3.1-70b cannot fit 2.00 GiB",
            "the smallest config needs at least",
            "method=qlora",
            "could hold it is a40 (",
        ),
    ),
    "a device that is not measured yet": (f"search {JOB} --device mps", 4, ("mps", "--device cpu")),
    "hardware that is elsewhere": (f"search {ON_CPU} --hardware h100-80g", 4, ("not h100-80g", "--ray-address")),
    # files
    "space's file": (f"search {ON_CPU} --space nowhere.yaml", 2, ("nowhere.yaml: no such file",)),
    "config's file": (f"trial {JOB} --config nowhere.json", 2, ("nowhere.json", "No such file")),
    "model's folder": ("search --model ./nowhere", 2, ("nowhere", "no such file")),
    "model's file": ("search --model nowhere.json", 2, ("nowhere.json", "no such file")),
    "file to import": ("db import nowhere.jsonl", 2, ("nowhere.jsonl",)),
    "store": (f"recommend {JOB} --store ftp://somewhere/x", 2, ("not supported", "sqlite:///PATH")),
    # what is not known
    "nothing measured": (
        "recommend --model llama-3.1-8b",
        4,
        ("has not been measured on", "run: autofit search --model llama-3.1-8b --seq-len 2048 --global-batch 64"),
    ),
    "no frontier": ("frontier --model llama-3.1-8b --json", 4, ("has not been measured on",)),
    "hardware without measurements": (f"frontier {JOB} --hardware h10-80g", 2, ("did you mean h100-80g",)),
    "a card without measurements": (f"frontier {JOB} --hardware a100-40g", 4, ("been measured on a100-40g",)),
    "nothing fits": (
        f"recommend {JOB} --memory-limit 1GiB --format json",
        3,
        ("nothing that was measured fits 1.00 GiB", "the closest takes 2.00 GiB"),
    ),
}
"""Command, exit code, and what the one line holds."""


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_told_in_one_line(autofit: Autofit, filled: Path, case: str) -> None:
    command, code, parts = WRONG[case]
    done = autofit(command)
    if command.endswith(" json") and code == 3:
        done = without_document(done)
    check(done, code, *parts)
    with Store.open(str(filled)) as store:
        assert store.count() == len(MADE), "nothing that was measured is lost"
        assert store.searches() == []


@pytest.mark.parametrize("case", [c for c, (command, *_) in WRONG.items() if command.startswith(("search", "trial"))])
def test_with_json_nothing_is_printed_but_why_nothing_fits(autofit: Autofit, filled: Path, case: str) -> None:
    command, code, parts = WRONG[case]
    done = autofit(f"{command} --json")
    check(without_document(done) if code == 3 else done, code, *parts)


def without_document(done: Done) -> Done:
    """What is left when the document on standard output says the same as the line."""
    document = done.document
    assert set(document) == {"outcome", "reason", "memory_limit_bytes", "closest"}
    assert document["outcome"] == "nothing_fits"
    assert done.err == f"autofit: {document['reason']}\n"
    assert document["closest"]["over_limit_bytes"] > 0
    assert document["closest"]["config"]["method"] in METHODS
    return Done(done.code, "", done.err)


CLICKS: Mapping[str, tuple[str, str]] = {
    "no such command": ("serch", "No such command 'serch'"),
    "no such option": ("search --modle x", "No such option: --modle"),
    "a required option": ("search", "Missing option '--model'"),
    "a trial's config": (f"trial {MODEL}", "Missing option '--config'"),
    "thousands": (f"search {MODEL} --seq-len 8k", "write it out, such as 8192"),
    "other thousands": (f"search {MODEL} --seq-len 4k", "write it out, such as 4096"),
    "no number": (f"search {MODEL} --seq-len many", "Invalid value for '--seq-len'"),
    "no value": ("search --model", "requires an argument"),
    "a port": ("serve --port 99999", "Invalid value for '--port'"),
    "an argument too many": ("doctor llama", "unexpected extra argument"),
    "a file to export to": ("db export", "Missing argument 'file'"),
}


SPACED: Mapping[str, tuple[str, str | None]] = {
    "cards": (f"estimate {MODEL} --hardware rtx-4090 l4 --config method=lora", "--hardware rtx-4090,l4"),
    "a config": (
        f"trial {MODEL} --config method=qlora precision=bf16 rank=8",
        "--config method=qlora,precision=bf16,rank=8",
    ),
    "no option's values": ("probe llama", None),
    "the values of flags": ("probe --fresh --json llama", None),
    "after a flag": ("hardware --json h100 l4", None),
    "files": ("diagnose --config a.yml error.txt", None),
    "numbers": (f"search {MODEL} --seq-len 4096 8192", None),
}


@pytest.mark.parametrize("case", SPACED)
def test_spaces_in_place_of_commas(autofit: Autofit, case: str) -> None:
    command, separated = SPACED[case]
    done = autofit(command)
    assert (done.code, done.out) == (2, "")
    assert done.err.partition("Separate several values with commas: ")[2].strip() == (separated or "")


@pytest.mark.parametrize("case", CLICKS)
def test_wrong_usage(autofit: Autofit, case: str) -> None:
    command, part = CLICKS[case]
    done = autofit(command)
    assert (done.code, done.out) == (2, "")
    assert part in done.err
    assert "Traceback" not in done.err


def model_folder(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(text)
    return folder


BAD_MODELS: Mapping[str, tuple[str, str]] = {
    "architecture": ('{"model_type": "gpt-17", "hidden_size": 64}', "does not know the architecture 'gpt-17'"),
    "no architecture": ('{"hidden_size": 64}', "has no model_type"),
    "no language model": ('{"model_type": "vit"}', "no causal language model of the architecture 'vit'"),
    "not JSON": ('{"model_type": ', "is not valid JSON"),
    "a list": ("[1, 2]", "holds a JSON list"),
    "wrong types": ('{"model_type": "llama", "hidden_size": "wide"}', "transformers refuses"),
    "wrong shapes": (json.dumps({**tiny_model().config, "hidden_size": 65, "num_attention_heads": 4}), "hidden"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_bad_config_json(autofit: Autofit, tmp_path: Path, case: str) -> None:
    text, part = BAD_MODELS[case]
    folder = model_folder(tmp_path / "bad", text)
    check(autofit(f"search --model {folder} --device cpu --dry-run --json"), 2, part)


def test_code_of_a_model_is_never_executed(autofit: Autofit, tmp_path: Path) -> None:
    config = {**tiny_model().config, "model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
    folder = model_folder(tmp_path / "mine", json.dumps(config))
    (folder / "configuration_mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    check(autofit(f"search --model {folder} --device cpu"), 2, "auto_map", "never executed")
    assert not (tmp_path / "executed").exists()


def test_a_folder_without_a_config(autofit: Autofit, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check(autofit("search --model ./empty"), 2, "the folder has no config.json")


SPACES: Mapping[str, tuple[str, str]] = {
    "axis": (
        "axes:\n  method: [full]\n  optimiser: [adamw]\n",
        "space.yaml:3: unknown axis 'optimiser': did you mean optimizer",
    ),
    "batch": (
        "axes:\n  method: [full]\n  micro_batch: [3]\n",
        "space.yaml:3: none of its micro_batch values (3) divides the batch of 4",
    ),
    "unsupported": (
        "axes:\n  method: [full]\ndefaults:\n  offload: optimizer\n  precision: fp16-mixed\n",
        "space space has no config for this search: offload=optimizer cannot work with fp16-mixed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPACES)
def test_a_bad_space(autofit: Autofit, tmp_path: Path, case: str) -> None:
    text, part = SPACES[case]
    (tmp_path / "space.yaml").write_text(text)
    check(autofit(f"search {ON_CPU} --space space.yaml --json"), 2, part)


CONFIGS: Mapping[str, tuple[str, str]] = {
    "not JSON": ("method=full", "config file config.json is not JSON"),
    "not an object": ("[1]", "must hold one JSON object"),
    "axis": ('{"microbatch": 1}', "unknown axis 'microbatch': did you mean micro_batch"),
    "value": ('{"micro_batch": "4"}', "the value of micro_batch is text: write the number 4, not '4'"),
    "inner config": ('{"config": [1]}', "must hold one JSON object"),
    "bytes": ("\udcff", "config.json"),
    "nested": ("[" * 100_000, "config file config.json is not a config: it is nested too deeply"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_config_file(autofit: Autofit, tmp_path: Path, case: str) -> None:
    text, part = CONFIGS[case]
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    check(autofit(f"trial {JOB} --config config.json --json"), 2, part)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("micro_batch=3", "micro_batch 3 does not divide the 4 sequences"),
        ("sharding=zero3", "use --devices"),
        ("offload=nvme,optimizer=sgd", "use adamw"),
        ("attention=flash", "flash"),
        ("loss=fused", "fused"),
    ],
)
def test_a_config_that_cannot_work_is_an_outcome_with_its_reason(
    autofit: Autofit, store_file: Path, config: str, reason: str
) -> None:
    done = autofit(f"trial {ON_CPU} --config {config} --json")
    assert (done.code, done.err) == (2, "")
    assert done.document["outcome"] == "unsupported"
    assert reason in done.document["reason"]
    done = autofit(f"trial {ON_CPU} --config {config}")
    assert done.code == 2
    assert f"unsupported: {done.out.split('unsupported: ')[1]}" in done.out and reason in done.out
    with Store.open(str(store_file)) as store:
        assert store.count() == 0


@pytest.mark.skipif(os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd"), reason="there is an accelerator")
def test_an_accelerator_that_is_not_here(autofit: Autofit) -> None:
    check(autofit(f"search {JOB} --device cuda"), 4, "no CUDA or ROCm device is found", "nvidia-smi")


def test_a_cluster_that_does_not_answer(autofit: Autofit) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    check(autofit(f"search {ON_CPU} --ray-address {address}"), 4, address, "--ray-address")


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (f"recommend {JOB} -o", "nowhere/sft.yaml"),
        (f"frontier {JOB} --html", "nowhere/chart.html"),
        (f"frontier {JOB} --png", "nowhere/chart.png"),
        ("db export", "nowhere/trials.jsonl"),
    ],
)
def test_a_file_that_cannot_be_written(autofit: Autofit, filled: Path, command: str, file: str) -> None:
    check(autofit(f"{command} {file}"), 2, file, "cannot be written: No such file or directory")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "there is nothing to import"),
        ("not JSON\n", "line 1 cannot be imported"),
        ('{"schema": 99}\n', "line 1 cannot be imported"),
        ('{"schema": 1, "autofit": "0.1.0"}\n{"outcome": "fits"}\n', "line 2 cannot be imported"),
        ("\udcff\n", "cannot be read"),
        ("[" * 100_000, "line 1 cannot be imported: it is nested too deeply"),
        ('{"schema": 1}\n{"outcome": ' + "[" * 100_000, "line 2 cannot be imported: it is nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_imported(autofit: Autofit, filled: Path, text: str, part: str) -> None:
    (filled.parent / "trials.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    check(autofit("db import trials.jsonl"), 2, part)
    with Store.open(str(filled)) as store:
        assert store.count() == len(MADE)


def test_the_hardware_at_hand_is_named_where_nothing_is_measured(autofit: Autofit) -> None:
    hardware, _ = detect()
    assert autofit("db upgrade").code == 0
    check(autofit(f"frontier {JOB}"), 4, f"not been measured on {hardware.name} yet")
