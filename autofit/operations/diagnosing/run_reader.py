"""What a trainer's keys ask for, with what the user says beside the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from autofit.catalog.models import Model, load, quantisation, shape
from autofit.core.errors import AutofitError, UsageError
from autofit.operations.diagnosing.diagnosis import DiagnosisRequest
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.helpful_changes import changed
from autofit.techniques.axes.kernels import MODEL_TYPES, by_liger
from autofit.techniques.axes.mlp import tile_count, why_whole
from autofit.techniques.habits import TRAINERS
from autofit.trainers.axolotl import TILE_TOKENS
from autofit.trainers.run import NotCounted, Run, Where
from autofit.trainers.trainer import TrainerFiles

EVALUATING = {"eval_strategy": "steps", "val_set_size": 0.1}
"""Keys with which a file of any trainer evaluates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReader:
    """Reads runs from the keys of one trainer's files."""

    trainer: TrainerFiles
    request: DiagnosisRequest
    where: Where
    notes: tuple[str, ...] = ()
    """What the error's text shows of the card and of the trainer, one sentence each."""
    _models: dict[str, Model | None] = field(init=False, default_factory=dict, compare=False)
    """What was loaded, by what names it."""

    def read(self, values: Mapping[str, Any]) -> Run:
        """The run that keys ask for of the model, with what the user says beside them."""
        run = self.trainer.read(values, self.where)
        model = self._model(run)
        if model is not None and run.config["method"] == "lora" and (in_four_bits := self._in_four_bits(model)):
            run = self.trainer.read({**values, **in_four_bits}, self.where)
            run = replace(run, notes=(*run.notes, "the checkpoint is in 4 bits: adapters on it are QLoRA"))
        failure = self.request.failure
        if run.evaluates is None and failure is not None and failure.phase == "evaluation":
            evaluates = self.trainer.read({**values, **EVALUATING}, self.where).evaluates
            note = "the error came in evaluation, which the file does not ask for: it is counted all the same"
            run = replace(run, evaluates=evaluates, notes=(*run.notes, note))
        if run.config["attention"] == "sdpa" and model is not None and not shape(model).sdpa and not _says_sdpa(values):
            instead = "is eager, as the model has no sdpa, unless"
            assumed = tuple(sentence.replace("is sdpa unless", instead) for sentence in run.assumed)
            run = replace(run, config=run.config.replace(attention="eager"), assumed=assumed)
        is_fused = run.config.get("loss") == "fused"
        if is_fused and model is not None and TRAINERS[self.trainer.name].leaves_liger_out(model):
            run = self._without_liger(run, model, next((key for key in LIGER_LOSS if values.get(key)), None))
        if by_liger(run.config) and not self._has_known_kernels(run, model):
            because = "Liger's kernels in layers of this architecture"
            key = next(key for key in values if "liger" in key)
            not_counted = NotCounted(key=key, effect="less", because=because)
            run = replace(run, config=run.config.without("kernels"), not_counted=(*run.not_counted, not_counted))
        if run.config.get("mlp") == "tiled" and model is not None:
            run = self._with_known_tiles(run, model, values.get("tiled_mlp_num_shards"))
        if not self.request.also:
            return run
        if run.narrower is not None and self.request.also.get("precision") == "bf16":
            # Said of frozen weights that the file alone would load in fp32.
            narrow = tuple((which, size) for which, size in run.beyond if which not in ("all", "outside"))
            run = replace(run, beyond=narrow, narrower=None)
        return replace(run, config=changed(run.config, self.request.also))

    def _source(self, run: Run) -> str | None:
        return run.model if self.request.model is None else self.request.model

    def _model(self, run: Run) -> Model | None:
        """The run's model; None for one that is not named or not found, which is said later."""
        source = self._source(run)
        if source is not None and source not in self._models:
            self._models[source] = None
            with suppress(AutofitError):
                self._models[source] = load(source)
        return None if source is None else self._models[source]

    def _in_four_bits(self, model: Model) -> Mapping[str, Any]:
        """The keys with which the trainer would quantise as the checkpoint is; none without 4 bits or such keys."""
        stored = quantisation(model)
        if not stored.get("load_in_4bit"):
            return {}
        double = bool(stored.get("bnb_4bit_use_double_quant"))
        keys: dict[str, dict[str, Any]] = {
            "axolotl": {"load_in_4bit": True},
            "llamafactory": {"quantization_bit": 4, "double_quantization": double},
            "trl": {"load_in_4bit": True, "use_bnb_nested_quant": double},
        }
        return keys.get(self.trainer.name, {})

    @staticmethod
    def _has_known_kernels(run: Run, model: Model | None) -> bool:
        """Whether it is known what Liger's kernels take in this run. Trials have no such selective checkpointing."""
        if run.config["checkpointing"] == "selective" and run.config["method"] == "full":
            return False
        return model is None or model.config["model_type"] in MODEL_TYPES

    def _without_liger(self, run: Run, model: Model, key: str | None) -> Run:
        """With all logits where `key` asks for Liger's loss; another fused loss has at most some of them at a time."""
        if key is None:
            return replace(run, config=run.config.replace(loss="chunked").without("kernels"))
        note = f"{key} does nothing here: {self.trainer.name} leaves Liger out for {model.name}"
        return replace(run, config=run.config.replace(loss="full").without("kernels"), notes=(*run.notes, note))

    def _with_known_tiles(self, run: Run, model: Model, tiles: object) -> Run:
        """The run with MLPs as a whole where trials cannot tile them; what it says of other tiles than theirs."""
        seq_len = self._seq_len(run)
        if seq_len is None:
            return run
        config, counted = run.config, tile_count(seq_len, shape(model).hidden_size)
        has = tiles if isinstance(tiles, int) else math.ceil(seq_len / TILE_TOKENS)
        others = []
        if has == 1 or why_whole(config, model, seq_len=seq_len, lora_dropout=run.lora_dropout):
            config = config.without("mlp")
            others += [("less", "tiles of MLPs that trials do not have")] if has > 1 else []
        elif has != counted:
            others.append(("more" if has < counted else "less", f"{counted} tiles are counted, and it has {has}"))
        if has > 1 and config["method"] == "full":
            others.append(("more", "axolotl's tiles keep a further copy of an MLP's gradients"))
        not_counted = [NotCounted(key="tiled_mlp", effect=effect, because=because) for effect, because in others]
        return replace(run, config=config, not_counted=(*run.not_counted, *not_counted))

    def _seq_len(self, run: Run) -> int | None:
        """Tokens of the longest sequence; None where neither the file nor the user says."""
        return run.seq_len if self.request.seq_len is None else self.request.seq_len

    def options(self, run: Run) -> WorkloadOptions:
        """The workload of a run. Raises `UsageError` for a model that is not found."""
        source, seq_len = self._source(run), self._seq_len(run)
        assert source is not None and seq_len is not None  # `diagnose` has asked for what is missing
        try:
            load(source)
        except UsageError as error:
            raise UsageError(f"{error}; say what it is built like: --model NAME (`autofit models`)") from error
        # Without habits where they are not known, or where the trainer would train something else than the nearest
        # config: the answer's uncounted keys then say so.
        trainer = TRAINERS.get(run.trainer)
        has_habits = trainer is not None and trainer.unsupported(run.config) is None
        return WorkloadOptions(
            trainer=run.trainer if has_habits else None,
            model=source,
            seq_len=seq_len,
            global_batch=run.global_batch,
            lora_dropout=run.lora_dropout,
            devices=run.devices,
            eval_batch=None if run.evaluates is None else run.evaluates.sequences,
        )


LIGER_LOSS = ("use_liger_kernel", "enable_liger_kernel", "liger_fused_linear_cross_entropy")
"""The keys that ask for Liger's fused loss: transformers' and trl's, LLaMA-Factory's, axolotl's."""


def _says_sdpa(values: Mapping[str, Any]) -> bool:
    """Whether a file asks for sdpa. Where it leaves that open, transformers takes eager for a model without it."""
    return "sdpa" in (values.get("attn_implementation"), values.get("flash_attn")) or bool(values.get("sdp_attention"))
