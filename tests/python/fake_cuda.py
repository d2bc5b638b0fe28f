"""Arrays that say they lie on a CUDA device, without one: their memory is never to be read."""

import ctypes

import numpy as np


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_kept = []  # capsules name their memory without owning it


class CudaArray:
    """A contiguous bfloat16 (or int32) array on device `index`; notes the stream it was asked for."""

    def __init__(self, *shape, index=0, int32=False):
        self.shape, self.index, self.int32, self.streams = shape, index, int32, []

    def __dlpack_device__(self):
        return 2, self.index

    def __dlpack__(self, *, stream=None, **options):
        self.streams.append(stream)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        memory = np.zeros(1, np.int64)
        code, bits = (0, 32) if self.int32 else (4, 16)
        tensor = _Tensor(
            memory.ctypes.data, 2, self.index, len(self.shape), code, bits, 1, shape, None, 0
        )
        managed = _Managed(tensor, None, ctypes.CFUNCTYPE(None, ctypes.c_void_p)())
        _kept.append((shape, memory, managed))
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)
