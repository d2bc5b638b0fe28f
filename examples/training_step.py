"""Some steps of training of a causal language model of two layers, with Rafter's attention.

usage: python examples/training_step.py [cpu|cuda] [STEPS]

Needs PyTorch. The first step's gradients are compared with those of PyTorch's own attention.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

import rafter.torch

VOCABULARY, WIDTH, HEADS, SEQLEN, BATCH = 16, 64, 4, 32, 8


class Block(nn.Module):
    """Attention and a small MLP, each with a residual."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, attention):
        batch, seqlen, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, seqlen, 3, HEADS, WIDTH // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # [batch, heads, seqlen, dim]
        o = attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(batch, seqlen, WIDTH))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Tokens to logits of the next ones."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQLEN, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, attention):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attention)
        return self.head(x)


def loss_of(model, tokens, attention):
    logits = model(tokens[:, :-1], attention)
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def batch_of(device):
    """Sequences that repeat their first half: the second half can be learnt."""
    half = torch.randint(VOCABULARY, (BATCH, SEQLEN // 2), device=device)
    return torch.cat([half, half], dim=1)


def gradients(model, tokens, attention):
    model.zero_grad()
    loss_of(model, tokens, attention).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def main():
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    ours = rafter.torch.scaled_dot_product_attention
    theirs = functional.scaled_dot_product_attention
    torch.manual_seed(0)
    model = Model().to(device)
    if device == "cuda":  # the kernels of GPUs are for bf16 and f16
        model = model.to(torch.bfloat16)

    tokens = batch_of(device)
    pairs = zip(gradients(model, tokens, ours), gradients(model, tokens, theirs))
    worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    print(f"largest difference of a gradient from PyTorch's: {worst:.1e} of its largest element")
    assert worst < (0.05 if device == "cuda" else 1e-3)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(device), ours)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} before, {losses[-1]:.3f} after {steps} steps")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
