"""PyTorch's tensors from cudapool, in one of two ways. PyTorch 2.8 or later.

For a part of a program, with PyTorch's own cache on top (to be preferred):

    pool = cudapool_torch.MemPool()
    with pool.use():
        model = ...

For the whole process, every tensor a block of the pool. Before anything else has used the GPU:

    cudapool_torch.use_everywhere()

The second needs a C++ compiler, once: PyTorch does not look whether an allocator of its own kind got memory,
so a small extension throws `torch.OutOfMemoryError` (../torch/extension.cpp). It does without PyTorch's
statistics, snapshots and IPC, which that mode of PyTorch does not have; torch.cuda.empty_cache,
set_per_process_memory_fraction and Tensor.record_stream work.

SPDX-License-Identifier: MIT OR Apache-2.0
"""

import contextlib
import functools
import os
import re
import subprocess

import torch

import cudapool

_HERE = os.path.dirname(os.path.abspath(__file__))


class MemPool:
    """A torch.cuda.MemPool whose memory comes from cudapool. Only the thread that uses it is served: a
    backward pass runs on others. Drop its tensors before it."""

    def __init__(self):
        self.pool = torch.cuda.MemPool(_allocator().allocator())

    @contextlib.contextmanager
    def use(self, device=None):
        with torch.cuda.use_mem_pool(self.pool, device):
            yield self


@functools.cache
def _allocator():
    """One for all pools, and never dropped: PyTorch's pools do not hold it, and ask it to free their memory
    when they go."""
    return torch.cuda.memory.CUDAPluggableAllocator(
        cudapool.library._name, "pool_torch_alloc", "pool_torch_free"
    )


# Which setter of PyTorch takes which function. PyTorch 2.8 has them all; an older one may lack some.
_HOOKS = {
    "set_reset_fn": "pool_torch_reset",
    "set_memory_fraction_fn": "pool_torch_memory_fraction",
    "set_record_stream_fn": "pool_torch_record_stream",
    "set_begin_allocate_to_pool": "pool_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "pool_torch_end_allocate_to_pool",
    "set_release_pool": "pool_torch_release_pool",
}


def use_everywhere(extension=None):
    """Makes cudapool the allocator of this process. `extension` is a path from `build_extension`."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        extension or build_extension(), "cudapool_torch_alloc", "cudapool_torch_free"
    )
    hooks = allocator.allocator()
    for setter, function in _HOOKS.items():
        getattr(hooks, setter)(cudapool.address_of(function))
    torch.cuda.memory.change_current_allocator(allocator)
    return allocator


def build_extension(
    folder=None,
    source=os.path.join(_HERE, "..", "torch", "extension.cpp"),
    include=os.environ.get("CUDAPOOL_INCLUDE", os.path.join(_HERE, "..", "..", "include")),
    compiler=os.environ.get("CXX", "c++"),
):
    """Compiles the extension for the PyTorch that runs, into `folder`, or else beside PyTorch's others."""
    from torch.utils import cpp_extension

    folder = folder or cpp_extension.get_default_build_root()
    os.makedirs(folder, exist_ok=True)
    target = os.path.join(folder, "libcudapool_torch.so")
    library = _loaded_path()
    # By rename, because the other processes of a job build it at the same moment, and load what is there.
    part = f"{target}.{os.getpid()}"
    command = [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", source, "-o", part, f"-I{include}"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()]
    command += ["-lc10", library, f"-Wl,-rpath,{os.path.dirname(library)}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"the extension for PyTorch could not be compiled: {' '.join(command)}\n{done.stderr}"
        )
    os.replace(part, target)
    return target


def _loaded_path():
    """Where the library of this process lies."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            # The file itself, which has the number of its version where it is installed.
            if re.search(r"/libcudapool\.so[.0-9]*$", line.rstrip()):
                return line.split(maxsplit=5)[5].rstrip()
    raise RuntimeError("libcudapool.so is not loaded")
