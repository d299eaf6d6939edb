// What PyTorch calls when cudapool is the allocator of the whole process: as pool_torch_alloc, but a request
// that fails throws PyTorch's own error, so that the user sees torch.OutOfMemoryError and never a tensor
// without memory. The library's call has returned by then: the exception passes through C++ only.
// cudapool_torch.py builds it, with the headers of the PyTorch that runs.
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#include <c10/util/Exception.h>

#include <cstddef>
#include <string>

#include "cudapool.h"

namespace {

std::string last_error() {
  char text[2048];
  pool_last_error(text, sizeof text);
  return text;
}

}  // namespace

extern "C" void *cudapool_torch_alloc(std::size_t size, int device, CUstream_st *stream) {
  void *block = pool_torch_alloc(size, device, stream);
  if (block != nullptr || size == 0) return block;
  const std::string why = last_error();
  TORCH_CHECK_WITH(OutOfMemoryError, pool_last_status() != POOL_ERROR_OUT_OF_MEMORY, "CUDA ", why);
  TORCH_CHECK(false, "cudapool: ", why);
  return nullptr;
}

extern "C" void cudapool_torch_free(void *block, std::size_t size, int device, CUstream_st *stream) noexcept {
  pool_torch_free(block, size, device, stream);
}
