#!/usr/bin/env python3
"""forward_sm90 beside PyTorch's attention kernels on the same tensors, alternating in one run.

usage: bench/peers/torch_sdpa.py LIBRARY [--out FILE] [--repeats N] [--cells NAME,...] [--commit ID]

LIBRARY is librafter_peer.so of a build with CUDA. One line per (kernel, case) is appended to FILE:
date, commit, device, driver, clock, kernel, case, repeats, median, p10, p90, rate. The groups of
--cells are the rows of docs/kernels/forward_sm90.md and, before and after them, the library GEMM.

Every repeat first reads 256 MiB, so that L2 holds none of the inputs and no dirty lines; while that
runs, the start event, the kernel and the stop event are queued, so launch latency is not in the
time. Candidates take turns within each repeat: a drift of the clock meets all of them. Needs
PyTorch with the cuDNN and flash backends and a GPU of compute capability 9.0.
"""

import argparse
import ctypes
import datetime
import json
import statistics
import subprocess

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, WIDTH = 16384, 2048  # tokens in all, heads · head_dim


class Case(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in
          ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "total")),
        ("causal", ctypes.c_int32),
        ("is_f16", ctypes.c_int32),
    ]


def table_cases():
    """The forward table: 16K tokens, then 32 heads, GQA, head_dim 256, f16, packed lengths."""
    for head_dim in (128, 64):
        for causal in (0, 1):
            for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                yield "table", dict(batch=TOKENS // seqlen, heads_q=WIDTH // head_dim,
                                    heads_kv=WIDTH // head_dim, seqlen=seqlen, head_dim=head_dim,
                                    causal=causal, dtype="bf16")
    base = dict(batch=1, heads_q=32, heads_kv=32, head_dim=128, dtype="bf16")
    for causal in (1, 0):
        for seqlen in (4096, 32768):
            yield "heads32", base | dict(seqlen=seqlen, causal=causal)
    yield "gqa", base | dict(heads_kv=8, seqlen=32768, causal=1)
    for causal in (1, 0):
        yield "d256", base | dict(batch=4, heads_q=8, heads_kv=8, head_dim=256, seqlen=4096,
                                  causal=causal)
    for causal in (0, 1):
        yield "f16", base | dict(batch=4, heads_q=16, heads_kv=16, seqlen=4096, causal=causal,
                                 dtype="f16")
    packed = dict(heads_q=16, heads_kv=16, head_dim=128, dtype="bf16")
    for name, lengths in (("one_long", [16384] + [128] * 127),
                          ("mixed", [1000, 2520, 2520, 2520, 1440])):
        for causal in (0, 1):
            yield "packed", packed | dict(batch=len(lengths), seqlen=max(lengths), causal=causal,
                                          lengths=name, length_list=lengths)


def flops(case):
    """4 · head_dim FLOPs per visible pair; causal counts half the square, as the peers do."""
    pairs = sum(n * n for n in case.get("length_list", [case["seqlen"]] * case["batch"]))
    return 4 * case["heads_q"] * case["head_dim"] * pairs * (0.5 if case["causal"] else 1)


def candidates(forward, case):
    dtype = torch.float16 if case["dtype"] == "f16" else torch.bfloat16
    lengths = case.get("length_list")
    rows = [sum(lengths)] if lengths else [case["batch"], case["seqlen"]]

    def tensor(heads):
        return torch.randn(*rows, heads, case["head_dim"], device="cuda", dtype=dtype)

    q, k, v = tensor(case["heads_q"]), tensor(case["heads_kv"]), tensor(case["heads_kv"])
    o = torch.full_like(q, float("nan"))
    lse = torch.empty(q.numel() // case["head_dim"], device="cuda")
    workspace = torch.empty(1 << 16, dtype=torch.uint8, device="cuda")
    offsets = None
    if lengths:
        offsets = torch.tensor([0] + lengths, device="cuda").cumsum(0).to(torch.int32)
    described = Case(case["batch"], case["heads_q"], case["heads_kv"], case["seqlen"],
                     case["seqlen"], case["head_dim"], rows[0] if lengths else 0, case["causal"],
                     dtype == torch.float16)

    def ours():
        stream = torch.cuda.current_stream().cuda_stream
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, o, lse)]
        pointers.append(ctypes.c_void_p(offsets.data_ptr() if lengths else None))
        if forward(ctypes.byref(described), *pointers, ctypes.c_void_p(workspace.data_ptr()),
                   ctypes.c_int64(workspace.numel()), ctypes.c_void_p(stream)) != 0:
            raise SystemExit("rafter_forward failed")

    runs = {"forward_sm90": ours}
    if not lengths:
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]

        def peer(backend):
            def run():
                with sdpa_kernel(backend):
                    return functional.scaled_dot_product_attention(
                        *heads_first, is_causal=bool(case["causal"]),
                        enable_gqa=case["heads_q"] != case["heads_kv"])
            return run

        runs["torch_cudnn"] = peer(SDPBackend.CUDNN_ATTENTION)
        runs["torch_flash"] = peer(SDPBackend.FLASH_ATTENTION)
        ours()
        try:
            reference = runs["torch_cudnn"]().transpose(1, 2).float()
        except RuntimeError:
            reference = runs["torch_flash"]().transpose(1, 2).float()
        error = ((o.float() - reference).norm() / reference.norm()).item()
        if not error < 0.01:
            raise SystemExit(f"{case}: relative difference {error} from PyTorch")
    return runs


def measure(runs, repeats, flush):
    for name, run in list(runs.items()):
        try:
            run()
            run()
        except RuntimeError as error:  # a backend that does not take the case
            print(f"not run: {name}: {str(error).splitlines()[0]}", flush=True)
            del runs[name]
    events = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.any(flush)
            start.record()
            run()
            stop.record()
            events[name].append((start, stop))
        if repeat % 4 == 3:
            torch.cuda.synchronize()  # the queue has a limit
    torch.cuda.synchronize()
    return {name: sorted(a.elapsed_time(b) * 1e-3 for a, b in pairs)
            for name, pairs in events.items()}


def gemm_case(size=8192):
    """The library GEMM of the same run: what the matrix units give under this run's power."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return dict(m=size, n=size, k=size, dtype="bf16"), {"torch_matmul": lambda: torch.matmul(a, b)}


def add_arguments(parser, groups):
    parser.add_argument("library")
    parser.add_argument("--out")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cells", default=",".join(groups), help="groups of rows, in commas")
    parser.add_argument("--commit", default="unknown")
    parser.set_defaults(parser=parser, groups=groups)


class Recorder:
    """Times candidates and appends a record of each to --out."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.wanted = arguments.cells.split(",")
        if unknown := set(self.wanted) - set(arguments.groups):
            arguments.parser.error(f"--cells: {', '.join(sorted(unknown))} given; "
                                   f"{', '.join(arguments.groups)} allowed")
        self.flush = torch.empty(32 << 20, dtype=torch.int64, device="cuda")
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm",
                 "--format=csv,noheader,nounits"]
        device, driver, clock = subprocess.run(query, capture_output=True, text=True,
                                               check=True).stdout.split("\n")[0].split(", ")
        self.context = {"record": "bench", "commit": arguments.commit, "device": device,
                        "driver": driver, "clock_max_hz": float(clock) * 1e6,
                        "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                        "state": "burst, L2 flushed by reading"}

    def measure(self, runs):
        return measure(runs, self.arguments.repeats, self.flush)

    def report(self, group, case, pipeline, times, work):
        shown = {key: value for key, value in case.items() if key != "length_list"}
        line = []
        for name, samples in times.items():
            median = statistics.median(samples)
            record = self.context | {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "kernel": name, "pipeline": pipeline, "group": group, "case": shown,
                "repeats": len(samples), "median_s": median,
                "p10_s": samples[len(samples) // 10], "p90_s": samples[len(samples) * 9 // 10],
                "flop_per_s": work / median}
            line.append(f"{name} {record['flop_per_s'] / 1e12:.0f}")
            if self.arguments.out:
                with open(self.arguments.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
        print(group, *(f"{key}={value}" for key, value in shown.items()), "TFLOP/s:", *line,
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser, ["gemm", "table", "heads32", "gqa", "d256", "f16", "packed"])
    arguments = parser.parse_args()
    forward = ctypes.CDLL(arguments.library).rafter_forward
    recorder = Recorder(arguments)

    def gemm():
        if "gemm" in recorder.wanted:
            case, runs = gemm_case()
            recorder.report("gemm", case, None, recorder.measure(runs),
                            2 * case["m"] * case["n"] * case["k"])

    gemm()  # before and after: the power limit drifts
    for group, case in table_cases():
        if group in recorder.wanted:
            recorder.report(group, case, "fused", recorder.measure(candidates(forward, case)),
                            flops(case))
    gemm()


if __name__ == "__main__":
    main()
