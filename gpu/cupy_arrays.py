#!/usr/bin/env python3
"""CuPy with one of its ways to memory; results are compared with NumPy's.

    cupy_arrays.py native|python|function

`python` is the allocator of cudapool_cupy.py, `function` CuPy's C-function allocator on pool_cupy_alloc.
`native` is also what runs under the shim. Exit code 77 if CuPy or its GPU is not there.
"""

import sys
import time


def import_cupy():
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy raises errors of its own kinds where the driver is missing
        print(f"skipped: {type(error).__name__}: {error}".splitlines()[0])
        raise SystemExit(77) from None
    return cupy


def work(cupy):
    import numpy

    chance = numpy.random.default_rng(5)
    kept = []
    for step in range(60):
        size = int(chance.integers(10, 1200))
        data = chance.random((size, size))
        stream = cupy.cuda.Stream(non_blocking=True) if step % 3 == 0 else cupy.cuda.Stream.null
        with stream:
            array = cupy.asarray(data)
            result = cupy.sort((array @ array + array.T).ravel())[:: max(1, size // 2)]
            stream.synchronize()
            wanted = numpy.sort((data @ data + data.T).ravel())[:: max(1, size // 2)]
            if not numpy.allclose(cupy.asnumpy(result), wanted):
                raise SystemExit(f"step {step}: CuPy and NumPy differ")
        kept.append(array)
        del kept[: -int(chance.integers(1, 6))]


def check_out_of_memory(cupy):
    total = cupy.cuda.runtime.memGetInfo()[1]
    try:
        cupy.empty(2 * total, dtype=cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError:
        return
    raise SystemExit("twice the device's memory was to be had")


def main(mode):
    cupy = import_cupy()
    if mode != "native":
        import cudapool
        import cudapool_cupy

        if mode == "python":
            cudapool_cupy.use()
        else:
            functions = cudapool_cupy.c_allocator()
            cupy.cuda.set_allocator(functions.malloc)
    start = time.perf_counter()
    work(cupy)
    print(f"seconds\t{time.perf_counter() - start:.2f}")
    if mode == "python":
        check_out_of_memory(cupy)
    if mode != "native":
        counters = cudapool.stats(device=0)
        print(f"pool blocks allocated\t{counters['alloc_count']}")
        if counters["alloc_count"] == 0:
            raise SystemExit("the pool was never asked")


if __name__ == "__main__":
    main(*sys.argv[1:])
