#!/usr/bin/env python3
"""numba-cuda with its device arrays from cudapool: examples/python/cudapool_numba.py, named by the
environment variable NUMBA_CUDA_MEMORY_MANAGER as a user names it, on the driver that the loader finds. No
kernel is launched.
"""

import numpy
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

import cudapool
from common import equal, require_driver, true


def check_arrays_are_blocks():
    data = numpy.random.default_rng(2).random((1000, 77))
    array = cuda.to_device(data)
    address = array.__cuda_array_interface__["data"][0]
    info = cudapool.query(address)
    known = (info["base"], info["requested_size"], info["owner"])
    equal("the block of an array", known, (address, data.nbytes, b"numba"))
    true("to the device and back", numpy.array_equal(array.copy_to_host(), data))
    copy = cuda.device_array_like(data)
    copy.copy_to_device(array)
    true("device to device", numpy.array_equal(copy.copy_to_host(), data))
    view = array[10:20]
    del array
    true("a view keeps the block", numpy.array_equal(view.copy_to_host(), data[10:20]))
    equal("live blocks", cudapool.stats()["live_blocks"], 2)
    del view, copy
    equal("live blocks after the arrays' end", cudapool.stats()["live_blocks"], 0)


def check_memory_info():
    cuda.synchronize()
    cudapool.trim()
    before = cuda.current_context().get_memory_info()
    array = cuda.device_array(64 << 20, dtype=numpy.uint8)
    true("an array takes memory", cuda.current_context().get_memory_info().free <= before.free - array.nbytes)
    del array
    cuda.synchronize()
    cudapool.trim()
    equal("memory after its end", cuda.current_context().get_memory_info(), before)


def check_out_of_memory():
    total = cuda.current_context().get_memory_info().total
    kept = []
    try:
        while len(kept) < 9:
            kept.append(cuda.device_array(total // 8, dtype=numpy.uint8))
    except CudaAPIError as error:
        equal("the code of the error", int(error.code), 2)
        true("it explains itself", "POOL_ERROR_OUT_OF_MEMORY" in str(error))
    true("the device is full at some time", 6 <= len(kept) < 9)
    kept.pop()
    kept.append(cuda.device_array(total // 8, dtype=numpy.uint8))
    kept.clear()


def check_reset():
    array = cuda.to_device(numpy.arange(1000))
    cuda.current_context().reset()
    del array
    again = cuda.to_device(numpy.arange(1000))
    true("a new array after a reset", numpy.array_equal(again.copy_to_host(), numpy.arange(1000)))


def main():
    true("numba finds a device", cuda.is_available())
    require_driver()
    check_arrays_are_blocks()
    check_memory_info()
    check_out_of_memory()
    check_reset()
    # Finalizers of what is still there run while the interpreter ends, after the context is closed.
    kept = cuda.to_device(numpy.arange(10))
    name = cuda.get_current_device().name
    cuda.close()
    print(f"numba-cuda: arrays from the pool on {name.decode() if isinstance(name, bytes) else name}")
    return kept


KEPT = None

if __name__ == "__main__":
    KEPT = main()
