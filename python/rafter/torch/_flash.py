"""The functions of flash_attn, version 2: [batch, seqlen, heads, head_dim], bottom-right masks."""

from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ._ops import append_op, attend, refuse

_WithLse = Union[Tensor, Tuple[Tensor, Tensor, None]]


def _window(causal: bool, window_size: Tuple[int, int]) -> Tuple[int, int]:
    left, right = window_size
    return (left, 0) if causal else (left, right)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _WithLse:
    """flash_attn.flash_attn_func.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim].
        k, v: [batch, seqlen_kv, heads_kv, head_dim]; heads_kv divides heads_q.
        dropout_p, alibi_slopes: refused by name.
        softmax_scale: default 1 / sqrt(head_dim).
        causal: row i sees keys up to i + seqlen_kv - seqlen_q.
        window_size: (left, right) keys beside the diagonal, -1 is unbounded.
        softcap: scores become softcap · tanh(score / softcap); 0 is off.
        deterministic: has no effect: results and gradients always are.
        return_attn_probs: also return lse, float32 [batch, heads_q, seqlen_q], and None.

    Returns: o [batch, seqlen_q, heads_q, head_dim_v], or (o, lse, None).
    """
    del deterministic  # always
    if dropout_p or alibi_slopes is not None:
        refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    result = attend(
        q, k, v, window=_window(causal, window_size), scale=softmax_scale, softcap=softcap,
        return_lse=return_attn_probs,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> _WithLse:
    """flash_attn.flash_attn_qkvpacked_func: qkv [batch, seqlen, 3, heads, head_dim], nothing is
    copied. The rest is as in flash_attn_func."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise ValueError(
            f"qkv: shape {tuple(qkv.shape)} given; [batch, seqlen, 3, heads, head_dim] allowed"
        )
    return flash_attn_func(
        *qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> _WithLse:
    """flash_attn.flash_attn_varlen_func: packed sequences.

    Args:
        q: [total_q, heads_q, head_dim]. k, v: [total_kv, heads_kv, head_dim].
        cu_seqlens_q, cu_seqlens_k: [batch + 1] int32 or int64 offsets, on the tensors' device.
        max_seqlen_q, max_seqlen_k: the longest sequence, or more. Fewer is a ValueError on the
            CPU; on a GPU, where lengths are not read by the call, sequences are cut there.
        block_table: refused by name.
    The rest is as in flash_attn_func; lse is [heads_q, total_q].
    """
    del deterministic  # always
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    result = attend(
        q, k, v, window=_window(causal, window_size), scale=softmax_scale, softcap=softcap,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_k, return_lse=return_attn_probs,
    )  # fmt: skip
    return (*result, None) if return_attn_probs else result


def _append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    caches: Tuple[Tensor, Tensor],
    lengths: Tensor,
    block_table: Optional[Tensor],
    tables: Optional[Tuple[Tensor, Tensor]],
    interleaved: bool,
) -> Tensor:
    """Appends k and v, turned where there are tables of rope; gives q, turned like them."""
    _check_room(lengths, k, caches[0], block_table)
    if tables is None:
        append_op(k, v, *caches, lengths, block_table, k, None, None, False)
        return q
    cos, sin = (x.float().contiguous() for x in tables)
    return append_op(k, v, *caches, lengths, block_table, q, cos, sin, interleaved)


def _check_rope(
    q: Tensor, k: Optional[Tensor], cos: Optional[Tensor], sin: Optional[Tensor], masked: bool
) -> None:
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos: given without rotary_sin (or the other); both or neither")
    if cos is None:
        return
    if k is None:
        raise ValueError("k: None given; new tokens allowed with rotary_cos")
    if k.shape[1] != q.shape[1] or not (masked or q.shape[1] == 1):
        raise NotImplementedError(
            f"rotary_cos: {q.shape[1]} queries and {k.shape[1]} new tokens, causal={masked}, is not "
            "supported: Rafter turns as many queries as new tokens, each by its own position"
        )


def _check_room(lengths: Tensor, new: Tensor, cache: Tensor, block_table: Optional[Tensor]) -> None:
    """What is appended fits. On a GPU the lengths are not read: tokens beyond are not written."""
    if lengths.is_cuda or torch.compiler.is_compiling() or new.shape[0] == 0:
        return
    pages = 1 if block_table is None else block_table.shape[1]
    longest = int(lengths.max()) + new.shape[1]
    if longest > pages * cache.shape[1]:
        raise ValueError(
            f"cache_seqlens: {longest} with k given; {pages * cache.shape[1]} (capacity) allowed"
        )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Union[int, Tensor, None] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """flash_attn.flash_attn_with_kvcache: new queries against a cache, to which k and v are first
    appended, in place.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim].
        k_cache, v_cache: [batch, capacity, heads_kv, head_dim], or pages [pages, page_size,
            heads_kv, head_dim] of any size with block_table.
        k, v: [batch, seqlen_new, heads_kv, head_dim], appended behind cache_seqlens.
        cache_seqlens: [batch] lengths before k is appended, or one for all; None without k: all.
        block_table: [batch, pages per sequence] int32 or int64.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2]; k, and q where it is causal or one
            query, are turned by their positions. Wants k, as many new tokens as queries.
        rotary_interleaved: elements 2i and 2i + 1 turn together, else i and i + rotary_dim / 2.
        num_splits: parts of the keys; 0 chooses.
        cache_batch_idx, cache_leftpad, alibi_slopes: refused by name.
        return_softmax_lse: also return lse, float32 [batch, heads_q, seqlen_q].
    The rest is as in flash_attn_func.

    Returns: o [batch, seqlen_q, heads_q, head_dim_v], or (o, lse).
    """
    refuse(
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes,
    )
    if (k is None) != (v is None):
        raise ValueError("k: given without v (or v without k); both or neither allowed")
    masked = causal or tuple(window_size) != (-1, -1)
    _check_rope(q, k, rotary_cos, rotary_sin, masked)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_seqlens is None and (k is not None or block_table is not None):
        raise ValueError("cache_seqlens: None given; lengths allowed with k or block_table")
    if k is not None and v is not None:
        tables = None if rotary_cos is None else (rotary_cos, rotary_sin)
        q = _append(
            q, k, v, (k_cache, v_cache), cache_seqlens, block_table, tables, rotary_interleaved
        )
        cache_seqlens = cache_seqlens + k.shape[1]
    return attend(
        q, k_cache, v_cache, window=_window(causal, window_size), scale=softmax_scale,
        softcap=softcap, splits=num_splits, seqused_kv=cache_seqlens, page_table=block_table,
        return_lse=return_softmax_lse,
    )  # fmt: skip
