/* hostoom.c: the host's memory runs out, at every allocation that the library makes: answers are success or
 * "host out of memory", never an abort, and frees always work. This program has the process's allocation
 * functions; they fail only where the library itself called them, so that the driver and the C library keep
 * theirs. */

#include "check.h"
#include "driver.h"
#include "scenario_ladder.h"

#include <link.h>
#include <sys/mman.h>
#include <sys/syscall.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *ptr, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

/* The code of the library. */
static uintptr_t library_start, library_end;

/* Its `fail_at`th allocation fails, and with `fail_sticky` all after that; 0: none. */
static uint64_t allocations, fail_at;
static int fail_sticky;

static int strikes(void *caller) {
  uint64_t number;
  if ((uintptr_t)caller < library_start || (uintptr_t)caller >= library_end || fail_at == 0) {
    return 0;
  }
  number = __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST);
  return number == fail_at || (fail_sticky && number > fail_at);
}

#define STRIKES() strikes(__builtin_return_address(0))

void *malloc(size_t size) {
  return STRIKES() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
  return STRIKES() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *ptr, size_t size) {
  return STRIKES() ? NULL : __libc_realloc(ptr, size);
}

void *memalign(size_t alignment, size_t size) {
  return STRIKES() ? NULL : __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) {
  return STRIKES() ? NULL : __libc_memalign(alignment, size);
}

int posix_memalign(void **out, size_t alignment, size_t size) {
  void *ptr = STRIKES() ? NULL : __libc_memalign(alignment, size);
  if (ptr == NULL) {
    return ENOMEM;
  }
  *out = ptr;
  return 0;
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
  if (STRIKES()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}

void *mmap64(void *address, size_t size, int protection, int flags, int file, off_t offset) {
  if (STRIKES()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}

static int find_library(struct dl_phdr_info *object, size_t size, void *unused) {
  int i;
  (void)size;
  (void)unused;
  if (object->dlpi_name == NULL || strstr(object->dlpi_name, "libcudapool.so") == NULL) {
    return 0;
  }
  for (i = 0; i < object->dlpi_phnum; i++) {
    if (object->dlpi_phdr[i].p_type == PT_LOAD && (object->dlpi_phdr[i].p_flags & PF_X) != 0) {
      library_start = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
      library_end = library_start + object->dlpi_phdr[i].p_memsz;
    }
  }
  return 1;
}

static int free_may(int status) {
  return status == POOL_OK;
}

static int may(int status) {
  return status == POOL_OK || status == POOL_ERROR_HOST_OUT_OF_MEMORY;
}

static void start_failing(const struct trouble *trouble) {
  allocations = 0;
  fail_sticky = trouble->sticky;
  fail_at = (uint64_t)trouble->nth;
}

/* Whether the failure came. */
static int stop_failing(void) {
  int struck = allocations >= fail_at;
  fail_at = 0;
  return struck;
}

/* From the very first call on, in a process that has not used the library. */
static int first_use(const struct trouble *trouble) {
  void *block = (void *)0x5a5a;
  pool_options options;
  int status, struck;
  driver_start(0);
  require_sim("so many processes take too long on a real driver");
  start_failing(trouble);
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  status = pool_options_init(&options);
  CHECK(may(status));
  status = pool_alloc(&block, 5000);
  CHECK(may(status));
  CHECK((status == POOL_OK) == (block != NULL));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK(may(pool_trim(NULL, 0, 0, NULL)));
  struck = stop_failing();
  CHECK_STATUS(POOL_OK, pool_alloc(&block, 5000));
  CHECK_STATUS(POOL_OK, pool_free(block));
  CHECK_TRIMS_TO_ZERO(0);
  /* Addresses that were reserved for an arena that did not come to be went back. */
  CHECK_EQ(calls_of("cuMemAddressReserve") - calls_of("cuMemAddressFree"),
           default_options().backend == POOL_BACKEND_MALLOC ? 0 : 1);
  return check_failures == 0 && !struck ? EXIT_BEYOND : driver_result();
}

/* A library that is in use, and grows: new streams, new sizes, the ladder. */
static int later_use(const struct trouble *trouble) {
  struct scenario run;
  int struck;
  run.free_may = free_may;
  run.may = may;
  scenario_start(&run);
  scenario_keep(&run);
  start_failing(trouble);
  scenario_run(&run);
  struck = stop_failing();
  scenario_finish(&run);
  return check_failures == 0 && !struck ? EXIT_BEYOND : driver_result();
}

/* The ladder, with all that it has. Where its bookkeeping had no memory, a request may be out of device
 * memory too. */
static int may_ladder(int status) {
  return may(status) || status == POOL_ERROR_OUT_OF_MEMORY;
}

static int in_the_ladder(const struct trouble *trouble) {
  struct ladder run;
  int struck;
  run.base.free_may = free_may;
  run.base.may = may_ladder;
  ladder_start(&run);
  start_failing(trouble);
  ladder_run(&run);
  struck = stop_failing();
  ladder_finish(&run);
  return check_failures == 0 && !struck ? EXIT_BEYOND : driver_result();
}

/* Many live blocks, one by one, so that every table grows; then all frees without any memory. */
static int many_blocks(const struct trouble *trouble) {
  enum { MOST = 3000 };
  static const struct trouble always = {"host allocation", 1, 1, 0};
  static void *blocks[MOST];
  int got = 0, i, struck;
  driver_start(0);
  start_failing(trouble);
  for (i = 0; i < MOST; i++) {
    int status = pool_alloc(&blocks[got], 512 + (size_t)(i % 40) * 1000);
    CHECK(may(status));
    got += status == POOL_OK;
  }
  struck = stop_failing();
  start_failing(&always);
  for (i = 0; i < got; i++) {
    CHECK_STATUS(POOL_OK, pool_free(blocks[i]));
  }
  stop_failing();
  CHECK_TRIMS_TO_ZERO(0);
  return check_failures == 0 && !struck ? EXIT_BEYOND : driver_result();
}

/* The functions for runtimes, with a log that needs memory too: NULL, or a block; no unwinding, no abort. */
static int runtimes_functions(const struct trouble *trouble) {
  static int local;
  CUstream stream;
  void *blocks[6];
  int round, i, struck;
  driver_start(0);
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  /* What the log says of wrong frees is not for the tests' reader. */
  CHECK(freopen("/dev/null", "w", stderr) != NULL);
  setenv("CUDAPOOL_CONF", "log:error", 1);
  start_failing(trouble);
  for (round = 0; round < 2; round++) {
    pool_torch_begin_allocate_to_pool(0, 1, (uint64_t)round, NULL);
    blocks[0] = pool_torch_alloc(5 * MIB, 0, stream);
    blocks[1] = pool_torch_alloc(700, 0, stream);
    pool_torch_end_allocate_to_pool(0, 1, (uint64_t)round);
    blocks[2] = pool_torch_alloc(3 * MIB, 0, stream);
    blocks[3] = pool_cupy_alloc(NULL, 2 * MIB, 0);
    blocks[4] = pool_ort_alloc(100000);
    blocks[5] = pool_ort_alloc(100);
    for (i = 0; i < 6; i++) {
      if (blocks[i] == NULL) {
        CHECK_EQ(pool_last_status(), POOL_ERROR_HOST_OUT_OF_MEMORY);
      }
    }
    pool_torch_record_stream(blocks[2], CU_STREAM_PER_THREAD);
    pool_torch_memory_fraction(round ? 1.0 : 0.5, 0);
    pool_ort_free(&local);
    for (i = 0; i < 3; i++) {
      pool_torch_free(blocks[i], 1, 0, stream);
      pool_ort_free(blocks[3 + i]);
    }
    pool_torch_release_pool(0, 1, (uint64_t)round);
    pool_torch_reset();
  }
  struck = stop_failing();
  CHECK_EQ(stats_of(0).live_blocks, 0);
  for (round = 0; round < 2; round++) {
    pool_torch_release_pool(0, 1, (uint64_t)round);
  }
  CHECK_TRIMS_TO_ZERO(0);
  return check_failures == 0 && !struck ? EXIT_BEYOND : driver_result();
}

static void every_allocation_fails(int (*child)(const struct trouble *), int density) {
  struct trouble trouble = {"host allocation", 0, 0, 0};
  scenario_each(child, trouble, density);
  trouble.sticky = 1;
  scenario_each(child, trouble, density);
}

static void first_use_without_memory(void) {
  every_allocation_fails(first_use, 16);
}

static void later_use_without_memory(void) {
  every_allocation_fails(later_use, 8);
}

static void ladder_without_memory(void) {
  every_allocation_fails(in_the_ladder, 8);
}

static void many_blocks_without_memory(void) {
  every_allocation_fails(many_blocks, 8);
}

static void runtimes_functions_without_memory(void) {
  every_allocation_fails(runtimes_functions, 8);
}

int main(void) {
  dl_iterate_phdr(find_library, NULL);
  if (!CHECK(library_start != 0)) {
    return check_result();
  }
  /* This process never uses the driver; its children do. */
  RUN(first_use_without_memory);
  RUN(later_use_without_memory);
  RUN(ladder_without_memory);
  RUN(many_blocks_without_memory);
  RUN(runtimes_functions_without_memory);
  return check_result();
}
