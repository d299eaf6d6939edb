/*
 * What the simulated CUDA driver offers beyond the driver's own functions: a look inside, and knobs.
 *
 * All of these work before cuInit, are not counted themselves and take no part in latencies and failure
 * rules. Where a call is named, "cuMemAlloc" means all its variants (cuMemAlloc_v2, ...), "cuMemAlloc_v2"
 * only that one, and NULL or "*" all calls. Functions that return int answer 0 or a CUresult; an unknown name
 * or device is an error.
 *
 * Environment, read at first use: CUDASIM_MEMORY, CUDASIM_DEVICES, CUDASIM_DRIVER_VERSION, CUDASIM_NO_VMM,
 * CUDASIM_FAIL, CUDASIM_LATENCY, CUDASIM_CLOCK, CUDASIM_LOG, CUDASIM_MISUSE, CUDASIM_FREE_WAITS;
 * sim/src/knobs.rs describes each.
 */
#ifndef CUDASIM_H
#define CUDASIM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/*
 * Device memory in use. It counts the sizes of cuMemCreate chunks that still have an owner or a mapping, the
 * sizes of blocks (cuMemAlloc and the like) rounded up to 512 bytes, and what memory pools have reserved.
 * Alignment gaps and the driver's own needs do not count, so total - free of cuMemGetInfo is the same number.
 */
uint64_t cudasim_used_bytes(int device);

/* The most that was ever in use, and starting that figure anew from what is in use now. */
uint64_t cudasim_peak_bytes(int device);
void cudasim_reset_peak(int device);

/* Changes the size of a device; may be less than is in use, then nothing more is to be had. */
int cudasim_set_memory(int device, uint64_t bytes);

/* How often a call was made, whatever it answered; and starting all counts from 0. */
uint64_t cudasim_call_count(const char *name);
void cudasim_reset_counts(void);

/*
 * Whether the processor time that calls take on the thread that makes them is counted (it is not, until this
 * is called), and how many nanoseconds it was; cudasim_reset_counts starts these anew too.
 */
void cudasim_time_calls(int on);
uint64_t cudasim_call_time(const char *name);

/*
 * Makes the nth call of that name from now on (1: the next one) answer `code` and do nothing; with `sticky`,
 * all later ones too. nth 0 forgets the rules made for exactly this name ("*": all rules).
 */
int cudasim_fail(const char *name, uint64_t nth, int sticky, int code);

/* How long calls of that name take at least, in nanoseconds; 0: no longer than they do. */
int cudasim_set_latency(const char *name, uint64_t ns);

/* How many misuses were reported. */
uint64_t cudasim_misuse_count(void);

/* Whether use of a dead stream or event handle ends the process (the default) or answers 400. */
void cudasim_set_misuse_aborts(int aborts);

/* Keeps reports off stderr; they are still counted and logged. */
void cudasim_set_silent(int silent);

/* Whether cuMemFree waits for work of the block's context (the default, as the real driver mostly does). */
void cudasim_set_free_waits(int waits);

/* Objects that exist: cuMemCreate handles with owners, mappings, reservations, blocks, streams, events. */
uint64_t cudasim_live_handles(void);
uint64_t cudasim_live_mappings(void);
uint64_t cudasim_live_reservations(void);
uint64_t cudasim_live_allocations(void);
uint64_t cudasim_live_streams(void);
uint64_t cudasim_live_events(void);

/* Work that keeps the stream busy for that long. */
int cudasim_spin(struct CUstream_st *stream, uint64_t microseconds);

/*
 * Like a kernel: in stream order waits `delay_us`, then writes `value` to `count` 32-bit words from `dptr`
 * on. Memory that cannot be written by then is reported and loses the context (700).
 */
int cudasim_poke(struct CUstream_st *stream, uint64_t dptr, uint32_t value, uint64_t count,
                 uint64_t delay_us);

/*
 * Virtual time. It starts at 0 and passes only while every thread that takes part sleeps: then it jumps to
 * the moment at which the first of them is to go on, and that one goes on alone. The streams take part while
 * they have work, and each thread of the program from its first call of the driver to its end. All times of
 * this driver go by it: work, latencies, events; a query that answers "not ready" takes 1 us. If it cannot go
 * on, a report says who sleeps.
 *
 * CUDASIM_CLOCK=virtual switches it on, or this call before the first use of the driver or of the clock; 0,
 * or a code if that is over.
 */
int cudasim_use_virtual_clock(void);

/* The time, and sleeping: by the virtual clock, if it is on, else by the host's. */
uint64_t cudasim_now_ns(void);
void cudasim_sleep_ns(uint64_t ns);

/*
 * A thread that waits otherwise than by this clock (in pthread_join, at a pipe) holds time up. It can leave
 * before that and enter again afterwards; any call of the driver enters too. `expect` keeps a place for a
 * thread that is about to be started, so that no time passes until it takes the place by `enter`. Entering
 * twice is the same as once. These do nothing without the virtual clock.
 */
void cudasim_thread_expect(void);
void cudasim_thread_enter(void);
void cudasim_thread_leave(void);

/*
 * The virtual clock for who has to wait by it; NULL if it is off. `wait` sleeps until somebody calls `wake`
 * with the word, or it is `until` (UINT64_MAX: no end); not at all if the word is not `seen`; it may end
 * early. Who is woken goes on before time does.
 */
struct cudasim_clock {
  uint64_t (*now)(void);
  void (*wait)(const uint32_t *word, uint32_t seen, uint64_t until);
  void (*wake)(const uint32_t *word);
};
const struct cudasim_clock *cudasim_clock(void);

#ifdef __cplusplus
}
#endif

#endif
