"""The optimizer and the format of its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autofit.core.distribution import install
from autofit.core.lattice import Axis, Config, Value, closure
from autofit.core.workload import Effect
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Part, Technique

if TYPE_CHECKING:
    import torch
    from torch import nn

    Make = Callable[[nn.Module, list[nn.Parameter]], torch.optim.Optimizer]
    """(module, those of its parameters to update) -> optimizer of these."""

LEARNING_RATE = 3e-5
"""Small enough that thirty steps on one batch stay finite with every optimizer, large enough that five of them lower
its loss by more than 16-bit rounding, which every trial checks. It affects neither memory nor time."""


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _torch(name: str, **options: bool) -> Make:
    def make(module: nn.Module, parameters: list[nn.Parameter]) -> Any:
        import torch

        return getattr(torch.optim, name)(parameters, lr=LEARNING_RATE, **options)

    return make


def _adafactor(module: nn.Module, parameters: list[nn.Parameter]) -> Any:
    from transformers.optimization import Adafactor

    # The values that transformers' Trainer sets for optim="adafactor".
    return Adafactor(parameters, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)


def _bitsandbytes(name: str) -> Make:
    def make(module: nn.Module, parameters: list[nn.Parameter]) -> Any:
        import bitsandbytes as bnb

        optimizer = getattr(bnb.optim, name)(parameters, lr=LEARNING_RATE)
        set_overrides(optimizer, module)
        return optimizer

    return make


def set_overrides(optimizer: Any, module: nn.Module) -> None:
    """Have bitsandbytes keep the states of the embeddings of `module` in 32 bits, for stability, as transformers'
    Trainer does. With ZeRO, there as here, they are not: the optimizer sees flat partitions, among which bitsandbytes
    finds no embedding."""
    from bitsandbytes.optim import GlobalOptimManager
    from torch import nn

    # A manager of its own: the library's global one would keep this model alive and apply its overrides, which it keys
    # by position, to the next model, or the next parameter.
    optimizer.mng = GlobalOptimManager.__new__(GlobalOptimManager)
    optimizer.mng.initialize()
    if optimizer.args.optim_bits == 8:
        for child in module.modules():
            if isinstance(child, nn.Embedding):
                optimizer.mng.register_module_override(child, "weight", {"optim_bits": 32})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The facts about one optimizer; they stand nowhere else."""

    make: Make
    does: str
    """In a few words."""
    trainer: str | None
    """`optim` of transformers' Trainer, in the spelling that every transformers since 4.50 accepts; None if that has no
    name for it alone."""
    state_bytes: float | None
    """Bytes of state per trained parameter, at least; None for two states in the parameters' own format. Factored and
    paged states and figures per block are left out."""
    effect: Effect = Effect.EXACT
    weight_decay: float = 0.0
    deepspeed: tuple[str, Mapping[str, object]] | None = None
    """`optimizer.type` and its arguments in DeepSpeed's file; None if that has no name for it."""
    updates_shards: bool = False
    """Whether torch can run its update on FSDP's sharded tensors."""
    does_to_matrices: str | None = None
    """What it does to whole matrices, in one word; None if it updates each parameter by itself, and so a flat shard,
    too."""
    above: str | None = None
    """An optimizer that is sure to need no more memory. The claim is transitive. None where no such claim is always
    true."""
    lowers_losses: bool = True
    """Whether five updates at `LEARNING_RATE` are sure to lower the loss of one batch."""
    package: str | None = None
    """The package that it needs, as `Stack` names it; None where all trials have it."""
    has_temporaries: bool = False
    """Whether an update on an accelerator takes memory by the size of what it updates."""
    in_8_bits: bool = False
    """Whether its states are in 8 bits."""
    paged: bool = False
    """Whether its states leave a full device for the host."""

    @property
    def by_element(self) -> bool:
        """Whether what it takes and does is proportional to the size of each parameter: nothing is in blocks, or of
        whole matrices."""
        return not self.in_8_bits and self.does_to_matrices is None


OPTIMIZERS = {
    "sgd": Kind(
        make=_torch("SGD", fused=True),
        does="no states",
        trainer="sgd",
        state_bytes=0.0,
        effect=Effect.TRAINING,
        deepspeed=("SGD", {"fused": True}),
        lowers_losses=False,  # a plain gradient step this small is lost in 16-bit weights
    ),
    "adafactor": Kind(
        make=_adafactor,
        does="factorised states; not with ZeRO or FSDP",
        trainer="adafactor",
        state_bytes=0.0,
        does_to_matrices="factorises",
        has_temporaries=True,
        above="sgd",
        effect=Effect.TRAINING,
    ),
    "lion-8bit": Kind(
        make=_bitsandbytes("Lion8bit"),
        does="one state in 8 bits; needs bitsandbytes, not with FSDP",
        trainer="lion_8bit",
        state_bytes=1.0,
        above="sgd",
        effect=Effect.TRAINING,
        package="bitsandbytes",
        in_8_bits=True,
    ),
    "adamw-8bit": Kind(
        make=_bitsandbytes("AdamW8bit"),
        does="two states in 8 bits; needs bitsandbytes, not with FSDP",
        trainer="adamw_bnb_8bit",
        state_bytes=2.0,
        above="lion-8bit",
        effect=Effect.NUMERICS,
        package="bitsandbytes",
        in_8_bits=True,
        weight_decay=0.01,
    ),
    "paged-adamw-8bit": Kind(
        make=_bitsandbytes("PagedAdamW8bit"),
        does="the same, moved to host memory under pressure; NVIDIA and AMD GPUs only",
        trainer="paged_adamw_8bit",
        state_bytes=0.0,
        effect=Effect.NUMERICS,
        package="bitsandbytes",
        in_8_bits=True,
        paged=True,
        weight_decay=0.01,
    ),
    "lion": Kind(
        make=_bitsandbytes("Lion"),
        does="one state in fp32; needs bitsandbytes, not with FSDP",
        trainer="lion_32bit",
        state_bytes=4.0,
        above="sgd",
        effect=Effect.TRAINING,
        package="bitsandbytes",
    ),
    "adamw": Kind(
        make=_torch("AdamW", fused=True),
        does="two states, updated by torch's fused kernel",
        trainer="adamw_torch_fused",
        state_bytes=None,
        deepspeed=("AdamW", {"torch_adam": True, "fused": True}),
        above="lion",
        weight_decay=0.01,
        updates_shards=True,
    ),
    "adamw-foreach": Kind(
        make=_torch("AdamW", foreach=True),
        does="the same, with temporaries as large as the weights; in no built-in space",
        trainer="adamw_torch",
        state_bytes=None,
        deepspeed=("AdamW", {"torch_adam": True, "foreach": True}),
        above="adamw",
        has_temporaries=True,
        weight_decay=0.01,
        updates_shards=True,
    ),
}
"""The axis's optimizers, in its order."""


def kind_of(config: Config) -> Kind:
    """The kind of the config's optimizer."""
    return OPTIMIZERS[config.text("optimizer")]


def weight_decay(optimizer: Value) -> float:
    """The trials' weight decay, which exports state: the default of torch, bitsandbytes and transformers for each.
    DeepSpeed and transformers' Trainer have 0 for AdamW, too; Trainer's own optimizers leave norms and biases out of
    it, which trials do not."""
    return OPTIMIZERS[str(optimizer)].weight_decay


class Optimizer(Technique):
    """Fused implementations where available; 8-bit states and Lion from bitsandbytes; Adafactor from transformers."""

    axis = Axis(
        name="optimizer",
        values=tuple(OPTIMIZERS),
        effects={name: kind.effect for name, kind in OPTIMIZERS.items()},
        recipe="adamw",
        # Bytes of state per parameter: sgd 0, lion-8bit 1, adamw-8bit 2, lion 4, adamw 8 (4 in pure bf16). No claim
        # where that is not the whole story: with 8-bit optimizers the embeddings' states stay in fp32 and updates
        # dequantise the states, Adafactor has temporaries, and paged states leave the device only as far as needed.
        lighter=closure((kind.above, name) for name, kind in OPTIMIZERS.items() if kind.above is not None),
        does="The optimizer, and the number format of its states.",
        meanings={name: kind.does for name, kind in OPTIMIZERS.items()},
    )
    parts = frozenset({Part.UPDATE})

    def affects(self, part: Part, config: Config) -> bool:
        """The decoder too, where its backward pass updates (`updates_in_backward`, whose file imports this one)."""
        return part in self.parts or (part is Part.DECODER and config.get("update") == "in-backward")

    def unsupported(self, config: Config, job: Job) -> str | None:
        value, kind = config.text("optimizer"), kind_of(config)
        if kind.paged and job.hardware.kind != "cuda":
            return f"{value} pages states between a CUDA device and its host; here it would page nothing"
        if kind.package is not None and getattr(job.stack, kind.package) is None:
            return f"{value} needs {kind.package}, which is not installed here ({install()})"
        return None

    def plan(self, plan: BuildPlan) -> None:
        make = kind_of(plan.config).make
        plan.optimizer = lambda module: make(module, trainable(module))
