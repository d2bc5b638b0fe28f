#!/usr/bin/env python3
"""rafter bench backward beside PyTorch's CPU attention backward on the same shapes, alternating.

usage: bench/peers/torch_sdpa_backward_cpu.py RAFTER [--out FILE] [--rounds N] [--time S]
       [--threads N,...] [--cells NAME,...] [--device FILE.json] [--isa NAME]

Gradients of q, k and v; PyTorch's forward is not in its time. How it is timed and recorded:
torch_sdpa_cpu.py beside this. FLOPs are 2.5 times the forward's, as rafter counts them.
"""

import torch_sdpa_cpu


class Backward(torch_sdpa_cpu.Forward):
    doc = __doc__
    verb = "backward"
    record = "peer_backward"
    groups = ("bf16", "f32")

    @staticmethod
    def cases():
        for dtype in ("bf16", "f32"):
            base = dict(batch=1, heads=8, head_dim=128, causal=0, dtype=dtype)
            yield dtype, base | dict(seqlen=1024)
            yield dtype, base | dict(seqlen=4096)
            yield dtype, base | dict(seqlen=4096, causal=1)
            yield dtype, base | dict(seqlen=2048, head_dim=64)

    @staticmethod
    def call_of(torch, case):
        q, k, v = (torch_sdpa_cpu.random_tensor(torch, case).requires_grad_() for _ in range(3))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v,
                                                             is_causal=bool(case["causal"]))
        d_o = torch_sdpa_cpu.random_tensor(torch, case)
        return lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)


if __name__ == "__main__":
    torch_sdpa_cpu.main(Backward)
