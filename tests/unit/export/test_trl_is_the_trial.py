"""trl's trainer against a trial with its habits: the same weights and loss, and nearly the same peak memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from export_samples import make_recommendation
from live_bytes import LiveBytes
from transformers.trainer_utils import IntervalStrategy
from unit.export import tiny_sft
from unit.export.test_export_is_the_trial import Run, count, described, give, trained

from autofit.catalog.models import architecture
from autofit.core.lattice import Value
from autofit.export import export
from autofit.techniques.axes.optimizer import LEARNING_RATE

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
forgetful_bitsandbytes = tiny.forgetful_bitsandbytes

WORDS, SEQ_LEN, STEPS = 36_000, 64, 2
"""More words than fit one tile."""

CONFIGS: list[dict[str, Value]] = [
    {"method": "full", "checkpointing": "full"},
    {"method": "lora", "rank": 8, "precision": "bf16"},
    {"method": "qlora", "rank": 8, "checkpointing": "full"},
    {"method": "qlora", "rank": 8, "precision": "bf16"},
]


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("values", CONFIGS, ids=lambda v: ",".join(str(x) for x in v.values()))
def test_trl_trains_as_the_trial(values: dict[str, Value], tmp_path: Path) -> None:
    model = tiny.model("llama", vocab_size=WORDS, num_hidden_layers=4, tie_word_embeddings=False)
    config = tiny.config(**{"micro_batch": 2, "loss": "chunked", **values})
    step = tiny.built(config, model, seq_len=SEQ_LEN, trainer="trl")
    tokens = torch.randint(WORDS, (STEPS, 4, SEQ_LEN), generator=torch.Generator().manual_seed(1))

    recommendation = make_recommendation(config, model=model.name, seq_len=SEQ_LEN, global_batch=4, trainer="trl")
    recommendation = replace(recommendation, hardware=tiny.CPU_HARDWARE)
    source = tiny_sft.save(architecture(model), str(tmp_path / "model"))
    exported = export(recommendation, format="trl", source=source)
    assert not [note for note in exported.notes if note.startswith(("precision", "loss"))]
    file = tmp_path / "sft.yaml"
    file.write_text(exported.text)
    args, choices = tiny_sft.parse(file)
    args.learning_rate, args.lr_scheduler_type = LEARNING_RATE, "constant"
    args.logging_strategy, args.logging_steps = IntervalStrategy("steps"), 1
    args.train_sampling_strategy = "sequential"
    trainer = tiny_sft.trainer(args, choices, tmp_path, tokens.flatten(0, 1).tolist(), steps=STEPS)
    give(step, trainer.model)

    with LiveBytes() as counter:
        count(counter, step.module)
        losses = [float(step.run(part)) for part in tokens]
    ours, theirs = Run(losses=losses, gradient_norms=[], peak_bytes=counter.peak), trained(trainer, tmp_path)
    assert described(dict(step.module.model.named_parameters())) == described(dict(trainer.model.named_parameters()))
    assert theirs.losses == pytest.approx(ours.losses, rel=2e-3)
    assert theirs.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.02)
