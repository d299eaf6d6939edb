#!/usr/bin/env python3
"""cuda.core with its buffers from cudapool: examples/python/cudapool_cuda_core.py on the driver that the
loader finds."""

import ctypes
import gc

import cudapool
import cudapool_cuda_core
from common import equal, require_driver, true
from cuda.bindings import driver
from cuda.core import Device, LegacyPinnedMemoryResource

SIZE = 3 << 20


def check_buffers(device, resource):
    stream = device.create_stream()
    first = resource.allocate(SIZE, stream=stream)
    address = int(first.handle)
    info = cudapool.query(address + 17)
    equal("the block of a buffer", (info["base"], info["requested_size"]), (address, SIZE))
    equal("its owner and device", (info["owner"], info["device"]), (b"cuda.core", device.device_id))
    said = (first.size, first.device_id, first.is_host_accessible)
    equal("what a buffer says of itself", said, (SIZE, 0, False))

    host = LegacyPinnedMemoryResource().allocate(SIZE, stream=stream)
    first.fill(0x5A, stream=stream)
    first.copy_to(host, stream=stream)
    stream.sync()
    true("contents come back", bytes(memory_of(host)) == b"\x5a" * SIZE)

    # Stream-ordered: freed on the stream, it is there again for it at once, and without the driver.
    calls = driver_calls()
    first.close(stream)
    second = resource.allocate(SIZE, stream=stream)
    equal("memory freed on a stream serves it again", int(second.handle), address)
    equal("driver calls for that", driver_calls(), calls)
    del second
    gc.collect()
    host.close()
    stream.sync()
    equal("live blocks at the end", cudapool.stats()["live_blocks"], 0)


def check_device_wide(device, resource):
    device.memory_resource = resource
    buffer = device.allocate(SIZE, stream=device.default_stream)
    equal("what the device allocates", cudapool.query(int(buffer.handle))["owner"], b"cuda.core")
    buffer.close(device.default_stream)


def check_out_of_memory(device, resource):
    stream = device.create_stream()
    _, total = cudapool.memory_info()
    kept, piece = [], total // 8
    try:
        while len(kept) < 9:
            kept.append(resource.allocate(piece, stream=stream))
    except MemoryError as error:
        true("the error is the pool's", isinstance(error, cudapool.OutOfMemoryError))
        true("it explains itself", str(piece) in str(error) and "POOL_ERROR_OUT_OF_MEMORY" in str(error))
    true("the device is full at some time", 6 <= len(kept) < 9)
    # One that goes makes room for another.
    kept.pop().close(stream)
    kept.append(resource.allocate(piece, stream=stream))
    for buffer in kept:
        buffer.close(stream)
    for size in (1 << 50, 1 << 62):
        try:
            resource.allocate(size, stream=stream)
        except cudapool.OutOfMemoryError:
            continue
        raise SystemExit(f"{size} bytes were to be had")


def memory_of(buffer):
    return (ctypes.c_char * buffer.size).from_address(int(buffer.handle))


def driver_calls():
    return sum(count for name, count in cudapool.stats().items() if name.startswith("driver_"))


def main():
    device = Device(0)
    device.set_current()
    require_driver()
    resource = cudapool_cuda_core.Resource(device)
    check_buffers(device, resource)
    check_device_wide(device, resource)
    check_out_of_memory(device, resource)
    gc.collect()
    # Not `device.sync()`: that one goes through the runtime library.
    driver.cuCtxSynchronize()
    cudapool.trim()
    stats = cudapool.stats()
    equal("memory at the end", (stats["live_blocks"], stats["reserved_bytes"]), (0, 0))
    print(f"cuda.core: buffers from the pool on {device.name}")


if __name__ == "__main__":
    main()
