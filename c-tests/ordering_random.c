/* ordering_random.c: random sizes on several streams with work that runs late. Each block is filled by its
 * stream, copied out by the stream just before it is freed, and the copies are compared when the streams are
 * done: a block that overlapped another, or was handed out while older work could still write it, holds
 * somebody else's mark. */

#include "check.h"
#include "driver.h"

enum { STREAMS = 6, LIVE = 160, WITNESSES = 512, ROUNDS = 30000, MARK_WORDS = 16 };
static const size_t LARGEST = 6 << 20;

static struct block {
  char *ptr;
  size_t bytes; /* a multiple of 4 */
  unsigned mark;
  int stream;
} blocks[LIVE];

/* Device memory of the test's own that receives head and tail of each freed block, and what must be in it. */
static CUdeviceptr witnesses;
static unsigned expected[WITNESSES];
static int witnessed;

static CUstream streams[STREAMS];
static uint64_t chance = 20240229;

/* Two live blocks never share an address; found here at once, whatever is written. */
static void check_apart(const struct block *block) {
  int i;
  for (i = 0; i < LIVE; i++) {
    const struct block *other = &blocks[i];
    if (other != block && other->ptr != NULL) {
      CHECK(block->ptr + block->bytes <= other->ptr || other->ptr + other->bytes <= block->ptr);
    }
  }
}

static void compare_witnesses(void) {
  static unsigned words[WITNESSES][2 * MARK_WORDS];
  int i, word;
  CU(CtxSynchronize());
  CU(MemcpyDtoH(words, witnesses, sizeof words));
  for (i = 0; i < witnessed; i++) {
    for (word = 0; word < 2 * MARK_WORDS; word++) {
      if (!CHECK_EQ(words[i][word], expected[i])) {
        break;
      }
    }
  }
  witnessed = 0;
}

static void allocate(struct block *block) {
  static unsigned next_mark = 1;
  CUstream stream;
  block->stream = (int)random_below(&chance, STREAMS);
  block->bytes = (random_size(&chance, LARGEST) + 2 * 4 * MARK_WORDS) & ~(size_t)3;
  block->mark = next_mark++;
  stream = streams[block->stream];
  if (random_below(&chance, 4) == 0) {
    CHECK_STATUS(POOL_OK, pool_alloc((void **)&block->ptr, block->bytes));
  } else {
    CHECK_STATUS(POOL_OK, pool_alloc_async((void **)&block->ptr, block->bytes, stream));
  }
  if (block->ptr == NULL) {
    return;
  }
  check_apart(block);
  if (random_below(&chance, 8) == 0) {
    busy(stream, 1 + (int)random_below(&chance, 3));
  }
  fill(block->ptr, block->bytes, block->mark, stream);
}

static void release(struct block *block) {
  CUstream stream = streams[block->stream];
  CUdeviceptr place, ptr = (CUdeviceptr)(uintptr_t)block->ptr;
  size_t half = 4 * MARK_WORDS;
  uint64_t way = random_below(&chance, 8);
  if (witnessed == WITNESSES) {
    compare_witnesses();
  }
  place = witnesses + (CUdeviceptr)witnessed * 2 * half;
  expected[witnessed++] = block->mark;
  if (way == 0) {
    /* The last use is another stream's, which was made to wait for the first one. */
    CUstream other = streams[random_below(&chance, STREAMS)];
    CU(StreamSynchronize(stream));
    busy(other, 1);
    CU(MemcpyDtoDAsync(place, ptr, half, other));
    CU(MemcpyDtoDAsync(place + half, ptr + block->bytes - half, half, other));
    CHECK_STATUS(POOL_OK, pool_use_on_stream(block->ptr, other));
  } else {
    CU(MemcpyDtoDAsync(place, ptr, half, stream));
    CU(MemcpyDtoDAsync(place + half, ptr + block->bytes - half, half, stream));
  }
  CHECK_STATUS(POOL_OK, way % 4 == 1 ? pool_free(block->ptr) : pool_free_async(block->ptr, stream));
  block->ptr = NULL;
}

int main(void) {
  int i;
  driver_start(0);
  check_running = "random blocks on several streams";
  CU(MemAlloc(&witnesses, WITNESSES * 2 * 4 * MARK_WORDS));
  for (i = 0; i < STREAMS - 2; i++) {
    streams[i] = new_stream(i == 0 ? 0 : CU_STREAM_NON_BLOCKING);
  }
  streams[STREAMS - 2] = CU_STREAM_LEGACY;
  streams[STREAMS - 1] = CU_STREAM_PER_THREAD;

  for (i = 0; i < ROUNDS && check_failures == 0; i++) {
    struct block *block = &blocks[random_below(&chance, LIVE)];
    if (block->ptr == NULL) {
      allocate(block);
    } else {
      release(block);
    }
    if (random_below(&chance, 2000) == 0) {
      CHECK_STATUS(POOL_OK, pool_trim(NULL, 0, (size_t)random_below(&chance, 64 * MIB), NULL));
    }
    if (i % 64 == 0) {
      pool_stats stats = stats_of(0);
      check_identity(&stats, __FILE__, __LINE__);
    }
    /* A stream goes while the others work on; a new one may get its handle at once. */
    if (i % 1000 == 999) {
      CU(StreamSynchronize(streams[1]));
      CU(StreamDestroy(streams[1]));
      streams[1] = new_stream(CU_STREAM_NON_BLOCKING);
    }
  }
  for (i = 0; i < LIVE; i++) {
    if (blocks[i].ptr != NULL) {
      release(&blocks[i]);
    }
  }
  compare_witnesses();
  CU(MemFree(witnesses));
  CHECK_TRIMS_TO_ZERO(0);
  return driver_result();
}
