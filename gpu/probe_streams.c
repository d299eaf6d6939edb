/* probe_streams.c: streams, events, and stream capture. */

#include "probe.h"

static CUevent new_event(void) {
  CUevent event = NULL;
  MUST(cu.EventCreate(&event, CU_EVENT_DISABLE_TIMING)); /* without timing, as the library makes them */
  return event;
}

/* ---- events ---- */

static void events_of_the_context(void) {
  CUcontext context = driver_start(0);
  CUstream stream = new_stream(CU_STREAM_NON_BLOCKING);
  CUevent event = new_event();
  double start;
  NEEDS(cu.CtxRecordEvent);
  busy(stream, 400);
  start = now_ms();
  SAME(cu.CtxRecordEvent(context, event), 0);
  SAME(cu.EventQuery(event), 600); /* covers a non-blocking stream */
  TRUE(now_ms() - start < 200);
  SAME(cu.StreamSynchronize(stream), 0);
  SAME(cu.EventQuery(event), 0);
  /* And with no work at all. */
  SAME(cu.CtxRecordEvent(context, event), 0);
  SAME(cu.EventSynchronize(event), 0);
}

static void events_of_the_per_thread_stream(void) {
  CUcontext context = driver_start(0);
  CUevent event = new_event();
  NEEDS(cu.CtxRecordEvent);
  busy(CU_STREAM_PER_THREAD, 400);
  SAME(cu.CtxRecordEvent(context, event), 0);
  SAME(cu.EventQuery(event), 600);
  SAME(cu.StreamSynchronize(CU_STREAM_PER_THREAD), 0);
  SAME(cu.EventQuery(event), 0);
}

static void legacy_stream_and_the_others(void) {
  CUstream blocking, non_blocking;
  CUevent event;
  driver_start(0);
  blocking = new_stream(0);
  non_blocking = new_stream(CU_STREAM_NON_BLOCKING);
  event = new_event();
  busy(non_blocking, 400);
  MUST(cu.EventRecord(event, NULL));
  SAME(cu.EventSynchronize(event), 0);
  SAME(cu.StreamQuery(non_blocking), 600); /* so it was not waited for */
  SAME(cu.StreamSynchronize(non_blocking), 0);
  busy(blocking, 400);
  MUST(cu.EventRecord(event, NULL));
  SAME(cu.EventQuery(event), 600);
  SAME(cu.StreamSynchronize(blocking), 0);
  SAME(cu.EventSynchronize(event), 0);
}

static void odd_events(void) {
  CUevent event;
  driver_start(0);
  event = new_event();
  SAME(cu.EventQuery(event), 0); /* never recorded */
  SAME(cu.EventQuery(NULL), 400);
  SAME(cu.EventDestroy(event), 0);
}

/* ---- streams ---- */

static void destroyed_streams_finish_their_work(void) {
  CUdeviceptr block = 0;
  CUstream stream;
  CUevent event;
  unsigned word = 0;
  double start;
  driver_start(0);
  MUST(cu.MemAlloc(&block, 1 << 20));
  MUST(cu.MemsetD32(block, 0, 1 << 18));
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  event = new_event();
  busy(stream, 300);
  MUST(cu.MemsetD32Async(block, 0x5A, 1 << 18, stream));
  MUST(cu.EventRecord(event, stream));
  start = now_ms();
  SAME(cu.StreamDestroy(stream), 0);
  TRUE(now_ms() - start < 200);
  SAME(cu.EventQuery(event), 600); /* the event lives on */
  SAME(cu.EventSynchronize(event), 0);
  SAME(cu.MemcpyDtoH(&word, block, 4), 0);
  SAME(word, 0x5A);
}

static void handles_are_given_again(void) {
  CUstream first, second;
  driver_start(0);
  first = new_stream(CU_STREAM_NON_BLOCKING);
  MUST(cu.StreamDestroy(first));
  second = new_stream(CU_STREAM_NON_BLOCKING);
  TRUE(first == second);
}

static void contexts_of_streams(void) {
  CUcontext context = driver_start(0), found = NULL;
  CUstream stream = new_stream(0);
  NEEDS(cu.StreamGetCtx);
  SAME(cu.StreamGetCtx(stream, &found), 0);
  TRUE(found == context);
  SAME(cu.StreamGetCtx(NULL, &found), 0);
  TRUE(found == context);
  MUST(cu.CtxSetCurrent(NULL));
  found = NULL;
  SAME(cu.StreamGetCtx(stream, &found), 0);
  TRUE(found == context);
  SAME(cu.StreamGetCtx(NULL, &found), 201);
}

/* ---- capture ---- */

static CUstream captured;

static void begin(unsigned flags, CUstreamCaptureMode mode) {
  driver_start(0);
  if (cu.StreamBeginCapture == NULL) {
    cannot_ask("the driver has no stream capture");
  }
  captured = new_stream(flags);
  MUST(cu.StreamBeginCapture(captured, mode));
}

/* How the capture stands: 0 none, 1 active, 2 invalidated. */
static int capture_state(void) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult result = cu.StreamIsCapturing(captured, &status);
  return result == CUDA_SUCCESS ? (int)status : 1000 + (int)result;
}

static CUresult end_capture(void) {
  CUgraph graph = NULL;
  return cu.StreamEndCapture(captured, &graph);
}

static void memory_calls_in_a_capture(void) {
  CUdeviceptr ptr = 0;
  begin(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  SAME(cu.MemAlloc(&ptr, 1 << 20), 900);
  SAME(capture_state(), 2);
  SAME(end_capture(), 901);
}

/* How the library calls the driver in a capture. */
static void relaxed_calls_in_a_capture(void) {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr ptr = 0, base = 0;
  CUevent event;
  size_t page;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver_start(0);
  page = page_size();
  event = new_event();
  begin(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  SAME(cu.ThreadExchangeStreamCaptureMode(&mode), 0);
  SAME(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
  SAME(cu.MemAlloc(&ptr, 1 << 20), 0);
  SAME(cu.MemFree(ptr), 0);
  SAME(cu.MemAddressReserve(&base, page, 0, 0, 0), 0);
  SAME(create(&handle, page), 0);
  SAME(cu.MemMap(base, page, 0, handle, 0), 0);
  SAME(give_access(base, page), 0);
  SAME(cu.MemUnmap(base, page), 0);
  SAME(cu.MemRelease(handle), 0);
  SAME(cu.EventQuery(event), 0);
  SAME(cu.ThreadExchangeStreamCaptureMode(&mode), 0);
  SAME(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
  SAME(capture_state(), 1);
  SAME(end_capture(), 0);
}

static void mapping_in_a_capture(void) {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr base = 0;
  size_t page;
  driver_start(0);
  page = page_size();
  begin(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  SAME(cu.MemAddressReserve(&base, page, 0, 0, 0), 0);
  SAME(create(&handle, page), 0);
  SAME(cu.MemMap(base, page, 0, handle, 0), 0);
  SAME(give_access(base, page), 0);
  SAME(cu.MemUnmap(base, page), 0);
  SAME(capture_state(), 1);
  SAME(end_capture(), 0);
}

static void queries_in_a_capture(void) {
  CUevent event;
  driver_start(0);
  event = new_event();
  begin(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  SAME(cu.EventQuery(event), 900);
  SAME(capture_state(), 2);
  SAME(end_capture(), 901);
}

static void context_events_in_a_capture(void) {
  CUcontext context = driver_start(0);
  CUevent event = new_event();
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  NEEDS(cu.CtxRecordEvent);
  begin(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  MUST(cu.ThreadExchangeStreamCaptureMode(&mode));
  SAME(cu.CtxRecordEvent(context, event), 900);
  SAME(capture_state(), 2);
  SAME(end_capture(), 901);
}

static void context_waits_in_a_capture(void) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  begin(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  MUST(cu.ThreadExchangeStreamCaptureMode(&mode));
  SAME(cu.CtxSynchronize(), 900);
  SAME(capture_state(), 2);
  SAME(end_capture(), 901);
}

static void legacy_stream_tells_of_captures(void) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
  begin(0, CU_STREAM_CAPTURE_MODE_GLOBAL);
  SAME(cu.StreamIsCapturing(NULL, &status), 906);
  SAME(capture_state(), 1); /* asking does no harm */
  SAME(end_capture(), 0);
  begin(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  SAME(cu.StreamIsCapturing(NULL, &status), 0);
  SAME(status, 0);
  SAME(end_capture(), 0);
}

static void events_recorded_in_a_capture(void) {
  CUevent event;
  driver_start(0);
  event = new_event();
  begin(CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_GLOBAL);
  SAME(cu.EventRecord(event, captured), 0);
  SAME(end_capture(), 0);
  SAME(cu.EventQuery(event), 907);
  SAME(cu.EventDestroy(event), 0);
}

static void legacy_stream_is_not_captured(void) {
  driver_start(0);
  if (cu.StreamBeginCapture == NULL) {
    cannot_ask("the driver has no stream capture");
  }
  SAME(cu.StreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL), 900);
}

int main(int argc, char **argv) {
  static const struct probe probes[] = {
      {"events_of_the_context", "cuCtxRecordEvent covers non-blocking streams and does not wait",
       events_of_the_context},
      {"events_of_the_per_thread_stream", "and the per-thread default stream",
       events_of_the_per_thread_stream},
      {"legacy_stream_and_the_others", "the legacy stream waits for blocking streams only",
       legacy_stream_and_the_others},
      {"odd_events", "unrecorded and NULL events", odd_events},
      {"destroyed_streams", "a destroyed stream finishes its work; its events live on",
       destroyed_streams_finish_their_work},
      {"handles_are_given_again", "a new stream may have a destroyed one's handle at once",
       handles_are_given_again},
      {"contexts_of_streams", "cuStreamGetCtx tells whose a stream is", contexts_of_streams},
      {"memory_calls_in_a_capture", "cuMemAlloc breaks a capture", memory_calls_in_a_capture},
      {"relaxed_calls_in_a_capture", "in relaxed mode memory and event calls do not",
       relaxed_calls_in_a_capture},
      {"mapping_in_a_capture", "virtual memory calls do not in any mode", mapping_in_a_capture},
      {"queries_in_a_capture", "asking an ordinary event breaks a capture", queries_in_a_capture},
      {"context_events_in_a_capture", "cuCtxRecordEvent breaks a capture in any mode",
       context_events_in_a_capture},
      {"context_waits_in_a_capture", "so does cuCtxSynchronize", context_waits_in_a_capture},
      {"legacy_stream_tells", "the legacy stream tells of captured blocking streams",
       legacy_stream_tells_of_captures},
      {"events_recorded_in_a_capture", "an event recorded in a capture answers 907",
       events_recorded_in_a_capture},
      {"legacy_stream_is_not_captured", "the legacy stream cannot be captured",
       legacy_stream_is_not_captured},
      {NULL, NULL, NULL},
  };
  return probe_main(probes, argc, argv);
}
