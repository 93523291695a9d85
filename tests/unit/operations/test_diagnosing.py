"""Diagnoses of small models' files: the verdict, the changes as diffs, what the user says beside the file."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import autofit
from autofit.catalog import hub
from autofit.catalog.hardware import card
from autofit.catalog.models import load, shape
from autofit.cli.text.diagnosis import changes_text, diagnosis_text
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.core.units import GIB, MIB
from autofit.core.workload import Effect
from autofit.estimate.estimate import Estimate
from autofit.export.trainer_arguments import SYNC_EACH_BATCH
from autofit.operations import Diagnosis, DiagnosisRequest
from autofit.operations.diagnosing.beyond import bytes_beyond, of_whole_run
from autofit.operations.diagnosing.case import Case
from autofit.operations.diagnosing.notes import notes_on_run
from autofit.operations.diagnosing.run_reader import RunReader
from autofit.prediction.estimation import Estimation
from autofit.trainers.run import Where
from autofit.trainers.source_file import SourceFile
from autofit.trainers.trainer import READERS
from tests import tiny
from tests.jobs import model_in, tiny_model

AXOLOTL = """\
# a small one
base_model: HuggingFaceTB/SmolLM2-135M
adapter: lora
lora_r: 16  # enough
lora_target_linear: true
sequence_len: 512
micro_batch_size: 8
gradient_accumulation_steps: 2
bf16: auto
optimizer: adamw_torch_fused
datasets:
- path: mine
  type: alpaca
"""
ERROR = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 12.00 GiB is allocated by PyTorch, and 400.00 MiB is reserved "
    "by PyTorch but unallocated."
)


@pytest.fixture(autouse=True, scope="module")
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Without trials. Several tests ask about the same files: what was estimated for one is known to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOFIT_STORE", str(tmp_path_factory.mktemp("store") / "store.db"))
        yield


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "lora.yml"
    path.write_text(AXOLOTL)
    return path


def diagnosed(path: Path, **asked: Any) -> Diagnosis:
    return autofit.diagnose(path, **{"hardware": "rtx-4090", **asked})


def without_advice(path: Path, **asked: Any) -> Diagnosis:
    """A diagnosis without its advice, which would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Estimation, "advised", lambda *_, of: of)
        return diagnosed(path, **asked)


def estimated(path: Path, **asked: Any) -> Estimate:
    return without_advice(path, **asked).estimate


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ("transformers", "output_dir: out\nuse_liger_kernel: true\n"),
        ("llamafactory", "stage: sft\nfinetuning_type: lora\nenable_liger_kernel: true\n"),
    ],
)
def test_ligers_kernels_of_an_architecture_that_is_not_known_are_not_counted(
    tmp_path: Path, trainer: str, text: str
) -> None:
    config = tmp_path / "args.yml"
    config.write_text(f"per_device_train_batch_size: 1\n{text}")
    request = DiagnosisRequest(hardware="b200", seq_len=512, also={"method": "lora", "precision": "bf16"})
    known, unknown = (
        Case(SourceFile.read(config), reader_of(trainer, config, replace(request, model=model))).run
        for model in ("qwen3-0.6b", "qwen3-30b-a3b")
    )
    assert (known.config.get("kernels"), known.not_counted) == ("liger", ())
    assert unknown.config.get("kernels") is None and unknown.config["loss"] == "fused"
    assert [part.key for part in unknown.not_counted] == [text.split("\n")[-2].partition(":")[0]]


@pytest.mark.parametrize(("model", "loss", "said"), [("pythia-160m", "full", True), ("olmo-2-7b", "fused", False)])
def test_llamafactory_leaves_liger_out_where_it_has_none_for_the_model(
    tmp_path: Path, model: str, loss: str, said: bool
) -> None:
    path = tmp_path / "lora.yml"
    path.write_text("model_name_or_path: its/model\nstage: sft\nbf16: true\nenable_liger_kernel: true\n")
    result = without_advice(path, model=model)
    assert result.estimate.config["loss"] == loss and "kernels" not in result.estimate.config
    assert any("enable_liger_kernel does nothing here" in note for note in result.notes) is said


def test_another_fused_loss_than_ligers_never_means_all_logits(tmp_path: Path) -> None:
    path = tmp_path / "lora.yml"
    path.write_text(
        "base_model: its/model\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nbf16: true\nliger_rope: true\n"
        "plugins:\n- axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n"
        "- axolotl.integrations.liger.LigerPlugin\n"
    )
    result = without_advice(path, model="pythia-160m")
    assert result.estimate.config["loss"] == "chunked"
    assert not any("does nothing here" in note for note in result.notes)


@pytest.mark.parametrize(
    ("model", "tiles", "mlp", "said"),
    [
        ("smollm2-135m", 4, "tiled", {}),
        ("smollm2-135m", 2, "tiled", {"4 tiles are counted, and it has 2": "more"}),
        ("smollm2-135m", 8, "tiled", {"4 tiles are counted, and it has 8": "less"}),
        ("smollm2-135m", 1, None, {}),
        ("pythia-160m", 4, None, {"tiles of MLPs that trials do not have": "less"}),
    ],
)
@pytest.mark.parametrize("adapter", ["adapter: lora\nlora_target_linear: true\n", ""])
def test_tiles_of_mlps_are_counted_as_trials_have_them(
    tmp_path: Path, model: str, tiles: int, mlp: str | None, said: dict[str, str], adapter: str
) -> None:
    file = tmp_path / "config.yml"
    file.write_text(f"base_model: x\nsequence_len: 2048\ntiled_mlp: true\ntiled_mlp_num_shards: {tiles}\n{adapter}")
    if not adapter and tiles > 1:
        said = {**said, "axolotl's tiles keep a further copy of an MLP's gradients": "more"}
    reader = reader_of("axolotl", file, DiagnosisRequest(hardware="b200", model=model))
    run = Case(SourceFile.read(file), reader).run
    assert run.config.get("mlp") == mlp
    assert {part.because: part.effect for part in run.not_counted if part.key == "tiled_mlp"} == said


def test_what_does_not_fit_is_told_what_to_change_in_its_own_file(config: Path, tmp_path: Path) -> None:
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    result = diagnosed(config, memory_limit="4GiB", model="smollm2-135m")
    assert not result.fits and result.estimate.device_bytes > 4 * GIB
    assert {role for remedy in result.remedies for role in remedy.change.roles} == {"smallest", "fastest", "safest"}
    for remedy in result.remedies:
        assert remedy.diff is not None and remedy.change.estimate.likely_fits
        copy = tmp_path / "copy.yml"
        copy.write_text(AXOLOTL)
        subprocess.run(["patch", "-s", str(copy)], input=remedy.diff, text=True, check=True)
        after = READERS["axolotl"].read(yaml.safe_load(copy.read_text()), Where())
        assert after.config == remedy.change.estimate.config and after.global_batch == 16
        assert "# a small one" in copy.read_text() and "lora_r: 16  # enough" in copy.read_text()
    first, *others = result.remedies
    doubtful = replace(first.change, estimate=replace(first.change.estimate, relative_error=0.99))
    text = changes_text(replace(result, remedies=(replace(first, change=doubtful), *others)))
    assert text.count("give or take 99%") == 1 and "\n  speeds " in text


FSDP = """\
model_name_or_path: HuggingFaceTB/SmolLM2-135M
dtype: bfloat16
bf16: false
max_length: 128
completion_only_loss: false
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
fsdp: full_shard
fsdp_config:
  version: 2
"""
SYNCHRONISED = "accelerator_config:\n  gradient_accumulation_kwargs:\n    sync_each_batch: true\n"


def test_fsdp_keeps_gradients_whole_over_the_accumulation_unless_the_file_synchronises(config: Path) -> None:
    asked: dict[str, Any] = {"model": "smollm2-135m", "devices": 4, "hardware": "h100-80g"}
    parameters = shape(load("smollm2-135m")).parameters
    config.write_text(FSDP + SYNCHRONISED)
    scattered = estimated(config, **asked)
    for text, more in (
        (FSDP, 2 - 2 / 4),  # bytes of each parameter, in place of a quarter of them
        (FSDP.replace("bf16: false", "bf16: true"), 2 - 4 / 4),  # whose sums are fp32
        (FSDP + "accelerator_config: elsewhere.json\n", 2 - 2 / 4),
        (FSDP.replace("steps: 4", "steps: 1"), 0),
        (FSDP + 'accelerator_config: \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\'\n', 0),
    ):
        run = READERS["trl"].read(yaml.safe_load(text), Where(devices=4))
        assert bytes_beyond(run, load("smollm2-135m")) == {"weights": 0, "gradients": parameters * more}
    config.write_text(FSDP)
    answer = diagnosed(config, memory_limit=int(1.14 * scattered.device_bytes), **asked)
    assert not answer.fits and any("gradients stay whole" in note for note in answer.notes)
    [remedy] = answer.remedies
    assert remedy.settings == {"accelerator_config.gradient_accumulation_kwargs.sync_each_batch": True}
    assert remedy.change.effect is Effect.EXACT and remedy.change.estimate.device_bytes == scattered.device_bytes
    assert remedy.diff is not None and SYNCHRONISED in remedy.diff.replace("\n+", "\n")


@pytest.mark.parametrize(
    ("text", "devices"),
    [(FSDP + "use_peft: true\n", 4), (FSDP.replace("bf16: false", "bf16: true"), 2)],
    ids=["adapters", "as much as two shards in fp32"],
)
def test_gradients_that_take_no_more_whole_are_no_matter(config: Path, text: str, devices: int) -> None:
    config.write_text(text)
    answer = without_advice(config, model="smollm2-135m", devices=devices, memory_limit="200MiB")
    assert not any("stay whole" in note for note in answer.notes)
    assert not any("sync_each_batch" in key for remedy in answer.remedies for key in ".".join(remedy.settings))


def case_of(config: Path, text: str) -> Case:
    config.write_text(text)
    request = DiagnosisRequest(hardware="h100-80g", model="smollm2-135m", devices=4)
    return Case(SourceFile.read(config), reader_of("trl", config, request))


def test_a_file_that_accumulates_only_once_it_is_edited_scatters_after_each_micro_batch(config: Path) -> None:
    case = case_of(config, FSDP.replace("steps: 4", "steps: 1").replace("batch_size: 1", "batch_size: 4"))
    smaller = case.nearest_expressible(case.run.config.replace(micro_batch=1))
    assert smaller is not None and case.extra_bytes(smaller) == 0
    assert case._reached[smaller][0][SYNC_EACH_BATCH] is True


def test_whole_gradients_raise_a_peak_in_evaluation_by_less(config: Path) -> None:
    case = case_of(config, FSDP)
    estimate, gradients = case.estimation.estimate(), bytes_beyond(case.run, load("smollm2-135m"))["gradients"]
    in_evaluation = estimate.phase_peaks["backward"] + gradients // 4
    evaluated = replace(estimate, phase_peaks={**estimate.phase_peaks, "evaluation": in_evaluation})
    assert of_whole_run(estimate, case.run, case.estimation, 0).device_bytes - estimate.device_bytes == gradients
    whole = of_whole_run(evaluated, case.run, case.estimation, 0)
    assert whole.device_bytes - estimate.device_bytes == gradients - gradients // 4
    assert whole.phase_peaks["evaluation"] == in_evaluation


def test_the_document_says_everything(config: Path) -> None:
    result = diagnosed(config, model="smollm2-135m").to_json()
    assert json.loads(json.dumps(result)) == result
    assert (result["trainer"], result["seq_len"], result["global_batch"]) == ("axolotl", 512, 16)
    assert result["estimate"]["fits"] and result["estimate"]["advice"] == []
    assert all({"roles", "change", "settings", "diff", "estimate"} <= change.keys() for change in result["changes"])
    assert result["traceback"] is None and result["unknown_keys"] == [] and result["assumed"]


@pytest.mark.parametrize(
    ("trainer", "keys", "in_four_bits"),
    [
        ("trl", {"use_peft": True}, {"load_in_4bit": True, "use_bnb_nested_quant": True}),
        ("axolotl", {"adapter": "lora", "lora_target_linear": True}, {"load_in_4bit": True}),
        ("llamafactory", {"finetuning_type": "lora"}, {"quantization_bit": 4}),
    ],
)
def test_adapters_of_a_checkpoint_in_4_bits_are_qlora(
    tmp_path: Path, trainer: str, keys: dict[str, Any], in_four_bits: dict[str, Any]
) -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}

    def reader(quantised: dict[str, Any]) -> RunReader:
        folder = model_in(tmp_path / "-".join(["model", *quantised]), {**tiny_model().config, **quantised})
        request = DiagnosisRequest(model=str(folder))
        return RunReader(trainer=READERS[trainer], request=request, where=Where())

    run = reader({"quantization_config": stored}).read(keys)
    stated = reader({}).read({**keys, **in_four_bits})
    assert run.config["method"] == "qlora" and replace(run, notes=stated.notes) == stated
    assert [note for note in run.notes if "adapters on it are QLoRA" in note]
    assert reader({}).read(keys).config["method"] == "lora"
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert reader(gptq).read(keys).config["method"] == "lora"


def test_attention_that_the_file_leaves_open_is_what_the_model_has(tmp_path: Path) -> None:
    request = DiagnosisRequest(model=str(model_in(tmp_path, tiny.GEMMA2.config)))
    read = RunReader(trainer=READERS["trl"], request=request, where=Where()).read
    assert read({}).config["attention"] == "eager"
    assert not any("is sdpa" in sentence for sentence in read({}).assumed)
    assert read({"run_name": "sdpa"}).config["attention"] == "eager"
    assert read({"attn_implementation": "sdpa"}).config["attention"] == "sdpa"


def test_a_quantised_checkpoint_is_noted(config: Path, tmp_path: Path) -> None:
    stored = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    notes = without_advice(config, model=str(model_in(tmp_path / "model", {**tiny_model().config, **stored}))).notes
    assert any("quantised (awq)" in note for note in notes)


def test_weights_in_8_bits_and_modules_trained_whole_are_counted(config: Path) -> None:
    plain = estimated(config, model="smollm2-135m")
    config.write_text(AXOLOTL + "load_in_8bit: true\n")
    eight = estimated(config, model="smollm2-135m")
    config.write_text(AXOLOTL + "lora_modules_to_save: [embed_tokens]\n")
    whole = estimated(config, model="smollm2-135m")
    assert 90 * MIB < plain.device_bytes - eight.device_bytes < 110 * MIB
    assert whole.device_bytes - plain.device_bytes == 16 * 49152 * 576
    assert sum(whole.breakdown.values()) == whole.device_bytes
    assert whole.memory_limit_bytes == plain.memory_limit_bytes
    less_than_these_modules = diagnosed(config, model="smollm2-135m", memory_limit="400MiB")
    assert not less_than_these_modules.fits and not less_than_these_modules.remedies


def test_an_error_names_the_card_and_what_is_left_of_it(config: Path) -> None:
    result = without_advice(config, hardware="auto", model="smollm2-135m", traceback=ERROR)
    assert result.estimate.hardware == "rtx-4090" and result.failure is not None
    assert result.estimate.memory_limit_bytes == int(23.64 * GIB) - result.failure.elsewhere_bytes
    assert "rtx-3090" in result.notes[0] and "the error shows 15.00 GiB" in result.notes[-2]


def test_what_the_error_shows_beyond_the_prediction_is_counted(config: Path) -> None:
    """Of the file and of what is advised: a run that has failed at 13 GiB does not fit in 12."""
    short = ERROR.replace("12.00 GiB", "10.00 GiB")
    plain = without_advice(config, model="smollm2-135m", memory_limit="12GiB")
    result = diagnosed(config, model="smollm2-135m", memory_limit="12GiB", traceback=short)
    missed = 13 * GIB - plain.estimate.peak_allocated_bytes
    assert plain.fits and not result.fits and missed > 0
    assert result.estimate.peak_allocated_bytes == 13 * GIB
    assert sum(result.estimate.breakdown.values()) == result.estimate.device_bytes
    assert all(remedy.change.estimate.breakdown["temporaries"] >= missed for remedy in result.remedies)


@pytest.mark.parametrize(("limit", "fragmented"), [("14GiB", True), ("8GiB", False)])
def test_fragmentation_explains_no_error_of_a_file_that_lacks_more(config: Path, limit: str, fragmented: bool) -> None:
    error = ERROR.replace("400.00 MiB", "3.50 GiB").replace("12.00 GiB", "10.00 GiB")
    result = without_advice(config, model="smollm2-135m", memory_limit=limit, traceback=error)
    assert ("memory is fragmented" in diagnosis_text(result)) is fragmented


TRL_SMALL = """\
model_name_or_path: HuggingFaceTB/SmolLM2-135M
max_length: 512
use_peft: true
per_device_train_batch_size: 1
completion_only_loss: false
"""
OF_EVALUATION = ERROR + '\n  File "/x/transformers/trainer.py", line 1, in evaluation_loop\n'


def test_a_file_that_fits_and_has_failed_is_not_made_faster(config: Path) -> None:
    """Its evaluation takes fewer sequences, where that is what failed."""
    config.write_text(AXOLOTL + "val_set_size: 0.1\nevals_per_epoch: 1\n")
    result = diagnosed(config, model="smollm2-135m", traceback=OF_EVALUATION)
    assert result.fits and [remedy.settings for remedy in result.remedies] == [{"eval_batch_size": 4}]
    of_saving = OF_EVALUATION.replace("evaluation_loop", "save_model")
    result = diagnosed(config, model="smollm2-135m", traceback=of_saving)
    assert result.fits and not result.remedies and "faster" not in changes_text(result)


@pytest.mark.parametrize("text", [TRL_SMALL, AXOLOTL], ids=["trl", "axolotl"])
def test_a_file_whose_run_failed_in_evaluation_evaluates(config: Path, text: str) -> None:
    config.write_text(text)
    result = diagnosed(config, model="smollm2-135m", traceback=OF_EVALUATION)
    key = "eval_batch_size" if text is AXOLOTL else "per_device_eval_batch_size"
    assert [remedy.settings for remedy in result.remedies] == [{key: 4}]
    assert result.remedies[0].diff is not None and f"+{key}: 4" in result.remedies[0].diff
    assert any("came in evaluation" in note for note in result.notes)


def test_what_fails_as_fsdp_gathers_a_checkpoint_is_saved_in_shards(config: Path) -> None:
    of_saving = OF_EVALUATION.replace("evaluation_loop", "_save_checkpoint")
    asked: dict[str, Any] = {"model": "smollm2-135m", "devices": 4, "traceback": of_saving}
    config.write_text(FSDP + SYNCHRONISED)
    answer = diagnosed(config, **asked)
    assert [remedy.settings for remedy in answer.remedies] == [{"fsdp_config.state_dict_type": "SHARDED_STATE_DICT"}]
    config.write_text(FSDP + "  fsdp_state_dict_type: SHARDED_STATE_DICT\n" + SYNCHRONISED)
    assert not diagnosed(config, **asked).remedies


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_checkpoint_that_exceeds_the_hosts_memory_is_noted(config: Path, in_shards: bool) -> None:
    config.write_text(FSDP + ("  state_dict_type: SHARDED_STATE_DICT\n" if in_shards else "") + SYNCHRONISED)
    request = DiagnosisRequest(hardware="rtx-4090", model="smollm2-135m", devices=4)
    reader = RunReader(trainer=READERS["trl"], request=request, where=Where(devices=4))
    case = Case(SourceFile.read(config), reader)
    estimate = case.estimation.estimate()
    small, enough = (replace(estimate, host_memory_bytes=estimate.saving_host_bytes + more) for more in (-1, 0))
    assert estimate.copied_bytes and not any("checkpoints" in note for note in notes_on_run(case, enough))
    assert any("checkpoints: saving one takes" in note for note in notes_on_run(case, small)) is not in_shards


def test_an_error_of_another_card_sets_no_limit(config: Path) -> None:
    result = without_advice(config, hardware="h100-80g", model="smollm2-135m", traceback=ERROR)
    assert result.estimate.memory_limit_bytes > 79 * GIB
    assert result.notes[0] == "the error is of another card, with 23.64 GiB"


def test_an_error_that_rounds_its_card_up_sets_the_cards_own_limit(config: Path) -> None:
    result = without_advice(config, model="smollm2-135m", traceback=ERROR.replace("23.64 GiB", "23.65 GiB"))
    assert result.failure is not None
    assert result.estimate.memory_limit_bytes + result.failure.elsewhere_bytes == card("rtx-4090").memory_bytes


FACTORY = """\
model_name_or_path: HuggingFaceTB/SmolLM2-135M
stage: sft
do_train: true
finetuning_type: lora
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
eval_strategy: steps
bf16: true
"""


def test_what_runs_out_of_memory_in_its_evaluation_is_told_to_evaluate_fewer(tmp_path: Path) -> None:
    """Training one sequence at a time fits, evaluating 8, the default, does not."""
    path = tmp_path / "sft.yaml"
    path.write_text(FACTORY)
    result = diagnosed(path, model="smollm2-135m", memory_limit="6GiB")
    assert not result.fits and result.estimate.peak_phase == "evaluation"
    assert max(size for phase, size in result.estimate.phase_peaks.items() if phase != "evaluation") < 5 * GIB
    assert "per_device_eval_batch_size is 8 unless it is set" in result.run.assumed
    remedy = result.remedies[0]
    assert remedy.settings == {"per_device_eval_batch_size": 4} and remedy.change.effect.label == "exact"
    assert remedy.change.estimate.likely_fits
    assert remedy.diff is not None and "+per_device_eval_batch_size: 4" in remedy.diff


TRL = """\
model_name_or_path: HuggingFaceTB/SmolLM2-1.7B
use_peft: true
lora_r: 16
lora_target_modules: [q_proj, v_proj]
max_length: 512
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
bf16: true
"""


def test_frozen_weights_that_trl_loads_in_fp32_are_loaded_in_bf16_before_anything_else_is_trained(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(TRL)
    wide = estimated(path, model="smollm2-1.7b", hardware="a100-40g")
    path.write_text(TRL + "dtype: bfloat16\n")
    narrow = estimated(path, model="smollm2-1.7b", hardware="a100-40g")
    assert wide.device_bytes - narrow.device_bytes > 3 * GIB
    path.write_text(TRL)
    result = diagnosed(path, model="smollm2-1.7b", memory_limit=f"{(wide.device_bytes + narrow.device_bytes) // 2} B")
    (remedy,) = result.remedies
    assert remedy.settings == {"dtype": "bfloat16"} and remedy.change.effect.label == "numerics"
    assert remedy.diff is not None and "+dtype: bfloat16" in remedy.diff
    assert remedy.change.estimate.device_bytes == narrow.device_bytes
    diagnosis = without_advice(path, model="smollm2-1.7b", hardware="a100-40g", also="precision=bf16")
    assert diagnosis.estimate.device_bytes == pytest.approx(narrow.device_bytes, rel=0.02), (
        "as the user says beside the file"
    )
    assert not any("fp32" in note for note in diagnosis.notes)
    smaller = diagnosed(path, model="smollm2-1.7b", memory_limit=f"{narrow.device_bytes * 9 // 10} B")
    assert smaller.remedies and all(r.settings["dtype"] == "bfloat16" for r in smaller.remedies)
    assert all(len(r.settings) > 1 for r in smaller.remedies)
    tiny = diagnosed(path, model="smollm2-1.7b", memory_limit="3GiB")  # less than fp32 takes beside 16 bits
    assert not tiny.fits and all(r.settings["dtype"] == "bfloat16" for r in tiny.remedies)


def test_adapters_whose_switch_is_missing_are_switched_on_first(tmp_path: Path) -> None:
    """trl ignores their settings without it; what the file says of them stays."""
    path = tmp_path / "sft.yaml"
    path.write_text(TRL.replace("use_peft: true\n", "").replace("lora_r: 16", "lora_r: 4") + "dtype: bfloat16\n")
    result = diagnosed(path, model="smollm2-1.7b", memory_limit="8GiB")
    assert not result.fits and result.run.config["method"] == "full" and "use_peft: true" in result.notes[0]
    (remedy,) = result.remedies
    assert remedy.settings == {"use_peft": True} and remedy.change.effect is Effect.TRAINING
    assert remedy.change.estimate.config["rank"] == 4 and remedy.change.estimate.likely_fits


def test_a_change_that_not_every_transformers_has_says_so_and_is_not_for_an_older_file(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(TRL.replace("512", "4096").replace("size: 4", "size: 1") + "dtype: bfloat16\n")
    new = Case(SourceFile.read(path), reader_of("trl", path))
    offload = new.run.config.replace(checkpointing="offload")
    assert new.nearest_expressible(offload) == offload
    path.write_text(path.read_text().replace("dtype", "torch_dtype"))
    assert Case(SourceFile.read(path), reader_of("trl", path)).nearest_expressible(offload) is None


OF_SMALL = DiagnosisRequest(hardware="rtx-4090", model="smollm2-135m")


def reader_of(trainer: str, path: Path, request: DiagnosisRequest = OF_SMALL) -> RunReader:
    return RunReader(
        trainer=READERS[trainer], request=request, where=Where(folder=path.parent, devices=request.devices)
    )


def test_a_trainers_habits_are_part_of_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"output_dir": "out", "per_device_train_batch_size": 2, "bf16": true}')
    also = "method=qlora,rank=16,checkpointing=full"
    result = estimated(path, model="smollm2-135m", seq_len=256, also=also)
    same = autofit.estimate(
        "smollm2-135m",
        result.config,
        hardware="rtx-4090",
        seq_len=256,
        global_batch=2,
        trainer="transformers",
        advice=False,
    )
    assert (result.device_bytes, result.peak_allocated_bytes) == (same.device_bytes, same.peak_allocated_bytes)
    plain = autofit.estimate(
        "smollm2-135m", result.config, hardware="rtx-4090", seq_len=256, global_batch=2, advice=False
    )
    assert same.peak_allocated_bytes > plain.peak_allocated_bytes


def test_the_smallest_change_is_the_one_of_the_fewest_keys(tmp_path: Path) -> None:
    """LLaMA-Factory has one key for two axes, where DeepSpeed's one axis takes twenty."""
    path = tmp_path / "full.yml"
    path.write_text(
        "model_name_or_path: HuggingFaceTB/SmolLM2-135M\nstage: sft\nfinetuning_type: full\ncutoff_len: 2048\n"
        "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nbf16: true\n"
    )
    result = diagnosed(path, hardware="h100-80g", devices=2, memory_limit="14500MiB")
    smallest = next(remedy for remedy in result.remedies if "smallest" in remedy.change.roles)
    assert dict(smallest.settings) == {"enable_liger_kernel": True}
    assert set(smallest.change.values) == {"kernels", "loss"}


def test_training_arguments_need_what_they_do_not_say(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"output_dir": "out", "per_device_train_batch_size": 2, "bf16": true}')
    with pytest.raises(UsageError, match=r"no GPU here.*--hardware .*; the file names no model.*--model; .*--seq-len"):
        diagnosed(path, hardware="auto")
    with pytest.raises(UsageError, match="the file names no model: say it with --model; the file does not say how"):
        diagnosed(path)
    with pytest.raises(UsageError, match="say it with --seq-len"):
        diagnosed(path, model="smollm2-135m")
    result = diagnosed(path, model="smollm2-135m", seq_len=256, also="method=lora,rank=16")
    assert (result.run.config["method"], result.run.config["rank"], result.fits) == ("lora", 16, True)
    assert all(remedy.change.estimate.config["rank"] == 16 for remedy in result.remedies)
    short = diagnosed(path, model="smollm2-135m", seq_len=256, memory_limit="500MiB")
    assert not short.remedies and not short.in_script and "--also method=lora" in short.to_json()["notes"][-1]


def test_what_the_script_decides_is_said_where_the_file_can_only_train_something_else(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text('{"output_dir": "out", "per_device_train_batch_size": 1, "gradient_checkpointing": true}')
    asked: dict[str, Any] = {"model": "smollm2-135m", "seq_len": 128}
    needs = estimated(path, **asked).device_bytes
    result = diagnosed(path, memory_limit=f"{needs * 4 // 5} B", **asked)
    assert not result.fits and all(remedy.change.effect is Effect.TRAINING for remedy in result.remedies)
    assert {"dtype=torch.bfloat16", "LoRA"} <= result.in_script.keys()
    assert all(change.estimate.likely_fits for change in result.in_script.values())
    documents = result.to_json()["in_script"]
    assert [change["script"] for change in documents] == list(result.in_script)
    assert documents[0].keys() == {"script", "change", "effect", "estimate"}
    in_script, of_file = changes_text(result).partition("fits with, in your script")[2].split("\nfits with\n")
    assert "such as --also precision=bf16" in in_script and "method=lora" in in_script
    assert "trains something else" in of_file


@pytest.mark.parametrize(
    ("key", "scripts", "also"),
    [
        ("bf16", ["dtype=torch.bfloat16", "dtype=torch.bfloat16 and LoRA", "QLoRA"], "precision=bf16"),
        ("fp16", ["dtype=torch.float16 and LoRA", "QLoRA"], "method=lora"),
    ],
)
def test_adapters_under_mixed_precision_are_those_of_weights_that_the_script_loads_in_16_bits(
    tmp_path: Path, key: str, scripts: list[str], also: str
) -> None:
    """Beside loss scaling, nothing is trained in bf16."""
    path = tmp_path / "args.json"
    path.write_text(f'{{"output_dir": "out", "per_device_train_batch_size": 1, "{key}": true}}')
    result = without_advice(path, model="smollm2-135m", seq_len=128, memory_limit="2200MiB")
    assert not result.fits and list(result.in_script) == scripts
    assert f"such as --also {also}" in changes_text(result)
    assert not any("--also method=lora" in note for note in result.to_json()["notes"])


def test_a_model_that_is_unknown_here_is_asked_for(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(hub_id: str) -> str:
        raise EnvironmentLacks(f"no hub for {hub_id}", remedy="none")

    monkeypatch.setattr(hub, "config_text", unreachable)
    config.write_text(AXOLOTL.replace("HuggingFaceTB/SmolLM2-135M", "nobody/SmolLM2-360M-mine"))
    with pytest.raises(EnvironmentLacks, match="--model smollm2-360m"):
        diagnosed(config)
    config.write_text(AXOLOTL)
    assert without_advice(config).options.model == "HuggingFaceTB/SmolLM2-135M"  # the catalog has it by its hub id


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"hardware": "auto"}, "there is no GPU here: name the card"),
        ({"hardware": "h1000"}, "unknown hardware"),
        ({"trainer": "torchtune"}, "unknown trainer"),
        ({"devices": 0}, "devices is 0: it must be at least 1"),
        ({"seq_len": 0}, "seq-len is 0: it must be at least 1"),
        ({"also": "rnak=8"}, "unknown axis"),
        (
            {"hardware": "t4", "also": "precision=bf16-mixed"},
            "lora.yml asks for bf16, which t4 only emulates: set fp16",
        ),
        (
            {"hardware": "t4", "also": "method=full,precision=bf16"},
            "bf16, which t4 only emulates, and fp16 in its place cannot be estimated: .* torch refuses loss scaling",
        ),
        ({"also": "sharding=zero3"}, "lora.yml asks for cannot be estimated: sharding=zero3 needs several devices"),
        ({"memory_limit": "1MiB", "also": "method=lora"}, None),
    ],
)
def test_what_cannot_be_answered_says_why(config: Path, asked: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert not diagnosed(config, model="smollm2-135m", **asked).fits
        return
    with pytest.raises(UsageError, match=words):
        diagnosed(config, model="smollm2-135m", **asked)


@pytest.mark.parametrize(
    ("name", "text", "diff"),
    [
        (
            "axolotl.yml",
            "base_model: x\nadapter: lora\nsequence_len: 512\nmicro_batch_size: 1\nbf16: true # mine\n",
            ["-bf16: true # mine", "+bf16: false # mine", "+fp16: true"],
        ),
        (
            "trl.yml",
            "model_name_or_path: HuggingFaceTB/SmolLM2-135M\nmax_length: 512\ndtype: bfloat16\nuse_peft: true\n",
            ["-dtype: bfloat16", "+dtype: float16", "+fp16: true"],
        ),
        (
            "args.json",
            '{\n  "output_dir": "out",\n  "per_device_train_batch_size": 2,\n  "bf16": true\n}\n',
            ['-  "bf16": true', '+  "bf16": false,', '+  "fp16": true'],
        ),
    ],
)
def test_on_a_card_that_emulates_bf16_the_smallest_change_is_fp16(
    tmp_path: Path, name: str, text: str, diff: list[str]
) -> None:
    config = tmp_path / name
    config.write_text(text)
    result = diagnosed(config, hardware="t4", model="smollm2-135m", seq_len=512)
    assert not result.fits and result.estimate.fits
    (remedy,) = result.remedies
    assert remedy.change.roles == ("smallest",) and remedy.change.effect is Effect.NUMERICS
    assert remedy.diff is not None
    assert [line for line in remedy.diff.splitlines()[2:] if line[0] in "+-"] == diff
    reason = f"{config} asks for bf16, which t4 only emulates"
    assert result.emulated is not None and result.emulated.startswith(reason)
    assert diagnosis_text(result).startswith(reason)
    edited = SourceFile.read(config).changed({tuple(key.split(".")): value for key, value in remedy.settings.items()})
    assert edited is not None
    config.write_text(edited)
    again = without_advice(config, hardware="t4", model="smollm2-135m", seq_len=512)
    assert again.emulated is None and again.run.config["precision"] == "fp16-mixed"
    assert again.estimate.device_bytes == result.estimate.device_bytes


def test_adapters_that_a_trainer_has_in_bf16_alone_are_answered_for_a_card_that_emulates_it(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(TRL.replace("512", "256") + "dtype: bfloat16\nload_in_4bit: true\n")
    result = diagnosed(path, hardware="t4", model="smollm2-135m")
    assert result.fits and result.emulated is None and result.estimate.tokens_per_second is None
    assert "emulated on t4, which is slow" in result.notes[0]


def test_what_does_not_fit_in_fp16_either_changes_both_at_once(tmp_path: Path) -> None:
    config = tmp_path / "axolotl.yml"
    lines = ("base_model: x", "adapter: lora", "lora_r: 8", "sequence_len: 2048", "micro_batch_size: 32", "bf16: true")
    config.write_text("\n".join(lines))
    result = diagnosed(config, hardware="t4", model="smollm2-135m")
    assert result.emulated and not result.estimate.likely_fits and result.remedies
    for remedy in result.remedies:
        assert remedy.settings["fp16"] is True and len(remedy.settings) > 1


@pytest.mark.parametrize(("kept", "value"), [("[attention]", "save-attention"), ("[attention, mlp]", "selective")])
def test_ligers_kernels_are_counted_beside_what_attention_gives(tmp_path: Path, kept: str, value: str) -> None:
    """Trials refuse them where they keep products, too, which may be others than a trainer keeps."""
    config = tmp_path / "axolotl.yml"
    switches = "liger_rope: true\nliger_rms_norm: true\nliger_glu_activation: true\n"
    config.write_text(
        "base_model: HuggingFaceTB/SmolLM2-135M\nsequence_len: 512\nmicro_batch_size: 1\nbf16: true\n"
        f"selective_checkpointing:\n  save: {kept}\nplugins: [axolotl.integrations.liger.LigerPlugin]\n{switches}"
    )
    run = without_advice(config).run
    not_counted = [part.key for part in run.not_counted]
    assert run.config["checkpointing"] == value
    assert ("selective_checkpointing" in not_counted) is (value == "selective")
    if value == "selective":
        assert "kernels" not in run.config and "liger_rope" in not_counted
    else:
        assert run.config["kernels"] == "liger" and "liger_rope" not in not_counted
