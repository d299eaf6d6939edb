// The two libraries that the demo and the benchmarks use, opened at run time: the CUDA driver
// (a real one with a device, else the simulated one) and cudapool.
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda_driver.h"
#include "cudapool.h"
#include "cudasim.h"

// What is used of the driver.
struct Cuda {
  decltype(&cuInit) init = nullptr;
  decltype(&cuDeviceGetCount) device_count = nullptr;
  decltype(&cuDeviceGetName) device_name = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain_context = nullptr;
  decltype(&cuCtxSetCurrent) set_context = nullptr;
  decltype(&cuStreamCreate) stream_create = nullptr;
  decltype(&cuCtxSynchronize) synchronize = nullptr;
  decltype(&cuMemGetInfo_v2) memory_info = nullptr;
  decltype(&cuMemAlloc_v2) alloc = nullptr;
  decltype(&cuMemFree_v2) free = nullptr;

  CUcontext context = nullptr;  // the primary context of device 0

  // The simulated driver's own counters and knobs; NULL with a real driver.
  decltype(&cudasim_used_bytes) used_bytes = nullptr;
  decltype(&cudasim_peak_bytes) peak_bytes = nullptr;
  decltype(&cudasim_call_count) call_count = nullptr;
  decltype(&cudasim_reset_counts) reset_counts = nullptr;
  decltype(&cudasim_time_calls) time_calls = nullptr;
  decltype(&cudasim_call_time) call_time = nullptr;
  decltype(&cudasim_spin) spin = nullptr;

  bool simulated() const { return used_bytes != nullptr; }
};

// What is used of cudapool.
struct Pool {
  decltype(&pool_alloc) alloc = nullptr;
  decltype(&pool_free) free = nullptr;
  decltype(&pool_alloc_async) alloc_async = nullptr;
  decltype(&pool_free_async) free_async = nullptr;
  decltype(&pool_alloc_with) alloc_with = nullptr;
  decltype(&pool_create) create = nullptr;
  decltype(&pool_destroy) destroy = nullptr;
  decltype(&pool_reclaim) reclaim = nullptr;
  decltype(&pool_trim) trim = nullptr;
  decltype(&pool_get_stats) get_stats = nullptr;
  decltype(&pool_options_init) options_init = nullptr;
  decltype(&pool_configure) configure = nullptr;
  decltype(&pool_last_error) last_error = nullptr;
  decltype(&pool_status_name) status_name = nullptr;
  decltype(&pool_version) version = nullptr;

  pool_stats stats() const {
    pool_stats stats{};
    stats.struct_size = sizeof stats;
    if (get_stats(nullptr, 0, &stats) != POOL_OK) throw std::runtime_error(error());
    return stats;
  }

  std::string error() const {
    char text[1024];
    last_error(text, sizeof text);
    return text;
  }
};

namespace driver {

template <class Function>
void require(void *library, const char *name, Function *function) {
  cuda_driver_symbol(library, name, function);
  if (*function == nullptr) throw std::runtime_error(std::string("no symbol ") + name);
}

// The folder in which this program lies: the libraries are found relative to it.
inline std::string own_folder() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0 || length == static_cast<ssize_t>(sizeof path)) return ".";
  const std::string whole(path, static_cast<size_t>(length));
  return whole.substr(0, whole.rfind('/'));
}

inline void *open_driver() { return dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); }

// Whether a driver is there that initialises and has a device.
inline bool usable() {
  void *library = open_driver();
  if (library == nullptr) return false;
  Cuda cuda;
  cuda_driver_symbol(library, "cuInit", &cuda.init);
  cuda_driver_symbol(library, "cuDeviceGetCount", &cuda.device_count);
  int count = 0;
  return cuda.init != nullptr && cuda.device_count != nullptr && cuda.init(0) == 0 &&
         cuda.device_count(&count) == 0 && count > 0;
}

// Makes sure that "libcuda.so.1" names a driver with a device. Where the machine has none, or the
// environment says CUDAPOOL_SIM=1, the program starts itself anew with the simulated driver first
// on the library path, so that cudapool finds it just as it would find the real one.
inline void choose(char **argv) {
  const char *state = getenv("CUDAPOOL_SIM");
  const bool started_anew = state != nullptr && strcmp(state, "active") == 0;
  const bool wanted = state != nullptr && strcmp(state, "1") == 0;
  if (started_anew || (!wanted && usable())) return;
  const std::string folder = own_folder() + "/../sim";
  if (access((folder + "/libcuda.so.1").c_str(), R_OK) != 0) {
    throw std::runtime_error("no CUDA driver with a device, and no simulated driver in " + folder);
  }
  const char *path = getenv("LD_LIBRARY_PATH");
  const std::string longer = path != nullptr && *path != 0 ? folder + ":" + path : folder;
  setenv("LD_LIBRARY_PATH", longer.c_str(), 1);
  setenv("CUDAPOOL_SIM", "active", 1);
  execv("/proc/self/exe", argv);
  throw std::runtime_error("cannot start this program anew");
}

inline void check(int result, const char *what) {
  if (result != 0) {
    throw std::runtime_error(std::string(what) + " failed with result " + std::to_string(result));
  }
}

// Makes the context current on the calling thread, as the CUDA runtime does on each thread.
inline void use_context(const Cuda &cuda) {
  check(cuda.set_context(cuda.context), "cuCtxSetCurrent");
}

// Opens the driver, and makes the primary context of device 0 current on this thread.
inline Cuda open_cuda() {
  void *library = open_driver();
  if (library == nullptr) throw std::runtime_error(dlerror());
  Cuda cuda;
  require(library, "cuInit", &cuda.init);
  require(library, "cuDeviceGetCount", &cuda.device_count);
  require(library, "cuDeviceGetName", &cuda.device_name);
  require(library, "cuDevicePrimaryCtxRetain", &cuda.retain_context);
  require(library, "cuCtxSetCurrent", &cuda.set_context);
  require(library, "cuStreamCreate", &cuda.stream_create);
  require(library, "cuCtxSynchronize", &cuda.synchronize);
  require(library, "cuMemGetInfo_v2", &cuda.memory_info);
  require(library, "cuMemAlloc_v2", &cuda.alloc);
  require(library, "cuMemFree_v2", &cuda.free);
  cuda_driver_symbol(library, "cudasim_used_bytes", &cuda.used_bytes);
  cuda_driver_symbol(library, "cudasim_peak_bytes", &cuda.peak_bytes);
  cuda_driver_symbol(library, "cudasim_call_count", &cuda.call_count);
  cuda_driver_symbol(library, "cudasim_reset_counts", &cuda.reset_counts);
  cuda_driver_symbol(library, "cudasim_time_calls", &cuda.time_calls);
  cuda_driver_symbol(library, "cudasim_call_time", &cuda.call_time);
  cuda_driver_symbol(library, "cudasim_spin", &cuda.spin);
  check(cuda.init(0), "cuInit");
  check(cuda.retain_context(&cuda.context, 0), "cuDevicePrimaryCtxRetain");
  use_context(cuda);
  return cuda;
}

// A stream that does not wait for the default stream, as frameworks make them.
inline CUstream_st *new_stream(const Cuda &cuda) {
  CUstream_st *stream = nullptr;
  check(cuda.stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  return stream;
}

// Opens cudapool: the file that CUDAPOOL_LIBRARY names, else the release build beside this program.
inline Pool open_pool() {
  const char *named = getenv("CUDAPOOL_LIBRARY");
  const std::string path =
      named != nullptr ? named : own_folder() + "/../release/libcudapool.so";
  void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  Pool pool;
  require(library, "pool_alloc", &pool.alloc);
  require(library, "pool_free", &pool.free);
  require(library, "pool_alloc_async", &pool.alloc_async);
  require(library, "pool_free_async", &pool.free_async);
  require(library, "pool_alloc_with", &pool.alloc_with);
  require(library, "pool_create", &pool.create);
  require(library, "pool_destroy", &pool.destroy);
  require(library, "pool_reclaim", &pool.reclaim);
  require(library, "pool_trim", &pool.trim);
  require(library, "pool_get_stats", &pool.get_stats);
  require(library, "pool_options_init", &pool.options_init);
  require(library, "pool_configure", &pool.configure);
  require(library, "pool_last_error", &pool.last_error);
  require(library, "pool_status_name", &pool.status_name);
  require(library, "pool_version", &pool.version);
  const uint32_t header =
      POOL_VERSION_MAJOR * 1000000 + POOL_VERSION_MINOR * 1000 + POOL_VERSION_PATCH;
  if (pool.version() != header) {
    throw std::runtime_error(path + " is not of the header's version");
  }
  return pool;
}

}  // namespace driver
