"""Which of a model's modules the real Liger replaces, against what stands for it in an estimate."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from autofit.techniques.axes.kernels import MODEL_TYPES
from tests.emulated_card.cards import Machine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.emulated_card.conftest import Start

COMPARED = """
    import json
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from autofit.estimate.kernels import liger_layers as stands_in
    from autofit.techniques.liger_layers import LigerLayers

    small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, vocab_size=128, pad_token_id=0)
    found = {}
    for model_type in json.loads(os.environ["MODEL_TYPES"]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small))

        def replaced():
            return sorted(name for name, module in model.named_modules() if "forward" in vars(module))

        with stands_in.replaced(model):
            stood_in = replaced()
        layers = LigerLayers(model)
        with torch.no_grad(), layers.plainly():
            plain = len(replaced())
            model(torch.ones(1, 4, dtype=torch.long))
        norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
        found[model_type] = [stood_in, replaced(), plain, [norm.in_place for norm in norms], stands_in.in_place(model)]
    print(json.dumps(found))
"""


def test_what_stands_for_liger_replaces_what_liger_replaces(home: Path, start: Start) -> None:
    with Machine(home, "a10g") as machine:
        found = start(machine, COMPARED, MODEL_TYPES=json.dumps(sorted(MODEL_TYPES))).answer()
    assert found.keys() == MODEL_TYPES
    for model_type, (stood_in, replaced, plain, in_place, stands_in_place) in found.items():
        assert stood_in == replaced and len(replaced) > 2, model_type
        assert plain == 0
        assert set(in_place) == {stands_in_place}, model_type
