"""rafter.attention, decode, merge and plan against float64, without copies, with named errors."""

import threading

import ml_dtypes
import numpy as np
import oracle
import pytest
import rafter

# Largest error allowed in units of the dtype's spacing at 1: rounding of inputs, P and o.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
BFLOAT16 = ml_dtypes.bfloat16

OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "align": "top-left"},
    {"window": (5, 3)},
    {"window": (None, 2)},
    {"causal": True, "window": (7, None)},
    {"softmax_scale": 0.0},
    {"softmax_scale": 0.7, "softcap": 2.0},
]


def assert_close(o, lse, expected, tolerance):
    expected_o, expected_lse = expected
    assert o.shape == expected_o.shape
    assert lse.shape == expected_lse.shape
    np.testing.assert_array_equal(np.isinf(lse), np.isinf(expected_lse))
    seen = ~np.isinf(expected_lse)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=tolerance, rtol=0)
    np.testing.assert_allclose(np.asarray(o, np.float64), expected_o, atol=tolerance, rtol=0)


def expected_of(q, k, v, options):
    renamed = {{"softmax_scale": "scale"}.get(key, key): x for key, x in options.items()}
    return oracle.attention(q, k, v, **renamed)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_is_right_against_float64(dtype, options):
    q, k, v = (x.astype(dtype) for x in oracle.qkv(dim_v=40))
    o, lse = rafter.attention(q, k, v, return_lse=True, **options)
    assert type(o) is np.ndarray and o.dtype == dtype and lse.dtype == np.float32
    assert_close(o, lse, expected_of(q, k, v, options), TOLERANCE[np.dtype(dtype).name])


def test_every_option_changes_the_result():
    q, k, v = oracle.qkv()
    results = [rafter.attention(q, k, v, **options).tobytes() for options in OPTIONS]
    assert len(set(results)) == len(OPTIONS)


def test_rows_without_keys_are_zero_with_minus_infinity():
    q, k, v = oracle.qkv(seqlen_q=9, seqlen_kv=4)
    o, lse = rafter.attention(q, k, v, causal=True, return_lse=True)
    assert (o[:, :5] == 0).all() and np.isneginf(lse[:, :, :5]).all()
    assert np.isfinite(lse[:, :, 5:]).all()


def test_empty_sizes_run():
    q, k, v = oracle.qkv(seqlen_kv=0)
    assert (rafter.attention(q, k, v) == 0).all()
    q, k, v = oracle.qkv(seqlen_q=0)
    assert rafter.attention(q, k, v).shape == (2, 0, 4, 24)
    q, k, v = oracle.qkv(batch=0)
    assert rafter.attention(q, k, v).shape == (0, 19, 4, 24)


def test_views_are_read_in_place_and_give_the_same_bits():
    q, k, v = oracle.qkv()
    expected = rafter.attention(q, k, v)
    heads_first = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    views = [x.transpose(0, 2, 1, 3) for x in heads_first]
    assert all(view.base is not None for view in views)
    np.testing.assert_array_equal(rafter.attention(*views), expected)
    wide = np.full((2, 33, 6, 24), np.nan, np.float32)
    wide[:, :, 1:5:2] = k
    np.testing.assert_array_equal(rafter.attention(q, wide[:, :, 1:5:2], v), expected)


def test_read_only_inputs_are_taken_and_read_only_outputs_refused():
    q, k, v = oracle.qkv()
    expected = rafter.attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    np.testing.assert_array_equal(rafter.attention(q, k, v), expected)
    with pytest.raises(ValueError, match="^out: a read-only array given"):
        rafter.attention(q, k, v, out=q)


def test_out_is_written_and_returned():
    q, k, v = (x.astype(BFLOAT16) for x in oracle.qkv())
    out = np.full(q.shape, np.nan, BFLOAT16)
    assert rafter.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, rafter.attention(q, k, v))
    wide = np.full(q.shape, np.nan, np.float32)
    rafter.attention(q, k, v, out=wide)
    np.testing.assert_array_equal(wide.astype(BFLOAT16), out)


def test_packed_sequences_have_the_bits_of_dense_ones():
    lengths = [(5, 9), (0, 3), (19, 19), (4, 0)]
    parts = [oracle.qkv(1, a, b, seed=i) for i, (a, b) in enumerate(lengths)]
    q, k, v = (np.concatenate([p[i][0] for p in parts]) for i in range(3))
    cu_q, cu_kv = (np.cumsum([0] + [pair[i] for pair in lengths]) for i in range(2))
    for index_dtype in (np.int32, np.int64):
        o, lse = rafter.attention(
            q, k, v, causal=True, return_lse=True,
            cu_seqlens_q=cu_q.astype(index_dtype), cu_seqlens_kv=cu_kv.astype(index_dtype),
        )  # fmt: skip
        for i, part in enumerate(parts):
            expected_o, expected_lse = rafter.attention(*part, causal=True, return_lse=True)
            rows = slice(cu_q[i], cu_q[i + 1])
            np.testing.assert_array_equal(o[rows], expected_o[0])
            np.testing.assert_array_equal(lse[:, rows], expected_lse[0])


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_decoding_reads_only_what_a_sequence_has(index_dtype):
    lengths, page_size = [13, 0, 32], 4
    q, k, v = oracle.qkv(batch=3, seqlen_q=1, seqlen_kv=32)
    seqused = np.array(lengths, index_dtype)
    expected = [rafter.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])[0, 0]
                for b, n in enumerate(lengths)]  # fmt: skip
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = np.nan
    o, lse = rafter.decode(q[:, 0], k, v, seqused, return_lse=True)
    assert o.shape == (3, 4, 24) and lse.shape == (3, 4)
    np.testing.assert_array_equal(o, expected)
    assert np.isneginf(lse[1]).all() and np.isfinite(lse[[0, 2]]).all()
    np.testing.assert_array_equal(rafter.decode(q, k, v, seqused)[:, 0], expected)

    pages = np.random.default_rng(1).permutation(24).astype(index_dtype).reshape(3, 8)
    caches = []
    for x in (k, v):
        cache = np.full((24, page_size, 2, 24), np.nan, np.float32)
        cache[pages.ravel()] = x.reshape(24, page_size, 2, 24)
        caches.append(cache)
    np.testing.assert_array_equal(rafter.decode(q[:, 0], *caches, seqused, pages), expected)


def test_merging_halves_is_the_whole():
    q, k, v = oracle.qkv(dim_v=8)
    whole, whole_lse = rafter.attention(q, k, v, return_lse=True)
    halves = [
        rafter.attention(q, k[:, s], v[:, s], return_lse=True)
        for s in (slice(0, 11), slice(11, None))
    ]
    o, lse = rafter.merge(halves)
    np.testing.assert_allclose(o, whole, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-5)
    empty = (np.full_like(whole, np.nan), np.full_like(whole_lse, -np.inf))
    np.testing.assert_array_equal(rafter.merge([empty, halves[0]])[0], halves[0][0])
    assert rafter.merge(halves, out=halves[0])[0] is halves[0][0]
    np.testing.assert_array_equal(halves[0][0], o)


class OnlyDlpack:
    """An array of a library that nobody knows."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class WithNamespace(OnlyDlpack):
    """An array of a library of the array API."""

    @property
    def dtype(self):
        return self.array.dtype

    def __array_namespace__(self):
        return type("xp", (), {"from_dlpack": lambda x: WithNamespace(np.from_dlpack(x))})


def test_any_dlpack_array_is_taken_and_its_type_given_back():
    q, k, v = oracle.qkv()
    expected = rafter.attention(q, k, v)
    o = rafter.attention(OnlyDlpack(q), OnlyDlpack(k), v)
    np.testing.assert_array_equal(np.from_dlpack(o), expected)
    o = rafter.attention(WithNamespace(q), k, v)
    assert type(o) is WithNamespace
    np.testing.assert_array_equal(o.array, expected)


def test_a_plan_runs_as_often_as_wanted():
    plan = rafter.plan(seqlen_q=19, seqlen_kv=33, batch=2, heads_q=4, heads_kv=2, head_dim=24)
    for seed in (1, 2):
        q, k, v = oracle.qkv(seed=seed)
        np.testing.assert_array_equal(plan.forward(q, k, v), rafter.attention(q, k, v))
    assert plan.kernel in plan.explain() and plan.kernel in repr(plan)
    assert plan.workspace_bytes >= 0 and plan.problem["heads_kv"] == 2
    paged = rafter.plan(seqlen_q=1, seqlen_kv=8, page_size=4, num_pages=3, seqused_kv=True).problem
    assert (paged["page_size"], paged["num_pages"], paged["seqused_kv"]) == (4, 3, True)
    assert plan.problem["page_size"] == 0 and not plan.problem["seqused_kv"]
    assert {c.kernel for c in plan.candidates} <= {k["name"] for k in rafter.kernels()}
    assert plan.explanation.time_s > 0
    with pytest.raises(ValueError, match="^q.seqlen: 19 given; 18 allowed"):
        rafter.plan(seqlen_q=18, seqlen_kv=33, batch=2, heads_q=4, heads_kv=2, head_dim=24).forward(
            *oracle.qkv()
        )


def test_the_interpreter_runs_on_while_a_kernel_does():
    q, k, v = oracle.qkv(1, 2048, 2048, 8, 8, 64)
    counted, done, seen = [0], threading.Event(), []

    def work():
        before = counted[0]
        rafter.attention(q, k, v, threads=1)
        seen.append(counted[0] - before)
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not done.is_set():
        counted[0] += 1
    worker.join()
    assert seen[0] > 0


Q, K, V = oracle.qkv()
INDEX = np.array([0, 19, 38])
ERRORS = [
    (lambda: rafter.attention(Q, K[:1], V), ValueError, "k.batch: 1 given; 2 allowed"),
    (lambda: rafter.attention(Q, K, None), ValueError, "v: NoneType given"),
    (lambda: rafter.attention(Q, "k", V), ValueError, "k: str given"),
    (lambda: rafter.attention(Q.astype("f8"), K, V), ValueError, "q.dtype: float64 given"),
    (lambda: rafter.attention(Q, K.astype("f2"), V), ValueError, "k.dtype"),
    (lambda: rafter.attention(Q.view("u2"), K, V), ValueError, "q.dtype: uint16 given"),
    (lambda: rafter.attention(Q[0, 0, 0], K, V), ValueError, "q: 1 dims given"),
    (lambda: rafter.attention(Q[0], K[0], V[0]), ValueError, "k: 3 dims given; 4: .batch, seqlen"),
    (lambda: rafter.attention(Q, K, V, out=Q), ValueError, "out: memory that overlaps q"),
    (lambda: rafter.attention(Q[..., ::2], K[..., :12], V), ValueError, "q.stride_head_dim"),
    (lambda: rafter.attention(Q, K, V, window=3), ValueError, "window: 3 given"),
    (lambda: rafter.attention(Q, K, V, window=(-2, 0)), ValueError, "window: -2 given"),
    (lambda: rafter.attention(Q, K, V, window=(1, 2), causal=True), ValueError, "window: "),
    (lambda: rafter.attention(Q, K, V, align="top-left"), ValueError, "align: top-left given"),
    (lambda: rafter.attention(Q, K, V, causal=True, align="x"), ValueError, "align: x given"),
    (lambda: rafter.attention(Q, K, V, softcap=-1.0), ValueError, "softcap: -1"),
    (lambda: rafter.attention(Q, K, V, kernel="abacus"), ValueError, "kernel: abacus given"),
    (lambda: rafter.attention(Q, K, V, pipeline="abacus"), ValueError, "pipeline: abacus given"),
    (lambda: rafter.attention(Q, K, V, threads=-1), ValueError, "threads: -1 given"),
    (lambda: rafter.attention(Q, K, V, cu_seqlens_q=INDEX), ValueError, "cu_seqlens_kv: None"),
    (lambda: rafter.attention(Q, K, V, seqused_kv=INDEX), ValueError, "seqused_kv"),
    (lambda: rafter.attention(Q, K, V, seqused_kv=INDEX * 1.0), ValueError, "seqused_kv.dtype"),
    (lambda: rafter.attention(Q, K, V, seqused_kv=INDEX[::2]), ValueError, "seqused_kv: an array"),
    (lambda: rafter.attention(Q, K, V, out=K), ValueError, "out.seqlen: 33 given; 19 allowed"),
    (lambda: rafter.decode(Q, K[..., :8], V, None), ValueError, "k_cache.head_dim: 8 given"),
    (lambda: rafter.decode(Q, K, V, INDEX[:2] - 1), ValueError, r"seqused\[0\]: -1 given"),
    (lambda: rafter.merge([]), ValueError, "states: none given"),
    (lambda: rafter.merge([Q]), ValueError, r"states\[0\]: ndarray given"),
    (lambda: rafter.plan(seqlen_q="x"), ValueError, "seqlen_q: 'x' given; an integer"),
    (lambda: rafter.plan(seqlen_q=4, head_dim=300), ValueError, "head_dim: 300 given; 1 to 256"),
    (lambda: rafter.plan(seqlen_q=4, dtype="int4"), NotImplementedError, "forward_"),
    (
        lambda: rafter.attention(Q, K, V, pipeline="split-kv", kernel="forward_reference"),
        ValueError,
        "split-kv",
    ),
]


@pytest.mark.parametrize("call,kind,message", ERRORS, ids=[e[2] for e in ERRORS])
def test_mistakes_are_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
