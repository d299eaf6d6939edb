//! Conformance: one set of checks over both kinds of chunk, all kinds of streams, both orders, and pools of
//! both kinds, on the simulated driver.
//!
//! Each combination runs in a process of its own: the backend is fixed at first use, and counters are the
//! process's. Every allocation, free and trim of every check goes through [`Lab`], which holds the library to
//! a model of what is live: no overlap, right counters, and exactly the memory that the driver says it gave.

// Opening the driver and starting processes is what the simulated driver's own tests do too.
#[path = "../sim/tests/common/mod.rs"]
mod common;

use common::{Cuda, MIB, ok};
use cudapool::error::pool_status::{self, *};
use cudapool::ffi::constants::*;
use cudapool::ffi::functions::*;
use cudapool::ffi::types::*;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

const SIM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/sim");
const SIM_LIBRARY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/sim/libcuda.so.1");
const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;
/// What the simulated device has, unless a check says otherwise.
const DEVICE: u64 = 8 << 30;

// ---- the combinations ----

#[derive(Clone, Copy, PartialEq, Debug)]
enum Backend {
    Vmm,
    Malloc,
}

/// The stream on which a combination works.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    /// By both of its names, in turn.
    Legacy,
    PerThread,
    Blocking,
    NonBlocking,
}

/// Which calls a combination makes where a check leaves it open.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Order {
    Stream,
    Device,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    backend: Backend,
    kind: Kind,
    order: Order,
    /// In a pool of `pool_create`, not the default one.
    created: bool,
}

type Check = (&'static str, fn(&mut Lab));

/// All checks, in the order in which a process runs them. The first one needs an arena that knows no other
/// stream.
const CHECKS: &[Check] = &[
    ("reuse at once", reuse_at_once),
    ("sizes and alignments", sizes_and_alignments),
    ("contents survive churn", contents_survive_churn),
    ("no reuse before work is done", no_reuse_before_work_is_done),
    ("waits where there is no other memory", waits_where_there_is_no_other_memory),
    ("uses on other streams count", uses_on_other_streams_count),
    ("query", query),
    ("refused frees change nothing", refused_frees_change_nothing),
    ("trim keeps what it is told to", trim_keeps_what_it_is_told_to),
    ("out of memory is a code", out_of_memory_is_a_code),
    ("soak", soak),
];

fn conform(test: &str, case: Case) {
    let conf = match case.backend {
        Backend::Vmm => "backend:vmm",
        Backend::Malloc => "backend:malloc",
    };
    let environment = [("CUDAPOOL_CONF", conf), ("CUDASIM_LIB", SIM_LIBRARY), ("LD_LIBRARY_PATH", SIM)];
    common::expect_success(common::in_process(test, &environment, || {
        // A wait that never ends must not keep the whole suite waiting.
        // SAFETY: no handler is installed; the signal ends the process.
        unsafe { libc::alarm(120) };
        let mut lab = Lab::new(case);
        if case.created {
            create_pool();
        }
        for (name, check) in CHECKS {
            println!("{case:?}: {name}");
            check(&mut lab);
            lab.comes_to_nothing();
        }
        // SAFETY: any handle may be passed.
        let destroyed = unsafe { pool_destroy(pool()) };
        assert_eq!(destroyed, if case.created { POOL_OK } else { POOL_ERROR_INVALID_ARGUMENT });
        assert_eq!(lab.cuda.cudasim_misuse_count(), 0, "the driver was misused");
    }));
}

macro_rules! cases {
    ($($name:ident: $backend:ident $kind:ident $order:ident $created:literal;)*) => {$(
        #[test]
        fn $name() {
            let case = Case {
                backend: Backend::$backend,
                kind: Kind::$kind,
                order: Order::$order,
                created: $created,
            };
            conform(stringify!($name), case);
        }
    )*};
}

cases! {
    vmm_legacy_stream_ordered: Vmm Legacy Stream false;
    vmm_legacy_device_ordered: Vmm Legacy Device false;
    vmm_per_thread_stream_ordered: Vmm PerThread Stream false;
    vmm_per_thread_device_ordered: Vmm PerThread Device false;
    vmm_blocking_stream_ordered: Vmm Blocking Stream false;
    vmm_blocking_device_ordered: Vmm Blocking Device false;
    vmm_non_blocking_stream_ordered: Vmm NonBlocking Stream false;
    vmm_non_blocking_device_ordered: Vmm NonBlocking Device false;
    malloc_legacy_stream_ordered: Malloc Legacy Stream false;
    malloc_legacy_device_ordered: Malloc Legacy Device false;
    malloc_per_thread_stream_ordered: Malloc PerThread Stream false;
    malloc_per_thread_device_ordered: Malloc PerThread Device false;
    malloc_blocking_stream_ordered: Malloc Blocking Stream false;
    malloc_blocking_device_ordered: Malloc Blocking Device false;
    malloc_non_blocking_stream_ordered: Malloc NonBlocking Stream false;
    malloc_non_blocking_device_ordered: Malloc NonBlocking Device false;
    created_vmm_per_thread_device_ordered: Vmm PerThread Device true;
    created_vmm_non_blocking_stream_ordered: Vmm NonBlocking Stream true;
    created_malloc_legacy_stream_ordered: Malloc Legacy Stream true;
    created_malloc_blocking_device_ordered: Malloc Blocking Device true;
}

// ---- the lab ----

/// The pool under test; NULL for the default one.
static POOL: AtomicPtr<pool_t> = AtomicPtr::new(ptr::null_mut());

fn pool() -> *mut pool_t {
    POOL.load(Relaxed)
}

fn create_pool() {
    let mut pool = ptr::null_mut();
    // SAFETY: no options, and a place for a pointer.
    assert_eq!(unsafe { pool_create(ptr::null(), &mut pool) }, POOL_OK);
    POOL.store(pool, Relaxed);
}

/// What `pool_alloc_async` and `pool_alloc` ask for, said explicitly.
fn plain_request(size: usize, way: Way) -> pool_request {
    let (flags, stream) = match way {
        Way::Stream(handle) => (POOL_REQUEST_STREAM_ORDERED, stream_pointer(handle)),
        Way::Device => (0, ptr::null_mut()),
    };
    pool_request {
        struct_size: size_of::<pool_request>(),
        pool: pool(),
        size,
        alignment: 0,
        device: POOL_DEVICE_CURRENT,
        reserved: 0,
        flags,
        stream,
        owner: ptr::null(),
    }
}

/// Through which calls a block comes or goes.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    Stream(usize),
    Device,
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Block {
    at: u64,
    size: usize,
    usable: usize,
    way: Way,
}

impl Block {
    fn words(&self) -> usize {
        self.usable / 4
    }
}

struct Lab {
    cuda: Cuda,
    case: Case,
    context: usize,
    own: usize,
    /// A stream that waits for none of the kinds.
    other: usize,
    /// The next name of the legacy stream.
    turn: bool,
    /// What the library has handed out.
    live: BTreeMap<u64, Block>,
    live_bytes: u64,
    requested_bytes: u64,
    allocs: u64,
    frees: u64,
    /// Device memory of the test's own.
    foreign: u64,
}

fn stream_pointer(handle: usize) -> *mut CUstream_st {
    handle as *mut CUstream_st
}

fn pointer(address: u64) -> *mut c_void {
    address as *mut c_void
}

/// The status and the block of a call that writes its block even where it fails.
#[track_caller]
fn received(call: impl FnOnce(*mut *mut c_void) -> pool_status) -> Result<u64, pool_status> {
    let mut out = pointer(0x5a5a);
    let status = call(&mut out);
    assert_eq!(status == POOL_OK, !out.is_null(), "{status:?} with {out:?}");
    if status == POOL_OK { Ok(out as u64) } else { Err(status) }
}

/// Calls the library without the model.
#[track_caller]
fn raw_alloc(size: usize, way: Way) -> Result<u64, pool_status> {
    // SAFETY: `out` is a place for a pointer, the stream is alive.
    received(|out| unsafe {
        if !pool().is_null() {
            return pool_alloc_with(out, &plain_request(size, way));
        }
        match way {
            Way::Stream(handle) => pool_alloc_async(out, size, stream_pointer(handle)),
            Way::Device => pool_alloc(out, size),
        }
    })
}

fn raw_free(address: u64, way: Way) -> pool_status {
    // SAFETY: any pointer may be passed; the stream is alive.
    unsafe {
        match way {
            Way::Stream(handle) => pool_free_async(pointer(address), stream_pointer(handle)),
            Way::Device => pool_free(pointer(address)),
        }
    }
}

#[track_caller]
fn statistics() -> pool_stats {
    let mut stats = pool_stats { struct_size: size_of::<pool_stats>(), ..Default::default() };
    // SAFETY: the struct says how long it is.
    assert_eq!(unsafe { pool_get_stats(pool(), 0, &mut stats) }, POOL_OK);
    stats
}

fn query_status(address: u64) -> (pool_status, pool_block_info) {
    let mut info = pool_block_info {
        struct_size: size_of::<pool_block_info>(),
        base: pointer(0x5a5a),
        requested_size: 1,
        usable_size: 1,
        device: 1,
        order: 1,
        stream: ptr::null_mut(),
        owner: [1; POOL_OWNER_SIZE],
        pool: pointer(0x5a5a).cast(),
    };
    // SAFETY: the struct says how long it is.
    let status = unsafe { pool_query(pointer(address), &mut info) };
    (status, info)
}

impl Lab {
    fn new(case: Case) -> Lab {
        let cuda = Cuda::start();
        let mut context = 0;
        ok(cuda.cuCtxGetCurrent(&mut context));
        let own = match case.kind {
            Kind::Legacy => LEGACY,
            Kind::PerThread => PER_THREAD,
            Kind::Blocking => cuda.stream(0),
            Kind::NonBlocking => cuda.stream(NON_BLOCKING),
        };
        let other = cuda.stream(NON_BLOCKING);
        let live = BTreeMap::new();
        let (live_bytes, requested_bytes, allocs, frees, foreign) = (0, 0, 0, 0, 0);
        let turn = false;
        Lab {
            cuda,
            case,
            context,
            own,
            other,
            turn,
            live,
            live_bytes,
            requested_bytes,
            allocs,
            frees,
            foreign,
        }
    }

    /// The combination's stream, by one of its names.
    fn stream(&mut self) -> usize {
        self.turn = !self.turn;
        if self.own == LEGACY && self.turn { 0 } else { self.own }
    }

    /// How the combination allocates and frees.
    fn way(&mut self) -> Way {
        match self.case.order {
            Order::Stream => Way::Stream(self.stream()),
            Order::Device => Way::Device,
        }
    }

    /// The stream that works on a block.
    fn worker(&self, block: &Block) -> usize {
        match block.way {
            Way::Stream(handle) => handle,
            Way::Device => self.own,
        }
    }

    /// The counters tell the truth: about each other, about the model, and about the driver.
    #[track_caller]
    fn check_books(&self) -> pool_stats {
        let stats = statistics();
        let parts = stats.live_bytes + stats.cached_bytes + stats.pending_bytes + stats.overhead_bytes;
        assert_eq!(stats.reserved_bytes, parts, "the identity: {stats:?}");
        assert_eq!(
            stats.reserved_bytes,
            self.cuda.cudasim_used_bytes(0) - self.foreign,
            "the driver's account"
        );
        let counted =
            [stats.live_blocks, stats.live_bytes, stats.requested_bytes, stats.alloc_count, stats.free_count];
        let model = [self.live.len() as u64, self.live_bytes, self.requested_bytes, self.allocs, self.frees];
        assert_eq!(counted, model, "blocks, live, requested, allocations, frees");
        assert!(
            stats.live_bytes_peak >= stats.live_bytes && stats.reserved_bytes_peak >= stats.reserved_bytes
        );
        stats
    }

    /// Enters a block that the library has handed out.
    #[track_caller]
    fn enter(&mut self, at: u64, size: usize, way: Way) -> Block {
        let (status, info) = query_status(at);
        assert_eq!((status, info.base, info.requested_size), (POOL_OK, pointer(at), size));
        let block = Block { at, size, usable: info.usable_size, way };
        assert_eq!(at % POOL_DEFAULT_ALIGNMENT as u64, 0);
        assert!(block.usable >= size && block.usable.is_multiple_of(4), "{block:?}");
        if let Some((_, below)) = self.live.range(..=at).next_back() {
            assert!(below.at + below.usable as u64 <= at, "{block:?} overlaps {below:?}");
        }
        if let Some((_, above)) = self.live.range(at..).next() {
            assert!(at + block.usable as u64 <= above.at, "{block:?} overlaps {above:?}");
        }
        self.live.insert(at, block);
        self.live_bytes += block.usable as u64;
        self.requested_bytes += size as u64;
        self.allocs += 1;
        self.check_books();
        block
    }

    #[track_caller]
    fn try_alloc(&mut self, size: usize, way: Way) -> Result<Block, pool_status> {
        match raw_alloc(size, way) {
            Ok(at) => Ok(self.enter(at, size, way)),
            Err(status) => {
                self.check_books();
                Err(status)
            }
        }
    }

    #[track_caller]
    fn alloc_by(&mut self, size: usize, way: Way) -> Block {
        self.try_alloc(size, way).unwrap_or_else(|status| panic!("{status:?} for {size} bytes"))
    }

    #[track_caller]
    fn alloc(&mut self, size: usize) -> Block {
        let way = self.way();
        self.alloc_by(size, way)
    }

    #[track_caller]
    fn alloc_aligned(
        &mut self,
        size: usize,
        alignment: usize,
        owner: *const i8,
    ) -> Result<Block, pool_status> {
        let way = self.way();
        let request = pool_request { alignment, owner: owner.cast(), ..plain_request(size, way) };
        // SAFETY: the request says how long it is, and its owner is NULL or terminated.
        let at = received(|out| unsafe { pool_alloc_with(out, &request) })?;
        assert_eq!(at % alignment.max(1) as u64, 0, "{at:#x} at alignment {alignment}");
        Ok(self.enter(at, size, way))
    }

    /// Takes a block out of the model.
    fn strike(&mut self, block: Block) {
        assert_eq!(self.live.remove(&block.at), Some(block));
        self.live_bytes -= block.usable as u64;
        self.requested_bytes -= block.size as u64;
        self.frees += 1;
    }

    #[track_caller]
    fn free_by(&mut self, block: Block, way: Way) {
        assert_eq!(raw_free(block.at, way), POOL_OK, "{block:?} by {way:?}");
        self.strike(block);
        self.check_books();
    }

    #[track_caller]
    fn free(&mut self, block: Block) {
        let way = self.way();
        self.free_by(block, way);
    }

    #[track_caller]
    fn trim(&mut self, keep: usize) -> u64 {
        let before = self.check_books().reserved_bytes;
        let mut released = 1;
        // SAFETY: the place for the bytes is a local.
        assert_eq!(unsafe { pool_trim(pool(), 0, keep, &mut released) }, POOL_OK);
        assert_eq!(self.check_books().reserved_bytes, before - released as u64);
        released as u64
    }

    /// With no block live, all memory goes back to the driver.
    #[track_caller]
    fn comes_to_nothing(&mut self) {
        assert!(self.live.is_empty(), "the check has left blocks");
        self.trim(0);
        let stats = statistics();
        assert_eq!(stats.reserved_bytes, 0, "{stats:?}");
        assert_eq!(self.cuda.cudasim_live_handles() + self.cuda.cudasim_live_mappings(), 0);
        assert_eq!(self.cuda.cudasim_live_allocations(), u64::from(self.foreign > 0));
    }

    /// The whole block, on the stream that works on it.
    #[track_caller]
    fn fill(&self, block: &Block, value: u32) {
        ok(self.cuda.cuMemsetD32Async(block.at, value, block.words(), self.worker(block)));
    }

    /// Whether every word of the block is `value`, as its stream sees it.
    #[track_caller]
    fn check_filled(&self, block: &Block, value: u32) {
        let mut words = vec![0u32; block.words()];
        let stream = self.worker(block);
        ok(self.cuda.cuMemcpyDtoHAsync_v2(words.as_mut_ptr().cast(), block.at, words.len() * 4, stream));
        ok(self.cuda.cuStreamSynchronize(stream));
        let wrong = words.iter().position(|word| *word != value);
        assert!(wrong.is_none(), "word {wrong:?} of {block:?} is not {value:#x} any more");
    }

    #[track_caller]
    fn finish_work(&self) {
        ok(self.cuda.cuCtxSynchronize());
    }

    /// How many calls of the driver `f` makes.
    fn calls_in<R>(&mut self, f: impl FnOnce(&mut Lab) -> R) -> (u64, R) {
        let before = self.cuda.calls("*");
        let result = f(self);
        (self.cuda.calls("*") - before, result)
    }

    fn set_memory(&self, bytes: u64) {
        ok(self.cuda.cudasim_set_memory(0, bytes));
    }

    /// Device memory that the library does not know.
    fn take_foreign(&mut self, bytes: usize) -> u64 {
        self.foreign = bytes as u64;
        self.cuda.alloc(bytes)
    }

    fn return_foreign(&mut self, address: u64) {
        ok(self.cuda.cuMemFree_v2(address));
        self.foreign = 0;
    }
}

// ---- the checks ----

/// Memory freed on a stream serves the same stream at once, however busy it is, without a word to the driver.
/// Memory freed device-ordered serves once the work is done, and nothing new is taken.
fn reuse_at_once(lab: &mut Lab) {
    for size in [1, 700, 4096, 5000, 300_000, MIB, 3 * MIB + 1] {
        let block = lab.alloc(size);
        lab.fill(&block, 1);
        let (free_way, way) = (lab.way(), lab.way());
        if lab.case.order == Order::Stream {
            ok(lab.cuda.cudasim_spin(lab.own, 2000));
            let (calls, at) = lab.calls_in(|_| {
                assert_eq!(raw_free(block.at, free_way), POOL_OK);
                raw_alloc(size, way).unwrap()
            });
            assert_eq!(calls, 0, "driver calls for a cached pair of {size} bytes");
            assert_eq!(at, block.at, "{size} bytes were not where the best fit is");
            lab.strike(block);
            let again = lab.enter(at, size, way);
            lab.free(again);
        } else {
            lab.free(block);
            lab.finish_work();
            let before = lab.check_books().reserved_bytes;
            let again = lab.alloc(size);
            assert_eq!(lab.check_books().reserved_bytes, before, "idle memory was not used for {size} bytes");
            lab.free(again);
        }
    }
}

/// Sizes around every rounding, and every alignment: enough room, usable to the last word.
fn sizes_and_alignments(lab: &mut Lab) {
    assert!(matches!(received_nothing(lab.way()), POOL_OK), "size 0 is success, and no block");
    let mut sizes = vec![1, 2, 3 * MIB + 4097, 33 * MIB + 7, 64 * MIB];
    for round in [512, 4096, 65_536, MIB, 2 * MIB, 16 * MIB] {
        sizes.extend([round - 1, round, round + 1]);
    }
    let blocks: Vec<Block> = sizes.iter().map(|size| lab.alloc(*size)).collect();
    for (block, value) in blocks.iter().zip(1..) {
        lab.fill(block, value);
    }
    lab.finish_work();
    for (block, value) in blocks.iter().zip(1..) {
        for at in [block.at, block.at + block.usable as u64 - 4] {
            assert_eq!(common::peek(at), value, "{block:?}");
        }
        lab.free(*block);
    }
    for shift in 0..=POOL_MAX_ALIGNMENT.ilog2() {
        let blocks = [1, 5000, 3 * MIB + 1].map(|size| {
            let block = lab.alloc_aligned(size, 1 << shift, ptr::null()).unwrap();
            lab.fill(&block, shift);
            block
        });
        for block in blocks {
            lab.check_filled(&block, shift);
            lab.free(block);
        }
    }
    for bad in [3, 513, usize::MAX, POOL_MAX_ALIGNMENT * 2] {
        assert_eq!(lab.alloc_aligned(100, bad, ptr::null()), Err(POOL_ERROR_INVALID_ARGUMENT));
    }
}

/// The status of a request for no bytes.
fn received_nothing(way: Way) -> pool_status {
    let mut out = pointer(0x5a5a);
    // SAFETY: `out` is a place for a pointer, the stream is alive.
    let status = unsafe {
        match way {
            Way::Stream(handle) => pool_alloc_async(&mut out, 0, stream_pointer(handle)),
            Way::Device => pool_alloc(&mut out, 0),
        }
    };
    assert!(out.is_null());
    status
}

/// Blocks keep their contents while others come and go around them, and idle memory is given back.
fn contents_survive_churn(lab: &mut Lab) {
    let mut random = Random(0x243f_6a88_85a3_08d3);
    let mut blocks: Vec<(Block, u32)> = Vec::new();
    for round in 0..8u32 {
        for (at, (block, _)) in blocks.iter().enumerate() {
            if at % 2 == round as usize % 2 {
                lab.free(*block);
            }
        }
        blocks = blocks
            .into_iter()
            .enumerate()
            .filter(|(at, _)| at % 2 != round as usize % 2)
            .map(|(_, b)| b)
            .collect();
        if round % 3 == 1 {
            lab.trim(0);
        }
        while blocks.len() < 48 {
            let block = lab.alloc(random.size(2 * MIB));
            let value = round << 16 | blocks.len() as u32;
            lab.fill(&block, value);
            blocks.push((block, value));
        }
        for (block, value) in &blocks {
            lab.check_filled(block, *value);
        }
    }
    for (block, _) in blocks {
        lab.free(block);
    }
}

/// Who asks for memory that another's work is not finished with.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Taker {
    OtherStream,
    DeviceOrder,
    /// The per-thread stream of another thread.
    OtherThread,
}

const TAKERS: [Taker; 3] = [Taker::OtherStream, Taker::DeviceOrder, Taker::OtherThread];

/// Has `taker` allocate and fill a block, and finish that.
fn take(lab: &mut Lab, taker: Taker, size: usize, value: u32) -> Block {
    let work = |cuda: &Cuda, way: Way, stream: usize| {
        let at =
            raw_alloc(size, way).unwrap_or_else(|status| panic!("{taker:?} got {status:?} for {size} bytes"));
        ok(cuda.cuMemsetD32Async(at, value, query_status(at).1.usable_size / 4, stream));
        ok(cuda.cuStreamSynchronize(stream));
        at
    };
    let (at, way) = match taker {
        Taker::OtherStream => (work(&lab.cuda, Way::Stream(lab.other), lab.other), Way::Stream(lab.other)),
        Taker::DeviceOrder => (work(&lab.cuda, Way::Device, lab.other), Way::Device),
        Taker::OtherThread => {
            let (context, at) = (lab.context, AtomicU64::new(0));
            lab.cuda.on_threads(1, |cuda, _| {
                ok(cuda.cuCtxSetCurrent(context));
                at.store(work(cuda, Way::Stream(PER_THREAD), PER_THREAD), Relaxed);
            });
            let at = at.into_inner();
            // Looked at, and freed, from here on by another stream: that thread's is gone.
            (at, Way::Stream(lab.other))
        }
    };
    lab.enter(at, size, way)
}

/// A block that is freed while late work on its stream still reads it, and later writes it.
fn free_under_work(lab: &mut Lab, size: usize, witness: u64, micros: u64) {
    let block = lab.alloc(size);
    let stream = lab.worker(&block);
    lab.fill(&block, 0x01d);
    ok(lab.cuda.cudasim_spin(stream, micros));
    ok(lab.cuda.cuMemcpyDtoDAsync_v2(witness, block.at, 4, stream));
    ok(lab.cuda.cuMemcpyDtoDAsync_v2(witness + 4, block.at + block.usable as u64 - 4, 4, stream));
    ok(lab.cuda.cudasim_poke(stream, block.at, 0xbad, block.words() as u64, micros));
    lab.free(block);
}

/// Neither another stream nor device order gets memory that work submitted before its free still uses.
fn no_reuse_before_work_is_done(lab: &mut Lab) {
    let witness = lab.take_foreign(4096);
    for taker in TAKERS {
        for size in [700, 5000, 300_000, 3 * MIB] {
            free_under_work(lab, size, witness, 2000);
            let taken = take(lab, taker, size, 0x2e3);
            lab.finish_work();
            assert_eq!(
                [common::peek(witness), common::peek(witness + 4)],
                [0x01d; 2],
                "late reads, {taker:?}, {size}"
            );
            lab.check_filled(&taken, 0x2e3);
            lab.free_by(taken, Way::Device);
        }
    }
    lab.return_foreign(witness);
}

/// On a device with no other memory the request is served all the same, once the work is done.
fn waits_where_there_is_no_other_memory(lab: &mut Lab) {
    let witness = lab.take_foreign(4096);
    for taker in TAKERS {
        lab.trim(0);
        lab.set_memory(8 * MIB as u64 + lab.foreign);
        free_under_work(lab, 6 * MIB, witness, 10_000);
        let taken = take(lab, taker, 5 * MIB, 0x2e3);
        lab.finish_work();
        assert_eq!([common::peek(witness), common::peek(witness + 4)], [0x01d; 2], "late reads, {taker:?}");
        lab.check_filled(&taken, 0x2e3);
        lab.free_by(taken, Way::Device);
        lab.set_memory(DEVICE);
    }
    lab.return_foreign(witness);
}

/// A named use on another stream delays the reuse even on the block's own stream.
fn uses_on_other_streams_count(lab: &mut Lab) {
    for size in [700, 5000, 300_000, 3 * MIB] {
        let block = lab.alloc(size);
        ok(lab.cuda.cudasim_poke(lab.other, block.at, 0xbad, block.words() as u64, 4000));
        // SAFETY: block and stream are alive.
        let named = unsafe { pool_use_on_stream(pointer(block.at), stream_pointer(lab.other)) };
        assert_eq!(named, POOL_OK);
        lab.free(block);
        let again = lab.alloc(size);
        lab.fill(&again, 7);
        lab.finish_work();
        lab.check_filled(&again, 7);
        lab.free(again);
    }
}

/// Every address in a block tells of it; no other address does.
fn query(lab: &mut Lab) {
    let owner = c"an owner whose name is longer than thirty-one bytes";
    let blocks = [1, 700, 4096, 5000, 2 * MIB, 9 * MIB + 3]
        .map(|size| lab.alloc_aligned(size, 0, owner.as_ptr().cast()).unwrap());
    for block in blocks {
        let usable = block.usable as u64;
        for inside in [0, 1, usable / 2, block.size as u64 - 1, usable - 1] {
            let (status, info) = query_status(block.at + inside);
            assert_eq!(status, POOL_OK, "{inside} bytes into {block:?}");
            assert_eq!(
                (info.base as u64, info.requested_size, info.usable_size),
                (block.at, block.size, block.usable)
            );
            let (order, stream) = match block.way {
                // NULL is the legacy stream's other name.
                Way::Stream(handle) => (POOL_ORDER_STREAM, handle.max(LEGACY)),
                Way::Device => (POOL_ORDER_DEVICE, 0),
            };
            assert_eq!((info.device, info.order, info.stream as usize), (0, order, stream));
            let tag: Vec<u8> = info.owner.iter().map(|c| *c as u8).collect();
            assert_eq!(tag.split_last().unwrap(), (&0, &owner.to_bytes()[..POOL_OWNER_SIZE - 1]));
        }
        let (status, info) = query_status(block.at + usable);
        assert!(status == POOL_ERROR_INVALID_POINTER || info.base as u64 != block.at, "past {block:?}");
    }
    for block in blocks {
        lab.free(block);
        let (status, info) = query_status(block.at);
        assert_eq!((status, info.base, info.usable_size), (POOL_ERROR_INVALID_POINTER, ptr::null_mut(), 0));
    }
    for nowhere in [0, 1, u64::MAX] {
        assert_eq!(query_status(nowhere).0, POOL_ERROR_INVALID_POINTER);
    }
}

/// What is no start of a live block is refused by either free, and nothing has changed.
fn refused_frees_change_nothing(lab: &mut Lab) {
    let foreign = lab.take_foreign(4096);
    let on_host = 0u64;
    for size in [1, 700, 5000, 3 * MIB] {
        let (gone, kept) = (lab.alloc(size), lab.alloc(size));
        lab.fill(&kept, 5);
        lab.free(gone);
        let before = format!("{:?}", lab.check_books());
        for way in [lab.way(), Way::Device, Way::Stream(lab.other)] {
            let again = raw_free(gone.at, way);
            assert!(matches!(again, POOL_ERROR_DOUBLE_FREE | POOL_ERROR_INVALID_POINTER), "{again:?}");
            for inside in [1, 4, kept.usable as u64 / 2, kept.usable as u64 - 1] {
                assert_eq!(
                    raw_free(kept.at + inside, way),
                    POOL_ERROR_INVALID_POINTER,
                    "{inside} into {kept:?}"
                );
            }
            for not_ours in [foreign, ptr::from_ref(&on_host) as u64, 1, u64::MAX] {
                assert_eq!(raw_free(not_ours, way), POOL_ERROR_INVALID_POINTER, "{not_ours:#x}");
            }
            assert_eq!(raw_free(0, way), POOL_OK, "NULL");
        }
        assert_eq!(format!("{:?}", lab.check_books()), before, "a refused free changed the counters");
        lab.check_filled(&kept, 5);
        lab.free(kept);
    }
    lab.return_foreign(foreign);
}

/// A trim leaves no more than it was told, and takes no more than it need, to within a chunk.
fn trim_keeps_what_it_is_told_to(lab: &mut Lab) {
    let blocks = [MIB; 40].map(|size| lab.alloc(size));
    for block in blocks {
        lab.fill(&block, 3);
    }
    for block in blocks {
        lab.free(block);
    }
    for keep in [30 * MIB, 17 * MIB, 3 * MIB] {
        lab.trim(keep);
        let stats = lab.check_books();
        assert_eq!((stats.live_bytes, stats.pending_bytes), (0, 0));
        // No chunk of one-MiB blocks is larger than 16 MiB.
        let low = keep.saturating_sub(16 * MIB) as u64;
        assert!((low..=keep as u64).contains(&stats.reserved_bytes), "{keep}: {stats:?}");
    }
    assert_eq!(lab.trim(usize::MAX), 0);
}

/// The device is full: the caller is told so, nobody loses anything, and whatever is freed serves again, of
/// whatever sizes it was.
fn out_of_memory_is_a_code(lab: &mut Lab) {
    let way = lab.way();
    let ooms = statistics().oom_count;
    for (size, times) in [DEVICE as usize + 1, 1 << 40, usize::MAX - 4095, usize::MAX].into_iter().zip(1..) {
        let (calls, answer) = lab.calls_in(|_| raw_alloc(size, way));
        assert_eq!((calls, answer), (0, Err(POOL_ERROR_OUT_OF_MEMORY)), "{size} bytes, more than the device");
        assert_eq!(lab.check_books().oom_count, ooms + times);
    }

    lab.set_memory(64 * MIB as u64);
    let mut blocks = Vec::new();
    let refusal = loop {
        match lab.try_alloc(8 * MIB, way) {
            Ok(block) => {
                lab.fill(&block, blocks.len() as u32);
                blocks.push(block);
            }
            Err(status) => break status,
        }
    };
    assert_eq!((refusal, blocks.len()), (POOL_ERROR_OUT_OF_MEMORY, 8));
    let mut text = [0u8; 512];
    // SAFETY: the buffer is as long as said.
    let length = unsafe { pool_last_error(text.as_mut_ptr().cast(), text.len()) };
    let text = String::from_utf8_lossy(&text[..length.min(text.len() - 1)]);
    assert!(text.contains("8388608") && text.contains("67108864"), "the numbers are not in: {text}");
    assert_eq!(lab.check_books().oom_count, ooms + 5);
    for size in [1, 5000, 20 * MIB] {
        assert_eq!(lab.try_alloc(size, way), Err(POOL_ERROR_OUT_OF_MEMORY), "{size} bytes");
    }

    let last = blocks.pop().unwrap();
    lab.free(last);
    let again = lab.alloc(8 * MIB);
    lab.fill(&again, 7);
    blocks.push(again);
    // Every other one goes: no gap is larger than a block.
    for at in [0, 2, 4, 6] {
        lab.free(blocks[at]);
    }
    let large = lab.alloc(26 * MIB);
    lab.fill(&large, 0xb16);
    lab.check_filled(&large, 0xb16);
    for at in [1, 3, 5, 7] {
        lab.check_filled(&blocks[at], at as u32);
    }
    lab.set_memory(DEVICE);
    let more = lab.alloc(100 * MIB);
    for block in [large, more, blocks[1], blocks[3], blocks[5], blocks[7]] {
        lab.free(block);
    }
}

// ---- the soak ----

/// xorshift64: the same numbers everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 11) % bound as u64) as usize
    }

    /// Mostly small, now and then large, as programs ask.
    fn size(&mut self, most: usize) -> usize {
        let top = most >> self.below(16);
        1 + self.below(top.max(1))
    }
}

const SOAK_STEPS: usize = 20_000;
const SOAK_LIVE: usize = 160;
const SOAK_DEVICE: u64 = 96 << 20;
/// Bytes at either end of a block that carry its mark.
const MARK: usize = 64;
const WITNESSES: usize = 512;

/// Ends of freed blocks, copied out by the stream that frees them, and what must be in them.
struct Witnesses {
    at: u64,
    expected: Vec<u32>,
}

impl Witnesses {
    fn compare(&mut self, lab: &Lab) {
        lab.finish_work();
        for (value, place) in self.expected.drain(..).zip(0..) {
            for word in (0..2 * MARK as u64).step_by(4) {
                let found = common::peek(self.at + place * 2 * MARK as u64 + word);
                assert_eq!(found, value, "a block did not keep its mark until it was freed");
            }
        }
    }
}

/// Random blocks on several streams with work that runs late, on a device that is now and then full.
fn soak(lab: &mut Lab) {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut witnesses = Witnesses { at: lab.take_foreign(WITNESSES * 2 * MARK), expected: Vec::new() };
    let event = lab.cuda.event();
    let mut blocks: Vec<(Block, u32)> = Vec::new();
    let mut refused = 0;
    lab.set_memory(SOAK_DEVICE);
    for step in 0..SOAK_STEPS {
        if random.below(64) == 0 {
            let stream = if random.below(2) == 0 { lab.own } else { lab.other };
            ok(lab.cuda.cudasim_spin(stream, random.below(300) as u64));
        }
        match random.below(1000) {
            0 => drop(lab.trim(random.below(SOAK_DEVICE as usize))),
            1..=10 if !blocks.is_empty() => {
                let block = blocks[random.below(blocks.len())].0;
                let (status, info) = query_status(block.at + random.below(block.usable) as u64);
                assert_eq!((status, info.base as u64), (POOL_OK, block.at));
            }
            _ if random.below(SOAK_LIVE) >= blocks.len() => {
                let size = random.size(8 * MIB);
                let got = match random.below(16) {
                    0 => lab.alloc_aligned(size, 1 << random.below(22), ptr::null()),
                    1 => lab.try_alloc(size, Way::Device),
                    2 | 3 => lab.try_alloc(size, Way::Stream(lab.other)),
                    _ => {
                        let way = lab.way();
                        lab.try_alloc(size, way)
                    }
                };
                match got {
                    Ok(block) => {
                        let (mark, stream) = (step as u32, lab.worker(&block));
                        for at in [block.at, block.at + (block.usable - MARK) as u64] {
                            ok(lab.cuda.cuMemsetD32Async(at, mark, MARK / 4, stream));
                        }
                        blocks.push((block, mark));
                    }
                    Err(status) => {
                        assert_eq!(status, POOL_ERROR_OUT_OF_MEMORY);
                        // Far from full there is no excuse, unless a small survivor keeps all of a
                        // `cuMemAlloc` chunk.
                        let (live, wanted) = (lab.live_bytes, size as u64);
                        let fits = lab.case.backend == Backend::Vmm && live + wanted < SOAK_DEVICE / 4;
                        assert!(!fits, "{size} bytes were refused beside {live}");
                        refused += 1;
                    }
                }
            }
            _ if !blocks.is_empty() => {
                let (block, mark) = blocks.swap_remove(random.below(blocks.len()));
                soak_free(lab, &mut random, &mut witnesses, event, block, mark);
            }
            _ => {}
        }
    }
    for (block, mark) in blocks {
        soak_free(lab, &mut random, &mut witnesses, event, block, mark);
    }
    witnesses.compare(lab);
    println!("{refused} requests were refused");
    assert!(refused < SOAK_STEPS / 100, "{refused} requests were refused");
    lab.set_memory(DEVICE);
    ok(lab.cuda.cuEventDestroy_v2(event));
    lab.return_foreign(witnesses.at);
}

fn soak_free(lab: &mut Lab, random: &mut Random, to: &mut Witnesses, event: usize, block: Block, mark: u32) {
    if to.expected.len() == WITNESSES {
        to.compare(lab);
    }
    let place = to.at + (to.expected.len() * 2 * MARK) as u64;
    to.expected.push(mark);
    let mut stream = lab.worker(&block);
    let turn = random.below(8);
    if turn < 2 {
        // The last use is another stream's, made to wait for the first one.
        let (first, last) = (stream, if stream == lab.other { lab.own } else { lab.other });
        ok(lab.cuda.cuEventRecord(event, first));
        ok(lab.cuda.cuStreamWaitEvent(last, event, 0));
        stream = last;
    }
    ok(lab.cuda.cuMemcpyDtoDAsync_v2(place, block.at, MARK, stream));
    ok(lab.cuda.cuMemcpyDtoDAsync_v2(
        place + MARK as u64,
        block.at + (block.usable - MARK) as u64,
        MARK,
        stream,
    ));
    let way = match (turn, block.way) {
        (0, first) => {
            // SAFETY: block and stream are alive.
            let named = unsafe { pool_use_on_stream(pointer(block.at), stream_pointer(stream)) };
            assert_eq!(named, POOL_OK);
            first
        }
        (1, _) => Way::Stream(stream),
        (2, _) => Way::Device,
        (_, way) => way,
    };
    lab.free_by(block, way);
}
