#!/usr/bin/env python3
"""rafter bench attention beside PyTorch's CPU attention on the same shapes, alternating in one run.

usage: bench/peers/torch_sdpa_cpu.py RAFTER [--out FILE] [--rounds N] [--time S] [--threads N,...]
                                     [--cells NAME,...] [--device FILE.json] [--isa NAME]

RAFTER is the built tool. One JSON line per (case, threads) is appended to FILE; it holds both: date,
commit, machine, versions, the case, and for each of the two median, p10, p90 over all rounds.

Each round runs rafter, then PyTorch, for so many seconds, each in a process of its own that is bound
to the first N CPUs of this one's; PyTorch's process lives through the rounds and sleeps while
rafter runs. Both get contiguous [batch, seqlen, heads, head_dim] tensors of normal values. FLOPs
are those that rafter counts (visible pairs alone). Needs PyTorch.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time


class Forward:
    """What is compared: the cases, rafter's verb, and PyTorch's call."""
    doc = __doc__
    verb = "attention"
    record = "peer"
    groups = ("short", "d128", "causal", "d64", "f32")

    @staticmethod
    def cases():
        """Rows of issue "CPU attention at the speed of the silicon" that are a forward."""
        base = dict(batch=1, heads=8, head_dim=128, causal=0, dtype="bf16")
        for seqlen in (16, 32, 64, 128, 256):
            yield "short", base | dict(seqlen=seqlen)
        for seqlen in (512, 1024, 2048, 4096):
            yield "d128", base | dict(seqlen=seqlen)
        yield "causal", base | dict(seqlen=4096, causal=1)
        yield "d64", base | dict(seqlen=4096, head_dim=64)
        yield "f32", base | dict(seqlen=4096, dtype="f32")

    @staticmethod
    def call_of(torch, case):
        tensors = [random_tensor(torch, case) for _ in range(3)]

        def call():
            with torch.inference_mode():
                return torch.nn.functional.scaled_dot_product_attention(
                    *tensors, is_causal=bool(case["causal"]))

        return call


def random_tensor(torch, case):
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[case["dtype"]]
    shape = (case["batch"], case["seqlen"], case["heads"], case["head_dim"])
    return torch.randn(shape, dtype=dtype).transpose(1, 2)


def worker(what, threads):
    """Answers each line on stdin ([case, seconds]) with the times of calls in so many seconds."""
    import torch

    torch.set_num_threads(threads)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    last, call = None, None
    for line in sys.stdin:
        case, seconds = json.loads(line)
        if case != last:
            call, last = what.call_of(torch, case), case
            call()
            call()
        end = time.perf_counter() + seconds
        times = []
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), flush=True)


class Peer:
    """PyTorch in a process of its own."""

    def __init__(self, threads):
        self.process = subprocess.Popen([sys.executable, sys.argv[0], "--worker", str(threads)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        **bound(threads))
        self.versions = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("PyTorch's process ended")
        return json.loads(line)

    def times(self, case, seconds):
        self.process.stdin.write(json.dumps([case, seconds]) + "\n")
        self.process.stdin.flush()
        return sorted(self.answer())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def bound(threads):
    """For subprocess: the first CPUs, as many as there are threads."""
    first = sorted(os.sched_getaffinity(0))[:threads]
    return {"preexec_fn": lambda: os.sched_setaffinity(0, first),
            "env": os.environ | {"OMP_NUM_THREADS": str(threads)}, "text": True}


def rafter_once(what, arguments, case, threads):
    command = [arguments.rafter, "bench", what.verb, "--pipeline", "fused", "--format", "json",
               "--seqlen", str(case["seqlen"]), "--head-dim", str(case["head_dim"]),
               "--heads-q", str(case["heads"]), "--batch", str(case["batch"]),
               "--causal", str(case["causal"]), "--dtype", case["dtype"],
               "--threads", str(threads), "--time", str(arguments.time), "--evidence", "false"]
    if arguments.device:
        command += ["--device", arguments.device]
    options = bound(threads)
    if arguments.isa:
        options["env"]["RAFTER_CPU_ISA"] = arguments.isa
    done = subprocess.run(command, capture_output=True, check=False, **options)
    if done.returncode != 0:
        raise SystemExit(f"rafter failed: {done.stderr.strip()}")
    document = json.loads(done.stdout)
    if len(document["benchmarks"]) != 1:
        raise SystemExit(f"rafter gave {len(document['benchmarks'])} rows where one was asked for")
    return document["context"], document["benchmarks"][0]


def summary(medians, low, high, flops):
    median = statistics.median(medians)
    return {"median_s": median, "p10_s": min(low), "p90_s": max(high), "flop_per_s": flops / median}


def compare(what, arguments, group, case, threads, peer):
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        context, row = rafter_once(what, arguments, case, threads)
        ours.append(row)
        theirs.append(peer.times(case, arguments.time))
        time.sleep(0.3)  # its threads spin for a while before they sleep
    flops = ours[0]["flops"]
    rafter = summary([r["time_s"] for r in ours], [r["time_p10_s"] for r in ours],
                     [r["time_p90_s"] for r in ours], flops)
    torch = summary([statistics.median(t) for t in theirs], [t[len(t) // 10] for t in theirs],
                    [t[len(t) * 9 // 10] for t in theirs], flops)
    return {"record": what.record,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "context": context, **peer.versions, "group": group,
            "case": case | {"threads": threads},
            "rounds": arguments.rounds, "flops": flops,
            "rafter": {"kernel": ours[0]["kernel"], **rafter}, "torch_sdpa": torch,
            "times_faster": torch["median_s"] / rafter["median_s"]}


def main(what):
    if len(sys.argv) == 3 and sys.argv[1] == "--worker":
        worker(what, int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=what.doc.split("\n")[0])
    parser.add_argument("rafter")
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--time", type=float, default=0.5)
    parser.add_argument("--threads", default="1,2,4,16")
    parser.add_argument("--cells", default=",".join(what.groups))
    parser.add_argument("--device", help="probe file of this machine (rafter probe --out)")
    parser.add_argument("--isa", help="RAFTER_CPU_ISA for rafter")
    arguments = parser.parse_args()
    for threads in (int(n) for n in arguments.threads.split(",")):
        if threads > len(os.sched_getaffinity(0)):
            print(f"skipped: {threads} threads, and there are fewer CPUs", file=sys.stderr)
            continue
        peer = Peer(threads)
        for group, case in what.cases():
            if group not in arguments.cells.split(","):
                continue
            record = compare(what, arguments, group, case, threads, peer)
            if arguments.out:
                with open(arguments.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            print(f"{threads:2d} threads", *(f"{k}={v}" for k, v in case.items()),
                  f"{record['rafter']['kernel']} {record['rafter']['flop_per_s'] / 1e12:.3f}",
                  f"torch {record['torch_sdpa']['flop_per_s'] / 1e12:.3f} TFLOP/s,"
                  f" {record['times_faster']:.2f} times", flush=True)
        peer.close()


if __name__ == "__main__":
    main(Forward)
