/* bench.c: what the preload shim costs. Each figure is a ratio or a difference within one run, the wrapped
 * call beside the driver's own of the same process. Run under the shim; CUDAPOOL_PRELOAD says what is
 * measured. Exit code 1 if a pass-through takes more than BOUND_NS over the call itself in each of several
 * attempts. */

#define CHECK_WITHOUT_LIBRARY
#include "check.h"
#include "cuda_driver.h"
#include "cudasim.h"

typedef __typeof__(&cuMemAlloc_v2) alloc_function;
typedef __typeof__(&cuMemFree_v2) free_function;

enum { BOUND_NS = 100, ROUNDS = 101, BATCH = 20000, ATTEMPTS = 5 };

static void *library;

static void *found(const char *name) {
  void *function = dlsym(library, name);
  if (function == NULL) {
    fprintf(stderr, "no %s\n", name);
    exit(1);
  }
  return function;
}

#define TAKE(place, name)                       \
  do {                                          \
    void *function = found(name);               \
    memcpy(&(place), &function, sizeof(place)); \
  } while (0)

/* Where a function lies in the driver, which only a process without the shim is told. */
static long offset_of(const char *name) {
  Dl_info info;
  char *function = found(name);
  return dladdr(function, &info) != 0 ? (long)(function - (char *)info.dli_fbase) : -1;
}

/* The driver's own function, around the shim. */
static void *unwrapped(const char *self, const char *name) {
  char command[4200];
  long offset = -1;
  Dl_info info;
  FILE *child;
  snprintf(command, sizeof command, "env -u LD_PRELOAD '%s' --offset %s", self, name);
  child = popen(command, "r");
  if (child == NULL || fscanf(child, "%ld", &offset) != 1 || pclose(child) != 0 || offset < 0 ||
      dladdr(found("cuInit"), &info) == 0) {
    fprintf(stderr, "%s cannot be found\n", name);
    exit(1);
  }
  return (char *)info.dli_fbase + offset;
}

static int by_size(const void *left, const void *right) {
  double difference = *(const double *)left - *(const double *)right;
  return (difference > 0) - (difference < 0);
}

static double median(double *values, int count) {
  qsort(values, (size_t)count, sizeof *values, by_size);
  return values[count / 2];
}

/* Nanoseconds of a refused call, which is as short as a call can be. */
static double refused(alloc_function alloc) {
  double start = now_ms();
  int i;
  for (i = 0; i < BATCH; i++) {
    if (alloc(NULL, 4096) != CUDA_ERROR_INVALID_VALUE) {
      exit(1);
    }
  }
  return (now_ms() - start) * 1e6 / BATCH;
}

/* Nanoseconds of an allocation with its free. */
static double pair(alloc_function alloc, free_function free_it, size_t size, int count) {
  double start = now_ms();
  int i;
  for (i = 0; i < count; i++) {
    CUdeviceptr ptr = 0;
    if (alloc(&ptr, size) != 0 || free_it(ptr) != 0) {
      fprintf(stderr, "an allocation failed\n");
      exit(1);
    }
  }
  return (now_ms() - start) * 1e6 / count;
}

static int pass_through(alloc_function wrapped, alloc_function own) {
  double best = 1e9;
  int attempt, round;
  for (attempt = 0; attempt < ATTEMPTS && best > BOUND_NS; attempt++) {
    double more[ROUNDS], calls[ROUNDS];
    for (round = 0; round < ROUNDS; round++) {
      calls[round] = refused(own);
      more[round] = refused(wrapped) - calls[round];
    }
    if (attempt == 0 || median(more, ROUNDS) < best) {
      best = median(more, ROUNDS);
      printf("pass-through of cuMemAlloc: %.1f ns over the call's own %.1f ns (bound %d)\n", best,
             median(calls, ROUNDS), BOUND_NS);
    }
  }
  return best <= BOUND_NS;
}

static void pairs(const char *what, alloc_function alloc, free_function free_it, alloc_function own_alloc,
                  free_function own_free, int count) {
  static const size_t sizes[] = {4096, MIB, 32 * MIB, 256 * MIB};
  size_t i;
  for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    double ratios[ROUNDS], own[ROUNDS], times[ROUNDS];
    int round;
    for (round = 0; round < ROUNDS; round++) {
      own[round] = pair(own_alloc, own_free, sizes[i], count) / 1000;
      times[round] = pair(alloc, free_it, sizes[i], count) / 1000;
      ratios[round] = times[round] / own[round];
    }
    printf("cuMemAlloc + cuMemFree of %6zu KiB, %s: %7.2f us, the driver's own %7.2f us, ratio %.3f\n",
           sizes[i] / KIB, what, median(times, ROUNDS), median(own, ROUNDS), median(ratios, ROUNDS));
  }
}

/* A rescued call beside its parts done by hand: the refused call, asking the pool, the second call. */
static void rescue(alloc_function wrapped, alloc_function own_alloc, free_function own_free) {
  __typeof__(&pool_alloc) take;
  __typeof__(&pool_free) give;
  __typeof__(&pool_reclaim) reclaim;
  void *pool_library = dlopen("libcudapool.so", RTLD_NOW | RTLD_LOCAL);
  double ratios[31], parts[31];
  int round;
  if (pool_library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    exit(1);
  }
  library = pool_library;
  TAKE(take, "pool_alloc");
  TAKE(give, "pool_free");
  TAKE(reclaim, "pool_reclaim");
  for (round = 0; round < 31; round++) {
    int turn;
    double times[2];
    for (turn = 0; turn < 2; turn++) {
      int by_hand = (round + turn) % 2;
      CUdeviceptr ptr = 0;
      size_t released = 0;
      void *block = NULL;
      double start;
      CUresult result;
      if (take(&block, 7 * GIB) != 0 || give(block) != 0) {
        exit(1);
      }
      start = now_ms();
      if (by_hand) {
        result = own_alloc(&ptr, 4 * GIB);
        if (result == CUDA_ERROR_OUT_OF_MEMORY && reclaim(-1, 4 * GIB, &released) == 0) {
          result = own_alloc(&ptr, 4 * GIB);
        }
      } else {
        result = wrapped(&ptr, 4 * GIB);
      }
      times[by_hand] = now_ms() - start;
      if (result != 0 || own_free(ptr) != 0 || reclaim(-1, 8 * GIB, &released) != 0) {
        fprintf(stderr, "an allocation was not rescued\n");
        exit(1);
      }
    }
    ratios[round] = times[0] / times[1];
    parts[round] = times[1];
  }
  printf("a rescued cuMemAlloc of 4 GiB: %.2f of its parts by hand (%.0f us)\n", median(ratios, 31),
         median(parts, 31) * 1e3);
}

int main(int count, char **arguments) {
  const char *mode = getenv("CUDAPOOL_PRELOAD");
  alloc_function alloc, own_alloc;
  free_function free_it, own_free;
  __typeof__(&cuInit) init;
  __typeof__(&cuDevicePrimaryCtxRetain) retain;
  __typeof__(&cuCtxSetCurrent) set_current;
  CUcontext context = NULL;
  void *function;
  int good = 1;
  library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  if (count == 3) {
    printf("%ld\n", offset_of(arguments[2]));
    return 0;
  }
  TAKE(init, "cuInit");
  TAKE(retain, "cuDevicePrimaryCtxRetain");
  TAKE(set_current, "cuCtxSetCurrent");
  TAKE(alloc, "cuMemAlloc_v2");
  TAKE(free_it, "cuMemFree_v2");
  function = unwrapped(arguments[0], "cuMemAlloc_v2");
  memcpy(&own_alloc, &function, sizeof function);
  function = unwrapped(arguments[0], "cuMemFree_v2");
  memcpy(&own_free, &function, sizeof function);
  if (own_alloc == alloc || init(0) != 0 || retain(&context, 0) != 0 || set_current(context) != 0) {
    fprintf(stderr, "the shim is not there, or no device\n");
    return 1;
  }
  if (mode != NULL && strcmp(mode, "pool") == 0) {
    pairs("served by the pool", alloc, free_it, own_alloc, own_free, 5);
  } else {
    good = pass_through(alloc, own_alloc);
    pairs("passed through", alloc, free_it, own_alloc, own_free, 50);
    rescue(alloc, own_alloc, own_free);
  }
  return good ? 0 : 1;
}
