"""Exported scripts train a tiny Llama with the installed Trainer on the CPU, and do what the config says."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_samples import imported, make_config, make_recommendation, shorten
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from autofit.core.lattice import Value
from autofit.export import export
from autofit.techniques.axes.attention import IMPLEMENTATIONS
from autofit.techniques.selective import SELECTIVE

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

SEQ_LEN, LAYERS = 16, 4
SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a Llama of four small layers."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=LAYERS, num_key_value_heads=2)).save_pretrained(folder)
    return str(folder)


def train(source: str, folder: Path, *, seq_len: int = SEQ_LEN, **values: Value) -> tuple[Any, dict[str, Any]]:
    """The Trainer after its training, and the script's names."""
    recommendation = make_recommendation(make_config(micro_batch=2, **values), seq_len=seq_len, global_batch=4)
    recommendation = replace(recommendation, hardware=replace(recommendation.hardware, kind="cpu"))
    names = imported(export(recommendation, format="transformers", source=source).text)
    shorten(names["training_args"], folder, steps=2, learning_rate=1e-4)
    tokens = torch.arange(8 * seq_len).reshape(8, seq_len) % 320
    torch.manual_seed(0)
    trainer = names["make_trainer"]([{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()
    return trainer, names


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def plain(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the plain recipe in fp32."""
    return losses(train(tiny, tmp_path_factory.mktemp("run"), precision="fp32")[0])


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp32"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_dtypes_of_weights(tiny: str, tmp_path: Path, method: str, precision: str) -> None:
    trainer, _ = train(tiny, tmp_path, method=method, precision=precision, checkpointing="full")
    parameters = dict(trainer.model.named_parameters())
    trained = {p.dtype for p in parameters.values() if p.requires_grad}
    assert trained == {torch.bfloat16 if precision == "bf16" else torch.float32}
    frozen = {p.dtype for n, p in parameters.items() if not p.requires_grad and "norm" in n}
    base = torch.float32 if precision == "fp32" else torch.bfloat16
    assert frozen == (set() if method == "full" else {base})
    packed = [n for n, p in parameters.items() if p.dtype is torch.uint8]
    assert len(packed) == (7 * LAYERS if method == "qlora" else 0)
    assert trainer.accelerator.mixed_precision == ("bf16" if precision == "bf16-mixed" else "no")
    assert all(torch.isfinite(torch.tensor(losses(trainer))))


@pytest.mark.parametrize("value", ["full", "save-attention", "every-2", "every-4", "selective", "none"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_checkpointing_reaches_the_layers(tiny: str, tmp_path: Path, method: str, value: str) -> None:
    trainer, names = train(tiny, tmp_path, method=method, precision="fp32", checkpointing=value)
    layers = [m for m in trainer.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    every = {"every-2": 2, "every-4": 4}.get(value, 1)
    assert [layer.gradient_checkpointing for layer in layers] == [
        value != "none" and index % every == 0 for index in range(LAYERS)
    ]
    if value != "none":
        keywords = layers[0]._gradient_checkpointing_func.keywords
        assert keywords["use_reentrant"] is False
        context = keywords.get("context_fn")
        assert getattr(context, "func", None) is names.get("selective_contexts")
        if value in SELECTIVE:
            assert context.keywords.get("products", True) is (value == "selective")


@pytest.mark.parametrize(
    "values",
    [
        {"checkpointing": "full"},
        {"checkpointing": "save-attention", "attention": "efficient"},
        {"checkpointing": "selective"},
        {"loss": "chunked"},
        {"loss": "chunked", "checkpointing": "every-2", "attention": "eager"},
    ],
    ids=str,
)
def test_exact_techniques_leave_the_loss_alone(
    tiny: str, tmp_path: Path, plain: list[float], values: dict[str, Value]
) -> None:
    trainer, _ = train(tiny, tmp_path, precision="fp32", **values)
    assert losses(trainer) == pytest.approx(plain, rel=1e-5)
    expected = IMPLEMENTATIONS[str(values.get("attention", "sdpa"))]
    assert trainer.model.config._attn_implementation == expected


def test_sequences_that_share_rows_are_trained_on_as_if_padded(tiny: str, tmp_path: Path) -> None:
    def loss(items: list[Any], global_batch: int, **values: Value) -> float:
        """Of one step on all items."""
        config = make_config(micro_batch=2, precision="fp32", **values)
        recommendation = make_recommendation(config, seq_len=SEQ_LEN, global_batch=global_batch, lengths=(4, 12))
        recommendation = replace(recommendation, hardware=replace(recommendation.hardware, kind="cpu"))
        names = imported(export(recommendation, format="transformers", source=tiny).text)
        shorten(names["training_args"], tmp_path, steps=1, learning_rate=1e-4)
        trainer = names["make_trainer"](items)
        trainer.train()
        return losses(trainer)[0]

    rows = [[tokens[:12], tokens[12:]] for tokens in torch.arange(4 * SEQ_LEN).reshape(4, SEQ_LEN)]
    each = [{"input_ids": s, "labels": s.clone().index_fill(0, torch.tensor(0), -100)} for row in rows for s in row]
    padded = loss(each, len(each))
    assert loss(rows, len(rows), batching="padding-free") == pytest.approx(padded, rel=1e-5)
    assert loss(rows, len(rows), batching="padding-free", loss="chunked") == pytest.approx(padded, rel=1e-5)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_chunked_loss_under_adapters_and_autocast(tiny: str, tmp_path: Path, method: str) -> None:
    whole, _ = train(tiny, tmp_path, method=method, loss="full", seq_len=200)
    chunked, _ = train(tiny, tmp_path, method=method, loss="chunked", seq_len=200)
    assert losses(chunked) == pytest.approx(losses(whole), rel=1e-3)


SMALL = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=5.0),
        GraniteConfig(**SMALL, logits_scaling=4.0),
        CohereConfig(**SMALL, logit_scale=0.25),
    ],
    ids=lambda config: config.model_type,
)
def test_chunked_loss_is_the_models_own(config: Any) -> None:
    """Same loss and gradients as the architecture's own forward, over three chunks, some targets masked."""
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(config)
    chunked = copy.deepcopy(own)
    made = export(make_recommendation(make_config(loss="chunked", precision="fp32")), format="transformers", source="x")
    names = imported(made.text)
    names["chunk_the_loss"](chunked)
    tokens = torch.randint(0, 320, (3, 200))
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.2, -100)
    for items in (None, torch.tensor(77)):
        expected = own(input_ids=tokens, labels=labels, num_items_in_batch=items).loss
        got = chunked(input_ids=tokens, labels=labels, num_items_in_batch=items).loss
        assert got.item() == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        got.backward()
    for (name, a), b in zip(own.named_parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert chunked(input_ids=tokens[:, :4]).logits.shape == (3, 4, 320)


@pytest.mark.parametrize(
    ("value", "name", "fused"),
    [
        ("sgd", "SGD", None),
        ("adafactor", "Adafactor", None),
        ("adamw", "AdamW", True),
        ("adamw-foreach", "AdamW", None),
        ("lion", "Lion", None),
        ("lion-8bit", "Lion", None),
        ("adamw-8bit", "AdamW", None),
    ],
)
def test_optimizer_that_trainer_makes(tiny: str, tmp_path: Path, value: str, name: str, fused: bool | None) -> None:
    trainer, _ = train(tiny, tmp_path, optimizer=value, method="lora")
    made = trainer.optimizer.optimizer
    assert type(made).__name__ == name
    if type(made).__module__.startswith("torch"):
        assert made.defaults.get("fused") is fused
    else:
        bits = {"lion": 32, "lion-8bit": 8, "adamw-8bit": 8}
        assert value == "adafactor" or made.args.optim_bits == bits[value]
