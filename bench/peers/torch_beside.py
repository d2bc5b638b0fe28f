#!/usr/bin/env python3
"""librafter.so in one process with PyTorch and its OpenMP: the same bits, nobody waits, forks too.

usage: bench/peers/torch_beside.py LIBRARY [--out FILE] [--threads N] [--seconds S]

Runs the forward with bf16 and f32, alone, then with PyTorch imported and its threads there, then
while they multiply matrices, then in a forked child. Every run must give the bits of the first, and
PyTorch's products must stay right. Prints, and appends to FILE, one JSON record of what held and of
the median times. Exit 1 when something did not hold. Needs PyTorch; loads it after the library.
"""

import argparse
import ctypes
import datetime
import hashlib
import json
import os
import signal
import statistics
import struct
import sys
import threading
import time

i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
DTYPES = {"f32": (1, 4), "bf16": (3, 2)}  # RAFTER_F32, RAFTER_BF16; bytes
HEADS, SEQLEN, HEAD_DIM = 8, 1024, 128


class Struct(ctypes.Structure):
    """One of rafter.h."""


def of(name, *fields):
    return type(name, (Struct,), {"_fields_": list(fields)})


Tensor = of("Tensor", ("data", pointer), ("shape", i64 * 4), ("stride", i64 * 4), ("dtype", i32),
            ("reserved", i32))
Lse = of("Lse", ("data", pointer), ("shape", i64 * 3), ("stride", i64 * 3))
Indices = of("Indices", ("data", pointer), ("rows", i64), ("cols", i64), ("dtype", i32),
             ("reserved", i32))
Bits = of("Bits", ("data", pointer), ("rows", i64), ("cols", i64), ("row_stride", i64))
Counts = of("Counts", ("data", pointer), ("count", i64))
Problem = of("Problem", ("size", ctypes.c_size_t),
             *((n, i64) for n in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv",
                                  "head_dim", "head_dim_v")),
             *((n, i32) for n in ("dtype", "layout", "mask", "mask_align")),
             ("window_left", i64), ("window_right", i64), ("softmax_scale", ctypes.c_float),
             ("has_softmax_scale", i32), ("softcap", ctypes.c_float), ("seqused_kv", i32),
             *((n, i64) for n in ("total_q", "total_kv", "page_size", "num_pages")),
             ("kv_dtype", i32), ("tree_mask", i32))
Options = of("Options", ("size", ctypes.c_size_t),
             *((n, i32) for n in ("device", "device_index", "pipeline", "threads")),
             ("splits", i64), ("kernel", ctypes.c_char_p), ("device_spec", ctypes.c_char_p),
             ("pass_", i32), ("reserved", i32))
Arguments = of("Arguments", ("size", ctypes.c_size_t), *((n, Tensor) for n in "qkvo"),
               ("lse", Lse), *((n, Indices) for n in ("cu_seqlens_q", "cu_seqlens_kv",
                                                      "seqused_kv", "page_table")),
               ("workspace", pointer), ("workspace_bytes", i64), ("stream", pointer),
               ("k_scale", Tensor), ("v_scale", Tensor), ("tree_mask", Bits),
               ("bad_pages", Counts))
FUSED = 3  # RAFTER_FUSED


class Forward:
    """A plan, its tensors and its workspace."""

    def __init__(self, library, dtype, threads):
        self.library, (code, size) = library, DTYPES[dtype]
        problem = Problem(size=ctypes.sizeof(Problem), batch=1, heads_q=HEADS, seqlen_q=SEQLEN,
                          seqlen_kv=SEQLEN, head_dim=HEAD_DIM, dtype=code)
        options = Options(size=ctypes.sizeof(Options), pipeline=FUSED, threads=threads)
        self.plan = pointer()
        self.check(library.rafter_plan_create(ctypes.byref(problem), ctypes.byref(options),
                                              ctypes.byref(self.plan)))
        library.rafter_plan_kernel.restype = ctypes.c_char_p
        library.rafter_plan_workspace_bytes.restype = i64
        library.rafter_contiguous.restype = Tensor
        self.kernel = library.rafter_plan_kernel(self.plan).decode()
        count = SEQLEN * HEADS * HEAD_DIM
        self.buffers = [ctypes.create_string_buffer(count * size + 64) for _ in range(4)]
        for seed, buffer in enumerate(self.buffers[:3]):
            values = ((i * 2654435761 + seed * 40503) % 4093 / 2046.5 - 1 for i in range(count))
            if size == 4:
                buffer[:count * 4] = struct.pack(f"{count}f", *values)
            else:
                buffer[:count * 2] = b"".join(struct.pack("<f", x)[2:] for x in values)
        tensors = [library.rafter_contiguous(pointer(self.aligned(b)), code, i64(1), i64(SEQLEN),
                                             i64(HEADS), i64(HEAD_DIM)) for b in self.buffers]
        wanted = library.rafter_plan_workspace_bytes(self.plan)
        self.workspace = ctypes.create_string_buffer(wanted + 64)
        self.arguments = Arguments(size=ctypes.sizeof(Arguments), q=tensors[0], k=tensors[1],
                                   v=tensors[2], o=tensors[3],
                                   workspace=self.aligned(self.workspace),
                                   workspace_bytes=wanted)

    @staticmethod
    def aligned(buffer):
        return (ctypes.addressof(buffer) + 63) // 64 * 64

    def check(self, status):
        if status != 0:
            self.library.rafter_error_message.restype = ctypes.c_char_p
            raise SystemExit(self.library.rafter_error_message().decode())

    def run(self):
        self.check(self.library.rafter_forward(self.plan, ctypes.byref(self.arguments)))

    def digest(self):
        """Of O, after another run over a buffer of other bytes."""
        ctypes.memset(self.buffers[3], 0xA5, len(self.buffers[3]))
        self.run()
        offset = self.aligned(self.buffers[3]) - ctypes.addressof(self.buffers[3])
        return hashlib.sha256(self.buffers[3].raw[offset:-64 or None]).hexdigest()

    def median_s(self, seconds):
        times, end = [], time.perf_counter() + seconds
        while len(times) < 5 or time.perf_counter() < end:
            start = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def child_agrees(forwards, expected):
    """Whether a forked child gives the same bits; one that waits for ever is ended by SIGALRM."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if [f.digest() for f in forwards] == expected else 1)
    return os.waitpid(child, 0)[1] == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("library")
    parser.add_argument("--out")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    library = ctypes.CDLL(os.path.abspath(arguments.library))
    forwards = [Forward(library, dtype, arguments.threads) for dtype in DTYPES]
    expected = [f.digest() for f in forwards]
    held, times = {}, {"alone": [f.median_s(arguments.seconds) for f in forwards]}

    import torch
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    a, b = torch.randn(768, 768), torch.randn(768, 768)
    product = a @ b
    held["beside its idle threads"] = [f.digest() for f in forwards] == expected
    times["beside its idle threads"] = [f.median_s(arguments.seconds) for f in forwards]

    wrong, stop, products = [], threading.Event(), [0]

    def multiply():
        while not stop.is_set():
            products[0] += 1
            if not torch.allclose(a @ b, product):
                wrong.append(products[0])

    worker = threading.Thread(target=multiply, daemon=True)  # ends with a check that fails
    worker.start()
    held["while it multiplies"] = all([f.digest() for f in forwards] == expected for _ in range(5))
    times["while it multiplies"] = [f.median_s(arguments.seconds) for f in forwards]
    stop.set()
    worker.join()
    held["its products"] = not wrong and products[0] > 0
    held["in a forked child"] = child_agrees(forwards, expected)
    held["in the parent of one"] = [f.digest() for f in forwards] == expected
    with open("/proc/self/maps", encoding="utf-8") as maps:
        runtimes = sorted({line.split("/")[-1].strip() for line in maps
                           if "gomp" in line or "iomp" in line})
    record = {"record": "beside_torch",
              "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
              "torch": torch.__version__, "threads": arguments.threads, "openmp": runtimes,
              "kernels": dict(zip(DTYPES, (f.kernel for f in forwards))), "held": held,
              "products_meanwhile": products[0],
              "median_s": {when: dict(zip(DTYPES, s)) for when, s in times.items()}}
    print(json.dumps(record))
    if arguments.out:
        with open(arguments.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    sys.exit(0 if all(held.values()) else 1)


if __name__ == "__main__":
    main()
