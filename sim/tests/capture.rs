//! Stream capture: what is recorded, what is barred, what it spoils.

mod common;
use common::*;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;
const LEGACY: usize = 1;

fn begin(cu: &Cuda, mode: u32) -> usize {
    let s = cu.stream(1);
    ok(cu.cuStreamBeginCapture_v2(s, mode));
    s
}

fn status(cu: &Cuda, stream: usize) -> i32 {
    let mut status = 9;
    ok(cu.cuStreamIsCapturing(stream, &mut status));
    status
}

fn end(cu: &Cuda, stream: usize) -> (i32, usize) {
    let mut graph = 9;
    let code = cu.cuStreamEndCapture(stream, &mut graph);
    (code, graph)
}

fn nodes(cu: &Cuda, graph: usize) -> usize {
    let mut count = 0;
    ok(cu.cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count));
    count
}

fn set_mode(cu: &Cuda, mode: u32) -> u32 {
    let mut mode = mode;
    ok(cu.cuThreadExchangeStreamCaptureMode(&mut mode));
    mode
}

tests! {
    work_is_recorded_and_can_be_launched [] {
        let cu = Cuda::start();
        let (s, memory) = (cu.stream(1), cu.alloc(4096));
        ok(cu.cuMemsetD32Async(memory, 0, 1024, s));
        ok(cu.cuStreamBeginCapture_v2(s, GLOBAL));
        assert_eq!(status(&cu, s), 1);
        ok(cu.cuMemsetD32Async(memory, 5, 8, s));
        ok(cu.cuMemcpyDtoDAsync_v2(memory + 64, memory, 32, s));
        let (mut state, mut id, mut frontier) = (0, 0, 0);
        ok(cu.cuStreamGetCaptureInfo_v2(s, &mut state, &mut id, &mut 0, std::ptr::null_mut(), &mut frontier));
        assert_eq!((state, frontier), (1, 1));
        let (code, graph) = end(&cu, s);
        assert_eq!((code, nodes(&cu, graph), status(&cu, s)), (0, 2, 0));
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(peek(memory), 0, "nothing has run");
        let mut instance = 0;
        ok(cu.cuGraphInstantiateWithFlags(&mut instance, graph, 0));
        ok(cu.cuGraphDestroy(graph));
        ok(cu.cuGraphLaunch(instance, s));
        ok(cu.cuGraphExecDestroy(instance));
        ok(cu.cuStreamSynchronize(s));
        assert_eq!((peek(memory), peek(memory + 64)), (5, 5));
    }

    beginning_and_ending_are_checked [] {
        let cu = Cuda::start();
        assert_eq!(cu.cuStreamBeginCapture_v2(0, GLOBAL), 900);
        assert_eq!(cu.cuStreamBeginCapture_v2(cu.stream(1), 3), 1);
        assert_eq!(end(&cu, cu.stream(1)).0, 401);
        let s = begin(&cu, GLOBAL);
        assert_eq!(cu.cuStreamBeginCapture_v2(s, GLOBAL), 401);
        assert_eq!(cu.cuStreamEndCapture(s, std::ptr::null_mut()), 1);
        let mut context = 0;
        ok(cu.cuCtxGetCurrent(&mut context));
        cu.on_threads(1, |cu, _| {
            ok(cu.cuCtxSetCurrent(context));
            assert_eq!(end(cu, s), (908, 0));
        });
        assert_eq!(end(&cu, s).0, 0);
    }

    an_allocation_spoils_a_global_capture [] {
        let cu = Cuda::start();
        let block = cu.alloc(512);
        for call in [0, 1, 2, 3] {
            let (s, other, event) = (begin(&cu, GLOBAL), cu.stream(1), cu.event());
            let code = match call {
                0 => cu.cuMemAlloc_v2(&mut 0, 512),
                1 => cu.cuMemFree_v2(block),
                2 => cu.cuEventQuery(event),
                _ => cu.cuStreamSynchronize(other),
            };
            assert_eq!(code, 900, "call {call}");
            assert_eq!(status(&cu, s), 2);
            assert_eq!(cu.cuMemsetD32Async(block, 0, 1, s), 901);
            assert_eq!(end(&cu, s), (901, 0));
            assert_eq!(status(&cu, s), 0);
        }
        ok(cu.cuMemFree_v2(block));
    }

    modes_of_thread_and_capture_decide [] {
        let cu = Cuda::start();
        // Own captures: only a relaxed one, or a relaxed thread, permits it.
        for (capture, thread, code) in [
            (GLOBAL, GLOBAL, 900), (THREAD_LOCAL, GLOBAL, 900), (RELAXED, GLOBAL, 0),
            (GLOBAL, THREAD_LOCAL, 900), (THREAD_LOCAL, THREAD_LOCAL, 900), (RELAXED, THREAD_LOCAL, 0),
            (GLOBAL, RELAXED, 0), (THREAD_LOCAL, RELAXED, 0), (RELAXED, RELAXED, 0),
        ] {
            let s = begin(&cu, capture);
            set_mode(&cu, thread);
            assert_eq!(cu.cuMemAlloc_v2(&mut 0, 512), code, "{capture} {thread}");
            assert_eq!(set_mode(&cu, GLOBAL), thread);
            assert_eq!(end(&cu, s).0, if code == 0 { 0 } else { 901 });
        }
        // Another thread's captures: only a global one concerns a global thread.
        let mut context = 0;
        ok(cu.cuCtxGetCurrent(&mut context));
        for (capture, thread, code) in [
            (GLOBAL, GLOBAL, 900), (THREAD_LOCAL, GLOBAL, 0), (RELAXED, GLOBAL, 0),
            (GLOBAL, THREAD_LOCAL, 0), (GLOBAL, RELAXED, 0),
        ] {
            let s = begin(&cu, capture);
            cu.on_threads(1, |cu, _| {
                ok(cu.cuCtxSetCurrent(context));
                set_mode(cu, thread);
                assert_eq!(cu.cuMemAlloc_v2(&mut 0, 512), code, "{capture} {thread}");
            });
            assert_eq!(end(&cu, s).0, if code == 0 { 0 } else { 901 });
        }
        let mut bad = 3;
        assert_eq!(cu.cuThreadExchangeStreamCaptureMode(&mut bad), 1);
    }

    no_mode_permits_a_conflict [] {
        let cu = Cuda::start();
        set_mode(&cu, RELAXED);
        let s = begin(&cu, RELAXED);
        assert_eq!(cu.cuStreamQuery(s), 900);
        assert_eq!(end(&cu, s).0, 901);
        let s = begin(&cu, RELAXED);
        assert_eq!(cu.cuStreamSynchronize(s), 900);
        assert_eq!(end(&cu, s).0, 901);
        let s = begin(&cu, RELAXED);
        assert_eq!(cu.cuCtxSynchronize(), 900);
        assert_eq!(end(&cu, s).0, 901);
        let (s, event) = (begin(&cu, RELAXED), cu.event());
        assert_eq!(cu.cuCtxRecordEvent(0, event), 900);
        assert_eq!(end(&cu, s).0, 901);
    }

    captured_events_cannot_be_asked [] {
        let cu = Cuda::start();
        let (s, event) = (begin(&cu, RELAXED), cu.event());
        ok(cu.cuEventRecord(event, s));
        assert_eq!((cu.cuEventQuery(event), cu.cuEventSynchronize(event)), (907, 907));
        assert_eq!(end(&cu, s).0, 0);
        assert_eq!(cu.cuEventQuery(event), 907, "not even afterwards");
        ok(cu.cuEventRecord(event, s));
        ok(cu.cuEventQuery(event));
    }

    legacy_use_spoils_captures_of_blocking_streams [] {
        let cu = Cuda::start();
        let memory = cu.alloc(512);
        let mut host = 0u32;
        for call in [0, 1, 2] {
            let s = cu.stream(0);
            ok(cu.cuStreamBeginCapture_v2(s, RELAXED));
            assert_eq!(cu.cuStreamIsCapturing(LEGACY, &mut 0), 906);
            assert_eq!(status(&cu, s), 1, "asking does no harm");
            let code = match call {
                0 => cu.cuMemsetD32Async(memory, 0, 1, LEGACY),
                1 => cu.cuMemcpyDtoH_v2((&raw mut host).cast(), memory, 4),
                _ => cu.cuStreamSynchronize(0),
            };
            assert_eq!(code, 906, "call {call}");
            assert_eq!(end(&cu, s).0, 901);
        }
        // A non-blocking stream's capture has nothing to do with it.
        let s = begin(&cu, RELAXED);
        ok(cu.cuMemsetD32Async(memory, 6, 1, LEGACY));
        ok(cu.cuStreamSynchronize(LEGACY));
        assert_eq!((end(&cu, s).0, peek(memory)), (0, 6));
    }

    streams_fork_and_join [] {
        let cu = Cuda::start();
        let (s, other, memory) = (begin(&cu, GLOBAL), cu.stream(1), cu.alloc_relaxed());
        let (forked, joined) = (cu.event(), cu.event());
        ok(cu.cuMemsetD32Async(memory, 1, 1, s));
        ok(cu.cuEventRecord(forked, s));
        ok(cu.cuStreamWaitEvent(other, forked, 0));
        assert_eq!(status(&cu, other), 1);
        ok(cu.cuMemsetD32Async(memory, 2, 1, other));
        ok(cu.cuEventRecord(joined, other));
        ok(cu.cuStreamWaitEvent(s, joined, 0));
        let (code, graph) = end(&cu, s);
        assert_eq!((code, nodes(&cu, graph), status(&cu, other)), (0, 2, 0));
        // Left unjoined, and ended on the wrong stream.
        for (on_fork, expected) in [(false, 904), (true, 903)] {
            let s = begin(&cu, GLOBAL);
            ok(cu.cuEventRecord(forked, s));
            ok(cu.cuStreamWaitEvent(other, forked, 0));
            ok(cu.cuMemsetD32Async(memory, 2, 1, other));
            assert_eq!(end(&cu, if on_fork { other } else { s }).0, expected);
            if on_fork {
                assert_eq!(end(&cu, s).0, 901);
            }
            assert_eq!(status(&cu, other), 0);
        }
    }

    captures_stay_apart [] {
        let cu = Cuda::start();
        let (outside, event) = (cu.stream(1), cu.event());
        ok(cu.cuEventRecord(event, outside));
        let s = begin(&cu, RELAXED);
        assert_eq!(cu.cuStreamWaitEvent(s, event, 0), 905);
        assert_eq!(end(&cu, s).0, 901);
        let (a, b) = (begin(&cu, RELAXED), begin(&cu, RELAXED));
        ok(cu.cuEventRecord(event, a));
        assert_eq!(cu.cuStreamWaitEvent(b, event, 0), 902);
        assert_eq!((end(&cu, a).0, end(&cu, b).0), (901, 901));
    }

    memory_of_a_capture_is_the_graphs [] {
        let cu = Cuda::start();
        let s = begin(&cu, GLOBAL);
        let mut block = 0;
        ok(cu.cuMemAllocAsync(&mut block, 4 * MIB, s));
        ok(cu.cuMemsetD32Async(block, 8, 1, s));
        assert_eq!(cu.cuMemFreeAsync(block + 512, s), 1);
        ok(cu.cuMemFreeAsync(block, s));
        assert_eq!(cu.cuMemFreeAsync(block, s), 1, "twice");
        let (code, graph) = end(&cu, s);
        assert_eq!((code, cu.cudasim_used_bytes(0) as usize), (0, 4 * MIB));
        let mut instance = 0;
        ok(cu.cuGraphInstantiateWithFlags(&mut instance, graph, 0));
        ok(cu.cuGraphLaunch(instance, s));
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(peek(block), 8);
        ok(cu.cuGraphExecDestroy(instance));
        ok(cu.cuGraphDestroy(graph));
        assert_eq!(cu.cudasim_used_bytes(0), 0);
    }

    virtual_memory_is_not_barred [] {
        let cu = Cuda::start();
        let s = begin(&cu, GLOBAL);
        let base = cu.mapped(GRANULARITY);
        ok(cu.cuMemsetD32Async(base, 1, 1, s));
        cu.free_bytes();
        assert_eq!(status(&cu, s), 1);
        assert_eq!(end(&cu, s).0, 0);
        ok(cu.cuMemUnmap(base, GRANULARITY));
        assert_eq!(cu.cudasim_misuse_count(), 0);
    }
}

impl Cuda {
    /// A block allocated although something captures.
    fn alloc_relaxed(&self) -> u64 {
        let before = set_mode(self, RELAXED);
        let block = self.alloc(512);
        set_mode(self, before);
        block
    }
}
