//! Streams and events: asynchronous for real, and ordered exactly as documented.

mod common;
use common::*;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

const BUSY_US: u64 = 200_000;
const BUSY_NS: u64 = BUSY_US * 1000;
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;
const NOT_READY: i32 = 600;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

tests! {
    work_runs_later_and_in_order [] {
        let cu = Cuda::start();
        let (s, memory) = (cu.stream(1), cu.alloc(4096));
        ok(cu.cuMemsetD32Async(memory, 1, 1024, s));
        ok(cu.cuStreamSynchronize(s));
        let start = cu.cudasim_now_ns();
        ok(cu.cudasim_spin(s, BUSY_US));
        ok(cu.cuMemsetD32Async(memory, 2, 1024, s));
        ok(cu.cuMemsetD32Async(memory, 3, 1, s));
        assert_eq!((cu.cudasim_now_ns() - start, peek(memory)), (0, 1));
        assert_eq!(cu.cuStreamQuery(s), NOT_READY);
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(cu.cudasim_now_ns() - start, BUSY_NS);
        assert_eq!((peek(memory), peek(memory + 4)), (3, 2));
        ok(cu.cuStreamQuery(s));
    }

    a_write_submitted_before_a_free_lands_after_it ["CUDASIM_FREE_WAITS" = "0"] {
        // The block is freed in the stream's order, then handed out again: the old write must not be early.
        let cu = Cuda::start();
        let (s, other) = (cu.stream(1), cu.stream(1));
        let (mut block, mut again) = (0, 0);
        ok(cu.cuMemAllocAsync(&mut block, 4096, s));
        ok(cu.cudasim_poke(s, block, 7, 1, BUSY_US));
        ok(cu.cuMemFreeAsync(block, s));
        ok(cu.cuMemAllocAsync(&mut again, 4096, other));
        assert_ne!(again, block, "another stream must not get it before the free is reached");
        ok(cu.cuMemAllocAsync(&mut again, 4096, s));
        assert_eq!(again, block, "the same stream gets it at once");
        // The next owner's bytes, written too early by the host, are overwritten by the old kernel.
        // SAFETY: device memory is mapped in this process.
        unsafe { (again as *mut u32).write_volatile(1) };
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(peek(again), 7);
        assert_eq!(cu.cudasim_misuse_count(), 0);
    }

    freeing_waits_by_default [] {
        let cu = Cuda::start();
        let (s, memory) = (cu.stream(1), cu.alloc(4096));
        let start = cu.cudasim_now_ns();
        ok(cu.cudasim_poke(s, memory, 7, 1, BUSY_US));
        ok(cu.cuMemFree_v2(memory));
        assert_eq!(cu.cudasim_now_ns() - start, BUSY_NS);
        assert_eq!(cu.cudasim_misuse_count(), 0);
    }

    freeing_under_pending_work_is_reported ["CUDASIM_FREE_WAITS" = "0"] {
        let cu = Cuda::start();
        let (s, memory) = (cu.stream(1), cu.alloc(4 * MIB));
        ok(cu.cudasim_poke(s, memory, 7, 1, BUSY_US));
        ok(cu.cuMemFree_v2(memory));
        assert_eq!(cu.cudasim_misuse_count(), 1);
        assert_eq!(cu.cuStreamSynchronize(s), 700);
        assert_eq!(cu.cuMemAlloc_v2(&mut 0, 512), 700, "the error sticks");
        ok(cu.cuDevicePrimaryCtxReset_v2(0));
        cu.use_primary(0);
        cu.alloc(512);
    }

    legacy_waits_for_blocking_streams_and_they_for_it [] {
        let cu = Cuda::start();
        let (a, b, free) = (cu.stream(0), cu.stream(0), cu.stream(1));
        let memory = cu.alloc(4096);
        ok(cu.cudasim_spin(a, BUSY_US));
        ok(cu.cuMemsetD32Async(memory, 1, 1, LEGACY));
        ok(cu.cuMemsetD32Async(memory + 4, 2, 1, b));
        ok(cu.cuStreamQuery(free));
        assert_eq!(cu.cuStreamQuery(b), NOT_READY, "b is behind the legacy stream");
        assert_eq!(cu.cuStreamQuery(0), NOT_READY);
        ok(cu.cuMemsetD32Async(memory + 8, 3, 1, free));
        ok(cu.cuStreamSynchronize(free));
        assert_eq!(cu.cuStreamQuery(a), NOT_READY, "non-blocking work does not wait for it");
        ok(cu.cuStreamSynchronize(b));
        ok(cu.cuStreamQuery(a));
        assert_eq!((peek(memory), peek(memory + 4)), (1, 2));
    }

    blocking_streams_do_not_wait_for_each_other [] {
        let cu = Cuda::start();
        let (a, b) = (cu.stream(0), cu.stream(0));
        let memory = cu.alloc(4096);
        ok(cu.cudasim_spin(a, BUSY_US));
        ok(cu.cuMemsetD32Async(memory, 1, 1, b));
        ok(cu.cuStreamSynchronize(b));
        assert_eq!(cu.cuStreamQuery(a), NOT_READY);
        ok(cu.cuCtxSynchronize());
        ok(cu.cuStreamQuery(a));
    }

    the_legacy_handle_covers_all_blocking_streams [] {
        let cu = Cuda::start();
        let (a, event) = (cu.stream(0), cu.event());
        ok(cu.cudasim_spin(a, BUSY_US));
        ok(cu.cuEventRecord(event, 0));
        assert_eq!(cu.cuEventQuery(event), NOT_READY);
        ok(cu.cuStreamSynchronize(LEGACY));
        ok(cu.cuEventQuery(event));
        ok(cu.cuStreamQuery(a));
    }

    other_contexts_are_unrelated ["CUDASIM_DEVICES" = "2"] {
        let cu = Cuda::start();
        let a = cu.stream(0);
        ok(cu.cudasim_spin(a, BUSY_US));
        cu.use_primary(1);
        ok(cu.cuStreamQuery(0));
        ok(cu.cuCtxSynchronize());
        assert_eq!(cu.cuStreamQuery(a), NOT_READY);
    }

    each_thread_has_a_default_stream_of_its_own [] {
        let cu = Cuda::start();
        let memory = cu.alloc(4096);
        let (mut context, mut here) = (0, 0);
        ok(cu.cuCtxGetCurrent(&mut context));
        ok(cu.cuStreamGetId(PER_THREAD, &mut here));
        ok(cu.cudasim_spin(PER_THREAD, BUSY_US));
        cu.on_threads(1, |cu, _| {
            ok(cu.cuCtxSetCurrent(context));
            let mut there = 0;
            ok(cu.cuStreamGetId(PER_THREAD, &mut there));
            assert_ne!(here, there);
            ok(cu.cuMemsetD32Async_ptsz(memory, 5, 1, 0));
            ok(cu.cuStreamSynchronize(PER_THREAD));
            assert_eq!(peek(memory), 5);
            assert_eq!(cu.cuStreamQuery(LEGACY), NOT_READY, "the other thread's is a blocking stream");
        });
        assert_eq!(cu.cuStreamQuery(PER_THREAD), NOT_READY);
        ok(cu.cuStreamSynchronize(0));
        ok(cu.cuStreamQuery(PER_THREAD));
    }

    an_event_is_a_snapshot [] {
        let cu = Cuda::start();
        let (s, event) = (cu.stream(1), cu.event());
        ok(cu.cuEventQuery(event));
        ok(cu.cuEventSynchronize(event));
        ok(cu.cudasim_spin(s, 1000));
        ok(cu.cuEventRecord(event, s));
        ok(cu.cudasim_spin(s, BUSY_US));
        ok(cu.cuEventSynchronize(event));
        assert_eq!(cu.cuStreamQuery(s), NOT_READY);
        ok(cu.cuEventRecord(event, s));
        assert_eq!(cu.cuEventQuery(event), NOT_READY);
    }

    waiting_keeps_what_the_event_was [] {
        let cu = Cuda::start();
        let (a, b, waiting, event) = (cu.stream(1), cu.stream(1), cu.stream(1), cu.event());
        ok(cu.cudasim_spin(a, 1000));
        ok(cu.cuEventRecord(event, a));
        ok(cu.cuStreamWaitEvent(waiting, event, 0));
        ok(cu.cudasim_spin(b, BUSY_US));
        ok(cu.cuEventRecord(event, b));
        ok(cu.cuEventDestroy_v2(event));
        ok(cu.cuStreamSynchronize(waiting));
        assert_eq!(cu.cuStreamQuery(b), NOT_READY);
        ok(cu.cuStreamQuery(a));
    }

    an_event_outlives_its_stream [] {
        let cu = Cuda::start();
        let (s, event) = (cu.stream(1), cu.event());
        let start = cu.cudasim_now_ns();
        ok(cu.cudasim_spin(s, BUSY_US));
        ok(cu.cuEventRecord(event, s));
        ok(cu.cuStreamDestroy_v2(s));
        assert_eq!(cu.cudasim_now_ns(), start, "destroying does not wait");
        assert_eq!(cu.cuEventQuery(event), NOT_READY);
        ok(cu.cuEventSynchronize(event));
        assert_eq!(cu.cudasim_now_ns() - start, BUSY_NS);
    }

    time_passes_between_events [] {
        let cu = Cuda::start();
        let s = cu.stream(0);
        let (mut from, mut to, mut time) = (0, 0, 0.0);
        ok(cu.cuEventCreate(&mut from, 0));
        ok(cu.cuEventCreate(&mut to, 0));
        assert_eq!(cu.cuEventElapsedTime(&mut time, from, to), 400, "never recorded");
        ok(cu.cuEventRecord(from, s));
        ok(cu.cudasim_spin(s, BUSY_US));
        ok(cu.cuEventRecord(to, s));
        assert_eq!(cu.cuEventElapsedTime(&mut time, from, to), NOT_READY);
        ok(cu.cuEventSynchronize(to));
        ok(cu.cuEventElapsedTime(&mut time, from, to));
        assert_eq!(time, BUSY_US as f32 / 1000.0);
        assert_eq!(cu.cuEventElapsedTime(&mut time, from, cu.event()), 400, "without timing");
    }

    context_events_cover_all_streams [] {
        let cu = Cuda::start();
        let (a, b, event) = (cu.stream(0), cu.stream(1), cu.event());
        let memory = cu.alloc(4096);
        ok(cu.cuCtxRecordEvent(0, event));
        ok(cu.cuEventQuery(event));
        ok(cu.cudasim_spin(b, BUSY_US));
        ok(cu.cuCtxRecordEvent(0, event));
        assert_eq!(cu.cuEventQuery(event), NOT_READY);
        ok(cu.cuCtxWaitEvent(0, event));
        ok(cu.cuMemsetD32Async(memory, 4, 1, a));
        ok(cu.cuMemsetD32Async(memory, 5, 1, cu.stream(1)));
        ok(cu.cuStreamSynchronize(a));
        ok(cu.cuEventQuery(event));
        ok(cu.cuStreamQuery(b));
    }

    events_belong_to_their_context ["CUDASIM_DEVICES" = "2"] {
        let cu = Cuda::start();
        let (s, event) = (cu.stream(0), cu.event());
        cu.use_primary(1);
        let there = cu.event();
        assert_eq!(cu.cuEventRecord(there, s), 400);
        ok(cu.cuEventQuery(event));
        ok(cu.cudasim_spin(s, BUSY_US));
        ok(cu.cuEventRecord(event, s));
        let other = cu.stream(0);
        ok(cu.cuStreamWaitEvent(other, event, 0));
        assert_eq!(cu.cuStreamQuery(other), NOT_READY, "any context may wait");
    }

    host_functions_run_in_order_and_may_not_call_the_driver [] {
        static CODE: AtomicU32 = AtomicU32::new(0);
        unsafe extern "C" fn call_driver(cuda: *mut c_void) {
            // SAFETY: the test passes its library and waits.
            let cuda = unsafe { &*cuda.cast::<Cuda>() };
            CODE.store(cuda.cuMemAlloc_v2(&mut 0, 512) as u32, Ordering::SeqCst);
        }
        let cu = Cuda::start();
        let s = cu.stream(0);
        ok(cu.cudasim_spin(s, BUSY_US));
        ok(cu.cuLaunchHostFunc(s, Some(call_driver), &cu as *const Cuda as *mut c_void));
        assert_eq!(CODE.load(Ordering::SeqCst), 0);
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(CODE.load(Ordering::SeqCst), 800);
        assert_eq!(cu.cuLaunchHostFunc(s, None, std::ptr::null_mut()), 1);
    }

    streams_write_and_wait_for_values [] {
        let cu = Cuda::start();
        let (a, b) = (cu.stream(1), cu.stream(1));
        let memory = cu.alloc(512);
        ok(cu.cuMemsetD32Async(memory, 0, 128, a));
        ok(cu.cuStreamSynchronize(a));
        ok(cu.cuStreamWaitValue32_v2(a, memory, 9, 1));
        ok(cu.cuMemsetD32Async(memory + 4, 1, 1, a));
        cu.cudasim_sleep_ns(5_000_000);
        assert_eq!((cu.cuStreamQuery(a), peek(memory + 4)), (NOT_READY, 0));
        ok(cu.cuStreamWriteValue32_v2(b, memory, 9, 0));
        ok(cu.cuStreamSynchronize(a));
        assert_eq!(peek(memory + 4), 1);
        assert_eq!(cu.cuStreamWaitValue32_v2(a, 0, 9, 1), 1);
    }

    idle_streams_answer_without_a_thread [] {
        let cu = Cuda::start();
        let before = threads();
        let (s, event) = (cu.stream(0), cu.event());
        for stream in [s, 0, LEGACY, PER_THREAD] {
            ok(cu.cuEventRecord(event, stream));
            ok(cu.cuEventQuery(event));
            ok(cu.cuStreamQuery(stream));
            ok(cu.cuStreamSynchronize(stream));
            ok(cu.cuStreamWaitEvent(stream, event, 0));
        }
        ok(cu.cuCtxSynchronize());
        assert_eq!(threads(), before);
    }

    a_destroyed_streams_handle_is_used_again_at_once [] {
        let cu = Cuda::start();
        let (mut first, mut second) = (0, 0);
        let s = cu.stream(0);
        ok(cu.cuStreamGetId(s, &mut first));
        ok(cu.cuStreamDestroy_v2(s));
        assert_eq!(cu.stream(0), s);
        ok(cu.cuStreamGetId(s, &mut second));
        assert_ne!(first, second);
    }

    arguments_are_checked [] {
        let cu = Cuda::start();
        let mut out = 0;
        assert_eq!(cu.cuStreamCreate(std::ptr::null_mut(), 0), 1);
        assert_eq!(cu.cuStreamCreate(&mut out, 2), 1);
        for bad in [0, LEGACY, PER_THREAD] {
            assert_eq!(cu.cuStreamDestroy_v2(bad), 400);
        }
        assert_eq!(cu.cuEventCreate(&mut out, 8), 1);
        assert_eq!(cu.cuEventCreate(&mut out, 4), 1, "interprocess events have no timing");
        assert_eq!(cu.cuEventQuery(0), 400);
        assert_eq!(cu.cuStreamWaitEvent(cu.stream(0), 0, 0), 400);
        assert_eq!(cu.cuStreamWaitEvent(cu.stream(0), cu.event(), 2), 1);
        let (mut s, mut priority) = (0, 0);
        ok(cu.cuStreamCreateWithPriority(&mut s, 0, -100));
        ok(cu.cuStreamGetPriority(s, &mut priority));
        assert_eq!(priority, -5);
    }

    dead_handles_answer_a_code_on_request ["CUDASIM_MISUSE" = "report"] {
        let cu = Cuda::start();
        let (s, event) = (cu.stream(0), cu.event());
        ok(cu.cuStreamDestroy_v2(s));
        ok(cu.cuEventDestroy_v2(event));
        assert_eq!(cu.cuStreamQuery(s), 400);
        assert_eq!(cu.cuStreamDestroy_v2(s), 400);
        assert_eq!(cu.cuEventQuery(event), 400);
        assert_eq!(cu.cuStreamQuery(0x1234), 400);
        assert_eq!(cu.cudasim_misuse_count(), 4);
    }
}

#[test]
fn a_destroyed_stream_ends_the_process() {
    let output = in_process("a_destroyed_stream_ends_the_process", &[], || {
        let cu = Cuda::start();
        let s = cu.stream(0);
        ok(cu.cuStreamDestroy_v2(s));
        cu.cuStreamQuery(s);
    });
    expect_death(output, libc::SIGABRT, "is used after it was destroyed");
}
