/* fake_driver.c: a library that looks like a driver, with versions of its symbols; it has no memory. The
 * driver's declarations see to it that it looks like one to the compiler too. */

#include "cuda_driver.h"

CUresult cuInit(unsigned flags) {
  (void)flags;
  return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 12000;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *ptr, size_t size) {
  (void)ptr, (void)size;
  return 42;
}

CUresult cuMemFree_v2(CUdeviceptr ptr) {
  (void)ptr;
  return 43;
}
