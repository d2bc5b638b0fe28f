"""Fused attention that knows its roofline.

rafter.attention and rafter.decode compute exact attention on arrays of any library with DLPack, on
the CPU or a CUDA device; rafter.attention_backward its gradients; rafter.explain says what it costs
and which wall it meets on any device; rafter.plan does both for work that is repeated;
rafter.merge unites results over disjoint keys. rafter.torch, imported on demand, has the functions
that PyTorch models call.
"""

from . import roofline
from ._attention import attention, attention_backward, decode, merge
from ._core import __version__
from ._explain import Ceiling, Device, Explanation, Figure, devices, explain, kernels
from ._plan import Plan, plan

__all__ = [
    "Ceiling",
    "Device",
    "Explanation",
    "Figure",
    "Plan",
    "__version__",
    "attention",
    "attention_backward",
    "decode",
    "devices",
    "explain",
    "kernels",
    "merge",
    "plan",
    "roofline",
]
