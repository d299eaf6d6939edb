//! An arena: the memory of one pool in one context, behind one lock; here is what needs no driver call.
//!
//! What does need one goes through [`super::ladder`] and [`super::settle`], with the lock released meanwhile.

use super::options::Options;
use super::order::{Marks, PER_THREAD, Stream, StreamKey};
use super::owners::{Owners, TAG_SIZE, Tag};
use super::registry;
use super::report::too_large;
use crate::arena::regions::Regions;
use crate::arena::{Calls, Debris, Mapper};
use crate::driver::lock::{Guard, Lock};
use crate::driver::{Api, Event, context, is_capturing, relaxed};
use crate::error::{NoHostMemory, Result, Status, bail, fail};
use crate::heap::{self, BlockInfo, Heap, NotLive, Part, SHARED, StreamId, block_flags};
use core::sync::atomic::{AtomicBool, Ordering::*};
use std::time::Instant;

/// Blocks of this many bytes and more are worth an event when they are freed in an arena of several streams; smaller ones stay with
/// their stream until a later mark covers them.
pub const MARK_BYTES: u64 = 1 << 20;

/// A request, checked and complete.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    /// Bytes, not 0 and at most the device's.
    pub size: u64,
    /// A power of two, 512 at least.
    pub align: u64,
    pub key: StreamKey,
    pub owner: Tag,
    pub own_allocation: bool,
}

/// How a block is freed.
#[derive(Clone, Copy, Debug)]
pub enum Release {
    Device,
    Stream(StreamKey),
}

/// A live block, as `pool_query` tells it.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub base: u64,
    pub requested: u64,
    pub usable: u64,
    pub device: i32,
    pub stream_ordered: bool,
    pub handle: u64,
    pub owner: [u8; TAG_SIZE],
}

/// Counters of an arena; what the heap counts is not repeated.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counters {
    pub allocs: u64,
    pub frees: u64,
    pub calls: Calls,
    pub oom: u64,
    pub oom_recovered: u64,
}

/// See the module.
pub struct Arena {
    pub mapper: Mapper,
    /// Bytes of the device.
    pub total: u64,
    /// The context is gone, and the arena with it; only its addresses are still known.
    pub lost: AtomicBool,
    /// A panic broke the invariants: no operation but harmless frees goes on.
    fenced: AtomicBool,
    state: Lock<State>,
}

/// What the lock protects.
pub struct State {
    pub heap: Heap,
    pub regions: Regions,
    /// By stream id; entry 0 stands for device order.
    pub streams: Vec<Stream>,
    /// The stream of the last call, and its key: [`StreamKey::NONE`] where the fast path must not take it.
    last: StreamId,
    last_key: StreamKey,
    /// Marks of the whole context.
    pub marks: Marks,
    /// Everything freed up to here is covered by a mark of the context.
    pub covered: u64,
    /// Everything freed up to here is finished with.
    pub done: u64,
    /// Events not in use.
    pub spare: Vec<Event>,
    pub counters: Counters,
    pub owners: Owners,
    /// What the driver would not take back, with the busy extents that some of it is mapped in.
    pub debris: Vec<(Debris, Vec<Part>)>,
    /// Bytes that growths under way are about to take.
    pub growing: u64,
    pub options: Options,
}

pub fn host_oom(_: NoHostMemory) -> Status {
    fail(
        Status::POOL_ERROR_HOST_OUT_OF_MEMORY,
        format_args!("the host has no memory for the pool's bookkeeping"),
    )
}

impl Arena {
    pub fn new(mapper: Mapper, total: u64, options: Options) -> core::result::Result<Arena, NoHostMemory> {
        let mut heap = Heap::new()?;
        if let Some(range) = mapper.range {
            heap.add_hole(0, range.len)?;
        }
        let mut streams = Vec::new();
        streams.try_reserve(4).map_err(|_| NoHostMemory)?;
        streams.push(Stream::new(StreamKey::DEVICE));
        let regions = Regions::new(mapper.range);
        Ok(Arena {
            mapper,
            total,
            lost: AtomicBool::new(false),
            fenced: AtomicBool::new(false),
            state: Lock::new(State {
                heap,
                regions,
                streams,
                last: SHARED,
                last_key: StreamKey::NONE,
                marks: Marks::default(),
                covered: 0,
                done: 0,
                spare: Vec::new(),
                counters: Counters::default(),
                owners: Owners::new(),
                debris: Vec::new(),
                growing: 0,
                options,
            }),
        })
    }

    pub fn device(&self) -> i32 {
        self.mapper.context.device
    }

    /// Locks the state of an arena that is in order.
    #[inline]
    pub fn lock(&self) -> Result<Guard<'_, State>> {
        let state = self.state.lock();
        if self.state.take_broken() || self.fenced.load(Relaxed) {
            return self.inspect(state);
        }
        Ok(state)
    }

    /// A panic was caught while the lock was held: goes on only if the invariants still hold.
    #[cold]
    fn inspect<'a>(&self, state: Guard<'a, State>) -> Result<Guard<'a, State>> {
        if !self.fenced.load(Relaxed) {
            let sound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| state.heap.validate()));
            match sound {
                Ok(()) => return Ok(state),
                Err(payload) => core::mem::forget(payload),
            }
            self.fenced.store(true, Relaxed);
        }
        bail!(
            POOL_ERROR_INTERNAL,
            "an earlier failure inside the pool broke its bookkeeping; the pool on this device is closed"
        )
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Notices that the context is gone.
    pub fn check_alive(&self, api: &Api) -> Result<()> {
        if !self.is_lost() && self.mapper.context.is_alive(api) {
            return Ok(());
        }
        self.lose(api);
        bail!(
            POOL_ERROR_CONTEXT_LOST,
            "the context of this block on device {} was destroyed or reset",
            self.device()
        )
    }

    /// Whether the stream has been used with this arena before.
    pub fn knows(&self, key: StreamKey) -> bool {
        self.lock().is_ok_and(|state| state.streams.iter().any(|s| s.key == key))
    }

    /// Whether the stream is of another context than this arena.
    fn is_foreign(&self, api: &Api, key: StreamKey) -> bool {
        let own = self.mapper.context.handle;
        match context::of_stream(api, key.handle) {
            Some(handle) => handle != own,
            // The default streams are those of the current context.
            None => !matches!(context::current_handle(api), handle if handle == 0 || handle == own),
        }
    }

    /// Frees on a stream of another context: nothing here can tell when that has got so far, so this waits for it.
    #[cold]
    fn free_foreign(&self, api: &Api, address: u64, key: StreamKey) -> Result<()> {
        if let Some(synchronize) = api.stream_synchronize
            && is_capturing(api, key.handle) == Some(false)
        {
            // SAFETY: the stream is the caller's own, in this call.
            let _ = relaxed(api, || unsafe { synchronize(key.handle) });
        }
        self.free(api, address, Release::Device)
    }

    /// Whether the address is in the reserved range: no lock is needed to tell.
    #[inline]
    pub fn has_in_range(&self, address: u64) -> bool {
        self.mapper.range.is_some_and(|r| address.wrapping_sub(r.base) < r.len)
    }

    /// Whether the address is in a `cuMemAlloc` chunk of this arena.
    pub fn has_in_chunks(&self, address: u64) -> bool {
        self.state.lock().regions.offset(address).is_some()
    }

    /// Allocates on the stream of the arena's last call from what is idle. 0 where there is nothing, or the stream is another.
    #[inline]
    pub fn allocate_fast(&self, size: u64, key: StreamKey) -> Result<u64> {
        let mut state = self.lock()?;
        if state.last_key != key && !state.recall(key) {
            return Ok(0);
        }
        let stream = state.last;
        let flags = block_flags::STREAM_ORDERED;
        let info = BlockInfo { requested: size, handle: key.handle, owner: 0, flags };
        let off = match state.heap.allocate_fast(stream, size, info) {
            Some(off) => off,
            // The search that follows needs no driver either.
            None => match state.heap.allocate(stream, size, heap::UNIT, info).map_err(host_oom)? {
                Some(off) => off,
                None => return Ok(0),
            },
        };
        state.counters.allocs = state.counters.allocs.wrapping_add(1);
        Ok(state.regions.address(off))
    }

    /// Allocates from what is idle, or climbs the ladder.
    pub fn allocate(&self, api: &Api, want: &Want) -> Result<u64> {
        if want.size > self.total {
            let mut state = self.lock()?;
            state.counters.oom = state.counters.oom.wrapping_add(1);
            return Err(too_large(want.size, self.device(), self.total));
        }
        if !want.own_allocation {
            let mut state = self.lock()?;
            if let Some(address) = state.try_allocate(want)? {
                return Ok(address);
            }
        }
        self.allocate_slowly(api, want)
    }

    /// Frees a block on a stream, if that takes no more than putting it back. False, and nothing done, otherwise.
    #[inline]
    pub fn free_fast(&self, api: &Api, address: u64, key: StreamKey) -> Result<bool> {
        let Some(range) = self.mapper.range else { return Ok(false) };
        let off = address.wrapping_sub(range.base);
        if off >= range.len {
            return Ok(false);
        }
        let mut state = self.lock()?;
        if state.last_key != key && !state.recall(key) {
            return Ok(false);
        }
        let stream = state.last;
        let Some(len) = state.heap.free_fast(off, stream) else { return Ok(false) };
        state.counters.frees = state.counters.frees.wrapping_add(1);
        if len >= MARK_BYTES && !state.heap.merge_all {
            drop(state);
            self.mark_stream(api, key);
        }
        Ok(true)
    }

    /// Frees the block that starts at `address`.
    pub fn free(&self, api: &Api, address: u64, release: Release) -> Result<()> {
        if let Release::Stream(key) = release
            && !((key.handle > PER_THREAD || registry::is_only(self)) && self.knows(key))
            && self.is_foreign(api, key)
        {
            return self.free_foreign(api, address, key);
        }
        let mut state = self.lock()?;
        let (off, _) = state.regions.offset(address).ok_or_else(|| not_a_block(address))?;
        let block = state.heap.block_at(off).map_err(|why| not_live(address, why))?;
        state.counters.frees = state.counters.frees.wrapping_add(1);
        let info = block.info;
        if info.owner != 0 {
            state.owners.subtract(info.owner, block.len);
        }
        let Release::Stream(key) = release else {
            state.heap.free_pending(&block);
            return Ok(());
        };
        // A stream that cannot be told for lack of memory is as good as all of them.
        let stream = match state.stream(key) {
            Ok(stream) if !waits_for_all(&info, key) => stream,
            _ => {
                state.heap.free_pending(&block);
                return Ok(());
            }
        };
        if block.len <= heap::MAX_SMALL && block.stream != stream {
            state.heap.free_pending(&block);
            return Ok(());
        }
        state.heap.free_on(&block, stream);
        let captured = state.streams.get(stream as usize).is_some_and(|s| s.captured.is_some());
        if captured || (block.len >= MARK_BYTES && !state.heap.merge_all) {
            drop(state);
            self.mark_stream(api, key);
        }
        Ok(())
    }

    /// The live block around `address`.
    pub fn query(&self, address: u64) -> Result<Found> {
        let state = self.lock()?;
        let (off, floor) = state.regions.offset(address).ok_or_else(|| not_a_block(address))?;
        let block = state.heap.block_around(off, floor).map_err(|_| not_a_block(address))?;
        Ok(Found {
            base: state.regions.address(block.off),
            requested: block.info.requested,
            usable: block.len,
            device: self.device(),
            stream_ordered: block.info.flags & block_flags::STREAM_ORDERED != 0,
            handle: block.info.handle,
            owner: state.owners.tag(block.info.owner),
        })
    }

    /// Notes that the block is used on a stream that its free will not name.
    pub fn use_elsewhere(&self, address: u64, key: StreamKey) -> Result<()> {
        let mut state = self.lock()?;
        let (off, _) = state.regions.offset(address).ok_or_else(|| not_a_block(address))?;
        let block = state.heap.block_at(off).map_err(|why| not_live(address, why))?;
        let own = block.info.flags & block_flags::STREAM_ORDERED != 0 && block.info.handle == key.handle;
        // The per-thread stream's handle does not say whose it is, so a use of it always counts.
        let own = own && key.handle != super::order::PER_THREAD;
        state.heap.mark(&block, if own { block_flags::USED_ON_OWN } else { block_flags::USED_ELSEWHERE });
        Ok(())
    }
}

impl State {
    /// Makes a stream that is known the last one. Not for the default streams, whose context only the driver can tell.
    #[inline(never)]
    fn recall(&mut self, key: StreamKey) -> bool {
        let known = key.handle > PER_THREAD && self.streams.iter().any(|s| s.key == key);
        known && self.other_stream(key).is_ok() && self.last_key == key
    }

    /// The id of a stream, which is added if it is new. The second stream of an arena ends the time when everything idle was
    /// one stream's.
    #[inline]
    pub fn stream(&mut self, key: StreamKey) -> core::result::Result<StreamId, NoHostMemory> {
        if self.last_key == key { Ok(self.last) } else { self.other_stream(key) }
    }

    #[cold]
    fn other_stream(&mut self, key: StreamKey) -> core::result::Result<StreamId, NoHostMemory> {
        let known = self.streams.iter().position(|s| s.key == key).map(|at| at as StreamId);
        let id = match known {
            Some(id) => id,
            None => self.add_stream(key)?,
        };
        if id == SHARED {
            self.heap.merge_all = false;
        }
        let captured = self.streams.get(id as usize).is_some_and(|s| s.captured.is_some());
        self.last_key = if captured || id == SHARED { StreamKey::NONE } else { key };
        self.last = id;
        Ok(id)
    }

    fn add_stream(&mut self, key: StreamKey) -> core::result::Result<StreamId, NoHostMemory> {
        // Only the first stream, in an arena without device-ordered use so far, has everything to itself.
        let first = self.streams.len() == 1 && self.counters.allocs == 0 && self.heap.bytes().mapped == 0;
        let at = self.streams.len();
        let vacant = (1..at).find(|id| {
            self.streams.get(*id).is_some_and(|s| s.marks.is_empty() && !s.is_captured())
                && !self.is_uncovered(*id as StreamId)
                && self.heap.stream_is_empty(*id as StreamId)
        });
        let id = match vacant {
            Some(id) => {
                if let Some(slot) = self.streams.get_mut(id) {
                    *slot = Stream::new(key);
                }
                self.heap.reset_stream(id as StreamId);
                id as StreamId
            }
            None => {
                self.streams.try_reserve(1).map_err(|_| NoHostMemory)?;
                let id = self.heap.add_stream()?;
                self.streams.push(Stream::new(key));
                id
            }
        };
        self.heap.merge_all = first;
        Ok(id)
    }

    /// Searches the arena's own lists.
    #[inline]
    pub fn try_allocate(&mut self, want: &Want) -> Result<Option<u64>> {
        let stream = self.stream(want.key).map_err(host_oom)?;
        let info = self.block_info(want)?;
        let found = self.heap.allocate(stream, want.size, want.align, info).map_err(host_oom)?;
        Ok(found.map(|off| self.handed_out(off, want, info.owner)))
    }

    #[inline]
    pub fn block_info(&mut self, want: &Want) -> Result<BlockInfo> {
        let owner = if want.owner.first() == Some(&0) {
            0
        } else {
            self.owners.intern(&want.owner).map_err(host_oom)?
        };
        let mut flags = if want.key.is_device_order() { 0 } else { block_flags::STREAM_ORDERED };
        if want.own_allocation {
            flags |= block_flags::OWN_ALLOCATION;
        }
        Ok(BlockInfo { requested: want.size, handle: want.key.handle, owner, flags })
    }

    /// Counts a block that the heap has handed out, and gives its address.
    #[inline]
    pub fn handed_out(&mut self, off: u64, want: &Want, owner: u16) -> u64 {
        self.counters.allocs = self.counters.allocs.wrapping_add(1);
        if owner != 0
            && let Ok(block) = self.heap.block_at(off)
        {
            self.owners.add(owner, block.len);
        }
        debug_assert_eq!(off % want.align, 0);
        self.regions.address(off)
    }

    /// Whether memory was freed on the stream that no mark covers.
    pub fn is_uncovered(&self, stream: StreamId) -> bool {
        self.streams.get(stream as usize).is_some_and(|s| self.heap.last_free(stream) > s.covered)
    }

    /// Notes whether a call found its stream captured. While it is, its calls stay off the fast path, so that the end is seen.
    pub fn set_captured(&mut self, stream: StreamId, captured: bool) {
        if let Some(s) = self.streams.get_mut(stream as usize) {
            s.captured = captured.then(Instant::now);
            if captured {
                self.last_key = StreamKey::NONE;
            }
        }
    }

    /// Whether some stream must be taken to be captured.
    pub fn is_captured(&self) -> bool {
        self.streams.iter().any(Stream::is_captured)
    }

    /// How far the device has got with what was freed on `stream`.
    pub fn done_of(&self, stream: StreamId) -> u64 {
        self.streams.get(stream as usize).map_or(0, |s| s.done.max(self.done))
    }
}

/// Whether a block freed on the stream of `key` must wait for more than that stream.
fn waits_for_all(info: &BlockInfo, key: StreamKey) -> bool {
    let elsewhere = info.flags & block_flags::USED_ELSEWHERE != 0;
    elsewhere || (info.flags & block_flags::USED_ON_OWN != 0 && key.handle != info.handle)
}

#[cold]
fn not_live(address: u64, why: NotLive) -> Status {
    match why {
        NotLive::Unknown => not_a_block(address),
        NotLive::Freed => fail(
            Status::POOL_ERROR_DOUBLE_FREE,
            format_args!("the block at {address:#x} has been freed already"),
        ),
    }
}

#[cold]
pub fn not_a_block(address: u64) -> Status {
    fail(Status::POOL_ERROR_INVALID_POINTER, format_args!("{address:#x} is not in a live block of the pool"))
}
