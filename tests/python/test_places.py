"""Where arrays lie and on which stream they run: what can be told without a GPU."""

import numpy as np
import oracle
import pytest
import rafter
from fake_cuda import CudaArray

HOST = np.zeros((2, 8, 2, 16), np.float32)


def cuda(*shape, **options):
    return CudaArray(*(shape or (2, 8, 2, 16)), **options)


def has_gpu():
    return any(kernel["device"] == "cuda" and kernel["machine_has"] for kernel in rafter.kernels())


@pytest.mark.skipif(has_gpu(), reason="a GPU is here, which would be given memory that is none")
@pytest.mark.parametrize(
    "call",
    [
        lambda a: rafter.attention(a, a, a),
        lambda a: rafter.decode(a, a, a, None),
        lambda a: rafter.attention_backward(a, a, a, a, a, a),
        lambda a: rafter.plan(seqlen_q=8, dtype="bf16", device="cuda"),
    ],
    ids=["attention", "decode", "backward", "plan"],
)
def test_without_a_gpu_the_planner_says_why(call):
    with pytest.raises(NotImplementedError, match="this build has no kernel|CUDA"):
        call(cuda())


@pytest.mark.parametrize("stream,asked", [(None, 1), (0, 1), (1234, 1234)])
def test_arrays_are_asked_for_on_the_stream_of_the_call(stream, asked):
    q, k = cuda(), cuda(2, 8, 2, 12)
    with pytest.raises((ValueError, NotImplementedError)):
        rafter.attention(q, k, k, stream=stream)
    assert set(q.streams) == {asked} and set(k.streams) == {asked}


class CudaStream:
    def __cuda_stream__(self):
        return 0, 77


def test_streams_of_libraries_are_taken():
    for stream, handle in [
        (CudaStream(), 77),
        (type("S", (), {"cuda_stream": 78})(), 78),
        (type("S", (), {"ptr": 79})(), 79),
    ]:
        q = cuda()
        with pytest.raises((ValueError, NotImplementedError)):
            rafter.attention(q, q, cuda(2, 8, 2), stream=stream)
        assert set(q.streams) == {handle}


def test_arrays_of_one_call_lie_together():
    for call, message in [
        (lambda: rafter.attention(HOST, cuda(), HOST), "k: an array on cuda:0 given; cpu"),
        (lambda: rafter.attention(cuda(), HOST, HOST), "k: an array on cpu given; cuda:0"),
        (lambda: rafter.attention(cuda(), cuda(index=1), cuda()), "k: an array on cuda:1 given"),
        (
            lambda: rafter.decode(cuda(), cuda(), cuda(), np.array([1, 2])),
            "seqused: an array on cpu given; cuda:0",
        ),
        (
            lambda: rafter.attention(HOST, HOST, HOST, seqused_kv=cuda(2, int32=True)),
            "seqused_kv: an array on cuda:0 given; cpu",
        ),
        (
            lambda: rafter.plan(seqlen_q=8, batch=2, heads_q=2, head_dim=16).forward(*[cuda()] * 3),
            "q: an array on cuda:0 given; cpu .the plan's",
        ),
    ]:
        with pytest.raises(ValueError, match="^" + message):
            call()


def test_streams_are_for_arrays_on_a_gpu():
    with pytest.raises(ValueError, match="^stream: 0 given; None allowed with arrays in host"):
        rafter.attention(HOST, HOST, HOST, stream=0)
    with pytest.raises(ValueError, match="^stream: 'x' given"):
        rafter.attention(cuda(), cuda(), cuda(), stream="x")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "cuda:1234567"])
def test_devices_of_plans_are_named(device):
    with pytest.raises(ValueError, match=f"^device: {device} given; cpu, cuda"):
        rafter.plan(seqlen_q=8, device=device)


def test_threads_are_of_a_cpu():
    for call in [
        lambda: rafter.plan(seqlen_q=8, dtype="bf16", device="cuda", threads=4),
        lambda: rafter.attention(cuda(), cuda(), cuda(), threads=4),
    ]:
        with pytest.raises(ValueError, match="^threads: 4 given; 0 with a CUDA device"):
            call()


def test_packed_capacities_may_be_stated():
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in oracle.qkv(seqlen_kv=19))
    cu = np.array([0, 19, 38])
    packed = dict(cu_seqlens_q=cu, cu_seqlens_kv=cu, causal=True)
    expected = rafter.attention(q, k, v, **packed)
    given = rafter.attention(q, k, v, **packed, max_seqlen_q=20, max_seqlen_kv=38)
    np.testing.assert_array_equal(given, expected)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        with pytest.raises(ValueError, match=r"^cu_seqlens_k?v?q?\[1\]: 19, a length of 19 given"):
            rafter.attention(q, k, v, **packed, **{name: 18})
        with pytest.raises(ValueError, match=f"^{name}: 4 given; None without"):
            rafter.attention(HOST, HOST, HOST, **{name: 4})
        with pytest.raises(ValueError, match=f"^{name}: 'x' given"):
            rafter.attention(q, k, v, **packed, **{name: "x"})
