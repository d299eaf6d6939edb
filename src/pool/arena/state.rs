//! The state of an arena, behind its lock: the heap, the streams that have been used with it, and the
//! counters.

use super::fence::{Fences, Stream};
use super::owners::{Owner, Owners};
use super::spilled::Spilled;
use crate::driver::Event;
use crate::error::{NoHostMemory, Result, Status, fail};
use crate::heap::{self, Block, BlockMeta, Bytes, Chunk, Heap, NotLive, Part, SHARED, StreamId, block_flags};
use crate::pool::options::{Backend, Options};
use crate::pool::settings;
use crate::pool::types::{AllocRequest, BlockInfo, PoolId, StreamKey, tag_text};
use crate::sync::clock;
use crate::vmem::address_map::AddressMap;
use crate::vmem::{Calls, Mapper, Unreclaimable};

/// Blocks of this many bytes and more are worth an event when they are freed in an arena of several streams;
/// smaller ones stay with their stream until a later fence covers them.
const FENCE_BYTES: u64 = 1 << 20;

/// Counters of an arena; what the heap counts is not repeated.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counters {
    pub allocs: u64,
    pub frees: u64,
    pub calls: Calls,
    pub oom: u64,
    pub oom_recovered: u64,
    /// Requests that waited for frees.
    pub waits: u64,
    /// Requests served with host memory.
    pub spills: u64,
}

/// What the lock protects.
pub struct State {
    /// As [`super::Arena::pool`]; a request that was on its way when its pool was destroyed finds out by it.
    pub(super) pool: PoolId,
    pub(super) heap: Heap,
    pub(super) addresses: AddressMap,
    /// By stream id; entry 0 stands for device order.
    pub(super) streams: Vec<Stream>,
    /// The stream of the last call, and its key: [`StreamKey::NONE`] where the fast path must not take it.
    last: StreamId,
    last_key: StreamKey,
    /// Fences of the whole context.
    pub(super) fences: Fences,
    /// Everything freed up to here is covered by a fence of the context.
    pub(super) covered: u64,
    /// The device has got past everything freed up to here.
    pub(super) done: u64,
    /// Events not in use.
    pub(super) spare: Vec<Event>,
    pub(super) counters: Counters,
    pub(super) owners: Owners,
    /// What the driver would not take back, with the busy extents that some of it is mapped in.
    pub(super) unreclaimable: Vec<(Unreclaimable, Vec<Part>)>,
    /// Bytes that growths under way are about to take.
    pub(super) growing: u64,
    /// Chunks of host memory.
    pub(super) spilled: Spilled,
    pub(super) options: Options,
    /// The count of frees when [`super::Arena::used`] was last brought up to date.
    pub(super) seen: u64,
}

impl State {
    pub fn new(mapper: &Mapper, pool: PoolId, options: Options) -> core::result::Result<State, NoHostMemory> {
        let mut heap = Heap::new()?;
        heap.pinned = options.pinned;
        if let Some(range) = mapper.range {
            heap.add_unmapped(0, range.len)?;
        }
        let mut streams = Vec::new();
        streams.try_reserve(4)?;
        streams.push(Stream::new(StreamKey::DEVICE));
        let addresses = AddressMap::new(mapper.range);
        Ok(State {
            pool,
            heap,
            addresses,
            streams,
            last: SHARED,
            last_key: StreamKey::NONE,
            fences: Fences::default(),
            covered: 0,
            done: 0,
            spare: Vec::new(),
            counters: Counters::default(),
            owners: Owners::new(),
            unreclaimable: Vec::new(),
            growing: 0,
            spilled: Spilled::default(),
            options,
            seen: 0,
        })
    }

    /// The id of the last call's stream, or of another one that is known, which is the last one then.
    #[inline]
    pub fn recall(&mut self, key: StreamKey) -> Option<StreamId> {
        (self.last_key == key || self.recall_other(key)).then_some(self.last)
    }

    /// Not for the default streams, whose context only the driver can tell.
    #[inline(never)]
    fn recall_other(&mut self, key: StreamKey) -> bool {
        let known = key.is_created() && self.streams.iter().any(|s| s.key == key);
        known && self.other_stream(key).is_ok() && self.last_key == key
    }

    /// The id of a stream, which is added if it is new. The second stream of an arena ends the time when
    /// everything idle was one stream's.
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
        let unknown = self.streams.iter().skip(1).all(|s| s.key == StreamKey::NONE);
        let first = unknown && self.counters.allocs == 0 && self.heap.bytes().mapped == 0;
        let at = self.streams.len();
        let vacant = (1..at).find(|id| {
            self.streams.get(*id).is_some_and(|s| s.fences.is_empty() && !s.is_captured())
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
                self.streams.try_reserve(1)?;
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
    pub fn try_allocate(&mut self, request: &AllocRequest) -> Result<Option<u64>> {
        let stream = self.stream(request.key)?;
        let meta = self.block_meta(request)?;
        let found = self.heap.allocate(stream, request.size, request.align, meta)?;
        Ok(found.map(|off| self.handed_out(off, request, meta.owner)))
    }

    /// The same for a request without an owner at the default alignment, on a stream that is known.
    #[inline]
    pub(super) fn allocate_fast(
        &mut self,
        stream: StreamId,
        size: u64,
        meta: BlockMeta,
    ) -> Result<Option<u64>> {
        let off = match self.heap.allocate_fast(stream, size, meta) {
            Some(off) => off,
            // The search that follows needs no driver either.
            None => match self.heap.allocate(stream, size, heap::UNIT, meta)? {
                Some(off) => off,
                None => return Ok(None),
            },
        };
        self.counters.allocs = self.counters.allocs.wrapping_add(1);
        Ok(Some(self.addresses.address(off)))
    }

    /// What the heap is to keep for a block.
    #[inline]
    pub(super) fn block_meta(&mut self, request: &AllocRequest) -> Result<BlockMeta> {
        if request.pool != self.pool {
            return Err(settings::gone());
        }
        let owner = if request.owner.first() == Some(&0) { 0 } else { self.owners.intern(&request.owner)? };
        let mut flags = if request.key.is_device_order() { 0 } else { block_flags::STREAM_ORDERED };
        if request.own_allocation {
            flags |= block_flags::OWN_ALLOCATION;
        }
        Ok(BlockMeta { requested: request.size, handle: request.key.handle, owner, flags })
    }

    /// Counts a block that the heap has handed out, and gives its address.
    #[inline]
    pub(super) fn handed_out(&mut self, off: u64, request: &AllocRequest, owner: u16) -> u64 {
        self.counters.allocs = self.counters.allocs.wrapping_add(1);
        if owner != 0
            && let Ok(block) = self.heap.block_at(off)
        {
            self.owners.add(owner, block.len);
        }
        debug_assert_eq!(off % request.align, 0);
        self.addresses.address(off)
    }

    /// The search of a request that the lists did not serve at first sight: all that is idle coalesces
    /// before. With `slab_anywhere` a slab may do without a page for slabs.
    pub fn search(&mut self, request: &AllocRequest, slab_anywhere: bool) -> Result<Option<u64>> {
        if request.own_allocation {
            return Ok(None);
        }
        let stream = self.stream(request.key)?;
        self.heap.flush(stream);
        self.heap.slab_anywhere = slab_anywhere;
        let found = self.try_allocate(request);
        self.heap.slab_anywhere = false;
        if let Some(address) = found? {
            return Ok(Some(address));
        }
        let Some((len, align)) = Heap::extent_for(request.size, request.align) else { return Ok(None) };
        if self.heap.coalesce_across_streams(stream, len, align) {
            self.try_allocate(request)
        } else {
            Ok(None)
        }
    }

    /// Frees the block that starts at the offset on the stream of the last call, if that is simple. Returns
    /// its length.
    #[inline]
    pub(super) fn free_fast(&mut self, off: u64, key: StreamKey) -> Option<u64> {
        let stream = self.recall(key)?;
        let len = self.heap.free_fast(off, stream)?;
        self.counters.frees = self.counters.frees.wrapping_add(1);
        Some(len)
    }

    /// Whether a block of this length is worth an event when it is freed.
    #[inline]
    pub(super) fn is_worth_a_fence(&self, len: u64) -> bool {
        len >= FENCE_BYTES && !self.heap.merge_all
    }

    /// Counts a free that is about to be made.
    pub(super) fn note_free(&mut self, block: &Block) {
        self.counters.frees = self.counters.frees.wrapping_add(1);
        if block.info.owner != 0 {
            self.owners.subtract(block.info.owner, block.len);
        }
        // Its time was noted; what `catch_up_use` finds is what the fast path frees.
        self.seen = self.heap.seq() + 1;
    }

    pub(super) fn free_pending(&mut self, block: &Block) {
        self.heap.free_pending(block);
    }

    pub(super) fn free_on(&mut self, block: &Block, stream: StreamId) {
        self.heap.free_on(block, stream);
    }

    pub(super) fn set_flag(&mut self, block: &Block, flag: u8) {
        self.heap.set_flag(block, flag);
    }

    /// The live block that starts at `address`.
    pub(super) fn block_at(&self, address: u64) -> Result<Block> {
        let Some((off, floor)) = self.addresses.offset(address) else { return Err(not_ours(address)) };
        self.heap.block_at(off).map_err(|why| self.not_a_start(address, off, floor, why))
    }

    /// The live block around `address`.
    pub(super) fn query(&self, address: u64, device: i32) -> Result<BlockInfo> {
        let Some((off, floor)) = self.addresses.offset(address) else { return Err(not_ours(address)) };
        let Ok(block) = self.heap.block_around(off, floor) else { return Err(not_live(address)) };
        Ok(BlockInfo {
            base: self.addresses.address(block.off),
            requested: block.info.requested,
            usable: block.len,
            device,
            stream_ordered: block.info.flags & block_flags::STREAM_ORDERED != 0,
            handle: block.info.handle,
            owner: self.owners.tag(block.info.owner),
            pool: self.pool,
        })
    }

    /// Says why an address is not the start of a live block.
    #[cold]
    fn not_a_start(&self, address: u64, off: u64, floor: u64, why: NotLive) -> Status {
        if why == NotLive::Freed {
            return fail(
                Status::POOL_ERROR_DOUBLE_FREE,
                format_args!("the block at {address:#x} has been freed already"),
            );
        }
        let Ok(block) = self.heap.block_around(off, floor) else { return not_live(address) };
        let tag = self.owners.tag(block.info.owner);
        let tag = tag_text(&tag);
        fail(
            Status::POOL_ERROR_INVALID_POINTER,
            format_args!(
                "{address:#x} lies {} bytes into the live block of {} bytes at {:#x}{}{}{}, and is not its \
                 start",
                off - block.off,
                block.info.requested,
                self.addresses.address(block.off),
                if tag.is_empty() { "" } else { " (owner \"" },
                tag.escape_ascii(),
                if tag.is_empty() { "" } else { "\")" },
            ),
        )
    }

    /// Makes the state of an arena that holds nothing as good as new. Counts of frees go on, so that the
    /// fences of before mean nothing new.
    pub fn start_over(&mut self, pool: PoolId, options: &Options) -> bool {
        let empty = self.heap.bytes().mapped == 0 && self.unreclaimable.is_empty() && self.growing == 0;
        let quiet = (1..self.heap.streams()).all(|id| self.heap.stream_is_empty(id));
        if !empty || !quiet {
            return false;
        }
        self.heap.start_over();
        for id in 1..self.heap.streams() {
            self.heap.reset_stream(id);
            if let Some(stream) = self.streams.get_mut(id as usize) {
                stream.key = StreamKey::NONE;
                stream.captured = None;
            }
        }
        self.last = SHARED;
        self.last_key = StreamKey::NONE;
        self.counters = Counters::default();
        self.owners = Owners::new();
        self.options = *options;
        self.heap.pinned = options.pinned;
        self.pool = pool;
        true
    }

    /// Whether memory was freed on the stream that no fence covers.
    pub fn is_uncovered(&self, stream: StreamId) -> bool {
        self.streams.get(stream as usize).is_some_and(|s| self.heap.last_free_seq(stream) > s.covered)
    }

    /// Notes whether a call found its stream captured. While it is, its calls stay off the fast path, so that
    /// the end is seen.
    pub fn set_captured(&mut self, stream: StreamId, captured: bool) {
        if let Some(s) = self.streams.get_mut(stream as usize) {
            s.captured = captured.then(clock::now);
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

    /// Whether the call that last looked found the stream captured.
    pub(super) fn was_captured(&self, stream: StreamId) -> bool {
        self.streams.get(stream as usize).is_some_and(|s| s.captured.is_some())
    }

    /// Whether the stream has been used with the arena before.
    pub(super) fn knows(&self, key: StreamKey) -> bool {
        self.streams.iter().any(|s| s.key == key)
    }

    pub(super) fn has_address(&self, address: u64) -> bool {
        self.addresses.offset(address).is_some()
    }

    pub(super) fn validate(&self) {
        self.heap.validate();
    }

    pub(super) fn set_pool(&mut self, pool: PoolId) {
        self.pool = pool;
    }

    /// Whether frees were counted since the last question that [`State::note_free`] did not foresee.
    pub(super) fn was_used(&mut self) -> bool {
        let seq = self.heap.seq();
        core::mem::replace(&mut self.seen, seq) != seq
    }
}

/// What the layers above go by.
impl State {
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Changes the options, but for the backend and whether idle memory stays where it is.
    pub fn set_options(&mut self, options: &Options) {
        self.options = Options { pinned: self.options.pinned, ..*options };
    }

    /// Whether an arena made with this backend would be like this one.
    pub fn has_backend(&self, backend: Backend) -> bool {
        self.options.backend == backend
    }

    /// Lets idle memory be moved and given up again.
    pub fn unpin(&mut self) {
        self.options.pinned = false;
        self.heap.pinned = false;
    }

    pub fn bytes(&self) -> Bytes {
        self.heap.bytes()
    }

    /// Bytes of host memory among what is mapped.
    pub fn spilled(&self) -> u64 {
        self.spilled.bytes
    }

    /// Bytes held on the device: all but those of the host.
    pub fn on_device(&self) -> u64 {
        self.heap.bytes().mapped - self.spilled.bytes
    }

    /// The same, with what growths under way are about to take.
    pub fn on_device_soon(&self) -> u64 {
        self.on_device() + self.growing
    }

    pub fn is_growing(&self) -> bool {
        self.growing > 0
    }

    /// The count of frees so far.
    pub fn seq(&self) -> u64 {
        self.heap.seq()
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Counts an out-of-memory answer.
    pub fn count_oom(&mut self) {
        self.counters.oom = self.counters.oom.wrapping_add(1);
    }

    /// Counts a request that was served although it had been refused memory.
    pub fn count_recovery(&mut self) {
        self.counters.oom_recovered = self.counters.oom_recovered.wrapping_add(1);
    }

    /// Counts a request that waits for frees.
    pub fn count_wait(&mut self) {
        self.counters.waits = self.counters.waits.wrapping_add(1);
    }

    /// The largest free extent that a request could have.
    pub fn largest_free(&mut self, key: StreamKey) -> u64 {
        let stream = self.stream(key).unwrap_or(SHARED);
        self.heap.largest_free(stream)
    }

    /// The owners that hold most, most first.
    pub fn largest_owners<const N: usize>(&self) -> [Option<Owner>; N] {
        self.owners.largest::<N>()
    }

    /// Lets everything that is free coalesce.
    pub fn flush(&mut self) {
        for stream in 0..self.heap.streams() {
            self.heap.flush(stream);
        }
        self.retire();
    }

    /// As [`State::has_idle`], where the device has got further than it was seen; else there is no more than
    /// there was.
    pub fn has_more_idle(&mut self, bytes: u64, seen: &mut u64) -> bool {
        let now = self.progress();
        core::mem::replace(seen, now) != now && self.has_idle(bytes)
    }

    /// Changes when something freed turns out to be complete on the device.
    pub fn progress(&self) -> u64 {
        self.streams.iter().fold(self.done, |sum, stream| sum.wrapping_add(stream.done))
    }

    /// Whether chunks of so many bytes could be given back. Without host memory to find out, no.
    pub fn has_idle(&mut self, bytes: u64) -> bool {
        self.flush();
        let mut chunks = Vec::new();
        let ours = |chunk: &Chunk, _| !self.spilled.has(chunk.off);
        let idle = self.heap.collect_idle(bytes, &|s| self.done_of(s), &[], &mut chunks, &ours);
        idle.is_ok_and(|idle| idle >= bytes)
    }

    /// Whether the cached bytes are more than the option `max_idle` leaves alone.
    pub fn is_idle_beyond_bound(&self) -> bool {
        self.is_over_bound(self.heap.bytes().cached)
    }

    /// Whether so many idle bytes are more than the option `max_idle` leaves alone.
    fn is_over_bound(&self, idle: u64) -> bool {
        let percent = u128::from(self.options.max_idle_percent);
        u128::from(idle) * 100 > u128::from(self.heap.bytes().live) * percent
    }

    /// Whether enough memory lies in others' hands, covered by no fence, that an event of the whole context
    /// pays.
    pub fn is_context_fence_worth(&self, size: u64) -> bool {
        let bytes = self.heap.bytes();
        let elsewhere = bytes.pending + if self.heap.merge_all { 0 } else { bytes.cached };
        self.covered < self.heap.seq() && elsewhere >= size && self.is_over_bound(elsewhere)
    }
}

/// An address that is in nobody's memory, as far as the pool knows.
#[cold]
pub fn not_ours(address: u64) -> Status {
    fail(Status::POOL_ERROR_INVALID_POINTER, format_args!("{address:#x} is in no memory of the pool"))
}

#[cold]
fn not_live(address: u64) -> Status {
    fail(
        Status::POOL_ERROR_INVALID_POINTER,
        format_args!("{address:#x} is in memory of the pool, but in no live block"),
    )
}
