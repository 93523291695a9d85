"""A command with placeholders: what it comes to, and what is wrong with one that no trial can run."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from jobs import tiny_job, tiny_model

from autofit.catalog import models
from autofit.core.errors import UsageError
from autofit.core.workload import Workload
from autofit.planning.requests import WorkloadOptions
from autofit.techniques import complete
from autofit.trial.program.command import Command, source_of

WORKLOAD: Workload = tiny_job(seq_len=32, global_batch=8).workload


def test_each_word_is_one_argument_whatever_a_value_holds() -> None:
    command = Command.parse("python 'my train.py' --batch={micro_batch} --model {model} --compile {compile} {{}}")
    config = complete({"micro_batch": 2})
    expected = ["python", "my train.py", "--batch=2", "--model", "a folder; rm", "--compile", "false", "{}"]
    assert command.arguments(config, WORKLOAD, "a folder; rm") == expected
    assert command.line(config, WORKLOAD, "a folder; rm").startswith("python 'my train.py' --batch=2 --model 'a folder")


def test_the_workloads_figures_are_placeholders_too() -> None:
    command = Command.parse("train {accumulation} {seq_len} {global_batch}")
    assert command.arguments(complete({"micro_batch": 2}), WORKLOAD, "m") == ["train", "4", "32", "8"]


def test_what_full_training_lacks_has_a_value_all_the_same() -> None:
    command, lora = Command.parse("train {method} {rank} {targets}"), {"method": "lora", "rank": 16}
    assert command.arguments(complete({}), WORKLOAD, "m") == ["train", "full", "0", "none"]
    assert command.arguments(complete(lora), WORKLOAD, "m") == ["train", "lora", "16", "all-linear"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train --batch {micro_bach}", "did you mean micro_batch"),
        ("train {}", "unknown placeholder"),
        ("""train '{"lr": 1}'""", "write two"),
        ("train {micro_batch:03}", "without a format"),
        ("train {micro_batch!r}", "without a format"),
        ("train }", "for a brace that means itself, write two"),
        ("train 'open", "no closing quotation"),
        ("", "is empty"),
        ("cd there && train {micro_batch}", "without a shell"),
        ("{model} train", "must begin with the program"),
    ],
)
def test_a_command_that_no_trial_can_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Command.parse(text)


def test_a_program_that_is_not_there_is_named() -> None:
    Command.parse(f"{sys.executable} train.py").check_found()
    with pytest.raises(UsageError, match="no-such-program is not found"):
        Command.parse("no-such-program").check_found()
    with pytest.raises(UsageError, match="env A=1"):
        Command.parse("A=1 python").check_found()


def test_an_axis_that_varies_must_reach_the_program() -> None:
    configs = [complete({"micro_batch": size, "checkpointing": kind}) for size in (1, 2) for kind in ("full", "none")]
    Command.parse("train {micro_batch} {checkpointing}").check_takes(configs)
    Command.parse("train {accumulation} {checkpointing}").check_takes(configs)
    with pytest.raises(
        UsageError, match=r"varies checkpointing, which the command ignores: add \{checkpointing\} to it"
    ):
        Command.parse("train {micro_batch}").check_takes(configs)
    methods = [complete({"method": "lora"}), complete({})]
    kernels = [complete({"kernels": value}) for value in ("liger", "torch")]
    with pytest.raises(UsageError, match="varies kernels, which the command ignores"):
        Command.parse("train {micro_batch}").check_takes(kernels)
    Command.parse("train {method}").check_takes(methods)  # full training has no rank, adapters have one


def test_a_models_weights_are_where_its_architecture_came_from() -> None:
    assert source_of(models.load("smollm2-135m")) == "HuggingFaceTB/SmolLM2-135M"
    assert source_of(replace(tiny_model(), source="a, b/c, config.json")) == "a, b/c"
    assert source_of(tiny_model()) == "tiny"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"devices": 2}, "one device for now"),
        ({"trainer": "trl"}, "whatever --for trl says"),
        ({"lengths": [8, 16]}, "whatever --lengths says"),
        ({"eval_batch": 8}, "whatever --eval-batch says"),
    ],
)
def test_what_a_program_decides_itself_is_not_asked_for(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WorkloadOptions.of(model="tiny", command="train", **more)


def test_a_programs_trials_are_a_context_of_their_own() -> None:
    job = tiny_job(program="train {micro_batch}")
    assert job.workload.key != tiny_job().workload.key
    assert "program" not in tiny_job().workload.to_json()
    assert Workload.from_json(job.workload.to_json()) == job.workload
