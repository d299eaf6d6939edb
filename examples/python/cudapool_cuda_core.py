"""A memory resource for cuda.core that takes its buffers from cudapool.

    resource = cudapool_cuda_core.Resource(device)
    buffer = resource.allocate(1 << 20, stream=stream)
    buffer.close(stream)

or, for everything that cuda.core allocates on the device: device.memory_resource = resource

SPDX-License-Identifier: MIT OR Apache-2.0
"""

from cuda.core import Buffer, MemoryResource

import cudapool


class Resource(MemoryResource):
    """Stream-ordered memory of one device. Raises cudapool.OutOfMemoryError, which is a MemoryError."""

    def __init__(self, device):
        self._device_id = device.device_id

    def allocate(self, size, *, stream):
        block = cudapool.alloc(size, stream=_handle(stream), device=self._device_id, owner="cuda.core")
        return Buffer.from_handle(ptr=block, size=size, mr=self, stream=stream)

    def deallocate(self, ptr, size, *, stream):
        cudapool.free(int(ptr), stream=_handle(stream))

    @property
    def device_id(self):
        return self._device_id

    @property
    def is_device_accessible(self):
        return True

    @property
    def is_host_accessible(self):
        return False


def _handle(stream):
    """The number behind a stream, or behind an object that has one (as a graph under construction)."""
    return int(getattr(stream, "stream", stream).handle)
