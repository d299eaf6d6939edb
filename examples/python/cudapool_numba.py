"""Numba's device arrays from cudapool: a plugin of its "external memory management" interface.

Either for a whole program, without a change to it:

    NUMBA_CUDA_MEMORY_MANAGER=cudapool_numba python program.py

or before anything else of numba.cuda is used:

    numba.cuda.set_memory_manager(cudapool_numba.Manager)

Numba's finalizers carry no stream, so memory is used again when all work submitted so far has finished.
Handles for other processes can be had only with CUDAPOOL_CONF=backend:malloc: mapped memory has none of the
old kind.

SPDX-License-Identifier: MIT OR Apache-2.0
"""

import ctypes
import weakref

from numba.cuda import GetIpcHandleMixin, HostOnlyCUDAMemoryManager, MemoryInfo, MemoryPointer
from numba.cuda.cudadrv.driver import CudaAPIError

import cudapool

_CUDA_ERROR_OUT_OF_MEMORY = 2
_CUDA_ERROR_UNKNOWN = 999


class Manager(GetIpcHandleMixin, HostOnlyCUDAMemoryManager):
    """One for each context; the pool keeps the contexts apart itself."""

    def memalloc(self, size):
        try:
            block = cudapool.alloc(size, owner="numba")
        except cudapool.Error as error:
            is_full = isinstance(error, cudapool.OutOfMemoryError)
            code = _CUDA_ERROR_OUT_OF_MEMORY if is_full else _CUDA_ERROR_UNKNOWN
            raise CudaAPIError(code, str(error)) from error
        return MemoryPointer(
            weakref.proxy(self.context), ctypes.c_void_p(block), size, finalizer=lambda: _free(block)
        )

    def initialize(self):
        """The pool starts itself. May be called several times."""

    def get_memory_info(self):
        free, total = cudapool.memory_info()
        return MemoryInfo(free=free, total=total)

    @property
    def interface_version(self):
        return 1


def _free(block):
    try:
        cudapool.free(block)
    except cudapool.Error:
        # Runs in finalizers, after a reset of the context too: then the block is gone with it.
        pass


# What NUMBA_CUDA_MEMORY_MANAGER looks for.
_numba_memory_manager = Manager
