"""The base of every technique: one axis, when its values are valid, and how they alter a training step's build."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from autofit.core.lattice import Axis, Config, Value
from autofit.core.workload import Effect, Goal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autofit.techniques.job import Job

    LossKernel = Callable[[torch.Tensor, "Head", torch.Tensor], torch.Tensor]
    """(hidden [tokens, hidden_size], head, labels [tokens]) -> sum of the cross-entropy in nats, fp32 scalar."""
    OptimizerFactory = Callable[[nn.Module], torch.optim.Optimizer]
    """Module -> optimizer of its trainable parameters."""

MAX_GRADIENT_NORM = 1.0
"""Gradients are clipped to this norm, as trainers do by default; clipping is part of a step's time."""
IGNORE_INDEX = -100
"""The label of a position without a target, as in torch.nn.CrossEntropyLoss."""


@dataclass(slots=True, kw_only=True)
class Head:
    """The projection from hidden states to logits, with the transformations that some architectures apply to them."""

    weight: torch.Tensor
    """[vocabulary, hidden_size]."""
    bias: torch.Tensor | None = None
    softcap: float | None = None
    """Gemma 2: logits become softcap * tanh(logits / softcap)."""
    scale: float = 1.0
    """Factor on the logits (Cohere multiplies, Granite divides)."""


@dataclass(slots=True, kw_only=True)
class BuildPlan:
    """What the techniques decide for a config before anything is built; `training.build` carries it out."""

    config: Config
    job: Job
    device: torch.device
    trained_dtype: torch.dtype = field(init=False)
    """Dtype of the parameters that the optimizer updates: the master weights."""
    compute_dtype: torch.dtype = field(init=False)
    """Dtype of matrix products and of frozen parameters."""
    autocast: torch.dtype | None = None
    """The dtype that autocast provides, because the trained weights are wider; None without autocast."""
    loss_scaling: bool = False
    """Whether the loss is scaled to keep fp16 gradients from underflowing."""
    attention: str = field(init=False)
    """transformers' name for the attention implementation."""
    loss: LossKernel = field(init=False)
    evaluated_loss: LossKernel | None = None
    """The loss of evaluation between training steps, where it is another."""
    without_kernels: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context in which the model computes by torch's operations alone."""
    optimizer: OptimizerFactory = field(init=False)
    masks_padding: bool = False
    """Whether the model is told which tokens of several sequences are padding (`habits.masks_padding`)."""
    sequences: tuple[int, ...] = ()
    """Tokens of each sequence in a row where several are kept apart; none where a row is one sequence."""
    deepspeed: dict[str, Any] | None = None
    """DeepSpeed's own configuration, where DeepSpeed trains."""
    parts: tuple[BuildPart, ...] = ()
    """What alters the build, in the order in which it is applied."""
    bucket_views: bool = True
    """Whether gradients are views of DDP's buckets, so that they exist only once."""
    narrowed: bool = False
    """Whether a sharding library gives the forward pass the trained weights in compute_dtype and keeps the wider ones
    itself; elsewhere autocast converts them."""


class BuildPart:
    """Something that alters a build. A subclass overrides only the stages it takes part in, which run in this order.

    1. `plan`: set fields of the plan. 2. `on_skeleton`: alter the model while it is on the meta device.
    3. `on_model`: alter the model once its weights exist.
    """

    def plan(self, plan: BuildPlan) -> None:
        """Set the plan's fields that this part decides."""

    def on_skeleton(self, plan: BuildPlan, model: Any) -> Any:
        """The model (meta device) with this part applied."""
        return model

    def on_model(self, plan: BuildPlan, model: Any) -> None:
        """Alter the model, whose parameters now have values on the device."""


class Part(Enum):
    """A part of a training step that estimates trace by itself, once for all configs that agree on what affects it."""

    DECODER = "decoder"
    """The forward and backward passes without the loss, on one device."""
    RANK = "rank"
    """What a sharding library makes of that on one rank; what is kept of it goes by the library itself."""
    LOSS = "loss"
    UPDATE = "update"
    """The optimizer's update, where it follows the backward pass."""
    EVALUATION = "evaluation"
    """Sequences evaluated between training steps, on one device."""


class Technique(BuildPart):
    """One axis: its values, what they change, when they are valid, and how they alter a build."""

    axis: ClassVar[Axis]
    parts: ClassVar[frozenset[Part]] = frozenset(Part)
    """The parts of a step that differ between the axis's values, but for sizes that a part's key states by itself."""
    scales: ClassVar[bool] = False
    """Whether the sizes of a decoder are proportional to the value, so that one trace serves all."""

    def affects(self, part: Part, config: Config) -> bool:
        """Whether that part of the step of `config` depends on its value."""
        return part in self.parts

    def applies(self, config: Config) -> bool:
        return True

    def plain(self, goal: Goal) -> Value | None:
        """The value in the plain recipe; the user's own if `goal` gives one."""
        return self.axis.recipe

    def effect(self, config: Config, goal: Goal) -> Effect:
        """What the config's value changes relative to the plain recipe of `goal`."""
        value = config[self.axis.name]
        return Effect.EXACT if value == self.plain(goal) else self.axis.effect(value)

    def unsupported(self, config: Config, job: Job) -> str | None:
        """Why this axis's value cannot work in `config` for `job`, in one sentence; None if it can."""
        return None

    def holds(self, lighter: Config, heavier: Config, job: Job) -> bool:
        """Whether the axis's claim about two configs that differ on it holds for `job`."""
        return True
