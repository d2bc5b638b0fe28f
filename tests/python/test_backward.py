"""rafter.attention_backward against differences of the float64 forward pass."""

import ml_dtypes
import numpy as np
import oracle
import pytest
import rafter

SIZES = dict(batch=2, seqlen_q=5, seqlen_kv=7, heads_q=4, heads_kv=2, dim=8)


def gradients_by_differences(arrays, d_o, dlse, step=1e-5, **options):
    """Central differences of sum(o * d_o) + sum(lse * dlse) in float64."""
    arrays = [x.astype(np.float64) for x in arrays]
    causal, window = options.get("causal", False), options.get("window")

    def loss():
        o, lse = oracle.attention(
            *arrays, causal=causal, window=window, softcap=options.get("softcap", 0.0)
        )
        return (o * d_o).sum() + np.where(np.isinf(lse), 0, lse * dlse).sum()

    gradients = []
    for x in arrays:
        gradient = np.zeros_like(x)
        for i in np.random.default_rng(0).permutation(x.size)[:12]:
            kept = x.flat[i]
            x.flat[i] = kept + step
            above = loss()
            x.flat[i] = kept - step
            gradient.flat[i] = (above - loss()) / (2 * step)
            x.flat[i] = kept
        gradients.append(gradient)
    return gradients


def assert_equal_where_known(given, known):
    seen = known != 0
    assert seen.any()
    np.testing.assert_allclose(given[seen], known[seen], atol=2e-4)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (2, 1)}, {"softcap": 3.0}], ids=str
)
def test_gradients_are_those_of_the_forward_pass(options):
    arrays = oracle.qkv(**SIZES)
    o, lse = rafter.attention(*arrays, return_lse=True, **options)
    rng = np.random.default_rng(1)
    d_o = rng.standard_normal(o.shape, np.float32)
    dlse = rng.standard_normal(lse.shape, np.float32)
    given = rafter.attention_backward(*arrays, o, lse, d_o, dlse=dlse, **options)
    for gradient, known, array in zip(
        given, gradients_by_differences(arrays, d_o, dlse, **options), arrays
    ):
        assert gradient.shape == array.shape and gradient.dtype == array.dtype
        assert_equal_where_known(gradient, known)
    without = rafter.attention_backward(*arrays, o, lse, d_o, **options)
    assert np.abs(without[0] - given[0]).max() > 1e-3


def test_packed_gradients_have_the_bits_of_dense_ones_and_zeros_for_nobodys_rows():
    arrays = oracle.qkv(**SIZES)
    d_o = np.random.default_rng(1).standard_normal(arrays[0].shape, np.float32)
    o, lse = rafter.attention(*arrays, return_lse=True)
    expected = rafter.attention_backward(*arrays, o, lse, d_o)
    flat = [
        np.concatenate([x.reshape(-1, *x.shape[2:]), np.full((3, *x.shape[2:]), 9, np.float32)])
        for x in (*arrays, o, d_o)
    ]
    packed_lse = np.concatenate(
        [lse.transpose(1, 0, 2).reshape(4, -1), np.full((4, 3), np.nan, np.float32)], axis=1
    )
    given = rafter.attention_backward(
        *flat[:3], flat[3], packed_lse, flat[4],
        cu_seqlens_q=np.array([0, 5, 10]), cu_seqlens_kv=np.array([0, 7, 14]),
    )  # fmt: skip
    for gradient, dense in zip(given, expected):
        np.testing.assert_array_equal(gradient[:-3].reshape(dense.shape), dense)
        assert (gradient[-3:] == 0).all()


def test_a_plan_of_the_backward_pass_runs_and_writes_where_told():
    arrays = [x.astype(ml_dtypes.bfloat16) for x in oracle.qkv(**SIZES)]
    o, lse = rafter.attention(*arrays, return_lse=True)
    expected = rafter.attention_backward(*arrays, o, lse, o)
    plan = rafter.plan(
        seqlen_q=5, seqlen_kv=7, batch=2, heads_q=4, heads_kv=2, head_dim=8, dtype="bf16",
        pass_="backward",
    )  # fmt: skip
    assert plan.pass_ == "backward" and plan.device == "cpu"
    out = tuple(np.full(x.shape, np.nan, np.float32) for x in arrays)
    given = plan.backward(*arrays, o, lse, o, out=out)
    for wide, there, narrow in zip(given, out, expected):
        assert wide is there
        np.testing.assert_array_equal(wide.astype(narrow.dtype), narrow)
    with pytest.raises(ValueError, match="^plan: a plan of the backward pass"):
        plan.forward(*arrays)


ARRAYS = oracle.qkv(**SIZES)
O, LSE = rafter.attention(*ARRAYS, return_lse=True)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"d_o": O[:1]}, "d_o.batch: 1 given; 2"),
        ({"lse": LSE.astype(np.float16)}, "lse.dtype: f16 given; float32"),
        ({"lse": LSE[:, :1]}, "lse.heads"),
        ({"dlse": O}, r"dlse: shape \[2, 5, 4, 8\] given"),
        ({"out": ARRAYS[:2]}, "out: list given"),
        ({"out": (O, O, O)}, "dk"),
        ({"kernel": "forward_reference"}, "kernel: forward_reference given"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mistakes_are_named(change, message):
    q, k, v = ARRAYS
    given = {"q": q, "k": k, "v": v, "o": O, "lse": LSE, "d_o": O, **change}
    with pytest.raises(ValueError, match="^" + message):
        rafter.attention_backward(**given)
