/* probe_lookup.c: how the driver's functions are found. */

#include "probe.h"

static const struct {
  const char *base, *symbol;
  int version;
} names[] = {
    {"cuInit", "cuInit", 2000},
    {"cuMemAlloc", "cuMemAlloc_v2", 3020},
    {"cuMemFree", "cuMemFree_v2", 3020},
    {"cuMemGetInfo", "cuMemGetInfo_v2", 3020},
    {"cuMemAllocPitch", "cuMemAllocPitch_v2", 3020},
    {"cuMemAllocManaged", "cuMemAllocManaged", 6000},
    {"cuMemAllocAsync", "cuMemAllocAsync", 11020},
    {"cuMemFreeAsync", "cuMemFreeAsync", 11020},
    {"cuMemCreate", "cuMemCreate", 10020},
    {"cuMemMap", "cuMemMap", 10020},
    {"cuMemSetAccess", "cuMemSetAccess", 10020},
    {"cuMemUnmap", "cuMemUnmap", 10020},
    {"cuMemRelease", "cuMemRelease", 10020},
    {"cuStreamIsCapturing", "cuStreamIsCapturing", 10000},
    {"cuStreamGetCtx", "cuStreamGetCtx", 9020},
    {"cuEventRecord", "cuEventRecord", 2000},
    {"cuEventQuery", "cuEventQuery", 2000},
    {"cuCtxDestroy", "cuCtxDestroy_v2", 4000},
    {"cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxReset_v2", 11000},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
};
enum { NAMES = sizeof names / sizeof names[0] };

static void pointers_equal_dlsym(void) {
  int i;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  NEEDS(cu.GetProcAddress);
  for (i = 0; i < NAMES; i++) {
    void *found = NULL;
    same(names[i].base, cu.GetProcAddress(names[i].base, &found, names[i].version, 0, &status), 0);
    holds_true(names[i].symbol, found != NULL && found == dlsym(probe_library, names[i].symbol));
  }
}

static void per_thread_names(void) {
  enum { PER_THREAD = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM };
  void *found = NULL;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  NEEDS(cu.GetProcAddress);
  SAME(cu.GetProcAddress("cuMemAllocAsync", &found, 11020, PER_THREAD, &status), 0);
  TRUE(found != NULL && found == dlsym(probe_library, "cuMemAllocAsync_ptsz"));
  SAME(cu.GetProcAddress("cuMemAlloc", &found, 3020, PER_THREAD, &status), 0);
  TRUE(found != NULL && found == dlsym(probe_library, "cuMemAlloc_v2"));
}

static void what_is_not_found(void) {
  void *found = &found;
  CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
  NEEDS(cu.GetProcAddress);
  SAME(cu.GetProcAddress("cuNoSuchFunction", &found, 12000, 0, &status), 0);
  TRUE(found == NULL);
  same("status of an unknown name", status, 1);
  SAME(cu.GetProcAddress("cuMemAlloc_v2", &found, 12000, 0, &status), 0);
  same("status of a suffixed name", status, 1);
  SAME(cu.GetProcAddress("cuMemCreate", &found, 9000, 0, &status), 0);
  same("status of a version too low", status, 2);
  SAME(cu.GetProcAddress("cuMemAlloc", &found, 12000, 4, &status), 1);
}

static void the_old_lookup(void) {
  void *found = NULL, *untouched = &found;
  NEEDS(cu.GetProcAddress_v1);
  SAME(cu.GetProcAddress_v1("cuMemAlloc", &found, 12000, 0), 0);
  TRUE(found == dlsym(probe_library, "cuMemAlloc_v2"));
  SAME(cu.GetProcAddress_v1("cuNoSuchFunction", &untouched, 12000, 0), 500);
  TRUE(untouched == &found);
}

int main(int argc, char **argv) {
  static const struct probe probes[] = {
      {"pointers_equal_dlsym", "cuGetProcAddress gives the addresses that dlsym gives", pointers_equal_dlsym},
      {"per_thread_names", "flag 2 gives the per-thread variant, or else the plain function",
       per_thread_names},
      {"what_is_not_found", "unknown names, low versions and bad flags", what_is_not_found},
      {"the_old_lookup", "the form without a status", the_old_lookup},
      {NULL, NULL, NULL},
  };
  return probe_main(probes, argc, argv);
}
