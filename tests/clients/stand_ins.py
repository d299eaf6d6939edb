#!/usr/bin/env python3
"""The adapters for PyTorch and CuPy, which need a GPU to run, on stand-ins for what they take from these:
which stream a block is freed on, and how long the allocator of a pool lives.
"""

import gc
import sys
import threading
import types

import cudapool
from common import equal, require_driver, true


def stand_in_for_cupy():
    """`current.stream` is the handle of the current stream."""
    current = types.SimpleNamespace(stream=2)
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        get_current_stream=lambda device: types.SimpleNamespace(ptr=current.stream),
        device=types.SimpleNamespace(get_device_id=lambda: 0),
        UnownedMemory=lambda address, size, owner, device: (address, owner),
        MemoryPointer=lambda memory, offset: memory,
        memory=types.SimpleNamespace(OutOfMemoryError=type("OutOfMemoryError", (MemoryError,), {})),
    )
    sys.modules["cupy"] = cupy
    return cupy, current


def check_cupy():
    cupy, current = stand_in_for_cupy()
    import cudapool_cupy

    streams = []
    free = cudapool.free
    cudapool.free = lambda block, *, stream=None: (streams.append(stream), free(block, stream=stream))
    elsewhere = []
    for stream, at_the_end in ((2, 2), (2, 0), (0, 0), (1, 1)):
        current.stream = stream
        block = cudapool_cupy.allocate(1000)
        true("a block of the pool", cudapool.query(block[0])["owner"] == b"cupy")
        current.stream = at_the_end
        del block
        gc.collect()
    # Made on this thread's own stream, dropped by another thread, whose own stream has the same handle.
    current.stream = 2
    elsewhere.append(cudapool_cupy.allocate(1000))
    thread = threading.Thread(target=elsewhere.clear)
    thread.start()
    thread.join()
    cudapool.free = free
    equal("the streams of the frees", streams, [2, None, 0, 1, None])
    equal("live blocks", cudapool.stats()["live_blocks"], 0)
    try:
        cudapool_cupy.allocate(1 << 60)
    except cupy.cuda.memory.OutOfMemoryError:
        return
    raise SystemExit("2^60 bytes were to be had")


def check_torch():
    gone = []

    class Allocator:
        def __init__(self, *names):
            equal("the functions", names[1:], ("pool_torch_alloc", "pool_torch_free"))

        def allocator(self):
            return self

        def __del__(self):
            gone.append("allocator")

    class Pool:
        def __init__(self, allocator):
            self.allocator = id(allocator)  # as PyTorch: not a reference

        def __del__(self):
            gone.append("pool")

    torch = types.ModuleType("torch")
    memory = types.SimpleNamespace(CUDAPluggableAllocator=Allocator)
    torch.cuda = types.SimpleNamespace(memory=memory, MemPool=Pool)
    sys.modules["torch"] = torch
    import cudapool_torch

    pool = cudapool_torch.MemPool()
    del pool
    gc.collect()
    equal("what went with a pool", gone, ["pool"])


def main():
    check_cupy()
    require_driver()
    check_torch()
    print("the adapters for CuPy and PyTorch, on stand-ins")


if __name__ == "__main__":
    main()
