"""Attention in float64, row by row, and random problems."""

import numpy as np


def attention(q, k, v, causal=False, window=None, align="bottom-right", scale=None, softcap=0.0):
    """q [B, Sq, Hq, D], k, v [B, Sk, Hkv, D] of any dtype; o [B, Sq, Hq, Dv] and lse [B, Hq, Sq]."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    batch, seqlen_q, heads, dim = q.shape
    seqlen_kv, group = k.shape[1], heads // k.shape[2]
    left, right = window or (None, None)
    right = 0 if causal else right
    offset = seqlen_kv - seqlen_q if align == "bottom-right" else 0
    o = np.zeros((batch, seqlen_q, heads, v.shape[3]))
    lse = np.full((batch, heads, seqlen_q), -np.inf)
    for b, h, i in np.ndindex(batch, heads, seqlen_q):
        first = 0 if left is None else max(0, i + offset - left)
        last = seqlen_kv if right is None else min(seqlen_kv, i + offset + right + 1)
        if first >= last:
            continue
        s = k[b, first:last, h // group] @ q[b, i, h] * (dim**-0.5 if scale is None else scale)
        s = softcap * np.tanh(s / softcap) if softcap else s
        p = np.exp(s - s.max())
        o[b, i, h] = p @ v[b, first:last, h // group] / p.sum()
        lse[b, h, i] = s.max() + np.log(p.sum())
    return o, lse


def qkv(batch=2, seqlen_q=19, seqlen_kv=33, heads_q=4, heads_kv=2, dim=24, dim_v=None, seed=0):
    """Normal float32 tensors."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, seqlen_q, heads_q, dim), (batch, seqlen_kv, heads_kv, dim)]
    shapes.append((batch, seqlen_kv, heads_kv, dim_v or dim))
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
