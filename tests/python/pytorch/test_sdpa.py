"""rafter.torch.scaled_dot_product_attention against PyTorch's, on the CPU; skipped without PyTorch."""

import inspect
import os
import pathlib
import subprocess
import sys

import oracle
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import rafter.torch as rt  # noqa: E402
from rafter.torch import _ops  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention


def tensors(**sizes):
    """query, key, value [batch, heads, seqlen, head_dim], views of [batch, seqlen, heads, ...]."""
    return [torch.from_numpy(x).transpose(1, 2) for x in oracle.qkv(**sizes)]


def assert_near(a, b, tolerance=2e-6):
    assert a.shape == b.shape and a.dtype == b.dtype
    torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("lengths", [(19, 19), (9, 33), (33, 9)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_it_means_what_pytorch_means(lengths, is_causal):
    q, k, v = tensors(seqlen_q=lengths[0], seqlen_kv=lengths[1])
    options = dict(is_causal=is_causal, scale=0.3, enable_gqa=True)
    assert_near(rt.scaled_dot_product_attention(q, k, v, **options), sdpa(q, k, v, **options))


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)])
def test_leading_dims_are_pytorchs(leading):
    torch.manual_seed(0)
    q, k = torch.randn(*leading, 7, 8), torch.randn(*leading, 5, 8)
    assert_near(rt.scaled_dot_product_attention(q, k, k), sdpa(q, k, k))


def test_the_signature_is_pytorchs():
    given = inspect.signature(rt.scaled_dot_product_attention).parameters
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    assert list(given) == [argument.name for argument in schema.arguments]
    for argument in schema.arguments[3:]:
        assert given[argument.name].default == argument.default_value
        assert (given[argument.name].kind == inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only


def test_views_are_taken_without_copies(monkeypatch):
    q, k, v = tensors()
    heads_first = [x.contiguous() for x in (q, k, v)]
    wide = torch.full((2, 2, 33, 48), float("nan"))
    wide[..., :24] = k
    expected = rt.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def copied(*_):
        raise AssertionError("a tensor was copied")

    for name in ("contiguous", "clone", "to", "reshape"):
        monkeypatch.setattr(torch.Tensor, name, copied)
    for views in (heads_first, (q, wide[..., :24], v)):
        o = rt.scaled_dot_product_attention(*views, enable_gqa=True)
        assert torch.equal(o, expected) and o.transpose(1, 2).is_contiguous()


def test_a_head_dim_with_gaps_is_taken_too():
    q, k, v = tensors()
    gaps = torch.empty(2, 2, 33, 48)[..., ::2].copy_(k)
    assert torch.equal(
        rt.scaled_dot_product_attention(q, gaps, v, enable_gqa=True),
        rt.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    )


PROGRAM = """
import torch
import torch._C._dynamo.guards as guards
del guards._empty_strided_cpu
import rafter.torch
q, k, v = (torch.randn(2, 3, 9, 16) for _ in range(3))
o = rafter.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
assert type(o) is torch.Tensor and o.transpose(1, 2).is_contiguous()
torch.testing.assert_close(o, exact)
"""


def test_results_need_no_function_that_pytorch_keeps_to_itself():
    path = str(pathlib.Path(rt.__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, "PYTHONPATH": path}, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(19, 19), (9, 33)])
def test_gradients_are_pytorchs(is_causal, lengths):
    options = dict(is_causal=is_causal, enable_gqa=True)
    given = [x.requires_grad_() for x in tensors(seqlen_q=lengths[0], seqlen_kv=lengths[1])]
    o = rt.scaled_dot_product_attention(*given, **options)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(o, given, d_o)
    wide = [x.detach().double().requires_grad_() for x in given]
    expected = torch.autograd.grad(sdpa(*wide, **options), wide, d_o.double())
    for a, b in zip(gradients, expected):
        assert_near(a, b.float(), 5e-6)
    again = torch.autograd.grad(rt.scaled_dot_product_attention(*given, **options), given, d_o)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again))


def test_gradients_flow_where_only_some_are_asked_for_or_are_spread():
    q, k, v = tensors()
    v.requires_grad_()
    rt.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
    wide = [x.detach().double() for x in (q, k, v)]
    sdpa(*wide[:2], wide[2].requires_grad_(), enable_gqa=True).sum().backward()
    assert_near(v.grad, wide[2].grad.float(), 5e-6)
    assert q.grad is None


def test_no_operator_is_called_where_nobody_has_to_see_it(monkeypatch):
    q, k, v = tensors()
    expected = rt.scaled_dot_product_attention(q.requires_grad_(), k, v, enable_gqa=True)

    def called(*_):
        raise AssertionError("the operator was called")

    monkeypatch.setattr(_ops, "attention_op", called)
    with torch.no_grad():
        assert torch.equal(rt.scaled_dot_product_attention(q, k, v, enable_gqa=True), expected)
    with pytest.raises(AssertionError, match="the operator was called"):
        rt.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("grad", [False, True])
def test_the_operators_keep_pytorchs_rules(grad):
    q, k, v = (x.transpose(1, 2).requires_grad_(grad) for x in tensors(seqlen_q=5, seqlen_kv=5))
    arguments = (q, k, v, -1, 0, False, None, 0.0, 0, *[None] * 8)
    torch.library.opcheck(_ops.attention_op, arguments)


def test_compiled_whole_it_gives_the_same_bits():
    def twice(q, k, v):
        return 2 * rt.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    given = [x.requires_grad_() for x in tensors(seqlen_kv=19)]
    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    o, expected = compiled(*given), twice(*given)
    assert torch.equal(o, expected)
    d_o = torch.randn(o.shape)
    for a, b in zip(torch.autograd.grad(o, given, d_o), torch.autograd.grad(expected, given, d_o)):
        assert torch.equal(a, b)


def test_under_autocast_it_casts_as_pytorchs_does():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        a = rt.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        b = sdpa(q, k, v, enable_gqa=True)
    assert a.dtype == b.dtype == torch.bfloat16
    assert_near(a, b, 2e-2)


def test_forward_mode_is_refused():
    q, k, v = tensors()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="^q: a tensor with a tangent"):
            rt.scaled_dot_product_attention(dual, k, v, enable_gqa=True)


QUERY, KEY, VALUE = tensors()


@pytest.mark.parametrize(
    "more,kind,message",
    [
        ({"attn_mask": torch.ones(19, 33, dtype=torch.bool)}, NotImplementedError, "attn_mask: a"),
        ({"attn_mask": torch.zeros(19, 33)}, NotImplementedError, "attn_mask: a tensor"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: 0.1"),
        ({"enable_gqa": False}, ValueError, "key: 2 heads given; 4"),
        ({"key": KEY[0]}, ValueError, r"key: shape \(2, 33, 24\)"),
        ({"value": VALUE.double()}, ValueError, "v.dtype: float64"),
        ({"value": VALUE.half()}, ValueError, "v.dtype: f16"),
        ({"value": VALUE.to("meta")}, ValueError, "v: an array"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_has_not_is_refused_by_name(more, kind, message):
    given = dict(query=QUERY, key=KEY, value=VALUE, enable_gqa=True)
    with pytest.raises(kind, match="^" + message):
        rt.scaled_dot_product_attention(**{**given, **more})
