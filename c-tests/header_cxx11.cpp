// header_cxx11.cpp: the public header as C++11 sees it, alone and first: types and linkage. Needs no driver.

#include "cudapool.h"

#include "check.h"

#include <cstddef>
#include <type_traits>

// What a runtime keeps beside its own `CUstream` or `cudaStream_t`, which are pointers to this struct.
static_assert(std::is_same<decltype(pool_request::stream), CUstream_st *>::value,
              "streams pass without a cast");
static_assert(std::is_same<decltype(pool_alloc(nullptr, 0)), pool_status>::value,
              "functions return pool_status");
static_assert(std::is_same<decltype(pool_last_error(nullptr, 0)), std::size_t>::value, "lengths are size_t");

// C callers copy these byte by byte; so may C++ callers.
static_assert(std::is_standard_layout<pool_request>::value && std::is_trivial<pool_request>::value,
              "request");
static_assert(std::is_standard_layout<pool_block_info>::value && std::is_trivial<pool_block_info>::value,
              "info");
static_assert(std::is_standard_layout<pool_stats>::value && std::is_trivial<pool_stats>::value, "stats");
static_assert(std::is_standard_layout<pool_options>::value && std::is_trivial<pool_options>::value,
              "options");

static_assert(offsetof(pool_request, struct_size) == 0, "struct_size comes first");
static_assert(offsetof(pool_block_info, struct_size) == 0, "struct_size comes first");
static_assert(offsetof(pool_stats, struct_size) == 0, "struct_size comes first");
static_assert(offsetof(pool_options, struct_size) == 0, "struct_size comes first");
static_assert(POOL_OK == 0 && POOL_ERROR_OUT_OF_MEMORY == 200 && POOL_ERROR_INTERNAL == 900, "fixed numbers");

// A function pointer of the header's type, as a program that opens the library has it, and a status switch
// that the compiler checks for completeness.
static bool is_lifecycle(pool_status status) {
  switch (status) {
    case POOL_ERROR_FORKED:
    case POOL_ERROR_SHUTTING_DOWN:
      return true;
    case POOL_OK:
    case POOL_ERROR_INVALID_ARGUMENT:
    case POOL_ERROR_INVALID_POINTER:
    case POOL_ERROR_DOUBLE_FREE:
    case POOL_ERROR_INVALID_OPTION:
    case POOL_ERROR_NOT_SUPPORTED:
    case POOL_ERROR_IN_USE:
    case POOL_ERROR_OUT_OF_MEMORY:
    case POOL_ERROR_HOST_OUT_OF_MEMORY:
    case POOL_ERROR_NO_DRIVER:
    case POOL_ERROR_NO_DEVICE:
    case POOL_ERROR_DRIVER_VERSION:
    case POOL_ERROR_DRIVER:
    case POOL_ERROR_CONTEXT_LOST:
    case POOL_ERROR_INTERNAL:
      return false;
  }
  return false;
}

int main() {
  decltype(&pool_version) version = &pool_version;
  CHECK_EQ(version(), POOL_VERSION_MAJOR * 1000000 + POOL_VERSION_MINOR * 1000 + POOL_VERSION_PATCH);
  CHECK(is_lifecycle(POOL_ERROR_FORKED) && !is_lifecycle(POOL_OK));
  return check_result();
}
