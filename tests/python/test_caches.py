"""8-bit caches with scales, and merging what decode gives."""

import numpy as np
import oracle
import pytest
import rafter


def quantized(x):
    """int8 rows and their scales [..., heads], so that row = int8 * scale."""
    scale = np.abs(x).max(-1) / 127
    return np.round(x / scale[..., None]).astype(np.int8), scale.astype(np.float32)


@pytest.mark.parametrize("paged", [False, True])
def test_an_int8_cache_is_its_values_times_its_scales(paged):
    q, k, v = oracle.qkv(batch=3, seqlen_q=1, seqlen_kv=32)
    seqused = np.array([13, 0, 32], np.int32)
    (k8, k_scale), (v8, v_scale) = quantized(k), quantized(v)
    expected = rafter.decode(
        q, k8 * k_scale[..., None], v8 * v_scale[..., None], seqused, return_lse=True
    )
    caches, table = [k8, v8, k_scale, v_scale], None
    if paged:
        table = np.random.default_rng(1).permutation(24).astype(np.int32).reshape(3, 8)
        pages = []
        for x in caches:
            page = np.zeros((24, 4, *x.shape[2:]), x.dtype)
            page[table.ravel()] = x.reshape(24, 4, *x.shape[2:])
            pages.append(page)
        caches = pages
    o, lse = rafter.decode(
        q, *caches[:2], seqused, table, k_scale=caches[2], v_scale=caches[3], return_lse=True
    )
    np.testing.assert_allclose(o, expected[0], atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)


def test_a_scale_per_head_is_that_of_every_key():
    q, k, v = oracle.qkv(batch=2, seqlen_q=1, seqlen_kv=8)
    (k8, _), (v8, _) = quantized(k), quantized(v)
    heads = np.array([0.01, 0.02], np.float32)
    whole = np.broadcast_to(heads, (2, 8, 2)).copy()
    np.testing.assert_array_equal(
        rafter.decode(q, k8, v8, None, k_scale=heads, v_scale=heads),
        rafter.decode(q, k8, v8, None, k_scale=whole, v_scale=whole),
    )


Q, K, V = oracle.qkv(batch=2, seqlen_q=1, seqlen_kv=8)
K8, SCALE = quantized(K)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: rafter.decode(Q, K8, K8, None), "k_scale: null given"),
        (lambda: rafter.decode(Q, K, V, None, k_scale=SCALE), "k_scale: a tensor given; none"),
        (
            lambda: rafter.decode(Q, K8, K8, None, k_scale=SCALE[:, :4], v_scale=SCALE),
            "k_scale.seqlen: 4 given; 8",
        ),
        (
            lambda: rafter.decode(Q, K8, K8, None, k_scale=SCALE[0], v_scale=SCALE),
            r"k_scale: shape \[8, 2\] given; a scale per key",
        ),
        (
            lambda: rafter.decode(Q, K8, K8, None, k_scale=SCALE[0, 0, :1], v_scale=SCALE),
            "k_scale.heads: 1 given; 2",
        ),
    ],
    ids=range(5),
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match="^" + message):
        call()


@pytest.mark.parametrize("batch", [3, 4])
def test_states_of_decode_merge(batch):
    q, k, v = oracle.qkv(batch=batch, seqlen_q=1, seqlen_kv=16)  # 4 heads: square where batch is 4
    whole = rafter.decode(q[:, 0], k, v, None, return_lse=True)
    halves = [
        rafter.decode(q[:, 0], k[:, s], v[:, s], None, return_lse=True)
        for s in (slice(0, 6), slice(6, None))
    ]
    if batch == 4:
        with pytest.raises(ValueError, match="^packed: None where states.0..lse may be"):
            rafter.merge(halves)
    o, lse = rafter.merge(halves, packed=False)
    np.testing.assert_allclose(o, whole[0], atol=1e-6)
    np.testing.assert_allclose(lse, whole[1], atol=1e-5)
    with pytest.raises(ValueError, match="^states.1.: 3 arrays given; a pair"):
        rafter.merge([halves[0], (*halves[1], o)], packed=False)
