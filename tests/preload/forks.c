/* forks.c: a program that uses CUDA and forks; its children must get the driver's own answers, at once.
 *
 *   forks WAY driver|pool */

#include "client.h"

static CUdeviceptr of_parent;

static int child(void) {
  CUdeviceptr ptr = 77;
  size_t size = 0;
  CHECK_EQ(cu.MemAlloc(&ptr, 100), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(cu.MemFree(of_parent), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(cu.MemFree(0), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(cu.MemGetInfo(&size, &size), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(cu.MemAllocAsync(&ptr, 100, NULL), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(cu.MemFreeAsync(of_parent, NULL), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(cu.MemGetAddressRange(&ptr, &size, of_parent), CUDA_ERROR_NOT_INITIALIZED);
  CHECK_EQ(cu.PointerGetAttribute(&ptr, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, of_parent),
           CUDA_ERROR_NOT_INITIALIZED);
  return check_failures != 0;
}

static void *allocate(void *stop) {
  uint64_t state = 5;
  CHECK_EQ(pthread_self() != 0, 1);
  while (!__atomic_load_n((int *)stop, __ATOMIC_SEQ_CST)) {
    CUdeviceptr ptr = 0;
    if (cu.MemAlloc(&ptr, random_size(&state, MIB)) == 0) {
      CHECK_EQ(cu.MemFree(ptr), 0);
    }
  }
  return NULL;
}

int main(int count, char **arguments) {
  pthread_t thread;
  int i, stop = 0;
  if (count != 3) {
    return 2;
  }
  client_start(arguments[1]);
  helpers_open();
  CU(MemAlloc(&of_parent, 5000));
  CHECK_EQ(in_child(child), 0);
  /* While another thread is in the middle of something. */
  CHECK_EQ(pthread_create(&thread, NULL, allocate, &stop), 0);
  for (i = 0; i < 50; i++) {
    CHECK_EQ(in_child(child), 0);
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  pthread_join(thread, NULL);
  CU(MemFree(of_parent));
  return client_result();
}
