#!/usr/bin/env python3
"""decode_sm90 beside PyTorch's cuDNN attention, one query token, alternating in one run.

usage: bench/peers/torch_decode.py LIBRARY [--out FILE] [--repeats N] [--cells NAME,...] [--commit ID]

As torch_sdpa.py; every candidate is a CUDA graph of its launches, so that no time is Python's. The
rate is bytes of K and V per second: the event pair is in the time. Pages lie shuffled. The group
"layers" has 32 launches, each over caches of its own, queued on a stream and as a graph; with every
sequence of length 0, which is read on the device, the same launches have nothing but launching to do.
"""

import argparse
import ctypes
import datetime
import json
import statistics

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_sdpa

HEAD_DIM = 128
TABLE = [(1, 32, 8, 2048), (1, 32, 8, 8192), (1, 32, 8, 32768), (1, 32, 8, 131072),
         (4, 32, 8, 8192), (16, 32, 8, 8192), (128, 32, 8, 8192), (64, 32, 32, 4096),
         (1, 32, 32, 32768), (32, 64, 8, 16384), (8, 128, 8, 4096)]


LAYERS = 32
LAYERS_TABLE = [(1, 32, 8, 2048), (1, 32, 8, 8192), (16, 32, 8, 2048)]


class Case(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int64) for name in
                  ("batch", "heads_q", "heads_kv", "seqlen_kv", "head_dim", "page_size",
                   "num_pages", "table_cols")),
                ("kv_bits", ctypes.c_int32)]


def cases():
    for batch, heads_q, heads_kv, seqlen in TABLE:
        base = dict(batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_kv=seqlen)
        yield "table", base | dict(kv_dtype="bf16", page_size=0)
        if (batch, seqlen) in ((1, 8192), (16, 8192), (1, 131072)):
            for page_size in (1, 16, 64, 256):
                yield "pages", base | dict(kv_dtype="bf16", page_size=page_size)
        yield "e4m3", base | dict(kv_dtype="e4m3", page_size=0)
    yield "uneven", dict(batch=64, heads_q=32, heads_kv=8, seqlen_kv=131072, kv_dtype="bf16",
                         page_size=64, lengths="1 of 131072, 63 of 1024")


def candidates(library, case):
    batch, heads_q, heads_kv, seqlen = (case[key] for key in
                                        ("batch", "heads_q", "heads_kv", "seqlen_kv"))
    page = case["page_size"]
    lengths = [131072] + [1024] * 63 if "lengths" in case else [seqlen] * batch
    bytes_per_token = 2 * heads_kv * HEAD_DIM * (1 if case["kv_dtype"] == "e4m3" else 2)
    q = torch.randn(batch, 1, heads_q, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    table = used = None
    described = Case(batch, heads_q, heads_kv, seqlen, HEAD_DIM, 0, 0, 0,
                     8 if case["kv_dtype"] == "e4m3" else 16)
    if page:
        counts = [-(-length // page) for length in lengths]
        shape = (sum(counts), page, heads_kv, HEAD_DIM)
        table = torch.full((batch, max(counts)), -1, dtype=torch.int32)
        order = torch.randperm(sum(counts)).to(torch.int32)
        for row, count, first in zip(table, counts, torch.tensor([0] + counts).cumsum(0)):
            row[:count] = order[first:first + count]
        table = table.cuda()
        used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        described.page_size, described.num_pages, described.table_cols = page, sum(counts), max(counts)
    else:
        shape = (batch, seqlen, heads_kv, HEAD_DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if case["kv_dtype"] == "e4m3":
        k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    o = torch.full_like(q, float("nan"))
    size = library.rafter_decode_workspace(ctypes.byref(described), int(used is not None))
    if size < 0:
        raise SystemExit(f"{case}: refused")
    workspace = torch.full((max(size, 16),), 255, device="cuda", dtype=torch.uint8)

    def ours():
        address = [ctypes.c_void_p(None if t is None else t.data_ptr())
                   for t in (q, k, v, o, used, table, workspace)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if library.rafter_decode(ctypes.byref(described), *address, ctypes.c_int64(size), stream):
            raise SystemExit("rafter_decode failed")

    runs = {"decode_sm90": ours}
    if not page and case["kv_dtype"] == "bf16":
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return functional.scaled_dot_product_attention(*heads_first,
                                                               enable_gqa=heads_q != heads_kv)

        runs["torch_cudnn"] = cudnn
        ours()
        reference = cudnn().transpose(1, 2).float()
        error = ((o.float() - reference).norm() / reference.norm()).item()
        if not error < 0.01:
            raise SystemExit(f"{case}: relative difference {error} from PyTorch")
    graphs = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graphs[name] = graph
    alive = (q, k, v, o, workspace, table, used, runs)
    return ({name: graph.replay for name, graph in graphs.items()},
            sum(lengths) * bytes_per_token, alive)


def layers(library, batch, heads_q, heads_kv, seqlen):
    """Launches of 32 layers by candidate, and the bytes of K and V that all read."""
    shape = (LAYERS, batch, seqlen, heads_kv, HEAD_DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, 1, heads_q, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    o = torch.empty_like(q)
    described = Case(batch, heads_q, heads_kv, seqlen, HEAD_DIM, 0, 0, 0, 16)
    size = library.rafter_decode_workspace(ctypes.byref(described), 1)
    workspace = torch.full((max(size, 16),), 255, device="cuda", dtype=torch.uint8)
    runs = {}
    for name, length in (("", seqlen), (", lengths 0", 0)):
        lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)

        def queue(lengths=lengths):
            address = [ctypes.c_void_p(t.data_ptr()) for t in (q, k, v, o, lengths, workspace)]
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if library.rafter_decode_layers(ctypes.byref(described), ctypes.c_int64(LAYERS),
                                            *address, ctypes.c_int64(size), stream):
                raise SystemExit("rafter_decode_layers failed")

        queue()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            queue()
        runs["stream" + name], runs["graph" + name] = queue, graph.replay
    return runs, 2 * k.numel() * k.element_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    torch_sdpa.add_arguments(parser, ["table", "pages", "e4m3", "uneven", "layers"])
    arguments = parser.parse_args()
    library = ctypes.CDLL(arguments.library)
    library.rafter_decode_workspace.restype = ctypes.c_int64
    recorder = torch_sdpa.Recorder(arguments)
    for group, case in cases():
        if group not in recorder.wanted:
            continue
        runs, moved, alive = candidates(library, case)
        times = recorder.measure(runs)
        line = []
        for name, samples in times.items():
            median = statistics.median(samples)
            record = recorder.context | {
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "kernel": name, "pipeline": "split-kv", "group": f"decode {group}",
                "case": case | {"head_dim": HEAD_DIM, "name": name_of(case)},
                "repeats": len(samples), "median_s": median,
                "p10_s": samples[len(samples) // 10], "p90_s": samples[len(samples) * 9 // 10],
                "kv_bytes": moved, "bytes_per_s": moved / median}
            line.append(f"{name} {median * 1e6:.1f} us ({moved / median / 1e12:.2f} TB/s)")
            if arguments.out:
                with open(arguments.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
        print(group, name_of(case), *line, flush=True)
        del runs, alive
        torch.cuda.empty_cache()
    if "layers" in recorder.wanted:
        for case in LAYERS_TABLE:
            measure_layers(recorder, library, *case)


def measure_layers(recorder, library, batch, heads_q, heads_kv, seqlen):
    runs, moved = layers(library, batch, heads_q, heads_kv, seqlen)
    times = recorder.measure(runs)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    name = f"{LAYERS} layers of {batch} × {heads_q}/{heads_kv} × {seqlen}"
    for queueing in ("stream", "graph"):
        median, empty = medians[queueing], medians[queueing + ", lengths 0"]
        record = recorder.context | {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "kernel": "decode_sm90", "pipeline": "split-kv", "group": "decode layers",
            "case": {"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv,
                     "seqlen_kv": seqlen, "kv_dtype": "bf16", "head_dim": HEAD_DIM,
                     "layers": LAYERS, "queueing": queueing, "name": name},
            "repeats": len(times[queueing]), "median_s": median, "empty_s": empty,
            "dispatch_share": empty / median, "kv_bytes": moved, "bytes_per_s": moved / median}
        print("layers", name, queueing, f"{median * 1e6:.1f} us, lengths 0 {empty * 1e6:.1f} us",
              flush=True)
        if recorder.arguments.out:
            with open(recorder.arguments.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def name_of(case):
    page = f", pages of {case['page_size']}" if case["page_size"] else ""
    lengths = case.get("lengths", case["seqlen_kv"])
    return f"{case['batch']} × {case['heads_q']}/{case['heads_kv']} × {lengths}{page}"


if __name__ == "__main__":
    main()
