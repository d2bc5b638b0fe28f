"""Attention, decoding, merging and plans on arrays."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

from . import _core
from ._arrays import FLOAT32, Output, inputs, tensor
from ._explain import Explanation

Window = Optional[Tuple[Optional[int], Optional[int]]]


def _run(plan: _core.Plan, given: _core.Inputs, q: Any, out: Any, return_lse: bool) -> Any:
    made = Output(q, given.o_shape) if out is None else None
    lse = Output(q, given.lse_shape, FLOAT32) if return_lse else None
    plan.forward(
        given,
        tensor("out", out if made is None else made.array, writable=True),
        None if lse is None else tensor("lse", lse.array, writable=True),
    )
    o = out if made is None else made.result()
    return o if lse is None else (o, lse.result())


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
    seqused_kv: Any = None,
    page_table: Any = None,
    return_lse: bool = False,
    out: Any = None,
    pipeline: Optional[str] = None,
    kernel: Optional[str] = None,
    threads: int = 0,
    splits: int = 0,
) -> Any:
    """O = softmax(softmax_scale · QKᵀ + mask) V, exact, accumulated in float32.

    Arrays are of any library with DLPack, in host memory, float32, float16 or bfloat16, with any
    strides whose head_dim is contiguous. Nothing is copied; the result is of q's type. A query row
    that sees no key gives 0, and its lse is -inf.

    Args:
        q: [batch, seqlen_q, heads_q, head_dim]; with cu_seqlens_q [total_q, heads_q, head_dim].
        k: [batch, seqlen_kv, heads_kv, head_dim]; heads_kv divides heads_q. With cu_seqlens_kv
            [total_kv, heads_kv, head_dim]; with page_table [pages, page_size, heads_kv, head_dim].
        v: as k, with a head_dim_v of its own.
        causal: row i sees keys up to i + seqlen_kv - seqlen_q (bottom-right).
        window: (left, right), in keys beside the diagonal; None or -1 is unbounded.
        align: "bottom-right" (default) or "top-left", where the diagonal of a mask starts.
        softmax_scale: natural; default 1 / sqrt(head_dim).
        softcap: scores become softcap · tanh(score / softcap); None or 0 is off.
        cu_seqlens_q, cu_seqlens_kv: [batch + 1] int32 or int64, offsets of packed sequences.
        seqused_kv: [batch] int32 or int64, keys of each sequence (at most seqlen_kv).
        page_table: [batch, pages per sequence] int32 or int64, page numbers; needs seqused_kv.
        return_lse: also return lse, float32, natural logarithm, [batch, heads_q, seqlen_q]
            (packed: [heads_q, total_q]).
        out: an array for the result, of q's dtype or float32; returned.
        pipeline: "unfused", "half-fused", "fused" or "split-kv"; default: the cheapest kernel's.
        kernel: the name of a kernel (rafter.kernels() lists them).
        threads: 0 is the OpenMP default.
        splits: parts of the keys for split-kv; 0 chooses.

    Returns: o [batch, seqlen_q, heads_q, head_dim_v], or (o, lse).

    Raises:
        ValueError: names the argument, what was given and what is allowed; nothing was written.
        NotImplementedError: no kernel here does it; says which refused and why.
    """
    given = inputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table)
    plan = _core.plan_arrays(
        given,
        causal=causal,
        window=window,
        align=align,
        softmax_scale=softmax_scale,
        softcap=softcap or 0.0,
        pipeline=pipeline,
        kernel=kernel,
        threads=threads,
        splits=splits,
    )
    return _run(plan, given, q, out, return_lse)


def decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    seqused: Any,
    page_table: Any = None,
    *,
    causal: bool = True,
    window: Window = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    return_lse: bool = False,
    out: Any = None,
    pipeline: Optional[str] = None,
    kernel: Optional[str] = None,
    threads: int = 0,
    splits: int = 0,
) -> Any:
    """Attention of a few new queries of each sequence against its cache of keys and values.

    What lies in the caches past a sequence's length never enters the result.

    Args:
        q: [batch, heads_q, head_dim] for one query each, or [batch, seqlen_q, heads_q, head_dim].
        k_cache: [batch, capacity, heads_kv, head_dim]; with page_table
            [pages, page_size, heads_kv, head_dim].
        v_cache: as k_cache, with a head_dim_v of its own.
        seqused: [batch] int32 or int64, keys in each cache, the new ones included; None: all.
        page_table: [batch, pages per sequence] int32 or int64; needs seqused.
        causal: the last query sees the last key, the one before it one less, and so on.
    The other arguments, results and errors are those of rafter.attention; lse is [batch, heads_q]
    where q has three dims.
    """
    given = inputs(q, k_cache, v_cache, None, None, seqused, page_table, decode=True)
    plan = _core.plan_arrays(
        given,
        causal=causal,
        window=window,
        align=None,
        softmax_scale=softmax_scale,
        softcap=softcap or 0.0,
        pipeline=pipeline,
        kernel=kernel,
        threads=threads,
        splits=splits,
    )
    return _run(plan, given, q, out, return_lse)


def merge(states: Sequence[Tuple[Any, Any]], *, out: Optional[Tuple[Any, Any]] = None) -> Any:
    """Merges attention states over disjoint keys into the state over their union.

    lse = log Σ exp(lse_i), o = Σ exp(lse_i - lse) o_i. Exact: an empty state (lse = -inf) with X is
    X to the bit.

    Args:
        states: (o, lse) pairs: o [batch, seqlen_q, heads_q, head_dim_v] and lse float32 [batch,
            heads_q, seqlen_q], or as rafter.attention returned them for packed sequences.
        out: (o, lse) to write to; may be one of the states.

    Returns: (o, lse), of the type of the first state.
    """
    states = list(states)
    if not states:
        raise ValueError("states: none given; one state or more allowed")
    parts = []
    for i, state in enumerate(states):
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            raise ValueError(f"states[{i}]: {type(state).__name__} given; a pair (o, lse) allowed")
        o, lse = state
        parts.append((tensor(f"states[{i}].o", o), tensor(f"states[{i}].lse", lse)))
    if out is not None:
        to_o, to_lse = out
        _core.merge(
            parts, tensor("out.o", to_o, writable=True), tensor("out.lse", to_lse, writable=True)
        )
        return out
    o, lse = states[0]
    made_o, made_lse = Output(o, tuple(o.shape)), Output(lse, tuple(lse.shape), FLOAT32)
    _core.merge(
        parts,
        tensor("out.o", made_o.array, writable=True),
        tensor("out.lse", made_lse.array, writable=True),
    )
    return made_o.result(), made_lse.result()


class Plan:
    """A validated problem with its kernel, workspace and predicted cost; made by rafter.plan.

    Immutable, and usable from any thread.
    """

    def __init__(self, core: _core.Plan):
        self._core = core

    @property
    def kernel(self) -> str:
        """The chosen kernel."""
        return self._core.kernel

    @property
    def pipeline(self) -> str:
        return self._core.pipeline

    @property
    def threads(self) -> int:
        return self._core.threads

    @property
    def workspace_bytes(self) -> int:
        """What a run allocates beside its results, in bytes."""
        return self._core.workspace_bytes

    @property
    def problem(self) -> dict:
        """The sizes and options, with defaults filled in."""
        return self._core.problem

    @property
    def candidates(self) -> list:
        """Every kernel that was looked at: its predicted seconds, or why it was refused."""
        return self._core.candidates

    @property
    def explanation(self) -> Explanation:
        """What the plan costs, and its wall on the device that it was made for."""
        return Explanation(pipeline=self.pipeline, pass_="forward", **self._core.cost())

    def explain(self) -> str:
        """Several lines: the problem, the kernel and its wall, every candidate with its time or
        its refusal."""
        return self._core.explain()

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        seqused_kv: Any = None,
        page_table: Any = None,
        return_lse: bool = False,
        out: Any = None,
    ) -> Any:
        """Runs the plan; arrays, results and errors as rafter.attention."""
        given = inputs(q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table)
        return _run(self._core, given, q, out, return_lse)

    def __repr__(self) -> str:
        return f"<rafter.Plan {self.kernel} ({self.pipeline}), {self.workspace_bytes} B workspace>"

    def __str__(self) -> str:
        return self.explain()


def plan(
    *,
    seqlen_q: int,
    seqlen_kv: Optional[int] = None,
    batch: int = 1,
    heads_q: int = 1,
    heads_kv: int = 0,
    head_dim: int = 128,
    head_dim_v: int = 0,
    dtype: str = "f32",
    causal: bool = False,
    window: Window = None,
    align: Optional[str] = None,
    softmax_scale: Optional[float] = None,
    softcap: Optional[float] = None,
    total_q: int = 0,
    total_kv: int = 0,
    page_size: int = 0,
    num_pages: int = 0,
    seqused_kv: bool = False,
    pipeline: Optional[str] = None,
    kernel: Optional[str] = None,
    threads: int = 0,
    splits: int = 0,
    device_spec: Optional[str] = None,
) -> Plan:
    """Chooses the kernel of least predicted time for a problem, to be run as often as wanted.

    Args:
        seqlen_q, seqlen_kv: rows and keys of a sequence (capacities where lengths are data);
            seqlen_kv is seqlen_q by default.
        heads_kv: 0 is heads_q. head_dim_v: 0 is head_dim.
        dtype: "f32", "f16" or "bf16".
        total_q, total_kv: rows of all packed sequences; above 0 asks for the packed layout.
        page_size, num_pages: keys per page and pages of a paged cache.
        seqused_kv: whether a run gives the keys of each sequence.
        device_spec: ceilings for the prediction: a name of rafter.devices or a file of
            `rafter probe`; default: an estimate of this machine.
    The others are those of rafter.attention.
    """
    sizes = {
        "batch": batch,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "seqlen_q": seqlen_q,
        "seqlen_kv": seqlen_q if seqlen_kv is None else seqlen_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": dtype,
        "total_q": total_q,
        "total_kv": total_kv,
        "page_size": page_size,
        "num_pages": num_pages,
        "seqused_kv": seqused_kv,
    }
    return Plan(
        _core.plan_sizes(
            sizes,
            causal=causal,
            window=window,
            align=align,
            softmax_scale=softmax_scale,
            softcap=softcap or 0.0,
            pipeline=pipeline,
            kernel=kernel,
            threads=threads,
            splits=splits,
            device_spec=device_spec,
        )
    )
