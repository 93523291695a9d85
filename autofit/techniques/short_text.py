"""A config in a few words, for tables of any kind."""

from __future__ import annotations

from autofit.core.lattice import Config

_ALWAYS = {"precision": "", "micro_batch": "micro-batch ", "checkpointing": "ckpt ", "optimizer": "", "loss": "loss "}


def short(config: Config) -> str:
    """A config abbreviated for a table: the axes that usually differ, then others that depart from the plain choice."""
    words = [config.text("method")]
    if "rank" in config:
        words.append(f"r{config['rank']}")
    # An imported trial may know fewer axes than there are today.
    words += [f"{prefix}{config[axis]}" for axis, prefix in _ALWAYS.items() if axis in config]
    if config.get("targets") == "attention":
        words.append("targets attention")
    if config.get("attention") not in (None, "sdpa"):
        words.append(f"attention {config['attention']}")
    words += [f"{axis} {config[axis]}" for axis in ("update", "kernels", "mlp", "batching") if axis in config]
    if config.get("compile") is True:
        words.append("compile")
    words += [f"{axis} {config[axis]}" for axis in ("offload", "sharding") if config.get(axis) not in (None, "none")]
    return ", ".join(words)
