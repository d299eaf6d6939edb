#!/usr/bin/env python3
"""numba-cuda on the driver that the loader finds: arrays go to the device and come back.

Which of its two ways to the driver is taken, NUMBA_CUDA_USE_NVIDIA_BINDING says: 0 is its own, which opens
libcuda.so before libcuda.so.1 and finds functions by dlsym, trying suffixes. No kernel is launched.
"""

import numpy
from numba import config, cuda

from common import equal, require_driver, true


def same(what, got, wanted):
    true(f"{what}: equal arrays", numpy.array_equal(got, wanted))


def check_copies():
    data = numpy.random.default_rng(1).random((1000, 777))
    on_device = cuda.to_device(data)
    same("to the device and back", on_device.copy_to_host(), data)
    copy = cuda.device_array_like(data)
    copy.copy_to_device(on_device)
    same("device to device", copy.copy_to_host(), data)
    same("a slice", on_device[10:20].copy_to_host(), data[10:20])
    true("an array knows its device memory", on_device.__cuda_array_interface__["data"][0] != 0)


def check_streams_and_events():
    data = numpy.arange(1 << 20, dtype=numpy.int32)
    pinned = cuda.pinned_array_like(data)
    pinned[:] = data
    stream = cuda.stream()
    start, end = cuda.event(), cuda.event()
    start.record(stream)
    on_device = cuda.to_device(pinned, stream=stream)
    back = cuda.pinned_array_like(data)
    on_device.copy_to_host(back, stream=stream)
    end.record(stream)
    stream.synchronize()
    end.synchronize()
    same("through a stream", back, data)
    true("time passes", cuda.event_elapsed_time(start, end) >= 0)


def check_memory_is_returned():
    context = cuda.current_context()
    # Frees are put off; this is where.
    pending = context.memory_manager.deallocations
    pending.clear()
    before = context.get_memory_info()
    array = cuda.device_array(8 << 20, dtype=numpy.uint8)
    true("an array takes memory", context.get_memory_info().free < before.free)
    del array
    pending.clear()
    equal("memory after its end", context.get_memory_info(), before)


def main():
    true("numba finds a device", cuda.is_available())
    require_driver()
    check_copies()
    check_streams_and_events()
    check_memory_is_returned()
    name = cuda.get_current_device().name
    cuda.close()
    way = "cuda-bindings" if config.CUDA_USE_NVIDIA_BINDING else "its own binding"
    print(f"numba-cuda: arrays to and from {name.decode() if isinstance(name, bytes) else name}, by {way}")


if __name__ == "__main__":
    main()
