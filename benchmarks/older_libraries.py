"""What the published runs did that our own step does not, so that the estimator can be compared with their memory.

Read in the versions that the runs' authors pinned (scripts/benchmarks/refs/requirements.txt of
foundation-model-stack/fms-acceleration: torch 2.4.1, transformers 4.48.1, trl 0.13.0, peft 0.13.2, accelerate 1.0.1,
fms-hf-tuning 2.5.0); each difference names its place in those sources. Prediction errors guided where to read, but no
number here was fitted to a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from autofit.estimate.tracing import trace
from autofit.techniques import TECHNIQUES, adapters
from autofit.techniques.adapters import unwrap
from autofit.techniques.technique import IGNORE_INDEX, BuildPlan, Head, Technique
from autofit.training import build

if TYPE_CHECKING:
    from autofit.techniques.technique import LossKernel

OldLoss = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
"""(logits [sequences, seq_len, vocabulary], shifted labels [sequences, seq_len], under autocast) -> scalar."""


class OlderLibraries(Technique):
    """Changes a build into what the older libraries made of the same settings."""

    def __init__(self, *, wide_norms: bool) -> None:
        """`wide_norms`: whether trl prepared the quantised model, which leaves norms in fp32."""
        self._wide_norms = wide_norms
        self._kernel: LossKernel | None = None

    def plan(self, plan: BuildPlan) -> None:
        if plan.config["method"] != "full":
            # peft: get_peft_model(autocast_adapter_dtype=True) makes adapters fp32 whatever the base's dtype.
            plan.trained_dtype = torch.float32
        if self._kernel is None:
            is_gpt_bigcode = plan.job.model.config["model_type"] == "gpt_bigcode"
            of_model = _gpt_bigcode_loss if is_gpt_bigcode else _causal_lm_loss
            self._kernel = _kernel(of_model, plan.job.workload.seq_len)
        plan.loss = self._kernel

    def on_skeleton(self, plan: BuildPlan, model: Any) -> Any:
        if self._wide_norms:
            # trl/trainer/utils.py, peft_module_casting_to_bf16: after peft's prepare_model_for_kbit_training has made
            # everything fp32, the head and the embeddings go back to bf16, the norms do not.
            for name, module in model.named_modules():
                if isinstance(module, nn.LayerNorm) or "norm" in name:
                    module.to(torch.float32)
        return model

    def on_model(self, plan: BuildPlan, model: Any) -> None:
        causal_lm = unwrap(model)
        if causal_lm.config.model_type == "gpt_bigcode":
            _keep_cache(causal_lm.transformer)


@contextmanager
def older_libraries(*, wide_norms: bool) -> Iterator[None]:
    """Inside, every build and trace is as the older libraries made it; `wide_norms` as in `OlderLibraries`."""
    projections = adapters.attention_projections
    _take((*TECHNIQUES, OlderLibraries(wide_norms=wide_norms)))
    # scenarios.yaml of the source: q_proj, k_proj, v_proj, o_proj and c_attn. GPTBigCode calls o_proj c_proj.
    adapters.attention_projections = lambda model: [name for name in projections(model) if name != "c_proj"]
    try:
        yield
    finally:
        _take(TECHNIQUES)
        adapters.attention_projections = projections


def _take(techniques: tuple[Technique, ...]) -> None:
    for user in (build, trace):
        vars(user)["TECHNIQUES"] = techniques


def _kernel(loss: OldLoss, seq_len: int) -> LossKernel:
    """The old loss behind our kernels' signature; its frames hold what the old models' frames held."""

    def kernel(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden, head.weight, head.bias).view(-1, seq_len, head.weight.shape[0])
        mixed = torch.is_autocast_enabled("cpu")
        # CUDA's autocast is spelt out below: the CPU's has different lists of operations.
        with torch.autocast("cpu", enabled=False):
            result = loss(logits, labels.view(-1, seq_len), mixed)
            if mixed:
                # accelerate/utils/operations.py, ConvertOutputsToFp32: a copy beside the logits.
                logits.float()
        return result

    return kernel


def _causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor, mixed: bool) -> torch.Tensor:
    """transformers/loss/loss_utils.py, ForCausalLMLoss: the logits, their fp32 copy and its shifted copy at once."""
    wide = logits.float()
    shifted = wide[..., :-1, :].contiguous()
    targets = labels[..., :-1].contiguous()
    return functional.cross_entropy(
        shifted.view(-1, shifted.shape[-1]), targets.view(-1), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def _gpt_bigcode_loss(logits: torch.Tensor, labels: torch.Tensor, mixed: bool) -> torch.Tensor:
    """GPTBigCodeForCausalLM.forward: a shifted copy in the logits' own format.

    Of cross_entropy's two parts, CUDA's autocast (aten/src/ATen/autocast_mode.h) leaves log_softmax in the format that
    cross_entropy asks for, and widens the input of nll_loss.
    """
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., :-1].contiguous()
    likelihoods = functional.log_softmax(shifted.view(-1, shifted.shape[-1]), dim=-1)
    if mixed:
        likelihoods = likelihoods.float()
    return functional.nll_loss(likelihoods, targets.view(-1), ignore_index=IGNORE_INDEX, reduction="sum")


def _keep_cache(decoder: Any) -> None:
    """GPTBigCodeModel.forward collects keys and values (`presents`) even under checkpointing; the output holds them.

    They are views of c_attn's output and keep all of it alive.
    """
    kept: list[torch.Tensor] = []
    collecting = [False]

    def start(module: nn.Module, inputs: Any) -> None:
        collecting[0] = True

    def collect(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if collecting[0]:  # not during a checkpoint's recomputation
            kept.append(output)

    def hand_over(module: nn.Module, inputs: Any, output: Any) -> Any:
        output.past_key_values = tuple(kept)
        kept.clear()
        collecting[0] = False
        return output

    decoder.register_forward_pre_hook(start)
    for block in decoder.h:
        block.attn.c_attn.register_forward_hook(collect)
    decoder.register_forward_hook(hand_over)
