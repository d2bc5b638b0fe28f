#!/usr/bin/env python3
"""A Llama-shaped model of transformers, random weights: its logits and tokens per second with
Rafter's attention beside PyTorch's.

usage: PYTHONPATH=build/python bench/peers/transformers_generate.py [--out FILE] [--commit ID]
       [--prompt N,...] [--batch N] [--new N] [--layers N] [--repeats N]

The model's own generate loop, greedy, bf16, a cache that grows. Logits are those of the prompt and
of every step for the same tokens, held against the same model in float32 with PyTorch's attention.
Implementations take turns, the first of a turn is the second of the next. The loop hands each token
to a clock: a turn's rate is that of the median step, since bursts of other work on the host hit
single steps; rates are medians of the turns, and `won` is the share of the turns in which an
implementation made more new tokens a second. Needs PyTorch, transformers 5 and
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


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when the loop hands on the prompt and each new token, which it has waited for."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def generated(model, ids, new, clock=None):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
        do_sample=False, pad_token_id=0, streamer=clock,
    )  # fmt: skip


def seconds_of(model, ids, new):
    """Of the prompt, and of the median step."""
    clock = Clock()
    torch.cuda.synchronize()
    generated(model, ids, new, clock)
    started, first, *rest = clock.times
    steps = [b - a for a, b in zip([first, *rest], rest)]
    return first - started, statistics.median(steps)


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
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
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
            rates = {name: {"prompt": [], "new": []} for name in NAMES}
            for turn in range(-1, arguments.repeats):
                for name in NAMES if turn % 2 == 0 else NAMES[::-1]:
                    model.set_attn_implementation(name)
                    first, step = seconds_of(model, ids, 1 + arguments.new)
                    if turn >= 0:
                        rates[name]["prompt"].append(arguments.batch * prompt / first)
                        rates[name]["new"].append(arguments.batch / step)
            pairs = list(zip(*(rates[name]["new"] for name in NAMES)))
            won = sum(rafters > torchs for torchs, rafters in pairs) / len(pairs)
            for name in NAMES:
                new = sorted(rates[name]["new"])
                record = {
                    "date": datetime.date.today().isoformat(), "commit": arguments.commit,
                    "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                    "transformers": transformers.__version__, "attention": name,
                    "layers": arguments.layers, "batch": arguments.batch, "prompt": prompt,
                    "new": arguments.new, "turns": arguments.repeats, "logits_error": error[name],
                    "tokens_per_s": round(statistics.median(new), 1),
                    "tokens_per_s_p10": round(new[len(new) // 10], 1),
                    "tokens_per_s_p90": round(new[-1 - len(new) // 10], 1),
                    "won": round(won if name == "rafter" else 1 - won, 3),
                    "prompt_tokens_per_s": round(statistics.median(rates[name]["prompt"])),
                }  # fmt: skip
                print(
                    f"{name:7} batch {arguments.batch}, prompt {prompt}: "
                    f"{record['prompt_tokens_per_s']:.0f} prompt tokens/s, "
                    f"{record['tokens_per_s']:.1f} new tokens/s ({record['tokens_per_s_p10']:.1f} to "
                    f"{record['tokens_per_s_p90']:.1f}), {record['won']:.0%} of the turns, logits off "
                    f"by {error[name]:.2e}"
                )
                if arguments.out:
                    with open(arguments.out, "a") as file:
                        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
