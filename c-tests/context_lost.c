/* context_lost.c: a context goes at a bad moment: while another thread gets memory for it, while the driver
 * refuses, and while its memory is what a request needs. Whatever comes of it, nothing may stay behind. */

#include "check.h"
#include "driver.h"

static CUcontext primary;

static void reset(void) {
  CU(DevicePrimaryCtxReset(0));
  check_blocks_were_lost = 1;
}

static void revive(void) {
  CU(DevicePrimaryCtxRetain(&primary, 0));
  CU(CtxSetCurrent(primary));
}

/* Nothing of the lost context is left, and the next one works. */
static void check_nothing_left(void) {
  void *block = NULL;
  CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, 0, NULL));
  CHECK_EQ(sim.used_bytes(0), 0);
  CHECK_EQ(sim.live_handles(), 0);
  CHECK_EQ(sim.live_mappings(), 0);
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5 * MIB));
  fill(block, 5 * MIB, 0x55, NULL);
  CHECK(holds(block, 5 * MIB, 0x55));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
}

/* One growth is many calls of the one, and a single call of the other. */
static void latency_of_growth(uint64_t milliseconds) {
  CHECK_EQ(sim.set_latency("cuMemCreate", milliseconds * 1000000 / 16), 0);
  CHECK_EQ(sim.set_latency("cuMemAlloc", milliseconds * 1000000), 0);
}

static void *grow(void *out) {
  CU(CtxSetCurrent(primary));
  return (void *)(intptr_t)pool_alloc((void **)out, 64 * MIB);
}

/* Another thread notices the loss while this growth is under way. */
static void lost_while_growing(void) {
  void *block = NULL, *grown = NULL, *result = NULL;
  struct check_thread thread;
  int status;
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 2 * MIB));
  latency_of_growth(300);
  start_thread(&thread, grow, &grown);
  sleep_ms(100);
  reset();
  CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_free(block));
  result = join_thread(&thread);
  latency_of_growth(0);
  /* It may have been served from the new context, or the old one, or not at all. */
  status = (int)(intptr_t)result;
  CHECK((status == POOL_OK) == (grown != NULL));
  status = pool_free(grown);
  CHECK(status == POOL_OK || status == POOL_ERROR_CONTEXT_LOST);
  revive();
  check_nothing_left();
}

/* The driver refuses to unmap a chunk of the lost context once: it is unmapped later. */
static void lost_while_unmapping_fails(void) {
  enum { BLOCKS = 20 };
  void *block = NULL, *blocks[BLOCKS];
  int i;
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 2 * MIB));
  for (i = 0; i < BLOCKS; i++) {
    CHECK_STATUS(POOL_OK, pool_alloc(&blocks[i], 10 * MIB));
  }
  for (i = 0; i < BLOCKS; i += 2) {
    CHECK_STATUS(POOL_OK, pool_free(blocks[i]));
  }
  reset();
  CHECK_EQ(sim.fail("cuMemUnmap", 3, 0, 999), 0);
  CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_free(block));
  revive();
  check_nothing_left();
  CHECK_EQ(sim.fail("cuMemUnmap", 0, 0, 0), 0);
}

/* Stream-ordered requests ask no driver whether the context lives; one that needs its memory finds out. */
static void memory_of_a_lost_context_serves_the_next(void) {
  size_t total = 0, size = 600 * MIB;
  void *old = NULL, *new = NULL;
  CUstream stream;
  CU(DeviceTotalMem(&total, 0));
  CHECK_EQ(sim.set_memory(0, GIB), 0);
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&old, size, stream));
  reset();
  revive();
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&new, size, stream));
  fill(new, MIB, 0x77, stream);
  CU(StreamSynchronize(stream));
  CHECK(holds(new, MIB, 0x77));
  CHECK_STATS(0);
  if (old != new) { /* cuMemAlloc may give the address again, and then it is the new block's */
    CHECK_STATUS(POOL_ERROR_CONTEXT_LOST, pool_free_async(old, stream));
  }
  CHECK_STATUS(POOL_OK, pool_free_async(new, stream));
  CU(StreamSynchronize(stream));
  CU(StreamDestroy(stream));
  check_nothing_left();
  CHECK_EQ(sim.set_memory(0, total), 0);
}

/* A stream-ordered request that takes new memory notices the reset, although there is memory enough: its
 * block must not be counted among those that went with the old context. */
static void growth_notices_a_reset(void) {
  void *old = NULL, *new = NULL, *other = NULL;
  pool_block_info info;
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&old, 20 * MIB, stream));
  reset();
  revive();
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  CHECK_STATUS(POOL_OK, pool_alloc_async(&new, 40 * MIB, stream));
  CHECK_EQ(stats_of(0).live_bytes, 40 * MIB);
  CHECK_STATS(0);
  CHECK_STATUS(POOL_OK, pool_alloc(&other, 5 * MIB));
  info.struct_size = sizeof info;
  CHECK_STATUS(POOL_OK, pool_query(new, &info));
  CHECK(info.base == new);
  CHECK_STATUS(POOL_OK, pool_free(other));
  CHECK_STATUS(POOL_OK, pool_free_async(new, stream));
  CU(StreamSynchronize(stream));
  CU(StreamDestroy(stream));
  check_nothing_left();
}

int main(void) {
  primary = driver_start(0);
  require_sim("needs the simulated driver");
  RUN(lost_while_growing);
  RUN(lost_while_unmapping_fails);
  RUN(memory_of_a_lost_context_serves_the_next);
  RUN(growth_notices_a_reset);
  return driver_result();
}
