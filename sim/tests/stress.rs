//! Many threads at once: no deadlock, no lost write, no drift of the accounts.

mod common;
use common::*;

const THREADS: u32 = 6;
const ROUNDS: u32 = 150;

/// Small, fast, good enough to mix operations.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Runs `body` over and over on several threads that share the primary context.
fn hammer(cu: &Cuda, body: impl Fn(&Cuda, &mut Random, u32) + Sync) {
    let mut context = 0;
    ok(cu.cuCtxGetCurrent(&mut context));
    cu.on_threads(THREADS as usize, |cu, number| {
        let thread = number as u32 + 1;
        ok(cu.cuCtxSetCurrent(context));
        let mut random = Random(u64::from(thread).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        for _ in 0..ROUNDS {
            body(cu, &mut random, thread);
        }
    });
}

tests! {
    blocks_streams_and_events [] {
        let cu = Cuda::start();
        hammer(&cu, |cu, random, thread| {
            let (s, event) = (cu.stream(random.below(2) as u32), cu.event());
            let words = 1 + random.below(100_000) as usize;
            let block = cu.alloc(words * 4);
            ok(cu.cuMemsetD32Async(block, thread, words, s));
            ok(cu.cuEventRecord(event, s));
            match random.below(4) {
                0 => ok(cu.cuEventSynchronize(event)),
                1 => ok(cu.cuStreamSynchronize(s)),
                2 => ok(cu.cuStreamSynchronize(0)),
                _ => ok(cu.cuCtxSynchronize()),
            }
            if random.below(4) == 0 {
                ok(cu.cuStreamWaitEvent(0, event, 0));
            }
            // On a non-blocking stream the legacy synchronisation has promised nothing.
            ok(cu.cuStreamSynchronize(s));
            assert_eq!((peek(block), peek(block + 4 * (words as u64 - 1))), (thread, thread));
            ok(cu.cuMemFree_v2(block));
            ok(cu.cuEventDestroy_v2(event));
            ok(cu.cuStreamDestroy_v2(s));
        });
        ok(cu.cuCtxSynchronize());
        assert_eq!(cu.cudasim_used_bytes(0), 0);
        assert_eq!((cu.cudasim_live_streams(), cu.cudasim_live_events()), (0, 0));
        assert_eq!(cu.cudasim_misuse_count(), 0);
    }

    mappings [] {
        let cu = Cuda::start();
        let base = cu.reserve(64 * GRANULARITY * THREADS as usize);
        hammer(&cu, |cu, random, thread| {
            let own = base + u64::from(thread - 1) * 64 * GRANULARITY as u64;
            let at = own + random.below(60) * GRANULARITY as u64;
            let chunks = 1 + random.below(4);
            for i in 0..chunks {
                let handle = cu.create(GRANULARITY);
                cu.map(at + i * GRANULARITY as u64, GRANULARITY, handle);
                ok(cu.cuMemRelease(handle));
            }
            let size = chunks as usize * GRANULARITY;
            let words = size / 4;
            ok(cu.cuMemsetD32Async_ptsz(at, thread, words, 0));
            ok(cu.cuStreamSynchronize(2));
            assert_eq!(peek(at + size as u64 - 4), thread);
            ok(cu.cuMemUnmap(at, size));
        });
        assert_eq!((cu.cudasim_used_bytes(0), cu.cudasim_live_mappings()), (0, 0));
        assert_eq!(cu.cudasim_misuse_count(), 0);
    }

    pools_and_order [] {
        let cu = Cuda::start();
        hammer(&cu, |cu, random, thread| {
            let s = cu.stream(1);
            let mut blocks = Vec::new();
            for _ in 0..8 {
                let (words, mut block) = (1 + random.below(4096) as usize, 0);
                ok(cu.cuMemAllocAsync(&mut block, words * 4, s));
                ok(cu.cuMemsetD32Async(block, thread, words, s));
                blocks.push(block);
            }
            ok(cu.cuStreamSynchronize(s));
            for block in blocks {
                assert_eq!(peek(block), thread, "somebody else wrote here");
                ok(cu.cuMemFreeAsync(block, s));
            }
            ok(cu.cuStreamDestroy_v2(s));
        });
        ok(cu.cuCtxSynchronize());
        assert_eq!((cu.cudasim_used_bytes(0), cu.cudasim_misuse_count()), (0, 0));
    }

    contexts_come_and_go [] {
        let cu = Cuda::start();
        hammer(&cu, |cu, random, thread| {
            let mut own = 0;
            ok(cu.cuCtxCreate_v2(&mut own, 0, 0));
            let (s, block) = (cu.stream(0), cu.alloc(4096 + random.below(4 << 20) as usize));
            ok(cu.cuMemsetD32Async(block, thread, 1024, s));
            ok(cu.cuMemsetD32Async(block, thread, 1024, 0));
            cu.event();
            ok(cu.cuCtxDestroy_v2(own));
        });
        assert_eq!(cu.cudasim_used_bytes(0), 0);
        assert_eq!((cu.cudasim_live_streams(), cu.cudasim_live_events()), (0, 0));
        assert_eq!(cu.cudasim_misuse_count(), 0);
    }
}
