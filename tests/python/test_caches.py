"""8-bit caches with scales, and merging what decode gives."""

import ml_dtypes
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


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("computed", [False, True])
def test_appended_tokens_are_quantised_and_read_back(paged, computed):
    q, k, v = oracle.qkv(batch=2, seqlen_q=1, seqlen_kv=4)
    lengths, new = np.array([3, 9], np.int32), np.array([4, 2])
    shape = (6, 4, 2, 24) if paged else (2, 12, 2, 24)
    table = np.array([[4, 1, 3], [0, 2, 5]], np.int32) if paged else None
    caches = [np.zeros(shape, np.int8) for _ in range(2)]
    scales = [np.zeros(shape[:3], np.float32) if computed else np.full(2, 0.04, np.float32)
              for _ in range(2)]  # fmt: skip
    dropped = np.full(2, 7, np.int32)
    given = dict(page_table=table, k_scale=scales[0], v_scale=scales[1])
    assert rafter.append(
        k, v, *caches, lengths, seqused_new=new, dropped=dropped, **given
    ) is None  # fmt: skip
    assert (dropped == 0).all()
    for b, (n, rows) in enumerate(zip(lengths, new)):
        for cache, scale, x in zip(caches, scales, (k, v)):
            at = np.arange(n, n + rows)
            where = (table[b, at // 4], at % 4) if paged else (b, at)
            factor = scale[where] if computed else scale
            np.testing.assert_allclose(
                cache[where] * factor[..., None], x[b, :rows], atol=0.021, rtol=0
            )
    o = rafter.decode(q, *caches, lengths + new, **given)
    assert np.isfinite(o).all()
    rafter.append(k, v, *caches, np.array([12, 10]), dropped=dropped, **given)
    np.testing.assert_array_equal(dropped, [4, 2])


def test_what_append_is_given_wrong_is_named():
    q, k, v = oracle.qkv(batch=2, seqlen_q=1, seqlen_kv=2)
    caches, at = [np.zeros((2, 4, 2, 24), np.float32) for _ in range(2)], np.array([0, 1])
    table = np.zeros((4, 8), np.float32)
    for more, message in [
        (dict(cos=table), "sin: None given; cos and sin"),
        (dict(cos=table, sin=table[:2]), "sin: another shape than cos"),
        (dict(cos=table.T, sin=table.T), "cos: an array of another form"),
        (dict(out=q), "out: an array given; None without q"),
        (dict(cos=table, sin=table, interleaved=3), "interleaved: 3 given"),
        (dict(interleaved=True), "interleaved: True given; False without cos and sin"),
        (dict(k_scale=np.ones(2, np.float32)), "k_scale"),
        (dict(cos=np.zeros((4, 13), "f4"), sin=np.zeros((4, 13), "f4")), "rotary_dim: 26 given"),
    ]:
        with pytest.raises(ValueError, match="^" + message):
            rafter.append(k, v, *caches, at, **more)
    with pytest.raises(ValueError, match="^seqused.size: 0 given"):
        rafter.append(k, v, *caches, None)
    caches[0].flags.writeable = False
    with pytest.raises(ValueError, match="^k_cache: a read-only array given"):
        rafter.append(k, v, *caches, at)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_e4m3_cache_is_its_values(scaled):
    q, k, v = oracle.qkv(batch=2, seqlen_q=1, seqlen_kv=8)
    k8, v8 = (x.astype(ml_dtypes.float8_e4m3fn) for x in (k, v))
    scale = np.random.default_rng(1).random((2, 8, 2), np.float32) + 0.5
    factor = scale[..., None] if scaled else 1
    scales = dict(k_scale=scale, v_scale=scale) if scaled else {}
    expected = rafter.decode(q, k8.astype("f4") * factor, v8.astype("f4") * factor, None)
    o = rafter.decode(q, k8, v8, None, kernel="forward_reference", **scales)
    np.testing.assert_allclose(o, expected, atol=1e-5)


def test_a_tree_of_new_tokens_sees_what_its_bits_say():
    q, k, v = oracle.qkv(batch=2, seqlen_q=3, seqlen_kv=16)
    seqused = np.array([16, 9])
    # Token 1 and token 2 are both children of token 0: neither sees the other.
    seen = [[0], [0, 1], [0, 2]]
    words = np.array([[sum(1 << j for j in row) for row in seen]] * 2, np.uint64)
    for tree in (words, words.astype(np.int64)):
        o = rafter.decode(q, k, v, seqused, tree_mask=tree, kernel="forward_reference")
        for b, n in enumerate(seqused):
            for i, row in enumerate(seen):
                keys = [*range(n - 3), *(n - 3 + j for j in row)]
                wanted, _ = oracle.attention(q[b : b + 1, i : i + 1], k[b : b + 1, keys],
                                             v[b : b + 1, keys])  # fmt: skip
                np.testing.assert_allclose(o[b, i], wanted[0, 0], atol=1e-5)
    for given, message in [
        (words.astype(np.int32), "tree_mask.dtype: int32 given; int64, uint64"),
        (words[:, ::2], r"tree_mask: shape \[2, 2\], strides \[3, 2\] given"),
        (words[:1], "tree_mask.batch: 1 given; 2"),
    ]:
        with pytest.raises(ValueError, match="^" + message):
            rafter.decode(q, k, v, seqused, tree_mask=given, kernel="forward_reference")
    with pytest.raises(ValueError, match="^mask: a window given; none with tree_mask"):
        rafter.decode(q, k, v, seqused, tree_mask=words, causal=True)


def test_bad_pages_are_counted_and_on_the_cpu_are_errors():
    q, k, v = oracle.qkv(batch=2, seqlen_q=1, seqlen_kv=8)
    pages = [x.reshape(4, 4, 2, 24) for x in (k, v)]
    table, used = np.array([[0, 1], [2, 3]], np.int32), np.array([8, 5])
    bad = np.full(2, 7, np.int32)
    rafter.decode(q, *pages, used, table, bad_pages=bad)
    assert (bad == 0).all()
    for given, message in [
        (bad.astype(np.int64), "bad_pages.dtype: int64 given; int32"),
        (np.zeros((2, 1), np.int32), "bad_pages: shape"),
        (bad[:1], "bad_pages"),
    ]:
        with pytest.raises(ValueError, match="^" + message):
            rafter.decode(q, *pages, used, table, bad_pages=given)
    table[1, 1] = 4
    with pytest.raises(ValueError, match=r"^page_table\[1\]\[1\]: 4 given; 0 to num_pages"):
        rafter.decode(q, *pages, used, table, bad_pages=bad)


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
    with pytest.raises(ValueError, match="^packed: True given; None or False"):
        rafter.merge([rafter.attention(q, k, v, return_lse=True)], packed=True)
