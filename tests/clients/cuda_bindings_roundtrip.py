#!/usr/bin/env python3
"""NVIDIA's cuda-bindings on the driver that the loader finds: bytes go to the device and come back.

cuda-bindings takes every function from cuGetProcAddress_v2 and checks nothing itself, so what answers here
is the driver. Covers memory of each kind, copies in every direction, streams, events, the virtual memory
calls and the failures a client relies on. Exit code 0: all as on a real device.
"""

import random

from cuda.bindings import driver
from cuda.bindings.driver import CUresult

from common import equal, require_driver, true

SIZE = 3 * 1024 * 1024 + 12345  # no multiple of anything


def ok(answer):
    """The values of a call that must succeed: none, one, or a tuple."""
    result, *values = answer
    if result != CUresult.CUDA_SUCCESS:
        raise SystemExit(f"a call that must succeed answers {result!r}")
    return values[0] if len(values) == 1 else tuple(values)


def fails(what, answer, code):
    equal(what, answer[0], code)


def pattern(seed, size=SIZE):
    return random.Random(seed).randbytes(size)


def download(source, size=SIZE):
    into = bytearray(size)
    ok(driver.cuMemcpyDtoH(into, source, size))
    return bytes(into)


def address(pointer):
    return driver.CUdeviceptr(int(pointer))


def attribute(name, device):
    number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return ok(driver.cuDeviceGetAttribute(number, device))


def check_device():
    true("a device is there", ok(driver.cuDeviceGetCount()) >= 1)
    device = ok(driver.cuDeviceGet(0))
    name = ok(driver.cuDeviceGetName(128, device)).split(b"\0")[0]
    true("the device has a name", len(name) > 0)
    true("the device has memory", ok(driver.cuDeviceTotalMem(device)) > 1 << 20)
    true("the device computes", attribute("COMPUTE_CAPABILITY_MAJOR", device) >= 5)
    equal("unified addressing", attribute("UNIFIED_ADDRESSING", device), 1)
    fails("device -1", driver.cuDeviceGet(-1), CUresult.CUDA_ERROR_INVALID_DEVICE)
    name = ok(driver.cuGetErrorName(CUresult.CUDA_ERROR_OUT_OF_MEMORY))
    equal("the name of code 2", name, b"CUDA_ERROR_OUT_OF_MEMORY")
    return device


def check_lookup():
    for name in (b"cuMemAlloc", b"cuMemFreeAsync", b"cuMemAddressReserve"):
        pointer, status = ok(driver.cuGetProcAddress(name, 12000, 0))
        true(f"{name} is found", pointer and int(status) == 0)
    misses = ((b"cuNoSuchName", 12000, 1), (b"cuMemAlloc_v2", 12000, 1), (b"cuMemCreate", 2000, 2))
    for name, version, status in misses:
        pointer, got = ok(driver.cuGetProcAddress(name, version, 0))
        equal(f"lookup of {name} at {version}", (int(pointer), int(got)), (0, status))


def check_plain_memory():
    data, other = pattern(1), pattern(2)
    first, second = ok(driver.cuMemAlloc(SIZE)), ok(driver.cuMemAlloc(SIZE))
    equal("alignment", int(first) % 256, 0)
    ok(driver.cuMemcpyHtoD(first, data, SIZE))
    ok(driver.cuMemcpyHtoD(second, other, SIZE))
    equal("first buffer", download(first), data)
    equal("second buffer", download(second), other)
    ok(driver.cuMemcpyDtoD(second, first, SIZE))
    ok(driver.cuCtxSynchronize())
    equal("device to device", download(second), data)
    ok(driver.cuMemsetD8(address(int(first) + 100), 0xA5, 1000))
    ok(driver.cuMemsetD32(second, 0x01020304, 1000))
    ok(driver.cuCtxSynchronize())
    equal("memset of bytes", download(first), data[:100] + b"\xa5" * 1000 + data[1100:])
    equal("memset of words", download(second), b"\x04\x03\x02\x01" * 1000 + data[4000:])
    base, size = ok(driver.cuMemGetAddressRange(address(int(first) + 4096)))
    equal("address range", (int(base), size), (int(first), SIZE))
    ok(driver.cuMemFree(first))
    ok(driver.cuMemFree(second))
    fails("double free", driver.cuMemFree(second), CUresult.CUDA_ERROR_INVALID_VALUE)
    fails("size 0", driver.cuMemAlloc(0), CUresult.CUDA_ERROR_INVALID_VALUE)
    fails("too large", driver.cuMemAlloc(1 << 50), CUresult.CUDA_ERROR_OUT_OF_MEMORY)


def check_streams_and_events():
    data, back = pattern(3), bytearray(SIZE)
    producer = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    consumer = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    buffer, copy = ok(driver.cuMemAlloc(SIZE)), ok(driver.cuMemAlloc(SIZE))

    ok(driver.cuEventRecord(start, producer))
    ok(driver.cuMemcpyHtoDAsync(buffer, data, SIZE, producer))
    ok(driver.cuEventRecord(end, producer))
    ok(driver.cuStreamWaitEvent(consumer, end, 0))
    ok(driver.cuMemcpyDtoDAsync(copy, buffer, SIZE, consumer))
    ok(driver.cuMemcpyDtoHAsync(back, copy, SIZE, consumer))
    ok(driver.cuStreamSynchronize(consumer))
    equal("through two streams", bytes(back), data)
    ok(driver.cuEventSynchronize(end))
    ok(driver.cuEventQuery(end))
    ok(driver.cuStreamQuery(producer))
    true("time passes", ok(driver.cuEventElapsedTime(start, end)) >= 0)

    ok(driver.cuMemFree(buffer))
    ok(driver.cuMemFree(copy))
    for event in (start, end):
        ok(driver.cuEventDestroy(event))
    for stream in (producer, consumer):
        ok(driver.cuStreamDestroy(stream))


def check_stream_ordered_memory(device):
    if not attribute("MEMORY_POOLS_SUPPORTED", device):
        return
    data, back = pattern(4), bytearray(SIZE)
    per_thread = driver.CUstream(driver.CU_STREAM_PER_THREAD)
    stream = ok(driver.cuStreamCreate(0))
    for queue in (stream, per_thread):
        buffer = ok(driver.cuMemAllocAsync(SIZE, queue))
        ok(driver.cuMemcpyHtoDAsync(buffer, data, SIZE, queue))
        ok(driver.cuMemcpyDtoHAsync(back, buffer, SIZE, queue))
        ok(driver.cuMemFreeAsync(buffer, queue))
        ok(driver.cuStreamSynchronize(queue))
        equal("stream-ordered memory", bytes(back), data)
    ok(driver.cuMemPoolTrimTo(ok(driver.cuDeviceGetDefaultMemPool(device)), 0))
    ok(driver.cuStreamDestroy(stream))


def check_host_memory():
    data = pattern(5, 65536)
    host = ok(driver.cuMemAllocHost(len(data)))
    buffer = ok(driver.cuMemAlloc(len(data)))
    ok(driver.cuMemcpyHtoD(buffer, data, len(data)))
    ok(driver.cuMemcpyDtoH(host, buffer, len(data)))
    ok(driver.cuMemsetD8(buffer, 0, len(data)))
    ok(driver.cuMemcpyHtoD(buffer, host, len(data)))
    equal("through pinned memory", download(buffer, len(data)), data)
    ok(driver.cuMemFreeHost(host))
    ok(driver.cuMemFree(buffer))


def check_virtual_memory(device):
    if not attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", device):
        return
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = int(device)
    access = driver.CUmemAccessDesc()
    access.location.type = properties.location.type
    access.location.id = int(device)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    chunk = ok(driver.cuMemGetAllocationGranularity(properties, minimum))
    data = pattern(6, 2 * chunk)

    # Two chunks behind one range, and the second of them also at a place of its own.
    base = int(ok(driver.cuMemAddressReserve(4 * chunk, 0, address(0), 0)))
    handles = [ok(driver.cuMemCreate(chunk, properties, 0)) for _ in range(2)]
    for place, handle in ((0, handles[0]), (1, handles[1]), (3, handles[1])):
        ok(driver.cuMemMap(address(base + place * chunk), chunk, 0, handle, 0))
    ok(driver.cuMemSetAccess(address(base), 2 * chunk, [access], 1))
    ok(driver.cuMemSetAccess(address(base + 3 * chunk), chunk, [access], 1))
    ok(driver.cuMemcpyHtoD(address(base), data, 2 * chunk))
    equal("across two chunks", download(base, 2 * chunk), data)
    equal("the alias of a chunk", download(base + 3 * chunk, chunk), data[chunk:])
    equal("access", int(ok(driver.cuMemGetAccess(access.location, address(base)))), int(access.flags))

    # A chunk outlives its mapping and takes its contents along.
    ok(driver.cuMemUnmap(address(base), chunk))
    stray = driver.cuMemcpyHtoD(address(base), data, 16)
    fails("copy to where nothing is mapped", stray, CUresult.CUDA_ERROR_INVALID_VALUE)
    ok(driver.cuMemMap(address(base + 2 * chunk), chunk, 0, handles[0], 0))
    ok(driver.cuMemSetAccess(address(base + 2 * chunk), chunk, [access], 1))
    equal("a chunk that moved", download(base + 2 * chunk, chunk), data[:chunk])

    for handle in handles:
        ok(driver.cuMemRelease(handle))
    equal("released but mapped", download(base + 2 * chunk, chunk), data[:chunk])
    for place in (1, 2, 3):
        ok(driver.cuMemUnmap(address(base + place * chunk), chunk))
    ok(driver.cuMemAddressFree(address(base), 4 * chunk))
    fails("size no multiple", driver.cuMemCreate(chunk + 1, properties, 0), CUresult.CUDA_ERROR_INVALID_VALUE)


def main():
    ok(driver.cuInit(0))
    require_driver()
    device = check_device()
    check_lookup()
    fails("no context", driver.cuMemAlloc(16), CUresult.CUDA_ERROR_INVALID_CONTEXT)
    context = ok(driver.cuDevicePrimaryCtxRetain(device))
    ok(driver.cuCtxSetCurrent(context))
    equal("current context", int(ok(driver.cuCtxGetCurrent())), int(context))
    free_before, total = ok(driver.cuMemGetInfo())

    check_plain_memory()
    check_streams_and_events()
    check_stream_ordered_memory(device)
    check_host_memory()
    check_virtual_memory(device)

    equal("free memory at the end", ok(driver.cuMemGetInfo()), (free_before, total))
    ok(driver.cuCtxSetCurrent(None))
    ok(driver.cuDevicePrimaryCtxRelease(device))
    print(f"cuda-bindings: {SIZE} bytes and more, every way, on driver {ok(driver.cuDriverGetVersion())}")


if __name__ == "__main__":
    main()
