#!/usr/bin/env python3
"""A Llama-shaped model of transformers, random weights: its logits and tokens per second with
Rafter's attention beside PyTorch's.

usage: PYTHONPATH=build/python bench/peers/transformers_generate.py [--out FILE] [--commit ID]
       [--prompt N,...] [--batch N] [--new N] [--layers N]

The model's own generate loop, greedy, bf16, a cache that grows. Logits are those of the prompt and
of every step for the same tokens, held against the same model in float32 with PyTorch's attention;
times are the median of the repeats, implementations taking turns. Needs PyTorch, transformers 5 and
a GPU of compute capability 9.0.
"""

import argparse
import datetime
import json
import statistics
import time

import rafter.torch
import torch
import transformers

NAMES = ("sdpa", "rafter")


def model_of(layers):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=1 << 17,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def seconds_of(call):
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def generated(model, ids, new):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip


def logits_of(model, tokens, prompt):
    """Logits of every token: the prompt at once, then token by token with the cache."""
    out = model(tokens[:, :prompt], use_cache=True)
    seen = [out.logits[:, -64:].float()]
    for i in range(prompt, tokens.shape[1]):
        out = model(tokens[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        seen.append(out.logits.float())
    return torch.cat(seen, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out")
    parser.add_argument("--commit", default="")
    parser.add_argument("--prompt", default="1024,8192")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    rafter.torch.register_with_transformers()
    model = model_of(arguments.layers)
    with torch.no_grad():
        for prompt in map(int, arguments.prompt.split(",")):
            generator = torch.Generator("cuda").manual_seed(1)
            ids = torch.randint(
                3, 32000, (arguments.batch, prompt), device="cuda", generator=generator
            )
            model.set_attn_implementation("sdpa")
            tokens = generated(model, ids[:1], 8)
            logits, error = {}, {}
            for name in NAMES:
                model.set_attn_implementation(name)
                logits[name] = logits_of(model, tokens, prompt)
            model.float()
            model.set_attn_implementation("sdpa")
            exact = logits_of(model, tokens, prompt)
            model.bfloat16()
            for name in NAMES:
                error[name] = ((logits[name] - exact).norm() / exact.norm()).item()
            samples = {(name, what): [] for name in NAMES for what in ("prompt", "whole")}
            for turn in range(-1, arguments.repeats):
                for name in NAMES:
                    model.set_attn_implementation(name)
                    first = seconds_of(lambda: generated(model, ids, 1))
                    whole = seconds_of(lambda: generated(model, ids, 1 + arguments.new))
                    if turn >= 0:
                        samples[name, "prompt"].append(first)
                        samples[name, "whole"].append(whole)
            for name in NAMES:
                first = statistics.median(samples[name, "prompt"])
                whole = statistics.median(samples[name, "whole"])
                record = {
                    "date": datetime.date.today().isoformat(), "commit": arguments.commit,
                    "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                    "transformers": transformers.__version__, "attention": name,
                    "layers": arguments.layers, "batch": arguments.batch, "prompt": prompt,
                    "new": arguments.new, "prompt_s": first, "logits_error": error[name],
                    "tokens_per_s": round(arguments.batch * arguments.new / (whole - first), 1),
                    "prompt_tokens_per_s": round(arguments.batch * prompt / first),
                }  # fmt: skip
                print(
                    f"{name:7} batch {arguments.batch}, prompt {prompt}: "
                    f"{record['prompt_tokens_per_s']:.0f} prompt tokens/s, "
                    f"{record['tokens_per_s']:.1f} new tokens/s, logits off by {error[name]:.2e}"
                )
                if arguments.out:
                    with open(arguments.out, "a") as file:
                        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
