"""Arrays of any library: what the compiled half takes, and results of the caller's type."""

from __future__ import annotations

import sys
from typing import Any

from . import _core

FLOAT32 = "float32"


def library_of(array: Any) -> str:
    """The top package of an array's type: "numpy", "torch", "jax", ..."""
    return type(array).__module__.partition(".")[0]


def dtype_name(array: Any) -> str:
    """ "float32", "bfloat16", ... of an array that has a dtype, else ""."""
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def _bits(array: Any) -> tuple[Any, bool]:
    """The array as DLPack can carry it, and whether its uint16 are bfloat16.

    NumPy has no bfloat16 of its own; that of ml_dtypes cannot be exported and goes as uint16.
    """
    if library_of(array) == "numpy" and dtype_name(array) == "bfloat16":
        return array.view("uint16"), True
    return array, False


def _checked(name: str, array: Any) -> Any:
    """The array; a ValueError where its gradient would be lost."""
    if getattr(array, "requires_grad", False):
        raise ValueError(
            f"{name}: a tensor that requires grad given; tensors without gradient allowed "
            "(detach() them)"
        )
    return array


def inputs(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    seqused_kv: Any = None,
    page_table: Any = None,
    decode: bool = False,
) -> _core.Inputs:
    names = ("q", "k_cache", "v_cache") if decode else ("q", "k", "v")
    arrays, bf16 = zip(*(_bits(_checked(n, a)) for n, a in zip(names, (q, k, v))))
    return _core.Inputs(
        *arrays,
        bf16=bf16,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        seqused_kv=seqused_kv,
        page_table=page_table,
        decode=decode,
    )


def tensor(name: str, array: Any, writable: bool = False) -> _core.Tensor:
    array, bf16 = _bits(_checked(name, array))
    return _core.Tensor(name, array, writable=writable, bits16_are_bf16=bf16)


class Output:
    """A result: memory that can be written, and what the caller gets of it."""

    def __init__(self, like: Any, shape: tuple[int, ...], dtype: str | None = None):
        """`dtype` is "float32", or None for that of `like`."""
        self._finish = None
        library = library_of(like)
        if library == "numpy":
            self.array = sys.modules["numpy"].empty(shape, dtype=dtype or like.dtype)
        elif library == "torch":
            torch = sys.modules["torch"]
            wanted = torch.float32 if dtype == FLOAT32 else like.dtype
            self.array = torch.empty(shape, dtype=wanted, device=like.device)
        else:
            # Written once here, then handed to the caller's library without a copy.
            self.array = _core.empty(shape, dtype or dtype_name(like) or FLOAT32)
            namespace = getattr(like, "__array_namespace__", None)
            self._finish = namespace().from_dlpack if namespace else None

    def result(self) -> Any:
        return self._finish(self.array) if self._finish else self.array
