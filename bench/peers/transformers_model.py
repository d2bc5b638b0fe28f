#!/usr/bin/env python3
"""Whole models beside transformers: logits of the same random weights, and times of the 7B shape.

usage: bench/peers/transformers_model.py --rafter build/rafter [--seqlen 4096,32768] [--repeats N]
       [--out FILE] [--commit ID] [--only logits|time]

Logits: transformers makes small models of each family with random weights and saves them; `rafter
bench model --tokens --logits` reads the folder. In float32 on the CPU they must be those of
transformers up to roundings; in bf16 on the GPU their distance from float32 may be 1.5 times that
of transformers' own bf16. Exit 1 otherwise. Times: prefill with cuDNN's attention and a decode step
with a dynamic cache, beside rafter's in the same run. Needs PyTorch, transformers 5, a GPU of
compute capability 9.0 and the tool.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

SMALL = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "initializer_range": 0.05,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def families():
    t = transformers
    yield "llama", t.LlamaConfig(**SMALL)
    yield "llama3", t.LlamaConfig(**SMALL, rope_parameters=LLAMA3)
    yield "biases", t.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)
    yield "mistral", t.MistralConfig(**SMALL, sliding_window=40)
    yield "qwen2", t.Qwen2Config(**SMALL, tie_word_embeddings=True)
    yield "qwen3", t.Qwen3Config(**SMALL, head_dim=128)


def run_rafter(tool, arguments):
    return subprocess.run([tool, "bench", "model", *arguments], check=True, text=True,
                          stdout=subprocess.PIPE).stdout  # fmt: skip


def rafter_logits(tool, folder, tokens, device, dtype):
    numpy.save(folder / "tokens.npy", tokens.numpy().astype("int32"))
    run_rafter(tool, [
        "--model", str(folder), "--tokens", str(folder / "tokens.npy"), "--prompt", "64",
        "--logits", str(folder / "logits.npy"), "--device", device, "--dtype", dtype,
    ])  # fmt: skip
    return torch.from_numpy(numpy.load(folder / "logits.npy"))


def distance(logits, exact):
    return ((logits.double() - exact).norm() / exact.norm()).item()


def save(out, commit, record):
    """Adds a record to the file, where one is asked for."""
    if out:
        start = {
            "date": datetime.date.today().isoformat(), "commit": commit,
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        }  # fmt: skip
        with open(out, "a") as file:
            file.write(json.dumps(start | record) + "\n")


def check_logits(tool, out, commit):
    """One line and one record a family; whether all are as they should be."""
    good = True
    for name, config in families():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter_name, parameter in model.named_parameters():  # norms and biases too
            if parameter.dim() == 1:
                is_norm = "norm" in parameter_name
                torch.nn.init.uniform_(parameter, 0.5 if is_norm else -0.5, 1.5 if is_norm else 0.5)
        for parameter in model.parameters():  # weights that every dtype holds exactly
            parameter.data = parameter.data.bfloat16().float()
        tokens = torch.randint(0, 1024, (2, 96), generator=torch.Generator().manual_seed(1))
        with tempfile.TemporaryDirectory() as place, torch.no_grad():
            folder = pathlib.Path(place)
            model.save_pretrained(folder, max_shard_size="8MB")  # in shards
            exact = model.double()(tokens).logits
            single = distance(model.float()(tokens).logits, exact)
            half_model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16
            )  # not model.to(): that rounds the angles of RoPE as well
            peer = half_model.cuda().eval()(tokens.cuda()).logits.cpu()
            ours = distance(rafter_logits(tool, folder, tokens, "cpu", "f32"), exact)
            half = distance(rafter_logits(tool, folder, tokens, "cuda", "bf16"), exact)
        theirs = distance(peer, exact)
        ok = ours < 2e-5 and half <= 1.5 * theirs
        good = good and ok
        print(f"{name:8} f32: rafter {ours:.1e}, transformers {single:.1e}; "
              f"bf16: rafter {half:.2e}, transformers {theirs:.2e}; {'ok' if ok else 'WRONG'}",
              flush=True)  # fmt: skip
        save(out, commit, {
            "kind": "logits", "family": name,
            "f32_cpu_error": ours, "f32_cpu_transformers_error": single,
            "bf16_cuda_error": half, "bf16_cuda_transformers_error": theirs,
        })  # fmt: skip
    return good


def seconds_of(call, repeats):
    samples = []
    for turn in range(-1, repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if turn >= 0:
            samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def peer_times(seqlens, repeats):
    """{(phase, seqlen): seconds} of the Llama-2-7B shape."""
    config = transformers.LlamaConfig(num_key_value_heads=32, max_position_embeddings=1 << 17)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    times = {}
    with torch.inference_mode(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for seqlen in seqlens:
            ids = torch.randint(0, 32000, (1, seqlen), device="cuda")
            times["prefill", seqlen] = seconds_of(
                lambda: model(ids, logits_to_keep=1, use_cache=True), repeats
            )
    with torch.inference_mode():
        seqlen = min(seqlens)
        cache = model(torch.randint(0, 32000, (1, seqlen), device="cuda"), logits_to_keep=1,
                      use_cache=True).past_key_values  # fmt: skip
        one = torch.zeros((1, 1), dtype=torch.long, device="cuda")
        times["decode", seqlen] = seconds_of(
            lambda: model(one, past_key_values=cache, use_cache=True), 3 * repeats
        )
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rafter", required=True)
    parser.add_argument("--seqlen", default="4096,32768")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--only", choices=("logits", "time"))
    arguments = parser.parse_args()
    if arguments.only != "time" and not check_logits(
        arguments.rafter, arguments.out, arguments.commit
    ):
        return 1
    if arguments.only == "logits":
        return 0
    seqlens = [int(n) for n in arguments.seqlen.split(",")]
    peer = peer_times(seqlens, arguments.repeats)
    torch.cuda.empty_cache()
    for (phase, seqlen), theirs in peer.items():
        document = json.loads(run_rafter(arguments.rafter, [
            "--device", "cuda", "--phase", phase, "--seqlen", str(seqlen), "--operations", "false",
            "--format", "json",
        ]))  # fmt: skip
        for row in document["benchmarks"]:
            record = {
                "phase": phase, "seqlen": seqlen,
                "step": row["case"]["operation"], "rafter_s": row["time_s"],
                "predicted_s": row["predicted_time_s"], "launches": row["launches_counted"],
                "transformers_s": theirs,
            }  # fmt: skip
            print(f"{phase} {seqlen}, {record['step']}: rafter {1e3 * row['time_s']:.2f} ms "
                  f"(predicted {1e3 * row['predicted_time_s']:.2f}), "
                  f"transformers {1e3 * theirs:.2f} ms", flush=True)  # fmt: skip
            save(arguments.out, arguments.commit, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
