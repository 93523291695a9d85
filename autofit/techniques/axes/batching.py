"""How sequences of different lengths are put together into micro-batches."""

from __future__ import annotations

from autofit.core.lattice import Axis, Config
from autofit.core.lengths import Batches, grouped, packed, padded
from autofit.core.workload import Effect, Workload
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Part, Technique

MEGA_BATCHES = 50
"""Optimizer steps among whose sequences transformers' Trainer sorts by length, where a quarter of the data has as many
(`get_length_grouped_indices` of trainer_pt_utils.py)."""
KEPT_APART = frozenset(
    {"gemma2", "gemma3_text", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"}
)
"""Architectures of which a test shows that a sequence is computed alike in a row of its own and after others, where
positions restart (`find_packed_sequence_indices` of transformers' masking_utils.py). Others ignore that, such as those
with a state that runs through the row."""


def micro_batches(config: Config, workload: Workload) -> Batches | None:
    """How long the config's micro-batches are; None where every sequence is full. Ranks wait for the longest of all of
    theirs."""
    lengths = workload.lengths
    if lengths is None:
        return None
    if packs(config):
        return packed(lengths, workload.seq_len)
    size = config.number("micro_batch")
    if config.get("batching") == "grouped":
        # Each process sorts for itself, and all take their micro-batches from the result in turn.
        sorted_at_once = max(1, MEGA_BATCHES * workload.batch_per_device // size // workload.devices)
        return grouped(lengths, size * workload.devices, sorted_at_once)
    return padded(lengths, size * workload.devices)


def rows_per_sequence(config: Config, workload: Workload) -> float:
    """Rows per sequence of a step: 1, or less where sequences share rows."""
    batches = micro_batches(config, workload)
    return 1.0 if batches is None else batches.rows


def packs(config: Config) -> bool:
    """Whether sequences share rows, which are all of one length and have next to no padding."""
    return config.get("batching") in ("packed", "padding-free")


def separates_sequences(config: Config) -> bool:
    """Whether sequences that share a row do not attend to each other."""
    return config.get("batching") == "padding-free"


class Batching(Technique):
    """A row of `packed` is one sequence to the model. In one of `padding-free` each sequence is computed as it is when
    padded: positions restart, none attends to another, and what is first in one is no target of another's."""

    axis = Axis(
        name="batching",
        # No claim between any: apart, sequences take a mask with sdpa and eager, and none with flash.
        values=("packed", "grouped", "padding-free", "padded"),
        effects={"packed": Effect.TRAINING, "grouped": Effect.TRAINING, "padding-free": Effect.TRAINING},
        recipe="padded",
        leaves_out_recipe=True,
        does="How sequences of different lengths make a micro-batch.",
        meanings={
            "packed": "whole ones, one after the other, in rows as long as the longest; the batch counts rows",
            "grouped": "those of similar length together, padded to the longest",
            "padding-free": "rows as of packed, in which no sequence attends to another; most architectures",
            "padded": "drawn at random, padded to the longest",
        },
        where="with --lengths",
    )
    parts = frozenset({Part.DECODER, Part.EVALUATION})

    def affects(self, part: Part, config: Config) -> bool:
        """Only where the sequences of a row are kept apart: else every row is computed alike."""
        return part in self.parts and separates_sequences(config)

    def unsupported(self, config: Config, job: Job) -> str | None:
        if "batching" in config and job.workload.lengths is None:
            return f"batching={config['batching']} needs --lengths: without them every sequence is full, as if packed"
        if not separates_sequences(config):
            return None
        config_json = job.model.config
        bidirectional = config_json.get("is_causal") is False or config_json.get("use_bidirectional_attention")
        if config_json["model_type"] not in KEPT_APART or bidirectional:
            return (
                f"batching=padding-free is not known to keep sequences apart in {job.model.name}: use padded or packed"
            )
        if config["attention"] == "flash" and config["compile"] is True:
            return "batching=padding-free with attention=flash was never tried compiled: use compile=false or sdpa"
        return None

    def plan(self, plan: BuildPlan) -> None:
        batches = micro_batches(plan.config, plan.job.workload)
        if batches is not None and separates_sequences(plan.config):
            plan.sequences = batches.row if plan.config["attention"] == "flash" else batches.shared_row
