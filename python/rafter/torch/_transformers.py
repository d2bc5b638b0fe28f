"""Attention for models of transformers (version 5)."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from ._ops import HEADS_FIRST, attend, refuse


_NO_ARRAYS = (None,) * 4


def _construction(function: Callable) -> tuple:
    """What a mask function of transformers was made of: its code and that of what it closes over,
    which tells a plain mask from one that a model or a packed batch has changed."""
    parts: list = [function.__code__]
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for part in held if isinstance(held, tuple) else (held,):
            parts.append(_construction(part) if callable(part) else None)
    return tuple(parts)


def _check_plain(mask_function: Callable, local_size: Optional[int]) -> None:
    from transformers import masking_utils as masks

    plain = [masks.causal_mask_function, masks.bidirectional_mask_function]
    if mask_function in plain:
        return
    if local_size is not None:
        windows = [masks.sliding_window_causal_mask_function(local_size)]
        bidirectional = getattr(masks, "sliding_window_bidirectional_mask_function", None)
        if bidirectional is not None:
            windows.append(bidirectional(local_size))
        if _construction(mask_function) in [_construction(window) for window in windows]:
            return
    raise NotImplementedError(
        "mask_function: a mask of the model's own or of packed sequences is not supported: "
        "Rafter has causal masks, windows and padding"
    )


def mask_for_rafter(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Optional[Callable] = None,
    attention_mask: Optional[Tensor] = None,
    local_size: Optional[int] = None,
    device: Any = None,
    **_: Any,
) -> Optional[Tensor]:
    """What attention_for_rafter gets as its attention_mask.

    None where every key is seen as causality allows; lengths, int32 [batch, 1, 1, 1], where a cache
    of fixed capacity is longer than what it holds; padding, uint8 [batch, 1, 1, keys], where
    sequences have some. Of four dims: transformers hands on those unchanged.
    """
    if mask_function is not None:
        _check_plain(mask_function, local_size)
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise NotImplementedError(
                f"attention_mask: shape {tuple(attention_mask.shape)} is not supported: Rafter has "
                "causal masks, windows and padding [batch, keys]"
            )
        attention_mask = attention_mask[:, -kv_length:]
        if not attention_mask.all():
            return attention_mask[:, None, None].bool().to(torch.uint8)
    held = q_offset + q_length - kv_offset
    if not isinstance(held, Tensor):
        if held == kv_length:
            return None
        held = torch.tensor(held, device=device)
    held = held.to(device=device, dtype=torch.int32).reshape(-1, 1, 1, 1)
    return held.expand(batch_size, 1, 1, 1).contiguous()


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, **options: Any) -> Tensor:
    """Attention of padded sequences, packed for it: rows of padding give 0."""
    keys = seen.shape[1]
    k, v = k[:, :keys], v[:, :keys]  # of a cache of fixed capacity, what it holds
    rows = seen[:, keys - q.shape[1] :]

    def offsets(valid: Tensor) -> Tensor:
        return torch.nn.functional.pad(valid.sum(1).cumsum(0), (1, 0)).to(torch.int32)

    packed = attend(
        q[rows], k[seen], v[seen], cu_seqlens_q=offsets(rows), cu_seqlens_kv=offsets(seen),
        max_seqlen_q=q.shape[1], max_seqlen_kv=keys, **options,
    )  # fmt: skip
    return packed.new_zeros((*q.shape[:3], v.shape[3])).index_put((rows,), packed)


def attention_for_rafter(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    output_attentions: bool = False,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    **_: Any,
) -> Tuple[Tensor, None]:
    """The signature of transformers' attention functions: query [batch, heads, seqlen, head_dim];
    gives [batch, seqlen, heads, head_dim_v] and no weights."""
    arrays = (s_aux, position_bias, cu_seq_lens_q, cu_seq_lens_k)
    if dropout or output_attentions or arrays != _NO_ARRAYS:
        refuse(
            dropout=dropout,
            s_aux=s_aux,
            position_bias=position_bias,
            output_attentions=output_attentions,
            cu_seq_lens_q=cu_seq_lens_q,
            cu_seq_lens_k=cu_seq_lens_k,
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    span = -1 if sliding_window is None else sliding_window - 1  # its count includes the row's key
    options = dict(window=(span, 0 if causal else span), scale=scaling, softcap=softcap or 0.0)
    if attention_mask is None:
        return attend(query, key, value, heads_first=HEADS_FIRST, **options), None
    if attention_mask.dtype == torch.int32:
        lengths = attention_mask.flatten()
        return attend(
            query, key, value, seqused_kv=lengths, heads_first=HEADS_FIRST, **options
        ), None
    if attention_mask.dtype == torch.uint8:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return _attend_padded(q, k, v, attention_mask.flatten(1).bool(), **options), None
    raise NotImplementedError(
        f"attention_mask: {attention_mask.dtype}, shape {tuple(attention_mask.shape)} is not "
        "supported: Rafter has causal masks, windows and padding [batch, keys]"
    )


def register_with_transformers(name: str = "rafter") -> None:
    """Makes attn_implementation=`name` of a transformers model mean Rafter.

        rafter.torch.register_with_transformers()
        model = AutoModelForCausalLM.from_config(config, attn_implementation="rafter")

    Causal, sliding-window and softcap models, padded batches, caches that grow and caches of fixed
    capacity. Dropout, attention sinks, position biases, masks of a model's own and packed batches
    are refused by name.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention_for_rafter)
    AttentionMaskInterface.register(name, mask_for_rafter)
