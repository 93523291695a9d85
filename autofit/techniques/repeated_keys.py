"""torch's attention with keys and values repeated for all heads. Exported scripts contain this function verbatim."""

from __future__ import annotations

from typing import Any


def register_repeated_keys(name: str) -> None:
    """Has transformers know, under `name`, sdpa attention whose keys and values are repeated for the heads that share
    them.

    transformers leaves that to torch where there is no mask, and torch has no fused kernel for shared keys in fp32 or
    before compute capability 8.0: it then keeps the scores of all pairs of tokens.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        heads = query.shape[1] // key.shape[1]
        options.setdefault("is_causal", getattr(module, "is_causal", True))
        key, value = repeat_kv(key, heads), repeat_kv(value, heads)
        return sdpa_attention_forward(None, query, key, value, attention_mask, **options)  # no module that shares keys

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
