"""The functions of flash_attn, on the CPU; skipped without PyTorch."""

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import rafter.torch as rt  # noqa: E402


def tensors(**sizes):
    return [torch.from_numpy(x) for x in oracle.qkv(**sizes)]


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (4, 2)},
    {"causal": True, "window_size": (4, 2)},
    {"softmax_scale": 0.3, "softcap": 2.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_flash_attn_func_is_right_against_float64(options):
    q, k, v = tensors()
    o, lse, probs = rt.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    window = options.get("window_size")
    if window and options.get("causal"):
        window = (window[0], 0)
    wanted, wanted_lse = oracle.attention(
        q, k, v, options.get("causal", False), window,
        scale=options.get("softmax_scale"), softcap=options.get("softcap", 0.0),
    )  # fmt: skip
    np.testing.assert_allclose(o, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    assert probs is None
    assert torch.equal(rt.flash_attn_func(q, k, v, deterministic=True, **options), o)


def test_every_option_changes_the_result():
    results = [rt.flash_attn_func(*tensors(), **options).numpy().tobytes() for options in OPTIONS]
    assert len(set(results)) == len(OPTIONS)


def test_qkv_in_one_tensor_gives_the_same_bits_and_gradients():
    qkv = torch.stack(tensors(heads_kv=4, seqlen_kv=19), 2).requires_grad_()
    o = rt.flash_attn_qkvpacked_func(qkv, causal=True)
    apart = [x.detach().contiguous().requires_grad_() for x in qkv.unbind(2)]
    expected = rt.flash_attn_func(*apart, causal=True)
    assert torch.equal(o, expected)
    d_o = torch.randn(o.shape)
    (gradient,) = torch.autograd.grad(o, qkv, d_o)
    for a, b in zip(gradient.unbind(2), torch.autograd.grad(expected, apart, d_o)):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="^qkv: shape"):
        rt.flash_attn_qkvpacked_func(qkv[:, :, :2])


def test_packed_sequences_have_the_bits_of_dense_ones():
    q, k, v = (x.requires_grad_() for x in tensors(seqlen_q=33))
    cu = torch.tensor([0, 33, 66], dtype=torch.int32)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    packed = rt.flash_attn_varlen_func(*flat, cu, cu, 33, 33, causal=True)
    dense = rt.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(packed.view_as(q), dense)
    d_o = torch.randn(q.shape)
    for a, b in zip(
        torch.autograd.grad(packed, flat, d_o.flatten(0, 1)),
        torch.autograd.grad(dense, (q, k, v), d_o),
    ):
        assert torch.equal(a.view_as(b), b)
    o, lse, _ = rt.flash_attn_varlen_func(*flat, cu, cu, 33, 40, return_attn_probs=True)
    assert lse.shape == (4, 66)
    with pytest.raises(ValueError, match=r"^cu_seqlens_kv\[1\]: 33, a length of 33 given"):
        rt.flash_attn_varlen_func(*flat, cu, cu, 33, 32)


def test_the_gradient_of_lse_counts():
    given = [x.requires_grad_() for x in tensors(seqlen_q=5, seqlen_kv=7, dim=8)]
    o, lse, _ = rt.flash_attn_func(*given, causal=True, return_attn_probs=True)
    gradients = torch.autograd.grad(lse.square().sum() + o.sum(), given)
    q, k, v = (x.detach().double().requires_grad_() for x in given)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 8**0.5
    scores = scores.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(2), float("-inf"))
    wanted_lse = scores.logsumexp(-1)
    wanted_o = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.repeat_interleave(2, 2))
    wanted = torch.autograd.grad(wanted_lse.square().sum() + wanted_o.sum(), (q, k, v))
    for a, b in zip(gradients, wanted):
        torch.testing.assert_close(a, b.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("lengths", [(5, 9), 7])
def test_a_cache_is_appended_to_and_read(paged, lengths):
    q, new_k, new_v = tensors(seqlen_q=2, seqlen_kv=2)
    used = [lengths] * 2 if isinstance(lengths, int) else lengths
    caches = [torch.full((2, 16, 2, 24), float("nan")) for _ in range(2)]
    for b, n in enumerate(used):
        for i, cache in enumerate(caches):
            cache[b, :n] = torch.from_numpy(oracle.qkv(1, 1, n, seed=7 + b)[1 + i][0])
    whole = [
        [torch.cat([c[b, :n], new[b]])[None] for c, new in zip(caches, (new_k, new_v))]
        for b, n in enumerate(used)
    ]
    table = None
    if paged:
        table = torch.tensor([[3, 0, 6, 1], [2, 5, 4, 7]], dtype=torch.int32)
        pool = [torch.full((8, 4, 2, 24), float("nan")) for _ in range(2)]
        for to, cache in zip(pool, caches):
            to[table.long().flatten()] = cache.view(8, 4, 2, 24)
        caches = pool
    at = lengths if isinstance(lengths, int) else torch.tensor(lengths, dtype=torch.int32)
    o, lse = rt.flash_attn_with_kvcache(
        q, *caches, new_k, new_v, cache_seqlens=at, block_table=table, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    for b in range(2):
        wanted = rt.flash_attn_func(q[b : b + 1], *whole[b], causal=True, return_attn_probs=True)
        torch.testing.assert_close(o[b : b + 1], wanted[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(lse[b : b + 1], wanted[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_new_keys_are_turned_by_their_positions(interleaved):
    q, new_k, new_v = tensors(seqlen_q=2, seqlen_kv=2)
    lengths = torch.tensor([5, 9])
    angles = torch.arange(16)[:, None] / 100 ** (torch.arange(8) / 8)[None]

    def turned(x, b):  # 16 of 24 elements
        at = slice(int(lengths[b]), int(lengths[b]) + 2)
        cos, sin = angles.cos()[at, None], angles.sin()[at, None]
        first, second = (x[..., 0:16:2], x[..., 1:16:2]) if interleaved else (
            x[..., :8], x[..., 8:16])  # fmt: skip
        pair = (first * cos - second * sin, second * cos + first * sin)
        head = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat([head, x[..., 16:]], -1)

    caches = [torch.from_numpy(oracle.qkv(2, 1, 16, seed=3)[i]).clone() for i in (1, 2)]
    before = [x.clone() for x in caches]
    o = rt.flash_attn_with_kvcache(
        q, *caches, new_k, new_v, angles.cos(), angles.sin(), cache_seqlens=lengths, causal=True,
        rotary_interleaved=interleaved,
    )  # fmt: skip
    for b, n in enumerate(lengths.tolist()):
        before[0][b, n : n + 2] = turned(new_k[b], b)
        before[1][b, n : n + 2] = new_v[b]
        for cache, wanted in zip(caches, before):
            torch.testing.assert_close(cache[b], wanted[b], atol=1e-6, rtol=0)
        wanted = rt.flash_attn_func(
            turned(q[b], b)[None], *(x[b : b + 1, : n + 2] for x in before), causal=True
        )
        torch.testing.assert_close(o[b : b + 1], wanted, atol=2e-6, rtol=0)


def test_appending_keeps_the_rules_of_torch_compile():
    q, new_k, new_v = tensors(seqlen_q=2, seqlen_kv=2)
    lengths = torch.tensor([5, 9])

    def step(cache_k, cache_v):
        return rt.flash_attn_with_kvcache(
            q, cache_k, cache_v, new_k, new_v, cache_seqlens=lengths, causal=True
        )

    eager = [torch.zeros(2, 16, 2, 24) for _ in range(2)]
    compiled = [x.clone() for x in eager]
    whole = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(step(*eager), whole(*compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled))
    assert eager[0][1, 9].abs().sum() > 0


def test_parts_of_the_keys_are_honoured():
    q, k, v = tensors(seqlen_q=1, seqlen_kv=64)
    whole = rt.flash_attn_with_kvcache(q, k, v)
    split = rt.flash_attn_with_kvcache(q, k, v, num_splits=4)
    torch.testing.assert_close(whole, split, atol=1e-6, rtol=0)


Q, K, V = tensors()
ONES, LENGTHS = torch.ones(2), torch.tensor([5, 33])
CU = torch.tensor([0, 19])


@pytest.mark.parametrize(
    "call,kind,message",
    [
        (lambda: rt.flash_attn_func(Q, K, V, 0.5), NotImplementedError, "dropout_p: 0.5"),
        (
            lambda: rt.flash_attn_func(Q, K, V, alibi_slopes=ONES),
            NotImplementedError,
            "alibi_slopes: a tensor",
        ),
        (
            lambda: rt.flash_attn_varlen_func(
                Q[0], K[0], V[0], CU, CU, 19, 19, block_table=ONES
            ),
            NotImplementedError,
            "block_table: a tensor",
        ),
        *[
            (
                lambda name=name: rt.flash_attn_with_kvcache(Q, K, V, **{name: ONES}),
                NotImplementedError,
                f"{name}: a tensor",
            )
            for name in ("cache_batch_idx", "cache_leftpad", "alibi_slopes")
        ],
        (lambda: rt.flash_attn_with_kvcache(Q, K, V, K), ValueError, "k: given without v"),
        (
            lambda: rt.flash_attn_with_kvcache(Q, K, V, rotary_cos=ONES),
            ValueError,
            "rotary_cos: given without rotary_sin",
        ),
        (
            lambda: rt.flash_attn_with_kvcache(Q, K, V, rotary_cos=ONES, rotary_sin=ONES),
            ValueError,
            "k: None given; new tokens",
        ),
        (
            lambda: rt.flash_attn_with_kvcache(
                Q, K, V, K[:, :2], V[:, :2], rotary_cos=ONES, rotary_sin=ONES, cache_seqlens=3
            ),
            NotImplementedError,
            "rotary_cos: 19 queries and 2 new tokens",
        ),
        (
            lambda: rt.flash_attn_with_kvcache(Q, K, V, K, V),
            ValueError,
            "cache_seqlens: None given",
        ),
        (
            lambda: rt.flash_attn_with_kvcache(Q, K, V, K[:, :1], V[:, :1], cache_seqlens=LENGTHS),
            ValueError,
            "cache_seqlens: 34 with k given; 33",
        ),
        (
            lambda: rt.flash_attn_with_kvcache(Q.clone().requires_grad_(), K[:, :4], V[:, :4],
                                               cache_seqlens=torch.tensor([4, 8]),
                                               block_table=torch.zeros(2, 2, dtype=torch.int32)),
            NotImplementedError,
            "page_table: a tensor is not supported where q",
        ),
    ],
    ids=range(13),
)  # fmt: skip
def test_what_they_have_not_is_refused_by_name(call, kind, message):
    with pytest.raises(kind, match="^" + message):
        call()
