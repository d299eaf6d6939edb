/* lonely.c: a program that uses CUDA and nothing else: one allocation, from another working folder than it was started in.
 *
 *   lonely WAY MEBIBYTES RESULT */

#include "client.h"

int main(int count, char **arguments) {
  CUdeviceptr ptr = 0;
  if (count != 4 || chdir("/") != 0) {
    return 2;
  }
  client_start(arguments[1]);
  CHECK_EQ(cu.MemAlloc(&ptr, strtoull(arguments[2], NULL, 10) * MIB), atoi(arguments[3]));
  CU(MemFree(ptr));
  return check_result();
}
