/* race.c: 64 threads meet the driver for the first time at one moment: looking up, allocating, freeing.
 *
 *   race WAY driver|pool */

#include "client.h"

enum { THREADS = 64 };

static pthread_barrier_t start;
static const char *way;

static void *run(void *number) {
  __typeof__(&cuMemAlloc_v2) alloc;
  __typeof__(&cuMemFree_v2) release;
  __typeof__(&cuDevicePrimaryCtxRetain) retain;
  CUcontext primary = NULL;
  CUdeviceptr ptr = 0;
  void *found;
  pthread_barrier_wait(&start);
  found = look_up(way, "cuMemAlloc", "cuMemAlloc_v2");
  memcpy(&alloc, &found, sizeof found);
  found = look_up(way, "cuMemFree", "cuMemFree_v2");
  memcpy(&release, &found, sizeof found);
  found = look_up(way, "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain");
  memcpy(&retain, &found, sizeof found);
  CHECK_EQ(retain(&primary, 0), 0);
  CHECK_EQ(cu.CtxSetCurrent(primary), 0);
  CHECK_EQ(alloc(&ptr, 1000 + (uintptr_t)number), 0);
  CHECK_EQ(release(ptr), 0);
  CHECK_EQ(release(ptr + 1), CUDA_ERROR_INVALID_VALUE);
  memcpy(&found, &alloc, sizeof found);
  return found;
}

int main(int count, char **arguments) {
  pthread_t thread[THREADS];
  void *first = NULL, *found = NULL;
  uintptr_t i;
  if (count != 3) {
    return 2;
  }
  way = arguments[1];
  /* Neither of these is wrapped. */
  found = dlsym(driver_library(RTLD_LOCAL), "cuInit");
  memcpy(&cu.Init, &found, sizeof found);
  found = dlsym(driver_library(RTLD_LOCAL), "cuCtxSetCurrent");
  memcpy(&cu.CtxSetCurrent, &found, sizeof found);
  CU(Init(0));
  pthread_barrier_init(&start, NULL, THREADS);
  for (i = 0; i < THREADS; i++) {
    CHECK_EQ(pthread_create(&thread[i], NULL, run, (void *)i), 0);
  }
  for (i = 0; i < THREADS; i++) {
    pthread_join(thread[i], &found);
    first = first == NULL ? found : first;
    CHECK(found == first); /* all get the same function */
  }
  helpers_open();
  return client_result();
}
