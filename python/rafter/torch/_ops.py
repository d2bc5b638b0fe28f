"""The operators rafter::attention and rafter::attention_backward, and the way around them."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _core
from .._attention import FORWARD_ONLY

# How tensors lie: [batch, seqlen, heads, head_dim], or with heads before seqlen q, k and v, or
# these and o.
TOKENS_FIRST, HEADS_FIRST, ALL_HEADS_FIRST = 0, 1, 2

_PLAIN = {Tensor, torch.nn.Parameter}
_SIMPLE = {type(None), bool, int, float}
# Modes that see operators: a direct call would hide from them. Absent in some PyTorch: then none.
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_transforms = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)
any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def _options(
    left: int, right: int, top_left: bool, scale: Optional[float], softcap: float, splits: int
) -> Tuple[Any, ...]:
    """As _core takes them. A causal mask is the window (-1, 0)."""
    if left < 0 and right < 0:
        return (False, None, None, scale, softcap, None, None, 0, splits)
    align = "top-left" if top_left else None
    return (False, (left, right), align, scale, softcap, None, None, 0, splits)


@torch.library.custom_op("rafter::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    left: int,
    right: int,
    top_left: bool,
    scale: Optional[float],
    softcap: float,
    splits: int,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_kv: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_kv: Optional[int],
    seqused_kv: Optional[Tensor],
    page_table: Optional[Tensor],
    k_scale: Optional[Tensor],
    v_scale: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    return _core.attend(
        q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table, k_scale, v_scale, None, None,
        *_options(left, right, top_left, scale, softcap, splits), max_seqlen_q, max_seqlen_kv, True,
        None, False, True, TOKENS_FIRST, None,
    )  # fmt: skip


@attention_op.register_fake
def _(q, k, v, *options):
    packed = q.dim() == 3
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    return o, q.new_empty(lse, dtype=torch.float32)


@torch.library.custom_op("rafter::attention_backward", mutates_args=())
def backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    d_o: Tensor,
    dlse: Optional[Tensor],
    left: int,
    right: int,
    top_left: bool,
    scale: Optional[float],
    softcap: float,
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_kv: Optional[Tensor],
    max_seqlen_q: Optional[int],
    max_seqlen_kv: Optional[int],
    seqused_kv: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor]:
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, *FORWARD_ONLY)
    options = _options(left, right, top_left, scale, softcap, 0)
    return _core.attend_backward(
        arrays, (o, lse, d_o, dlse), options, max_seqlen_q, max_seqlen_kv, None, None
    )


@backward_op.register_fake
def _(q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_TENSORS = 3  # q, k, v lead the arguments of attention_op; only they have gradients


def _setup(ctx, inputs, output) -> None:
    (q, k, v, left, right, top_left, scale, softcap, _, cu_q, cu_kv, max_q, max_kv, seqused,
     page_table, k_scale, v_scale) = inputs  # fmt: skip
    for name, given in (("page_table", page_table), ("k_scale", k_scale), ("v_scale", v_scale)):
        if given is not None:
            raise NotImplementedError(
                f"{name}: a tensor is not supported where q, k or v require grad: caches in pages "
                "or of 8 bits have no backward pass"
            )
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_kv, seqused)
    ctx.options = (left, right, top_left, scale, softcap)
    ctx.longest = (max_q, max_kv)
    ctx.arguments = len(inputs)


def _dense(x: Tensor) -> Tensor:
    """A gradient that autograd spread over a dim, or whose head_dim is not contiguous, copied."""
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def _backward(ctx, d_o: Optional[Tensor], dlse: Optional[Tensor]) -> List[Optional[Tensor]]:
    q, k, v, o, lse, cu_q, cu_kv, seqused = ctx.saved_tensors
    d_o = torch.zeros_like(o) if d_o is None else _dense(d_o)
    gradients = backward_op(
        q, k, v, o, lse, d_o, dlse, *ctx.options, cu_q, cu_kv, *ctx.longest, seqused
    )
    return (*gradients, *([None] * (ctx.arguments - _TENSORS)))


attention_op.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("rafter::append", mutates_args=("k_cache", "v_cache"))
def append_op(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqused: Tensor,
    page_table: Optional[Tensor],
    q: Tensor,
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    interleaved: bool,
) -> Tensor:
    """rafter.append of q turned; without tables q's copy."""
    turned = None if cos is None else q
    arrays = (k, v, k_cache, v_cache, seqused, None, page_table, turned, None, None, None)
    out = _core.append(arrays, (cos, sin, interleaved), None, None)
    return q.clone() if out is None else out


@append_op.register_fake
def _(k, v, k_cache, v_cache, seqused, page_table, q, *rope):
    return q.new_empty(q.shape)


def _is_direct(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nobody but the kernel has to see this call: no compiler, no gradients, no mode."""
    if torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and _dispatch_modes() == 0
        and _transforms() is None
    )


def _refuse_tangents(**tensors: Tensor) -> None:
    """Forward-mode derivatives would be lost on the way through an operator."""
    for name, tensor in tensors.items():
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{name}: a tensor with a tangent is not supported: Rafter has gradients in reverse "
                "mode only"
            )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: Tuple[int, int] = (-1, -1),
    top_left: bool = False,
    scale: Optional[float] = None,
    softcap: float = 0.0,
    splits: int = 0,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_kv: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_kv: Optional[int] = None,
    seqused_kv: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    k_scale: Optional[Tensor] = None,
    v_scale: Optional[Tensor] = None,
    return_lse: bool = False,
    heads_first: int = TOKENS_FIRST,
) -> Any:
    """rafter.attention in [batch, seqlen, heads, head_dim] or packed, or of four dims as
    heads_first says, with gradients: o, or (o, lse). A head_dim that is not contiguous is copied;
    any other stride is taken as it is."""
    if forward_ad._current_level >= 0:
        _refuse_tangents(q=q, k=k, v=v)
    left, right = window
    if _is_direct(q, k, v):
        return _core.attend(
            q, k, v, cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table, k_scale, v_scale, None,
            None, *_options(left, right, top_left, scale, softcap, splits), max_seqlen_q,
            max_seqlen_kv, return_lse, None, False, True, heads_first, None,
        )  # fmt: skip
    q, k, v = (x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous() for x in (q, k, v))
    if heads_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = attention_op(
        q, k, v, left, right, top_left, scale, softcap, splits, cu_seqlens_q, cu_seqlens_kv,
        max_seqlen_q, max_seqlen_kv, seqused_kv, page_table, k_scale, v_scale,
    )  # fmt: skip
    if heads_first == ALL_HEADS_FIRST:
        o = o.transpose(1, 2)
    return (o, lse) if return_lse else o


def refuse(**given: Any) -> None:
    """A NotImplementedError for the first argument that asks for something."""
    for name, value in given.items():
        if type(value) in _SIMPLE and not value:  # most are: isinstance with Tensor takes longer
            continue
        if isinstance(value, Tensor):
            raise NotImplementedError(
                f"{name}: a tensor of shape {tuple(value.shape)} is not supported: Rafter has no "
                "such option"
            )
        if value:
            raise NotImplementedError(
                f"{name}: {value!r} is not supported: Rafter has no such option"
            )
