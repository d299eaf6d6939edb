/* rescue.c: a direct cuMemAlloc beside a pool that idles on most of the device. By itself it fails; with the
 * preload shim in guard mode the pool gives way and it succeeds. Prints which; exit code 77 if the device is
 * too full already to tell. */

#include "check.h"
#include "driver.h"

int main(void) {
  enum { PIECES = 8 };
  void *pieces[PIECES];
  size_t available = 0, total = 0, piece;
  CUdeviceptr direct = 0;
  pool_stats stats;
  CUresult result;
  int i;
  driver_start(0);
  CU(MemGetInfo(&available, &total));
  if (available < GIB) {
    printf("skipped: less than a GiB is free\n");
    return EXIT_SKIPPED;
  }
  /* Seven eighths of what is free, in pieces, all of it idle at last. */
  piece = available / 64 * 7 & ~(size_t)4095;
  for (i = 0; i < PIECES; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc(&pieces[i], piece));
  }
  for (i = 0; i < PIECES; i++) {
    CHECK_STATUS(POOL_OK, pool_free(pieces[i]));
  }
  CU(CtxSynchronize());
  result = cu.MemAlloc(&direct, available / 2);
  stats = stats_of(0);
  CHECK(result == 0 || result == 2);
  printf("%s\n", result == 0 ? "rescued" : "refused");
  printf("idle in the pool\t%.2f GiB\n", (double)(stats.cached_bytes + stats.pending_bytes) / (double)GIB);
  if (result == 0) {
    CU(MemFree(direct));
  }
  return check_result();
}
