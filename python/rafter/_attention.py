"""Attention, decoding, gradients, caches and merging on arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple

from . import _core
from ._arrays import on_stream

Window = Optional[Tuple[Optional[int], Optional[int]]]
# For a backward pass: no page_table, k_scale, v_scale, tree_mask or bad_pages.
FORWARD_ONLY = (None,) * 5


def on(stream: Any, array: Any, call: Any, *arguments: Any) -> Any:
    """The call on a stream that the caller names, or on the current one of the array's library."""
    if stream is None:
        return call(*arguments, None)
    with on_stream(array, stream) as handle:
        return call(*arguments, handle)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window = None,
    align: Optional[str] = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_kv: Optional[int] = None,
    seqused_kv: Any = None,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    return_lse: bool = False,
    out: Any = None,
    pipeline: Optional[str] = None,
    kernel: Optional[str] = None,
    threads: int = 0,
    splits: int = 0,
    stream: Any = None,
) -> Any:
    """O = softmax(softmax_scale · QKᵀ + mask) V, exact, accumulated in float32.

    Arrays are of any library with DLPack, in host memory or all on one CUDA device, float32,
    float16 or bfloat16, with any strides whose head_dim is contiguous. Nothing is copied; the
    result is of q's type. A query row that sees no key gives 0, and its lse is -inf.

    On a CUDA device the work is queued on the current stream of q's library and nothing waits for
    it (arrays of libraries that tell no stream, such as JAX, are the exception: the result is
    ready when the call returns). Workspace is what the stream keeps, 1 MiB at most, or comes from
    that library's allocator. Calls can be captured in a CUDA graph. Lengths and page tables are
    read on the device: what is wrong with their values is not found by the call.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim]; with cu_seqlens_q [total_q, heads_q, head_dim].
        k: [batch, seqlen_kv, heads_kv, head_dim]; heads_kv divides heads_q. With cu_seqlens_kv
            [total_kv, heads_kv, head_dim]; with page_table [pages, page_size, heads_kv, head_dim].
            May be int8 with k_scale, or float8_e4m3fn.
        v: as k, with a head_dim_v of its own.
        causal: row i sees keys up to i + seqlen_kv - seqlen_q (bottom-right).
        window: (left, right), in keys beside the diagonal; None or -1 is unbounded.
        align: "bottom-right" (default) or "top-left", where the diagonal of a mask starts.
        softmax_scale: natural; default 1 / sqrt(head_dim).
        softcap: scores become softcap · tanh(score / softcap); None or 0 is off.
        cu_seqlens_q, cu_seqlens_kv: [batch + 1] int32 or int64, offsets of packed sequences.
        max_seqlen_q, max_seqlen_kv: the longest of the packed sequences, or more. Default: read
            from the offsets in host memory; all rows where the offsets are on a CUDA device.
        seqused_kv: [batch] int32 or int64, keys of each sequence (at most seqlen_kv).
        page_table: [batch, pages per sequence] int32 or int64, page numbers.
        k_scale, v_scale: float32 factors of 8-bit k and v: one per key and head, of the shape of k
            without head_dim, or one per head, [heads_kv].
        return_lse: also return lse, float32, natural logarithm, [batch, heads_q, seqlen_q]
            (packed: [heads_q, total_q]).
        out: an array for the result, of q's dtype or float32; returned.
        pipeline: "unfused", "half-fused", "fused" or "split-kv"; default: the cheapest kernel's.
        kernel: the name of a kernel (rafter.kernels() lists them).
        threads: of a CPU; 0 is the OpenMP default, and all that a GPU takes.
        splits: parts of the keys for split-kv; 0 chooses.
        stream: of a CUDA device, in place of the current one: a stream of torch or CuPy, an object
            with __cuda_stream__, or the handle of a cudaStream_t. Results belong to it.

    Returns: o [batch, seqlen_q, heads_q, head_dim_v], or (o, lse).

    Raises:
        ValueError: names the argument, what was given and what is allowed; nothing was written.
        NotImplementedError: no kernel here does it; says which refused and why.
        RuntimeError: the device failed, or has no memory left.
    """
    return on(
        stream, q, _core.attend, q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table,
        k_scale, v_scale, None, None, causal, window, align, softmax_scale, softcap, pipeline,
        kernel, threads, splits, max_seqlen_q, max_seqlen_kv, return_lse, out, False, False, 0,
    )  # fmt: skip


def decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqused: Any,
    page_table: Any = None,
    *,
    causal: Optional[bool] = None,
    window: Window = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    k_scale: Any = None,
    v_scale: Any = None,
    tree_mask: Any = None,
    bad_pages: Any = None,
    return_lse: bool = False,
    out: Any = None,
    pipeline: Optional[str] = None,
    kernel: Optional[str] = None,
    threads: int = 0,
    splits: int = 0,
    stream: Any = None,
) -> Any:
    """Attention of a few new queries of each sequence against its cache of keys and values.

    What lies in the caches past a sequence's length never enters the result.

    Args:
        q: [batch, heads_q, head_dim] for one query each, or [batch, seqlen_q, heads_q, head_dim].
        k_cache: [batch, capacity, heads_kv, head_dim]; with page_table
            [pages, page_size, heads_kv, head_dim]. May be int8 with k_scale, or float8_e4m3fn.
        v_cache: as k_cache, with a head_dim_v of its own.
        seqused: [batch] int32 or int64, keys in each cache, the new ones included; None: all.
        page_table: [batch, pages per sequence] int32 or int64, page numbers.
        causal: the last query sees the last key, the one before it one less, and so on. The
            default, except with tree_mask.
        k_scale, v_scale: float32 factors of 8-bit caches: one per key and head, of the shape of
            k_cache without head_dim, or one per head, [heads_kv].
        tree_mask: [batch, seqlen_q] int64 or uint64, for new tokens proposed as a tree, at most 64:
            bit j of word i says that query i sees the key of new token j. Every key before the new
            ones is seen.
        bad_pages: [batch] int32, written: how many of a sequence's pages do not exist. On a CUDA
            device, where page tables are not read by the call, keys of such pages are not seen, and
            nothing is counted without queries; on the CPU they are errors.
    The other arguments, results and errors are those of rafter.attention; lse is [batch, heads_q]
    where q has three dims.
    """
    return on(
        stream, q, _core.attend, q, k_cache, v_cache, None, None, seqused, page_table, k_scale,
        v_scale, tree_mask, bad_pages, causal, window, None, softmax_scale, softcap, pipeline,
        kernel, threads, splits, None, None, return_lse, out, True, False, 0,
    )  # fmt: skip


if not TYPE_CHECKING:  # calls like an earlier one go past the reading of their arguments
    _module = sys.modules[__name__]
    attention = _core.quick(_module, attention, {}, False)
    decode = _core.quick(
        _module, decode, {"k_cache": "k", "v_cache": "v", "seqused": "seqused_kv"}, True
    )


def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    window: Window = None,
    align: Optional[str] = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_kv: Optional[int] = None,
    seqused_kv: Any = None,
    out: Optional[Tuple[Any, Any, Any]] = None,
    pipeline: Optional[str] = None,
    kernel: Optional[str] = None,
    threads: int = 0,
    stream: Any = None,
) -> Tuple[Any, Any, Any]:
    """The gradients of rafter.attention with respect to q, k and v; the same bits every time.

    Args:
        q, k, v: what the forward pass took, with its options.
        o, lse: what it gave.
        d_o: the gradient with respect to o, of q's dtype or float32.
        dlse: the gradient with respect to lse, float32; None is zero.
        out: (dq, dk, dv) to write to, each of q's dtype or float32; returned. Rows that belong to
            no sequence are not written there; in arrays that the call makes they are 0.
    The other arguments and the errors are those of rafter.attention.

    Returns: (dq, dk, dv), of the shapes of q, k, v and of q's dtype.
    """
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, *FORWARD_ONLY)
    options = (
        causal, window, align, softmax_scale, softcap, pipeline, kernel, threads, 0
    )  # fmt: skip
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 3):
        raise ValueError(f"out: {type(out).__name__} given; None or (dq, dk, dv) allowed")
    return on(
        stream, q, _core.attend_backward, arrays, (o, lse, d_o, dlse), options, max_seqlen_q,
        max_seqlen_kv, out,
    )  # fmt: skip


def append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    seqused: Any,
    *,
    seqused_new: Any = None,
    page_table: Any = None,
    q: Any = None,
    cos: Any = None,
    sin: Any = None,
    interleaved: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    dropped: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Writes the rows of new tokens into a cache, in place: turned by their position and quantised
    as asked, in one launch on a CUDA device (two with dropped).

    Row i of sequence b belongs at position seqused[b] + i. A token whose position is beyond the
    capacity, the page table or the tables of cos and sin is not written.

    Args:
        k: [batch, seqlen, heads_kv, head_dim]; one new token each may leave out seqlen.
        v: as k, with a head_dim_v of its own.
        k_cache, v_cache: as in rafter.decode, of k's dtype, int8 or float8_e4m3fn.
        seqused: [batch] int32 or int64, lengths before.
        seqused_new: [batch], how many of the rows are there; None: all.
        page_table: [batch, pages per sequence] int32 or int64.
        q: [batch, seqlen, heads_q, head_dim], queries to turn in the same launch.
        cos, sin: float32 [max_position, rotary_dim / 2] tables of a rotary position embedding.
        interleaved: elements 2i and 2i + 1 turn together, else i and i + rotary_dim / 2; False
            without cos and sin.
        k_scale, v_scale: float32 factors of 8-bit caches: [heads_kv] given, rows are divided by
            them; or of the shape of the cache without head_dim, computed for each row and written.
        dropped: [batch] int32, written: how many tokens were not.
        out: where q is written, may be q itself.
        stream: as in rafter.attention.

    Returns: q turned, of q's type, or None without q. Errors are those of rafter.attention.
    """
    arrays = (
        k, v, k_cache, v_cache, seqused, seqused_new, page_table, q, k_scale, v_scale, dropped
    )  # fmt: skip
    return on(stream, k, _core.append, arrays, (cos, sin, interleaved), out)


def merge(
    states: Sequence[Tuple[Any, Any]],
    *,
    out: Optional[Tuple[Any, Any]] = None,
    packed: Optional[bool] = None,
    stream: Any = None,
) -> Any:
    """Merges attention states over disjoint keys into the state over their union.

    lse = log Σ exp(lse_i), o = Σ exp(lse_i - lse) o_i. Exact: an empty state (lse = -inf) with X is
    X to the bit.

    Args:
        states: (o, lse) pairs: o [batch, seqlen_q, heads_q, head_dim_v] and lse float32 [batch,
            heads_q, seqlen_q], or as rafter.attention returned them for packed sequences, or
            rafter.decode for one query each.
        out: (o, lse) to write to; may be one of the states.
        packed: whether an o of three dims is of packed sequences, lse [heads_q, total_q], or of one
            query each, lse [batch, heads_q]. Needed only where both would fit the shapes.
        stream: as in rafter.attention.

    Returns: (o, lse), of the type of the first state.
    """
    states = list(states)
    first = states[0][0] if states and isinstance(states[0], (tuple, list)) else None
    return on(stream, first, _core.merge, states, out, packed)
