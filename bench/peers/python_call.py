#!/usr/bin/env python3
"""What a call from Python costs the host above the C++ call: both queue one small kernel.

usage: PYTHONPATH=build/python bench/peers/python_call.py LIBRARY [--out FILE] [--commit ID]

LIBRARY is librafter_peer.so of a build with CUDA. 200 calls in a row are queued (fewer than a
stream holds before it blocks) and timed by the host's clock; candidates take turns, the median of
60 turns counts. One line per candidate is appended to FILE. Needs PyTorch and a GPU of compute
capability 9.0. Three cases of 8 heads of 128 queries: without a mask, causal, and causal with more
query tiles than the GPU has SMs, which then draws them from a counter: a workspace.
"""

import argparse
import ctypes
import datetime
import gc
import json
import statistics
import time

import rafter
import rafter.torch
import torch

CALLS, TURNS = 200, 60
CASES = ((1, 0), (1, 1), (17, 1))  # batch, causal


class Case(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in
          ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim")),
        ("causal", ctypes.c_int32),
    ]


def cpp_call(library, q, k, v, causal):
    """A function that gives the seconds of one C++ call, the mean of CALLS."""
    seconds = ctypes.CDLL(library).rafter_seconds_per_call
    seconds.restype = ctypes.c_double
    o, workspace = torch.empty_like(q), torch.empty(1 << 20, dtype=torch.int8, device="cuda")
    case = Case(*q.shape[:1], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3], causal)
    pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, o, workspace)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)

    def timed():
        spent = seconds(ctypes.byref(case), *pointers, stream, CALLS)
        if spent < 0:
            raise SystemExit("python_call: the C++ call failed")
        return spent

    return timed


def python_call(call):
    def timed():
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - started) / CALLS

    return timed


def candidates(library, batch, causal):
    """The calls by name, and the workspace of each in bytes."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, 128, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3)
    )
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.empty_like(q)
    plan = rafter.plan(
        batch=batch, seqlen_q=128, heads_q=8, dtype="bf16", causal=bool(causal), device="cuda"
    )
    masked = dict(causal=bool(causal))
    torch_sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "C++ Plan::forward": cpp_call(library, q, k, v, causal),
        "rafter.Plan.forward, out": python_call(lambda: plan.forward(q, k, v, out=out)),
        "rafter.attention, out": python_call(lambda: rafter.attention(q, k, v, out=out, **masked)),
        "rafter.attention": python_call(lambda: rafter.attention(q, k, v, **masked)),
        "rafter.attention, lse": python_call(
            lambda: rafter.attention(q, k, v, return_lse=True, **masked)
        ),
        "rafter.torch.flash_attn_func": python_call(
            lambda: rafter.torch.flash_attn_func(q, k, v, **masked)
        ),
        "rafter.torch sdpa": python_call(
            lambda: rafter.torch.scaled_dot_product_attention(*heads_first, is_causal=bool(causal))
        ),
        "operator rafter::attention": python_call(
            lambda: torch.ops.rafter.attention(
                q, k, v, -1, 0 if causal else -1, False, None, 0.0, 0, *[None] * 8
            )
        ),
        "torch sdpa": python_call(lambda: torch_sdpa(*heads_first, is_causal=bool(causal))),
        "torch.empty_like": python_call(lambda: torch.empty_like(q)),
    }
    return calls, plan.workspace_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library")
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    records = []
    for batch, causal in CASES:
        timed, workspace = candidates(arguments.library, batch, causal)
        samples = {name: [] for name in timed}
        with torch.no_grad():
            for turn in range(-3, TURNS):  # the first three warm up
                for name, call in timed.items():
                    gc.collect(0)
                    gc.disable()
                    spent = call()
                    gc.enable()
                    torch.cuda.synchronize()
                    if turn >= 0:
                        samples[name].append(spent)
        base = statistics.median(samples["C++ Plan::forward"])
        for name, values in samples.items():
            values.sort()
            median = statistics.median(values)
            records.append({
                "date": datetime.date.today().isoformat(), "commit": arguments.commit,
                "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                "batch": batch, "causal": causal, "workspace_bytes": workspace,
                "workspace": f"workspace of {workspace} B" if workspace else "no workspace",
                "call": name, "median_s": median,
                "p10_s": values[len(values) // 10], "p90_s": values[-1 - len(values) // 10],
                "above_cpp_s": median - base,
            })  # fmt: skip
            print(
                f"batch {batch}, causal {causal}, workspace {workspace} B  {name:30} "
                f"{median * 1e6:7.2f} us, {1e6 * (median - base):+7.2f}"
            )
    if arguments.out:
        with open(arguments.out, "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
