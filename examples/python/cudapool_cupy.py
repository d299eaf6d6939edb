"""CuPy's arrays from cudapool.

    cudapool_cupy.use()                                # for the whole process
    with cupy.cuda.using_allocator(cudapool_cupy.allocate): ...   # for a part of it

Memory is ordered by CuPy's current stream. An array that goes while another stream is current than the one it
was made on is freed for all streams: its memory is used again when all work submitted so far has finished.

SPDX-License-Identifier: MIT OR Apache-2.0
"""

import threading

import cupy

import cudapool

_PER_THREAD = 2  # CU_STREAM_PER_THREAD


class _Block:
    """Owns a block as long as CuPy refers to it."""

    __slots__ = ("address", "device", "stream")

    def __init__(self, size, device):
        self.device, self.stream = device, _current_stream(device)
        self.address = cudapool.alloc(size, stream=self.stream[0], device=device, owner="cupy")

    def __del__(self):
        try:
            is_current = _current_stream(self.device) == self.stream
            cudapool.free(self.address, stream=self.stream[0] if is_current else None)
        except (AttributeError, TypeError, cudapool.Error):
            # No address: the allocation failed. Or the interpreter is ending, and modules are gone.
            pass


def _current_stream(device):
    """Its handle, and the thread where every thread has its own stream behind that handle
    (CUPY_CUDA_PER_THREAD_DEFAULT_STREAM)."""
    handle = cupy.cuda.get_current_stream(device).ptr
    return handle, threading.get_ident() if handle == _PER_THREAD else 0


def allocate(size):
    """What `cupy.cuda.set_allocator` takes. Raises CuPy's own error for out of memory."""
    device = cupy.cuda.device.get_device_id()
    try:
        block = _Block(size, device)
    except cudapool.OutOfMemoryError as error:
        held = cudapool.stats(device=device)["live_bytes"]
        raise cupy.cuda.memory.OutOfMemoryError(size, held) from error
    memory = cupy.cuda.UnownedMemory(block.address, size, block, device)
    return cupy.cuda.MemoryPointer(memory, 0)


def use():
    """Makes the pool CuPy's allocator."""
    cupy.cuda.set_allocator(allocate)


def c_allocator():
    """The same without a stream and without Python in the way. CuPy does not check its result: out of memory
    gives an array at address 0. Only for programs that never get near it."""
    return cupy.cuda.CFunctionAllocator(
        0, cudapool.address_of("pool_cupy_alloc"), cudapool.address_of("pool_cupy_free"), cudapool.library
    )
