"""Libraries of arrays: what the compiled half asks of those that have no C interface of DLPack.

An array of any library is exported by DLPack without a copy. Libraries are known by name only
where DLPack leaves something open (the current stream, how to allocate, dtypes that it cannot
carry), and are never imported: a caller who has their arrays has imported them.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Optional, Tuple

_CUDA = (2, 13)  # DLPack's device types of CUDA and of CUDA's managed memory
_LEGACY_STREAM = 1  # what DLPack calls the stream whose handle is 0

# Dtypes of ml_dtypes that NumPy cannot export, and the integers that carry them.
_AS_INTEGERS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


_libraries: Dict[type, str] = {}  # of types seen: every call on a GPU asks


def library_of(array: Any) -> str:
    """The top package of an array's type: "numpy", "torch", "jax", ..."""
    kind = type(array)
    library = _libraries.get(kind)
    if library is None:
        library = _libraries[kind] = kind.__module__.partition(".")[0]
    return library


def device_of(array: Any) -> Optional[Tuple[int, int]]:
    """DLPack's (device type, index) of an array; None without DLPack."""
    device = getattr(array, "__dlpack_device__", None)
    return None if device is None else tuple(int(x) for x in device())


def _is_cuda(array: Any) -> bool:
    device = device_of(array)
    return device is not None and device[0] in _CUDA


def current_stream(array: Any) -> int:
    """The handle of the current stream of an array's library, 0 where it tells none."""
    library = library_of(array)
    if library == "torch":
        return sys.modules["torch"].cuda.current_stream(array.device).cuda_stream
    if library == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream(array.device.id).ptr
    return 0


def exported(array: Any, stream: int) -> Tuple[Any, Optional[str]]:
    """What can be read by DLPack or as a buffer, and the dtype that it stands for where that is
    another. On CUDA the array is ready for work on `stream`."""
    if library_of(array) == "numpy":
        name = array.dtype.name
        if name in _AS_INTEGERS:
            return array.view(_AS_INTEGERS[name]), name
        return array, None
    if _is_cuda(array):
        return array.__dlpack__(stream=stream or _LEGACY_STREAM), None
    return array, None


def empty(like: Any, shape: Tuple[int, ...], dtype: str, zero: bool) -> Any:
    """A contiguous array of the library and on the device of `like`, of its dtype or "float32";
    None where the library's arrays cannot be written from outside."""
    library = library_of(like)
    if library == "torch":
        if dtype != "float32" and not zero and shape == like.shape and like.is_contiguous():
            return sys.modules["torch"].empty_like(like)  # the quickest of PyTorch's ways
        make = like.new_zeros if zero else like.new_empty
        if dtype != "float32":
            return make(shape)
        return make(shape, dtype=sys.modules["torch"].float32)
    if library == "numpy":
        numpy = sys.modules["numpy"]
        make = numpy.zeros if zero else numpy.empty
        return make(shape, "float32" if dtype == "float32" else like.dtype)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        make = cupy.zeros if zero else cupy.empty
        with like.device:
            return make(shape, "float32" if dtype == "float32" else like.dtype)
    return None


def empty_bytes(like: Any, size: int) -> Any:
    """Memory on the device of `like` from its library's allocator, which gives it to nobody before
    the work of the current stream is done; None without such a library."""
    library = library_of(like)
    if library == "torch":
        return like.new_empty((size,), dtype=sys.modules["torch"].int8)
    if library == "cupy":
        with like.device:
            return sys.modules["cupy"].empty((size,), "int8")
    return None


def quick_torch(array: Any) -> Optional[tuple]:
    """What torch_memory.cpp makes tensors with, the functions that code from torch.compile calls for
    it, and workspaces, those behind torch.cuda.caching_allocator_alloc. None for arrays of other
    libraries and where this PyTorch has no such functions; `empty` and `empty_bytes` serve then."""
    if library_of(array) != "torch":
        return None
    torch = sys.modules["torch"]
    dtypes = (torch.float32, torch.float16, torch.bfloat16)  # as TorchDtype has them
    try:
        from torch._C import _cuda_cudaCachingAllocator_raw_alloc as take
        from torch._C import _cuda_cudaCachingAllocator_raw_delete as give_back
        from torch._C import _cuda_getDevice
        from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda
    except ImportError:
        return None
    make = (_empty_strided_cpu, _empty_strided_cuda)
    return torch.Tensor, dtypes, *make, _cuda_getDevice, take, give_back


def adopted(array: Any, like: Any) -> Any:
    """An array of ours as one of the library of `like`, where that can be known."""
    namespace = getattr(like, "__array_namespace__", None)
    return array if namespace is None else namespace().from_dlpack(array)


def _handle(stream: Any) -> int:
    """The cudaStream_t of a stream: an integer, or an object of torch, CuPy or cuda.core."""
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    for name in ("cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    if isinstance(stream, int) and stream >= 0:
        return stream
    raise ValueError(
        f"stream: {stream!r} given; a stream of torch or CuPy, an object with __cuda_stream__, or "
        "the handle of a cudaStream_t as an integer allowed"
    )


class _External:
    """A stream by its handle, as CUDA's protocol for Python has it."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> Tuple[int, int]:
        return 0, self._handle


@contextmanager
def on_stream(like: Any, stream: Any) -> Iterator[int]:
    """Makes `stream` the current one of the library of `like`, so that memory which it allocates
    belongs to that stream. Gives the stream's handle."""
    handle = _handle(stream)
    if not _is_cuda(like):
        raise ValueError(f"stream: {stream!r} given; None allowed with arrays in host memory")
    library = library_of(like)
    if library == "torch":
        cuda = sys.modules["torch"].cuda
        with cuda.stream(cuda.ExternalStream(handle, device=like.device)):
            yield handle
    elif library == "cupy":
        cuda = sys.modules["cupy"].cuda
        from_external = getattr(cuda.Stream, "from_external", None)  # CuPy 14 on
        with like.device:
            of_cupy = (
                cuda.ExternalStream(handle, like.device.id)
                if from_external is None
                else from_external(_External(handle))
            )
            with of_cupy:
                yield handle
    else:
        yield handle
