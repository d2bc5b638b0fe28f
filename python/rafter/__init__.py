"""Fused attention that knows its roofline.

rafter.attention and rafter.decode compute exact attention on arrays of any library with DLPack, on
the CPU or a CUDA device; rafter.attention_backward its gradients; rafter.append writes new tokens
into a cache; rafter.merge unites results over disjoint keys; rafter.explain says what attention
costs and which wall it meets on any device; rafter.plan does both for work that is repeated.
rafter.Transformer runs whole models. rafter.torch, imported on demand, has the functions that PyTorch models call.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._attention import append, attention, attention_backward, decode, merge
from ._core import __version__

if TYPE_CHECKING:
    from . import roofline
    from ._explain import Ceiling, Device, Explanation, Figure, devices, explain, kernels
    from ._plan import Plan, plan
    from ._transformer import Session, Transformer

# Imported when first asked for: attention itself needs none of it.
_LATER = {
    "Ceiling": "_explain",
    "Device": "_explain",
    "Explanation": "_explain",
    "Figure": "_explain",
    "Plan": "_plan",
    "Session": "_transformer",
    "Transformer": "_transformer",
    "devices": "_explain",
    "explain": "_explain",
    "kernels": "_explain",
    "plan": "_plan",
    "roofline": "roofline",
}

__all__ = [
    "Ceiling",
    "Device",
    "Explanation",
    "Figure",
    "Plan",
    "Session",
    "Transformer",
    "__version__",
    "append",
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


def __getattr__(name: str) -> Any:
    if name == "torch":
        raise AttributeError("rafter.torch is there after `import rafter.torch`, which needs PyTorch")
    if name not in _LATER:
        raise AttributeError(f"module 'rafter' has no attribute {name!r}")
    module = import_module(f"rafter.{_LATER[name]}")
    value = module if _LATER[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list:
    loaded = [name for name in ("torch",) if name in globals()]
    return sorted({*(name for name in globals() if name.startswith("__")), *loaded, *__all__})
