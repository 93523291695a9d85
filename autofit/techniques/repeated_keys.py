"""torch's attention with keys and values repeated for all heads. Exported scripts contain this function verbatim."""

from __future__ import annotations

from typing import Any


def register_repeated_keys(name: str) -> None:
    """Has transformers know, under `name`, sdpa attention whose keys and values are repeated for the heads that share
    them.

    transformers leaves that to torch where there is no mask, and torch has no fused kernel for shared keys in fp32 or
    before compute capability 8.0: it then keeps the scores of all pairs of tokens.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> tuple[Any, None]:
        heads = query.shape[1] // key.shape[1]
        key, value = (shared.repeat_interleave(heads, dim=1) for shared in (key, value))
        result = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=options.get("dropout", 0.0),
            is_causal=attention_mask is None,
            scale=options.get("scaling"),
        )
        return result.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
