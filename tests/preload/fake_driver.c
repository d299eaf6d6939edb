/* fake_driver.c: a library that looks like a driver, with versions of its symbols; it has no memory. */

#include <stddef.h>

int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);
int cuMemAlloc_v2(unsigned long long *ptr, size_t size);
int cuMemFree_v2(unsigned long long ptr);

int cuInit(unsigned flags) {
  (void)flags;
  return 0;
}

int cuDriverGetVersion(int *version) {
  *version = 12000;
  return 0;
}

int cuMemAlloc_v2(unsigned long long *ptr, size_t size) {
  (void)ptr, (void)size;
  return 42;
}

int cuMemFree_v2(unsigned long long ptr) {
  (void)ptr;
  return 43;
}
