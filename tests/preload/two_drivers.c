/* two_drivers.c: a process with two libraries that have a driver's functions, one of them with versions of
 * its symbols. The first that a function is looked up in is the one that the shim serves; the other's
 * functions stay as they are.
 *
 *   two_drivers FAKE_DRIVER wrapped|without */

#include "client.h"

static int wrapped;

static int is_in(void *function, const char *library) {
  Dl_info info;
  return function != NULL && dladdr(function, &info) != 0 && strstr(info.dli_fname, library) != NULL;
}

static int call(void *function) {
  __typeof__(&cuMemAlloc_v2) alloc;
  memcpy(&alloc, &function, sizeof function);
  return alloc(NULL, 100);
}

static int fake_first(const char *path) {
  void *fake = need(dlopen(path, RTLD_NOW | RTLD_LOCAL), path);
  void *driver, *function;
  const char *where = wrapped ? "libcudapool_preload.so" : "fake_driver.so";
  function = dlvsym(fake, "cuMemAlloc_v2", "FAKE_1");
  CHECK(is_in(function, where));
  CHECK_EQ(call(function), 42);
  CHECK(dlvsym(fake, "cuMemAlloc_v2", "FAKE_2") == NULL);
  CHECK(dlerror() != NULL);
  CHECK(dlvsym(fake, "cuMemAlloc_v2", "FAKE_3") == NULL);
  CHECK(is_in(dlvsym(fake, "cuMemFree_v2", "FAKE_2"), where));
  CHECK(is_in(dlsym(fake, "cuMemAlloc_v2"), where));
  CHECK(is_in(dlsym(fake, "cuInit"), "fake_driver.so"));
  CHECK(dlsym(fake, "cuMemAllocManaged") == NULL);
  driver = driver_library(RTLD_LOCAL);
  function = dlsym(driver, "cuMemAlloc_v2");
  CHECK(is_in(function, "libcuda.so"));
  CHECK_EQ(call(function), CUDA_ERROR_NOT_INITIALIZED);
  return check_failures != 0;
}

static int driver_first(const char *path) {
  void *driver = driver_library(RTLD_LOCAL), *fake, *function;
  const char *where = wrapped ? "libcudapool_preload.so" : "libcuda.so";
  function = dlsym(driver, "cuMemAlloc_v2");
  CHECK(is_in(function, where));
  CHECK_EQ(call(function), CUDA_ERROR_NOT_INITIALIZED);
  fake = need(dlopen(path, RTLD_NOW | RTLD_LOCAL), path);
  function = dlvsym(fake, "cuMemAlloc_v2", "FAKE_1");
  CHECK(is_in(function, "fake_driver.so"));
  CHECK_EQ(call(function), 42);
  CHECK(is_in(dlsym(fake, "cuMemFree_v2"), "fake_driver.so"));
  CHECK(is_in(dlsym(driver, "cuMemFree_v2"), where));
  return check_failures != 0;
}

static const char *fake_path;

static int child(void) {
  return fake_first(fake_path);
}

int main(int count, char **arguments) {
  if (count != 3) {
    return 2;
  }
  fake_path = arguments[1];
  wrapped = strcmp(arguments[2], "wrapped") == 0;
  CHECK_EQ(in_child(child), 0);
  driver_first(fake_path);
  return check_result();
}
