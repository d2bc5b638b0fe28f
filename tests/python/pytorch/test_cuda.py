"""Arrays on a CUDA device: streams, graphs, memory, libraries. Skipped where no kernel runs."""

import threading

import pytest
import rafter

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import rafter.torch as rt  # noqa: E402

GPU_KERNELS = [k for k in rafter.kernels() if k["device"] == "cuda" and k["machine_has"]]
pytestmark = pytest.mark.skipif(
    not GPU_KERNELS or not torch.cuda.is_available(), reason="no GPU with a kernel here"
)
sdpa = torch.nn.functional.scaled_dot_product_attention


def qkv(batch=2, seqlen_q=150, seqlen_kv=200, heads_q=4, heads_kv=2, dim=64, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randn(batch, n, h, dim, device="cuda", generator=generator).bfloat16()
        for n, h in ((seqlen_q, heads_q), (seqlen_kv, heads_kv), (seqlen_kv, heads_kv))
    ]


def exact(q, k, v, causal=False):
    """o and lse in float64, bottom-right."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if causal:
        rows, keys = scores.shape[-2:]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        scores = scores.masked_fill(~seen, float("-inf"))
    o = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    return o.transpose(1, 2), scores.logsumexp(-1)


def assert_exact(given, wanted, tolerance=1e-2):
    torch.testing.assert_close(given.double(), wanted.to(given.device), atol=tolerance, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_right_and_of_the_callers_type(causal, dtype):
    q, k, v = (x.to(dtype) for x in qkv())
    o, lse = rafter.attention(q, k, v, causal=causal, return_lse=True)
    wanted_o, wanted_lse = exact(q, k, v, causal)
    assert o.dtype == dtype and o.device == q.device and lse.dtype == torch.float32
    assert_exact(o, wanted_o)
    assert_exact(lse, wanted_lse, 1e-3)
    out = torch.full(o.shape, float("nan"), device="cuda")
    assert rafter.attention(q, k, v, causal=causal, out=out) is out
    assert torch.equal(out.to(dtype), o)


def test_a_call_like_the_one_before_has_its_own_arrays_and_options():
    """Calls are kept by what they ask for: each pair here differs in one thing alone."""
    for _ in range(2):
        for seed in (0, 1, 2):
            q, k, v = qkv(seed=seed)
            for causal in (False, True):
                assert_exact(rafter.attention(q, k, v, causal=causal), exact(q, k, v, causal)[0])
            half = rafter.attention(q * 2, k, v, softmax_scale=0.5 * 64**-0.5)
            assert torch.equal(half, rafter.attention(q, k, v))
            spread = torch.cat([k, k], -1)[..., :64]  # of another stride
            assert torch.equal(rafter.attention(q, spread, v), rafter.attention(q, k, v))
            short = rafter.attention(q, k[:, :150], v[:, :150])
            assert_exact(short, exact(q, k[:, :150], v[:, :150])[0])
            wide = rafter.attention(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
            assert_exact(wide, exact(q, k, v)[0])
            heads_first = [x.transpose(1, 2) for x in (q, k, v)]
            first = rt.scaled_dot_product_attention(*heads_first, enable_gqa=True)
            assert_exact(first.transpose(1, 2), exact(q, k, v)[0])
            for used in (90, 200):
                lengths = torch.tensor([used, 77], dtype=torch.int32, device="cuda")
                o = rafter.decode(q[:, :1], k, v, lengths)
                for b, n in enumerate((used, 77)):
                    part = [x[b : b + 1] for x in (q[:, :1], k[:, :n], v[:, :n])]
                    assert_exact(o[b : b + 1], exact(*part)[0])


def test_a_call_like_the_one_before_refuses_what_that_would_have():
    q, k, v = qkv()
    for _ in range(2):
        rafter.attention(q, k, v, causal=True)
        with pytest.raises(ValueError, match="^causal: 1 given"):
            rafter.attention(q, k, v, causal=1)
        with pytest.raises(ValueError, match="^v: a tensor that requires grad"):
            rafter.attention(q, k, v.clone().requires_grad_(), causal=True)
        with pytest.raises(ValueError, match="^k: an array on cpu"):
            rafter.attention(q, k.cpu(), v, causal=True)
        with pytest.raises(ValueError, match="^out"):
            rafter.attention(q, k, v, causal=True, out=torch.empty_like(q[:, 1:]))


def test_a_plan_runs_there():
    q, k, v = qkv()
    plan = rafter.plan(
        seqlen_q=150, seqlen_kv=200, batch=2, heads_q=4, heads_kv=2, head_dim=64, dtype="bf16",
        device="cuda", causal=True,
    )  # fmt: skip
    assert plan.device == "cuda:0" and plan.kernel in plan.explain()
    assert torch.equal(plan.forward(q, k, v), rafter.attention(q, k, v, causal=True))
    with pytest.raises(ValueError, match="^q: an array on cpu given; cuda:0 .the plan"):
        plan.forward(*(x.cpu() for x in (q, k, v)))


def later(stream, q, k, v):
    """Arrays that hold NaN until work which is queued on `stream` has run."""
    late = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # clocks: about 0.1 s
        for to, x in zip(late, (q, k, v)):
            to.copy_(x)
    return late


def test_work_is_queued_on_the_current_stream_and_nothing_waits():
    q, k, v = qkv()
    expected = rafter.attention(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    late = later(stream, q, k, v)
    with torch.cuda.stream(stream):
        o = rafter.attention(*late, causal=True)
    assert not stream.query(), "the call waited"
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("kind", ["object", "handle"])
def test_a_stream_that_is_named_is_the_one(kind):
    q, k, v = qkv()
    expected = rafter.attention(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    late = later(stream, q, k, v)
    named = stream if kind == "object" else stream.cuda_stream
    o = rafter.attention(*late, causal=True, stream=named)
    assert not stream.query(), "the call waited"
    stream.synchronize()
    assert torch.equal(o, expected)
    assert torch.cuda.current_stream() != stream


def many_tiles(seed):
    """More query tiles than a GPU has SMs: causal attention of it has a workspace."""
    return qkv(batch=12, seed=seed, seqlen_q=700, seqlen_kv=700)


def test_calls_on_several_streams_do_not_share_memory():
    given = [many_tiles(i) for i in range(3)]
    expected = [rafter.attention(*x, causal=True) for x in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    results = [[] for _ in given]
    for _ in range(40):
        for x, stream, seen in zip(given, streams, results):
            with torch.cuda.stream(stream):
                seen.append(rafter.attention(*x, causal=True))
    torch.cuda.synchronize()
    for seen, wanted in zip(results, expected):
        assert all(torch.equal(o, wanted) for o in seen)


def test_threads_on_one_stream_do_not_share_workspace():
    given = [many_tiles(i) for i in range(3)]
    expected = [rafter.attention(*x, causal=True) for x in given]
    stream, wrong = torch.cuda.Stream(), []
    torch.cuda.synchronize()

    def work(x, wanted):
        with torch.cuda.stream(stream):
            seen = [rafter.attention(*x, causal=True) for _ in range(60)]
        stream.synchronize()
        wrong.extend(o for o in seen if not torch.equal(o, wanted))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(given, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_has_workspace_of_its_own():
    """It may be replayed beside calls on the stream that it was captured on."""
    q, k, v = many_tiles(0)
    expected = rafter.attention(q, k, v, causal=True)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        rafter.attention(q, k, v, causal=True)  # the stream has workspace from here on
    with torch.cuda.graph(graph, stream=stream):
        outs = [rafter.attention(q, k, v, causal=True) for _ in range(8)]
    for _ in range(10):
        graph.replay()  # on the current stream
        with torch.cuda.stream(stream):
            seen = [rafter.attention(q, k, v, causal=True) for _ in range(8)]
        torch.cuda.synchronize()
        assert all(torch.equal(o, expected) for o in (*outs, *seen))


def test_a_graph_captures_calls_and_replays_them_as_lengths_grow():
    q, k, v = qkv(seqlen_q=1, seqlen_kv=256)
    lengths = torch.tensor([100, 200], dtype=torch.int32, device="cuda")
    rafter.decode(q, k, v, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = rafter.decode(q, k, v, lengths)
        prefill = rafter.attention(k, k, v, causal=True)
    for seed, used in ((1, [3, 256]), (2, [0, 77])):
        for to, x in zip((q, k, v), qkv(seqlen_q=1, seqlen_kv=256, seed=seed)):
            to.copy_(x)
        lengths.copy_(torch.tensor(used))
        graph.replay()
        assert torch.equal(o, rafter.decode(q, k, v, lengths))
        assert torch.equal(prefill, rafter.attention(k, k, v, causal=True))
        for b, n in enumerate(used):
            if n:
                assert_exact(o[b : b + 1], exact(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n])[0])
            else:
                assert (o[b] == 0).all()


def test_packed_sequences_have_the_bits_of_dense_ones():
    q, k, v = qkv(seqlen_q=200)
    cu = torch.tensor([0, 200, 400], dtype=torch.int32, device="cuda")
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    expected = rt.flash_attn_func(q, k, v, causal=True)
    for stated in (200, 0):
        o = rt.flash_attn_varlen_func(*flat, cu, cu, stated, stated, causal=True)
        assert torch.equal(o.view_as(q), expected)


def test_what_no_kernel_does_is_refused_by_name_not_copied_to_the_host():
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="f32 is not among"):
        rafter.attention(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match="^seqused_kv: an array on cpu given; cuda:0"):
        rafter.attention(q, k, v, seqused_kv=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="^out: an array on cpu given; cuda:0"):
        rafter.attention(q, k, v, out=q.cpu())


@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_is_near_pytorchs_without_copies(is_causal):
    q, k, v = (x.transpose(1, 2) for x in qkv(seqlen_q=200))
    options = dict(is_causal=is_causal, enable_gqa=True)
    wanted = exact(*(x.transpose(1, 2) for x in (q, k, v)), is_causal)[0].transpose(1, 2)
    error = (sdpa(q, k, v, **options).double() - wanted).abs().max()
    for views in ((q, k, v), [x.contiguous() for x in (q, k, v)]):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        o = rt.scaled_dot_product_attention(*views, **options)
        grown = torch.cuda.max_memory_allocated() - before
        assert grown <= o.numel() * 2 + (1 << 20)  # o and workspace
        assert (o.double() - wanted).abs().max() <= 1.5 * error + 1e-3


def test_compiled_whole_it_gives_the_same_bits():
    q, k, v = qkv()

    def twice(q, k, v):
        return 2 * rt.flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(twice, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        given = qkv(seed=seed)
        assert torch.equal(compiled(*given), twice(*given))


def test_gradients_are_right_or_said_not_to_be_there():
    given = [x.requires_grad_() for x in qkv(seqlen_q=200)]
    o = rt.flash_attn_func(*given, causal=True)
    d_o = torch.randn_like(o)
    if not any(kernel["pass_"] == "backward" for kernel in GPU_KERNELS):
        with pytest.raises(NotImplementedError, match="backward pass for cuda"):
            torch.autograd.grad(o, given, d_o)
        return
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = torch.autograd.grad(exact(*wide, True)[0], wide, d_o.double())
    for a, b in zip(torch.autograd.grad(o, given, d_o), wanted):
        assert ((a.double() - b).norm() / b.norm()) < 1e-2


def test_merging_there_is_right():
    q, k, v = qkv()
    halves = [
        rafter.attention(q, k[:, s], v[:, s], return_lse=True)
        for s in (slice(0, 96), slice(96, None))
    ]
    o, lse = rafter.merge(halves)
    wanted_o, wanted_lse = exact(q, k, v)
    assert o.device == q.device
    assert_exact(o, wanted_o)
    assert_exact(lse, wanted_lse, 1e-3)


def test_tokens_are_appended_there_and_nothing_waits():
    q, k, v = qkv(seqlen_q=1, seqlen_kv=1)
    stream, lengths = torch.cuda.Stream(), torch.tensor([3, 6], device="cuda")
    caches = [torch.zeros(2, 8, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    rafter.append(k, v, *(x.clone() for x in caches), lengths)  # loading the kernel waits
    late = later(stream, q, k, v)
    with torch.cuda.stream(stream):
        rafter.append(*late[1:], *caches, lengths)
    assert not stream.query(), "the call waited"
    stream.synchronize()
    for cache, x in zip(caches, (k, v)):
        for b, n in enumerate([3, 6]):
            assert torch.equal(cache[b, n], x[b, 0])
        assert cache.count_nonzero() <= 2 * 2 * 64


def test_cupys_arrays_run_on_cupys_stream():
    cupy = pytest.importorskip("cupy")
    q, k, v = (x.half() for x in qkv())
    expected = rafter.attention(q, k, v, causal=True)
    given = [cupy.from_dlpack(x) for x in (q, k, v)]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        o, lse = rafter.attention(*given, causal=True, return_lse=True)
        assert type(o) is cupy.ndarray and type(lse) is cupy.ndarray
        stream.synchronize()
    assert torch.equal(torch.from_dlpack(o), expected)
    o = rafter.attention(*given, causal=True, stream=stream)
    stream.synchronize()
    assert torch.equal(torch.from_dlpack(o), expected)


def test_jaxs_arrays_give_jaxs_arrays(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    q, k, v = qkv()
    expected = rafter.attention(q, k, v, causal=True)
    given = [jax.numpy.from_dlpack(x) for x in (q, k, v)]
    o = rafter.attention(*given, causal=True)
    assert isinstance(o, jax.Array) and o.dtype == jax.numpy.bfloat16
    assert torch.equal(torch.from_dlpack(o), expected)
