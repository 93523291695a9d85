"""Exported scripts against the trial's own training step: same adapters, loss, gradients and peak memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from export_samples import imported, make_recommendation, shorten
from live_bytes import LiveBytes
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from autofit.catalog.models import Model, architecture
from autofit.core.lattice import Config, Value
from autofit.export import export
from autofit.techniques.axes.optimizer import LEARNING_RATE
from autofit.techniques.axes.update import updates_in_backward
from autofit.training.build import make_skeleton
from autofit.training.step import TrainingStep

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*:UserWarning", "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"
)
forgetful_bitsandbytes = tiny.forgetful_bitsandbytes

STEPS = 3
SEQ_LEN = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What happened in some optimizer steps."""

    losses: list[float]
    gradient_norms: list[float]
    peak_bytes: int


def script_of(
    model: Model, folder: Path, config: Config, trainer: str | None = None, lengths: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """The names of the script that is exported for `config`; `folder` receives the model it loads."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(architecture(model)).save_pretrained(folder)
    recommendation = make_recommendation(
        config, model=model.name, seq_len=SEQ_LEN, global_batch=4, trainer=trainer, lengths=lengths
    )
    recommendation = replace(recommendation, hardware=tiny.CPU_HARDWARE)
    return imported(export(recommendation, format="transformers", source=str(folder)).text)


def trial(step: TrainingStep, tokens: torch.Tensor) -> Run:
    """The steps as a trial makes them."""
    losses, norms = [], []
    with LiveBytes() as counter:
        count(counter, step.module)
        for part in tokens:
            losses.append(step.run(part))
            norms.append(step.gradient_norm)
    return Run(losses=[float(x) for x in losses], gradient_norms=[float(x) for x in norms], peak_bytes=counter.peak)


def trained(trainer: Any, folder: Path) -> Run:
    """The steps as the script's Trainer makes them."""
    with LiveBytes() as counter:
        count(counter, trainer.model)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(
        losses=[entry["loss"] for entry in history],
        gradient_norms=[entry["grad_norm"] for entry in history],
        peak_bytes=counter.peak,
    )


def count(counter: LiveBytes, module: torch.nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        counter.note(tensor)


def give(step: TrainingStep, model: torch.nn.Module) -> None:
    """Give `model` the values of the trial's parameters: their names, shapes and formats are the same."""
    ours = dict(step.module.model.named_parameters())
    theirs = dict(model.named_parameters())
    assert described(ours) == described(theirs)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype is torch.uint8:
                module._parameters[key] = copy.deepcopy(ours[f"{name}.{key}"])
    for name, parameter in theirs.items():
        if parameter.dtype is not torch.uint8:
            parameter.data.copy_(ours[name].data)


def described(parameters: dict[str, torch.nn.Parameter]) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(p.shape), p.dtype, p.requires_grad) for name, p in parameters.items()}


CONFIGS: list[dict[str, Value]] = [
    {"method": "full", "precision": "fp32", "micro_batch": 1, "checkpointing": "every-2"},
    {"method": "full", "precision": "bf16", "checkpointing": "full", "loss": "chunked", "optimizer": "adafactor"},
    {"method": "full", "precision": "bf16", "checkpointing": "selective", "micro_batch": 4, "attention": "eager"},
    {"method": "full", "precision": "fp32", "update": "in-backward", "micro_batch": 4},
    {"method": "full", "precision": "bf16", "update": "in-backward", "micro_batch": 4, "optimizer": "adamw-8bit"},
    {"method": "lora", "rank": 8, "targets": "attention", "checkpointing": "full", "optimizer": "sgd"},
    {"method": "lora", "rank": 32, "checkpointing": "selective", "loss": "chunked", "precision": "bf16"},
    {"method": "lora", "rank": 8, "checkpointing": "save-attention", "attention": "efficient", "precision": "fp32"},
    {"method": "qlora", "rank": 8, "checkpointing": "full", "loss": "chunked", "micro_batch": 4},
    {"method": "qlora", "rank": 8, "precision": "bf16", "checkpointing": "selective", "optimizer": "adamw-8bit"},
    {"method": "full", "precision": "fp32", "mlp": "tiled"},
    {"method": "lora", "rank": 8, "checkpointing": "full", "mlp": "tiled"},
]


AS_IN_GUIDES: list[dict[str, Value]] = [
    {"method": "lora", "rank": 8, "precision": "bf16", "checkpointing": "full"},
    {"method": "qlora", "rank": 8, "checkpointing": "full", "loss": "chunked"},
    {"method": "qlora", "rank": 8, "precision": "bf16", "checkpointing": "none"},
]
"""Configs in which transformers' Trainer with peft has habits of its own."""


@pytest.mark.parametrize(
    ("values", "trainer"),
    [*((values, None) for values in CONFIGS), *((values, "transformers") for values in AS_IN_GUIDES)],
    ids=lambda v: ",".join(str(x) for x in v.values()) if isinstance(v, dict) else v,
)
def test_script_trains_as_the_trial(values: dict[str, Value], trainer: str | None, tmp_path: Path) -> None:
    model = tiny.model("llama", vocab_size=4096, num_hidden_layers=4, tie_word_embeddings=True)
    config = tiny.config(**{"micro_batch": 2, **values})
    step = tiny.built(config, model, seq_len=SEQ_LEN, trainer=trainer)
    tokens = torch.randint(4096, (STEPS, 4, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    names = script_of(model, tmp_path, config, trainer)
    shorten(names["training_args"], tmp_path, steps=STEPS, learning_rate=LEARNING_RATE)
    theirs_trainer = names["make_trainer"]([{"input_ids": row, "labels": row} for row in tokens.flatten(0, 1)])
    give(step, theirs_trainer.model)
    ours, theirs = trial(step, tokens), trained(theirs_trainer, tmp_path)
    noise = 1e-5 if config["precision"] == "fp32" else 1e-3
    assert theirs.losses == pytest.approx(ours.losses, rel=noise)
    if updates_in_backward(config):
        assert set(theirs.gradient_norms) == {0.0}, "no gradient is left of which Trainer could tell the norm"
    else:
        assert theirs.gradient_norms == pytest.approx(ours.gradient_norms, rel=10 * noise)
    assert theirs.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.001)


def test_padding_changes_no_loss_and_takes_no_more_than_the_longest(tmp_path: Path) -> None:
    """Of one micro-batch: the mean over its tokens, as each sequence has it alone."""
    counts = (10, SEQ_LEN, 33, 50)
    model = tiny.model("llama", vocab_size=4096, num_hidden_layers=2, tie_word_embeddings=True)
    config = tiny.config(micro_batch=4, precision="fp32", checkpointing="full", loss="chunked")
    step = tiny.built(config, model, seq_len=SEQ_LEN)
    rows = [torch.randint(4096, (n,), generator=torch.Generator().manual_seed(n)) for n in counts]
    names = script_of(model, tmp_path, config, lengths=tuple(sorted(counts)))
    shorten(names["training_args"], tmp_path, steps=1, learning_rate=LEARNING_RATE)
    trainer = names["make_trainer"]([{"input_ids": row, "labels": row} for row in rows])
    give(step, trainer.model)
    alone = sum(step.reference_loss(row[None]) * (len(row) - 1) for row in rows)
    theirs = trained(trainer, tmp_path)
    assert theirs.losses == pytest.approx([alone / sum(n - 1 for n in counts)], rel=1e-5)
    longest = trial(step, torch.randint(4096, (1, 4, SEQ_LEN)))
    assert theirs.peak_bytes == pytest.approx(longest.peak_bytes, rel=0.001)


@pytest.mark.parametrize("targets", ["attention", "all-linear"])
@pytest.mark.parametrize("name", tiny.one_of_each_architecture())
def test_adapters_are_the_trials_own(name: str, targets: str, tmp_path: Path) -> None:
    """Same parameters by name, shape and format, in every architecture of the catalog, a mixture of experts too."""
    model = tiny.shrunk(name)
    config = tiny.config(method="lora", rank=8, targets=targets, attention=tiny.attention_of(model))
    skeleton = make_skeleton(tiny.plan(config, model))
    loaded = script_of(model, tmp_path, config)["load_model"]()
    assert described(dict(loaded.named_parameters())) == described(dict(skeleton.named_parameters()))


def test_targets_in_both_formats() -> None:
    """Phi has one projection for queries, keys and values: a list made for Llama would train its output alone."""
    for name, expected in {
        "phi-4": ["o_proj", "qkv_proj"],
        "llama-3.2-1b": ["k_proj", "o_proj", "q_proj", "v_proj"],
    }.items():
        recommendation = make_recommendation(tiny.config(method="lora", rank=8, targets="attention"), model=name)
        trl = export(recommendation, format="trl", source="x").text
        assert yaml.safe_load(trl)["lora_target_modules"] == expected
        script = export(recommendation, format="transformers", source="x").text
        assert f"    target_modules={expected!r},\n" in script


@pytest.mark.parametrize("method", ["full", "qlora"])
def test_language_model_alone_is_taken_from_a_larger_checkpoint(method: str, tmp_path: Path) -> None:
    model = tiny.shrunk("gemma-3-4b")
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=architecture(model).to_dict(),
            vision_config={"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **vision},
            mm_tokens_per_image=4,
        )
    )
    whole.save_pretrained(tmp_path)
    config = tiny.config(method=method, precision="bf16")
    recommendation = make_recommendation(config, model="gemma-3-4b", seq_len=SEQ_LEN)
    loaded = imported(export(recommendation, format="transformers", source=str(tmp_path)).text)["load_model"]()
    skeleton = make_skeleton(tiny.plan(config, model))
    assert set(dict(loaded.named_parameters())) == set(dict(skeleton.named_parameters()))
    embedding = whole.model.language_model.embed_tokens.weight
    assert torch.equal(loaded.get_input_embeddings().weight, embedding.to(loaded.get_input_embeddings().weight.dtype))


@pytest.mark.parametrize("method", ["full", "lora"])
def test_decoder_layers_alone_are_compiled(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    names = script_of(tiny.LLAMA, tmp_path, tiny.config(method=method, compile=True))
    model = names["load_model"]()
    assert compiled == list((model if method == "full" else model.get_base_model()).model.layers)
    of_script, compiled[:] = [type(layer) for layer in compiled], []
    tiny.built(tiny.config(method=method, compile=True))
    assert [type(layer) for layer in compiled] == of_script
    assert names["training_args"].torch_compile is False


def test_a_budget_is_that_of_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    names = script_of(tiny.LLAMA, tmp_path, tiny.config(checkpointing="budget-25", compile=True))
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        names["load_model"]()
        assert torch._functorch.config.activation_memory_budget == 0.25


def test_learning_rate_must_be_chosen(tmp_path: Path) -> None:
    names = script_of(tiny.LLAMA, tmp_path, tiny.config())
    with pytest.raises(SystemExit, match="set LEARNING_RATE"):
        names["make_trainer"]([])
