#!/usr/bin/env python3
"""The ctypes binding of examples/python, and the addresses that it gives to runtimes, on the driver that the
loader finds."""

import ctypes

import cudapool
import cudapool_onnxruntime
from common import equal, require_driver, true


def check_binding():
    equal("size 0", cudapool.alloc(0), 0)
    cudapool.free(None)
    block = cudapool.alloc(100_000, alignment=1 << 20, owner="binding")
    equal("alignment", block % (1 << 20), 0)
    info = cudapool.query(block + 5)
    equal("the block", (info["base"], info["requested_size"], info["owner"]), (block, 100_000, b"binding"))
    cudapool.use_on_stream(block, 2)
    cudapool.free(block, stream=2)
    for wrong in (block, 12345):
        try:
            cudapool.free(wrong)
        except cudapool.Error as error:
            true("the error tells", error.status in (101, 102) and "POOL_ERROR_" in str(error))
        else:
            raise SystemExit(f"{wrong:#x} could be freed")
    # The last would be 512 bytes if it were cut to the bits of a size.
    for size in (1 << 60, (1 << 64) + 512):
        try:
            cudapool.alloc(size)
        except cudapool.OutOfMemoryError as error:
            true("out of memory is a MemoryError too", isinstance(error, MemoryError))
            true("it tells how much", str(min(size, 2**64 - 1)) in str(error))
        else:
            raise SystemExit(f"{size} bytes were to be had")
    for call in (
        lambda: cudapool.alloc(-1),
        lambda: cudapool.alloc(512, device=1 << 32),
        lambda: cudapool.trim(-1),
    ):
        try:
            call()
        except ValueError:
            continue
        raise SystemExit("a number out of range was taken")
    true("idle memory is given back", cudapool.trim() > 0)
    equal("and then there is none", (cudapool.reclaim(1 << 20), cudapool.stats()["reserved_bytes"]), (0, 0))


def check_onnxruntime_options():
    """Called as ONNX Runtime calls them: decimal text, turned into function pointers."""
    options = cudapool_onnxruntime.provider_options(device_id="0")
    equal("other options stay", options["device_id"], "0")
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(options["gpu_external_alloc"]))
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(options["gpu_external_free"]))
    empty_cache = ctypes.CFUNCTYPE(None)(int(options["gpu_external_empty_cache"]))
    block = alloc(3 << 20)
    equal("the owner", cudapool.query(block)["owner"], b"onnxruntime")
    free(block)
    equal("no memory", alloc(1 << 60), None)
    empty_cache()
    equal("after the cache was emptied", cudapool.stats()["reserved_bytes"], 0)


def main():
    check_binding()
    require_driver()
    check_onnxruntime_options()
    print("the ctypes binding: blocks, errors, and ONNX Runtime's options")


if __name__ == "__main__":
    main()
