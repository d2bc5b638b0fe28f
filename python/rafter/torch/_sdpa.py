"""scaled_dot_product_attention, as torch.nn.functional has it."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ._ops import ALL_HEADS_FIRST, any_autocast, attend, refuse


def _four_dims(name: str, x: Tensor, leading: torch.Size) -> Tensor:
    """[..., heads, seqlen, head_dim] as [batch, heads, seqlen, head_dim]."""
    if x.dim() < 2 or x.shape[:-3] != leading:
        raise ValueError(
            f"{name}: shape {tuple(x.shape)} given; [..., heads, seqlen, head_dim] with the "
            f"leading dims {tuple(leading)} of query allowed"
        )
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, of the same signature and meaning.

    Args:
        query: [batch, heads_q, seqlen_q, head_dim], or with more or fewer leading dims. Strides
            are taken as they are: a transposed [batch, seqlen, heads, head_dim] is not copied.
        key, value: [batch, heads_kv, seqlen_kv, head_dim] and [..., head_dim_v].
        attn_mask: refused by name, bool or float; None.
        dropout_p: refused by name; 0.
        is_causal: row i sees keys up to i (top-left), also where seqlen_q and seqlen_kv differ.
        scale: default 1 / sqrt(head_dim).
        enable_gqa: heads_kv may divide heads_q.

    Under torch.autocast the tensors are cast as PyTorch's function casts them.

    Returns: [batch, heads_q, seqlen_q, head_dim_v], a view of [batch, seqlen_q, heads_q,
    head_dim_v], so that transposing it back copies nothing.

    Raises: NotImplementedError for what is refused by name or what no kernel here does; ValueError
    names the argument of rafter.attention (q, k, v) whose shape or dtype does not fit.
    """
    if attn_mask is not None or dropout_p:
        refuse(attn_mask=attn_mask, dropout_p=dropout_p)
    if any_autocast() and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    given = None
    if not (query.dim() == key.dim() == value.dim() == 4):
        given = query.shape
        query = _four_dims("query", query, given[:-3])
        key = _four_dims("key", key, given[:-3])
        value = _four_dims("value", value, given[:-3])
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError(
            f"key: {key.shape[1]} heads given; {query.shape[1]} allowed without enable_gqa"
        )
    o = attend(
        query, key, value, window=(-1, 0) if is_causal else (-1, -1), top_left=True, scale=scale,
        heads_first=ALL_HEADS_FIRST,
    )  # fmt: skip
    return o if given is None or len(given) == 4 else o.reshape(*given[:-2], *o.shape[2:])
