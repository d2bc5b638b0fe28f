"""PyTorch: attention of the signatures that models call, with gradients, safe under torch.compile.

    from rafter.torch import scaled_dot_product_attention     # torch.nn.functional's
    from rafter.torch import flash_attn_func                  # flash_attn's, and its siblings
    rafter.torch.register_with_transformers()                 # attn_implementation="rafter"

What a signature has and Rafter has not is a NotImplementedError that names it, never ignored.
Results, gradients included, are the same bits every time. Gradients need a backward kernel for the
tensors' device and dtype; where there is none, backward() raises a NotImplementedError that says
so. Needs PyTorch 2.4 or newer; from 2.10 on its tensors come without a call of Python.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "rafter.torch: no PyTorch is installed; PyTorch 2.4 or newer allowed (pip install torch)"
    ) from error

from ._flash import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from ._sdpa import scaled_dot_product_attention
from ._transformers import register_with_transformers

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "register_with_transformers",
    "scaled_dot_product_attention",
]
