"""The tables of memory in the main README: what is predicted for llama-3.1-8b, and what others have measured.

Predictions are those of `autofit estimate`, so no device is needed; an empty store makes them the same everywhere. The
measured rows are those of Mistral-7B on one A100 in recorded/published-estimates.json, each with its prediction.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import autofit
from autofit.core.units import GIB
from autofit.techniques import parse

CARDS = {"rtx-4090": "RTX 4090, 24 GB", "a100-40g": "A100, 40 GB", "h100-80g": "H100, 80 GB"}
SAVING = "checkpointing=full,loss=chunked"
ROWS = (
    ("full, `bf16-mixed`, checkpointing", f"method=full,{SAVING}"),
    ("full, `bf16`, checkpointing", f"method=full,precision=bf16,{SAVING}"),
    ("the same, 8-bit AdamW", f"method=full,precision=bf16,optimizer=adamw-8bit,{SAVING}"),
    ("LoRA", "method=lora"),
    ("LoRA, checkpointing", f"method=lora,{SAVING}"),
    ("QLoRA", "method=qlora"),
    ("QLoRA, checkpointing", f"method=qlora,{SAVING}"),
)
"""Each row's words and its config, beside a micro-batch of 4. Checkpointing comes with the chunked loss."""
PUBLISHED = Path(__file__).parent / "recorded/published-estimates.json"


VERDICTS = {
    True: {"sure": "yes", "likely": "likely", "unsure": "perhaps"},
    False: {"sure": "no", "likely": "unlikely", "unsure": "perhaps not"},
}
"""The word for an estimate's `fits` and its `certainty`."""


def row(words: str, config: str) -> str:
    """A config's allocated memory at the peak, on the card where it is largest, and whether it fits each card.

    What autocast reserves beside that differs between runs of one estimate, as it does on a card.
    """
    asked = f"micro_batch=4,{config}"
    found = [autofit.estimate("llama-3.1-8b", asked, hardware=card, advice=False) for card in CARDS]
    memory = max(estimate.peak_allocated_bytes for estimate in found) / GIB
    verdicts = [VERDICTS[estimate.fits][estimate.certainty or "unsure"] for estimate in found]
    return f"| {words} | {memory:.1f} GiB | {' | '.join(verdicts)} |"


def predicted() -> list[str]:
    """The Markdown table of predictions."""
    lines = [
        "| **predicted**: llama-3.1-8b | peak allocated | " + " | ".join(CARDS.values()) + " |",
        "|---|---|" + "---|" * len(CARDS),
    ]
    return lines + [row(words, config) for words, config in ROWS]


def measured() -> list[str]:
    """The Markdown table of what others have measured: the first run of each method, 4 x 4,096 tokens."""
    lines = ["| **measured** by others: Mistral-7B, A100 | peak allocated | predicted |", "|---|---|---|"]
    shown = set()
    for run in json.loads(PUBLISHED.read_text())["listed"]:
        config = parse(run["config"])
        how = f"{config['method']} {config['precision']}".replace("-", " ")
        if how not in shown and (run["model"], run["gpus"], config["micro_batch"]) == ("mistral-7b", 1, 4):
            shown.add(how)
            sizes = (f"{run[of] / GIB:.2f} GiB" for of in ("measured_bytes", "predicted_bytes"))
            lines.append(f"| {how}, checkpointing, 4 x 4,096 tokens | {' | '.join(sizes)} |")
    return lines


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOFIT_STORE"] = f"{folder}/store.db"
        print("\n".join([*predicted(), "", *measured()]))
