"""One optimizer step: forward and backward over the micro-batches, then the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from autofit.catalog.model_shape import drops_out
from autofit.techniques.losses.chunked_cross_entropy import chunked_cross_entropy
from autofit.techniques.losses.cross_entropy import full_cross_entropy
from autofit.techniques.technique import BuildPlan
from autofit.training.engines import Engine
from autofit.training.engines.local import LocalEngine
from autofit.training.loss_module import LossModule

PhaseObserver = Callable[[str], AbstractContextManager[None]]
"""Called with the name of a phase (`forward`, `backward`, `optimizer`), which runs inside the context it returns."""
Mark = Callable[[], None]
"""Called at the boundaries of what can be timed: at the start, after each micro-batch, and after the update."""


def unobserved(phase: str) -> AbstractContextManager[None]:
    return nullcontext()


class TrainingStep:
    """A training step built from a config.

    The loss is normalised by the number of targets in the whole optimizer step over all ranks, so that neither
    accumulation nor uneven padding changes the gradient.
    """

    def __init__(self, module: LossModule, engine: Engine, plan: BuildPlan) -> None:
        self.module = module
        self.engine = engine
        self.device = plan.device
        self.micro_batch = plan.config.number("micro_batch")
        self.vocabulary = int(module.config.vocab_size)
        self.dropout = drops_out(module.config)
        """Whether the architecture itself drops activations at random in training."""
        self._autocast = plan.autocast
        self.gradient_norm = torch.zeros(())
        """L2 norm of the last update's gradients before clipping, fp32 scalar."""

    def run(self, tokens: torch.Tensor, observe: PhaseObserver = unobserved, mark: Mark = lambda: None) -> torch.Tensor:
        """Take one optimizer step on `tokens` [sequences, seq_len]; returns the mean loss before it, in nats per token.

        With several ranks, each has its own sequences and returns its share: the mean is the sum over ranks. The number
        of sequences must be a multiple of the micro-batch. Nothing here waits for the device, but transformers does:
        each forward pass first asks whether sequences are packed (find_packed_sequence_indices in masking_utils.py), as
        it does in a user's training.
        """
        micro_batches = list(self.split(tokens))
        targets = self.module.rows.targets(tokens) * self.engine.ranks
        total = torch.zeros((), device=self.device)
        mark()
        for index, (inputs, labels) in enumerate(micro_batches):
            total += self.micro_step(inputs, labels, targets, last=index == len(micro_batches) - 1, observe=observe)
            mark()
        self.update(observe)
        mark()
        return total

    def micro_step(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        targets: int,
        *,
        last: bool,
        observe: PhaseObserver = unobserved,
    ) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns its share of the step's mean loss, detached.

        `targets` is the number of targets in the whole optimizer step.
        """
        self.engine.prepare(last=last)
        with observe("forward"), self.precision():
            loss: torch.Tensor = self.engine.root(inputs, labels) / targets
        with observe("backward"):
            self.engine.backward(loss)
        return loss.detach()

    def update(self, observe: PhaseObserver = unobserved) -> None:
        """The optimizer's update only."""
        with observe("optimizer"):
            self.gradient_norm = self.engine.update()

    def split(self, tokens: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The micro-batches of `tokens` [sequences, seq_len], each with its shifted labels."""
        for part in torch.split(tokens, self.micro_batch):
            yield part, self.module.rows.labels(part)

    @torch.no_grad()
    def evaluate(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss in nats per token of `tokens` [sequences, seq_len], all of them at once, as trainers evaluate
        between training steps: by the loss kernel of evaluation, without gradients, checkpoints and dropout.

        Runs through the engine, which gathers sharded parameters: all ranks must call this.
        """
        with self._evaluating(), self.precision():
            loss: torch.Tensor = self.engine.root(tokens, self.module.rows.labels(tokens))
        return loss / self.module.rows.targets(tokens)

    @torch.no_grad()
    def reference_loss(self, tokens: torch.Tensor) -> float:
        """Mean loss in nats per token of the plain forward: no compilation, no checkpointing, no custom kernel, and
        each sequence in a row of its own.

        Logits are computed a few rows at a time, so that the reference never needs more memory than training does.
        Runs through the engine, which gathers sharded parameters: all ranks must call this.
        """
        total = 0.0
        with self._evaluating():
            for row in torch.split(tokens, 1):
                for inputs, labels in self.module.rows.alone(row):
                    with self.precision():
                        total += float(self.engine.root(inputs, labels, chunked_cross_entropy))
        for module in self.engine.root.modules():
            reshard: Callable[[], None] | None = getattr(module, "reshard", None)
            if reshard is not None:  # FSDP waits for a backward
                reshard()
        return total / self.module.rows.targets(tokens)

    def plain_gradient_norm(self, row: torch.Tensor) -> float:
        """L2 norm of the gradient of the mean loss on `row` [1, seq_len], as plain training of the method and precision
        gives it: no compilation, no checkpointing, no custom kernel. Updates nothing.

        Only for an engine that does not share the work (`LocalEngine`). Raises what torch raises: unlike
        `reference_loss`, this may need more memory than training does.
        """
        assert isinstance(self.engine, LocalEngine)
        try:
            with self._evaluating():
                with self.precision():
                    losses = [
                        self.engine.root(*sequence, full_cross_entropy) for sequence in self.module.rows.alone(row)
                    ]
                self.engine.backward(torch.stack(losses).sum() / self.module.rows.targets(row))
        finally:
            norm = self.engine.discard()
        return float(norm)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, the module is in evaluation mode: checkpointing and dropout act in training mode only."""
        training = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(training)

    def precision(self) -> AbstractContextManager[None]:
        """The autocast context of the forward pass, if the config's precision needs one."""
        if self._autocast is None:
            return nullcontext()
        context: AbstractContextManager[None] = torch.autocast(self.device.type, self._autocast)
        return context
