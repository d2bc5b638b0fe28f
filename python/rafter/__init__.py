"""Fused attention that knows its roofline.

rafter.attention and rafter.decode compute exact attention on arrays of any library with DLPack;
rafter.explain says what it costs and which wall it meets on any device; rafter.plan does both for
work that is repeated; rafter.merge unites results over disjoint keys.
"""

from . import roofline
from ._attention import Plan, attention, decode, merge, plan
from ._core import __version__
from ._explain import Ceiling, Device, Explanation, Figure, devices, explain, kernels

__all__ = [
    "Ceiling",
    "Device",
    "Explanation",
    "Figure",
    "Plan",
    "__version__",
    "attention",
    "decode",
    "devices",
    "explain",
    "kernels",
    "merge",
    "plan",
    "roofline",
]
