"""cudapool for Python: the calls of the C library, through ctypes.

The adapters beside this file (CuPy, Numba, cuda.core, PyTorch) are built on it. The library is found by the
environment variable CUDAPOOL_LIBRARY, else by the loader (LD_LIBRARY_PATH or an installation).

    block = cudapool.alloc(1 << 20, stream=handle)     # an address; raises OutOfMemoryError
    cudapool.free(block, stream=handle)

SPDX-License-Identifier: MIT OR Apache-2.0
"""

import ctypes
import operator
import os

PATH = os.environ.get("CUDAPOOL_LIBRARY", "libcudapool.so.0")
library = ctypes.CDLL(PATH)

CURRENT_DEVICE = -1
OUT_OF_MEMORY = 200
_STREAM_ORDERED = 1


class Error(RuntimeError):
    """A call of the library failed; `status` is its number, the text is its last error."""

    def __init__(self, status):
        self.status = status
        super().__init__(f"{status_name(status)}: {last_error()}")


class OutOfMemoryError(Error, MemoryError):
    """No device memory could be had, whatever idle memory was given up for it."""


class _Request(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("pool", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("alignment", ctypes.c_size_t),
        ("device", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("flags", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("owner", ctypes.c_char_p),
    ]


class _BlockInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("base", ctypes.c_void_p),
        ("requested_size", ctypes.c_size_t),
        ("usable_size", ctypes.c_size_t),
        ("device", ctypes.c_int32),
        ("order", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("owner", ctypes.c_char * 32),
    ]


class _Stats(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t)] + [
        (name, ctypes.c_uint64)
        for name in (
            "live_bytes live_bytes_peak requested_bytes cached_bytes pending_bytes overhead_bytes"
            " reserved_bytes reserved_bytes_peak live_blocks alloc_count free_count driver_alloc_calls"
            " driver_free_calls driver_map_calls driver_unmap_calls driver_sync_calls oom_count"
            " oom_recovered_count headroom_bytes"
        ).split()
    ]


def _function(name, result, *arguments):
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function


_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_alloc_with = _function("pool_alloc_with", _int, ctypes.POINTER(_pointer), ctypes.POINTER(_Request))
_free = _function("pool_free", _int, _pointer)
_free_async = _function("pool_free_async", _int, _pointer, _pointer)
_use_on_stream = _function("pool_use_on_stream", _int, _pointer, _pointer)
_query = _function("pool_query", _int, _pointer, ctypes.POINTER(_BlockInfo))
_trim = _function("pool_trim", _int, _pointer, _int, _size, ctypes.POINTER(_size))
_reclaim = _function("pool_reclaim", _int, _int, _size, ctypes.POINTER(_size))
_get_stats = _function("pool_get_stats", _int, _pointer, _int, ctypes.POINTER(_Stats))
_last_error = _function("pool_last_error", _size, ctypes.c_char_p, _size)
_status_name = _function("pool_status_name", ctypes.c_char_p, _int)


def _size_of(number):
    """ctypes cuts a number to the bits that it has room for. What has no room is more than any device has,
    and stays so."""
    number = operator.index(number)
    if number < 0:
        raise ValueError(f"{number} is no number of bytes")
    return min(number, 2 ** (8 * ctypes.sizeof(_size)) - 1)


def _device_of(number):
    if not -(2**31) <= operator.index(number) < 2**31:
        raise ValueError(f"{number} is no device ordinal")
    return number


def _check(status):
    if status == OUT_OF_MEMORY:
        raise OutOfMemoryError(status)
    if status != 0:
        raise Error(status)


def alloc(size, *, stream=None, device=CURRENT_DEVICE, alignment=0, owner=None):
    """A block of `size` bytes, as an address (0 for size 0): ordered by `stream`, a handle, or device-ordered
    if that is None."""
    request = _Request(ctypes.sizeof(_Request), None, _size_of(size), _size_of(alignment), _device_of(device))
    request.owner = owner.encode() if owner else None
    if stream is not None:
        request.flags, request.stream = _STREAM_ORDERED, stream
    block = _pointer()
    _check(_alloc_with(ctypes.byref(block), ctypes.byref(request)))
    return block.value or 0


def free(block, *, stream=None):
    """Frees a block: its memory is used again on `stream` at once, or, if that is None, when all work so far
    has finished."""
    _check(_free(block) if stream is None else _free_async(block, stream))


def use_on_stream(block, stream):
    """Says that the block is also used on `stream`."""
    _check(_use_on_stream(block, stream))


def query(address):
    """Which live block an address lies in."""
    info = _BlockInfo(ctypes.sizeof(_BlockInfo))
    _check(_query(address, ctypes.byref(info)))
    return {name: getattr(info, name) for name, *_ in _BlockInfo._fields_[1:]}


def trim(keep=0, *, device=CURRENT_DEVICE):
    """Gives idle memory back to the driver until at most `keep` bytes stay; the bytes given back."""
    released = _size()
    _check(_trim(None, _device_of(device), _size_of(keep), ctypes.byref(released)))
    return released.value


def reclaim(wanted, *, device=CURRENT_DEVICE):
    """Makes the pool give way to an allocation beside it; the bytes given back."""
    released = _size()
    _check(_reclaim(_device_of(device), _size_of(wanted), ctypes.byref(released)))
    return released.value


def stats(*, device=CURRENT_DEVICE):
    """The counters of the pool, by their names in the header."""
    values = _Stats(ctypes.sizeof(_Stats))
    _check(_get_stats(None, _device_of(device), ctypes.byref(values)))
    return {name: getattr(values, name) for name, *_ in _Stats._fields_[1:]}


def memory_info():
    """(free, total) bytes of the current context's device; what is idle in the pool counts as free."""
    free_bytes, total = _size(), _size()
    result = ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free_bytes), ctypes.byref(total))
    if result != 0:
        raise RuntimeError(f"cuMemGetInfo failed with result {result}")
    return min(free_bytes.value + stats()["cached_bytes"], total.value), total.value


def last_error():
    """The calling thread's last failure in a sentence."""
    text = ctypes.create_string_buffer(2048)
    _last_error(text, len(text))
    return text.value.decode(errors="replace")


def status_name(status):
    return _status_name(status).decode()


def address_of(name):
    """The address of a function of the library, for runtimes that take one as a number."""
    return ctypes.cast(getattr(library, name), _pointer).value
