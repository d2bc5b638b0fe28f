#!/usr/bin/env python3
"""backward_sm90 beside the backward of PyTorch's attention kernels, alternating in one run.

usage: bench/peers/torch_sdpa_backward.py LIBRARY [--out FILE] [--repeats N] [--cells NAME,...]
       [--commit ID]

LIBRARY is librafter_peer.so of a build with CUDA. Gradients of q, k and v on the same tensors; o and
lse of ours are those of PyTorch's flash kernel. How it is timed and recorded: torch_sdpa.py beside
this. FLOPs are 2.5 times the forward's.
"""

import argparse
import ctypes

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_sdpa


class Case(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in
          ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "total",
           "window_left", "window_right")),
        ("is_f16", ctypes.c_int32),
    ]


GROUPS = ("table", "d256")


def candidates(library, case):
    """What is timed, by kernel; ours is compared with PyTorch's first."""
    dtype = torch.float16 if case["dtype"] == "f16" else torch.bfloat16

    def tensor():
        return torch.randn(case["batch"], case["seqlen"], case["heads_q"], case["head_dim"],
                           device="cuda", dtype=dtype)

    q, k, v, d_o = tensor(), tensor(), tensor(), tensor()
    gradients = [torch.full_like(q, float("nan")) for _ in range(3)]
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention(
        *heads_first, 0.0, bool(case["causal"]))
    o, lse = flash[0].transpose(1, 2).contiguous(), flash[1].contiguous()
    described = Case(case["batch"], case["heads_q"], case["heads_kv"], case["seqlen"],
                     case["seqlen"], case["head_dim"], 0, -1, 0 if case["causal"] else -1,
                     dtype == torch.float16)
    workspace = torch.empty(library.rafter_backward_workspace(ctypes.byref(described)),
                            dtype=torch.uint8, device="cuda")
    pointers = (ctypes.c_void_p * 8)(*(t.data_ptr() for t in (q, k, v, o, d_o, *gradients)))

    def ours():
        stream = torch.cuda.current_stream().cuda_stream
        if library.rafter_backward(ctypes.byref(described), pointers,
                                   ctypes.c_void_p(lse.data_ptr()), None,
                                   ctypes.c_void_p(workspace.data_ptr()),
                                   ctypes.c_int64(workspace.numel()),
                                   ctypes.c_void_p(stream)) != 0:
            raise SystemExit("rafter_backward failed")

    def peer(backend):
        leaves = [t.detach().requires_grad_() for t in heads_first]
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(*leaves, is_causal=bool(case["causal"]))
        return lambda: torch.autograd.grad(out, leaves, d_o.transpose(1, 2), retain_graph=True)

    runs = {"backward_sm90": ours, "torch_cudnn": peer(SDPBackend.CUDNN_ATTENTION),
            "torch_flash": peer(SDPBackend.FLASH_ATTENTION)}
    ours()
    for name, mine, theirs in zip(("dq", "dk", "dv"), gradients, runs["torch_flash"]()):
        theirs = theirs.transpose(1, 2).float()
        error = ((mine.float() - theirs).norm() / theirs.norm()).item()
        if not error < 0.01:
            raise SystemExit(f"{case}: {name} has a relative difference of {error} from PyTorch's")
    return runs


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    torch_sdpa.add_arguments(parser, GROUPS)
    arguments = parser.parse_args()
    library = ctypes.CDLL(arguments.library)
    library.rafter_backward_workspace.restype = ctypes.c_int64
    recorder = torch_sdpa.Recorder(arguments)
    for group, case in torch_sdpa.table_cases():
        if group in recorder.wanted:
            case["pass"] = "backward"
            recorder.report("backward_" + group, case, "fused",
                            recorder.measure(candidates(library, case)),
                            2.5 * torch_sdpa.flops(case))


if __name__ == "__main__":
    main()
