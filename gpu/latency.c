/* latency.c: how long driver calls take on the host, as medians of many: a line each (name, tab, time), and
 * last the line that makes the simulated driver take as long (CUDASIM_LATENCY, for chunks of 2 MiB). Usage:
 * latency [SECONDS], by default 10. */

#include "probe.h"

enum { MOST = 2000, LEAST = 5 };

static double samples[16][MOST];
static int sample_counts[16];

static double now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int by_size(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(int row) {
  qsort(samples[row], (size_t)sample_counts[row], sizeof samples[row][0], by_size);
  return sample_counts[row] == 0 ? 0 : samples[row][sample_counts[row] / 2];
}

static void start_over(void) {
  memset(sample_counts, 0, sizeof sample_counts);
}

/* Times one call into a row. */
#define TIMED(row, call)                                        \
  do {                                                          \
    double before = now_ns();                                   \
    CUresult result = (call);                                   \
    double after = now_ns();                                    \
    must(result, #call);                                        \
    if (sample_counts[row] < MOST) {                            \
      samples[row][sample_counts[row]++] = after - before;      \
    }                                                           \
  } while (0)

static char line[2048];

static void report(int row, const char *call, const char *size, int for_the_line) {
  double ns = median(row);
  printf("%s%s%s\t%.2f us\t%d samples\n", call, *size ? ", " : "", size, ns / 1000, sample_counts[row]);
  if (for_the_line) {
    size_t length = strlen(line);
    snprintf(line + length, sizeof line - length, "%s%s=%.0fns", length == 0 ? "" : ",", call,
             ns < 1 ? 1 : ns);
  }
}

/* Whether a measurement goes on: at least a few samples, at most MOST, else until its time is over. */
static int goes_on(double started, double seconds) {
  return sample_counts[0] < LEAST || (sample_counts[0] < MOST && now_ns() - started < seconds * 1e9);
}

static void classic(size_t bytes, const char *size, double seconds, int for_the_line) {
  double started = now_ns();
  start_over();
  while (goes_on(started, seconds)) {
    CUdeviceptr block = 0;
    TIMED(0, cu.MemAlloc(&block, bytes));
    TIMED(1, cu.MemFree(block));
  }
  report(0, "cuMemAlloc", size, for_the_line);
  report(1, "cuMemFree", size, for_the_line);
}

static void mapped(size_t bytes, const char *size, double seconds, int for_the_line) {
  CUdeviceptr base = 0;
  double started;
  MUST(cu.MemAddressReserve(&base, bytes, 0, 0, 0));
  started = now_ns();
  start_over();
  while (goes_on(started, seconds)) {
    CUmemGenericAllocationHandle handle = 0;
    TIMED(0, create(&handle, bytes));
    TIMED(1, cu.MemMap(base, bytes, 0, handle, 0));
    TIMED(2, give_access(base, bytes));
    TIMED(3, cu.MemUnmap(base, bytes));
    TIMED(4, cu.MemRelease(handle));
  }
  report(0, "cuMemCreate", size, for_the_line);
  report(1, "cuMemMap", size, for_the_line);
  report(2, "cuMemSetAccess", size, for_the_line);
  report(3, "cuMemUnmap", size, for_the_line);
  report(4, "cuMemRelease", size, for_the_line);
  MUST(cu.MemAddressFree(base, bytes));
}

/* One access for many small chunks, as a large block of small chunks takes it. */
static void access_to_many(double seconds) {
  enum { CHUNKS = 64 };
  size_t page = page_size();
  CUmemGenericAllocationHandle handles[CHUNKS];
  CUdeviceptr base = 0;
  double started;
  int i;
  MUST(cu.MemAddressReserve(&base, CHUNKS * page, 0, 0, 0));
  started = now_ns();
  start_over();
  while (goes_on(started, seconds)) {
    for (i = 0; i < CHUNKS; i++) {
      MUST(create(&handles[i], page));
      MUST(cu.MemMap(base + (size_t)i * page, page, 0, handles[i], 0));
    }
    TIMED(0, give_access(base, CHUNKS * page));
    TIMED(1, cu.MemUnmap(base, CHUNKS * page));
    for (i = 0; i < CHUNKS; i++) {
      MUST(cu.MemRelease(handles[i]));
    }
  }
  report(0, "cuMemSetAccess", "64 chunks of 2 MiB", 0);
  report(1, "cuMemUnmap", "64 chunks of 2 MiB", 0);
  MUST(cu.MemAddressFree(base, CHUNKS * page));
}

static void stream_ordered(double seconds) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  double started = now_ns();
  start_over();
  if (cu.MemAllocAsync == NULL) {
    return;
  }
  while (goes_on(started, seconds)) {
    CUdeviceptr block = 0;
    TIMED(0, cu.MemAllocAsync(&block, 2 << 20, stream));
    TIMED(1, cu.MemFreeAsync(block, stream));
    if (sample_counts[0] % 64 == 0) {
      MUST(cu.StreamSynchronize(stream));
    }
  }
  report(0, "cuMemAllocAsync", "2 MiB", 1);
  report(1, "cuMemFreeAsync", "2 MiB", 1);
  MUST(cu.StreamSynchronize(stream));
}

static void events_and_contexts(CUcontext context, double seconds) {
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  CUcontext current = NULL;
  CUevent event = NULL;
  double started = now_ns();
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  MUST(cu.EventCreate(&event, CU_EVENT_DISABLE_TIMING));
  start_over();
  while (goes_on(started, seconds)) {
    TIMED(0, cu.EventRecord(event, stream));
    MUST(cu.StreamSynchronize(stream));
    TIMED(1, cu.EventQuery(event));
    TIMED(2, cu.CtxSynchronize());
    TIMED(3, cu.CtxGetCurrent(&current));
    TIMED(4, cu.StreamIsCapturing(stream, &status));
    if (cu.CtxRecordEvent != NULL) {
      TIMED(5, cu.CtxRecordEvent(context, event));
    }
  }
  report(0, "cuEventRecord", "", 1);
  report(1, "cuEventQuery", "", 1);
  report(2, "cuCtxSynchronize", "", 1);
  report(3, "cuCtxGetCurrent", "", 1);
  report(4, "cuStreamIsCapturing", "", 1);
  if (cu.CtxRecordEvent != NULL) {
    report(5, "cuCtxRecordEvent", "", 1);
  }
}

int main(int argc, char **argv) {
  double each = (argc == 2 ? atof(argv[1]) : 10) / 9;
  size_t available = 0, total = 0;
  CUcontext context;
  probe_open();
  context = driver_start(0);
  MUST(cu.MemGetInfo(&available, &total));
  classic(2 << 20, "2 MiB", each, 1);
  classic(32 << 20, "32 MiB", each, 0);
  if (available > 2 * GIB) {
    classic(512 << 20, "512 MiB", each, 0);
  }
  if (cu.MemCreate != NULL) {
    mapped(2 << 20, "2 MiB", each, 1);
    mapped(32 << 20, "32 MiB", each, 0);
    if (available > 2 * GIB) {
      mapped(512 << 20, "512 MiB", each, 0);
    }
    access_to_many(each);
  }
  stream_ordered(each);
  events_and_contexts(context, each);
  printf("CUDASIM_LATENCY=%s\n", line);
  return EXIT_SUCCESS;
}
