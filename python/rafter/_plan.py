"""Plans: a problem, its kernel and its cost, to be run as often as wanted."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from . import _core
from ._attention import FORWARD_ONLY, Window, on
from ._explain import Explanation


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
        """The pipeline that the kernel is of."""
        return self._core.pipeline

    @property
    def pass_(self) -> str:
        """What the plan runs: "forward" or "backward"."""
        return self._core.pass_

    @property
    def device(self) -> str:
        """Where it runs: "cpu", "cuda:0", ..."""
        return self._core.device

    @property
    def threads(self) -> int:
        """Threads of a CPU."""
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
        return Explanation(pipeline=self.pipeline, pass_=self.pass_, **self._core.cost())

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
        k_scale: Any = None,
        v_scale: Any = None,
        tree_mask: Any = None,
        bad_pages: Any = None,
        return_lse: bool = False,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Runs a plan of the forward pass; arrays, results and errors as rafter.attention;
        tree_mask and bad_pages as rafter.decode."""
        arrays = (
            q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table, k_scale, v_scale,
            tree_mask, bad_pages,
        )  # fmt: skip
        return on(stream, q, self._core.forward, arrays, return_lse, out)

    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        d_o: Any,
        *,
        dlse: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_kv: Any = None,
        seqused_kv: Any = None,
        out: Optional[Tuple[Any, Any, Any]] = None,
        stream: Any = None,
    ) -> Tuple[Any, Any, Any]:
        """Runs a plan made with pass_="backward"; arrays, results and errors as
        rafter.attention_backward."""
        arrays = (q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, *FORWARD_ONLY)
        return on(stream, q, self._core.backward, arrays, (o, lse, d_o, dlse), out)

    def __repr__(self) -> str:
        return (
            f"<rafter.Plan {self.kernel} ({self.pipeline}, {self.pass_}) on {self.device}, "
            f"{self.workspace_bytes} B workspace>"
        )

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
    kv_dtype: Optional[str] = None,
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
    tree_mask: bool = False,
    pass_: str = "forward",
    pipeline: Optional[str] = None,
    kernel: Optional[str] = None,
    threads: int = 0,
    splits: int = 0,
    device: str = "cpu",
    device_spec: Optional[str] = None,
) -> Plan:
    """Chooses the kernel of least predicted time for a problem, to be run as often as wanted.

    Args:
        seqlen_q, seqlen_kv: rows and keys of a sequence (capacities where lengths are data);
            seqlen_kv is seqlen_q by default.
        heads_kv: 0 is heads_q. head_dim_v: 0 is head_dim.
        dtype: "f32", "f16" or "bf16". kv_dtype: of k and v, where it is another: "int8", "e4m3"
        total_q, total_kv: rows of all packed sequences; above 0 asks for the packed layout.
        page_size, num_pages: keys per page and pages of a paged cache.
        seqused_kv, tree_mask: whether a run gives the keys of each sequence; a tree of new tokens.
        pass_: "forward", or "backward" for a plan that Plan.backward runs.
        device: where it runs: "cpu", "cuda" or "cuda:1".
        device_spec: ceilings for the prediction: a name of rafter.devices or a file of
            `rafter probe`; default: an estimate of this machine's CPU, h100-sxm for a GPU.
    The others, and the errors, are those of rafter.attention.
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
        "kv_dtype": kv_dtype,
        "total_q": total_q,
        "total_kv": total_kv,
        "page_size": page_size,
        "num_pages": num_pages,
        "seqused_kv": seqused_kv,
        "tree_mask": tree_mask,
    }
    options = (
        causal, window, align, softmax_scale, softcap, pipeline, kernel, threads, splits
    )  # fmt: skip
    return Plan(_core.plan_sizes(sizes, options, device, pass_, device_spec))
