/* lonely.c: a program that uses CUDA and nothing else: one allocation, from another working folder than it
 * was started in, and one that is freed late, after the handlers that driver and pool have for the end of the
 * process.
 *
 *   lonely WAY MEBIBYTES RESULT */

#include "client.h"

static CUdeviceptr late;

static void free_late(void) {
  CUresult result = cu.MemFree == NULL ? 0 : cu.MemFree(late);
  if (result != 0 && result != CUDA_ERROR_DEINITIALIZED) {
    fprintf(stderr, "the late free answered %d\n", result);
    _exit(1);
  }
}

int main(int count, char **arguments) {
  CUdeviceptr ptr = 0;
  if (count != 4 || chdir("/") != 0) {
    return 2;
  }
  atexit(free_late);
  client_start(arguments[1]);
  CU(MemAlloc(&late, 1000));
  CHECK_EQ(cu.MemAlloc(&ptr, strtoull(arguments[2], NULL, 10) * MIB), atoi(arguments[3]));
  CU(MemFree(ptr));
  return check_result();
}
