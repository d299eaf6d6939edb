//! The state of an arena, behind its lock: the heap, the streams that have been used with it, and the counters.

use super::arena::{Want, host_oom};
use super::options::Options;
use super::order::{Marks, PER_THREAD, Stream, StreamKey};
use super::owners::Owners;
use super::pools::{self, PoolId};
use super::spill::Spilled;
use crate::driver::Event;
use crate::error::{NoHostMemory, Result};
use crate::heap::{BlockMeta, Heap, Part, SHARED, StreamId, block_flags};
use crate::sync::clock;
use crate::vmem::address_map::AddressMap;
use crate::vmem::{Calls, Mapper, Unreclaimable};

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
    /// As [`super::arena::Arena::pool`]; a request that was on its way when its pool was destroyed finds out by it.
    pub pool: PoolId,
    pub heap: Heap,
    pub addresses: AddressMap,
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
    pub unreclaimable: Vec<(Unreclaimable, Vec<Part>)>,
    /// Bytes that growths under way are about to take.
    pub growing: u64,
    /// Chunks of host memory.
    pub spilled: Spilled,
    pub options: Options,
    /// The count of frees when [`super::arena::Arena::used`] was last brought up to date.
    pub seen: u64,
}

impl State {
    pub fn new(mapper: &Mapper, pool: PoolId, options: Options) -> core::result::Result<State, NoHostMemory> {
        let mut heap = Heap::new()?;
        heap.pinned = options.pinned;
        if let Some(range) = mapper.range {
            heap.add_unmapped(0, range.len)?;
        }
        let mut streams = Vec::new();
        streams.try_reserve(4).map_err(|_| NoHostMemory)?;
        streams.push(Stream::new(StreamKey::DEVICE));
        let addresses = AddressMap::new(mapper.range);
        Ok(State {
            pool,
            heap,
            addresses,
            streams,
            last: SHARED,
            last_key: StreamKey::NONE,
            marks: Marks::default(),
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
        let unknown = self.streams.iter().skip(1).all(|s| s.key == StreamKey::NONE);
        let first = unknown && self.counters.allocs == 0 && self.heap.bytes().mapped == 0;
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

    /// Bytes held on the device: all but those of the host.
    pub fn on_device(&self) -> u64 {
        self.heap.bytes().mapped.saturating_sub(self.spilled.bytes)
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
    pub fn block_info(&mut self, want: &Want) -> Result<BlockMeta> {
        if want.pool != self.pool {
            return Err(pools::gone());
        }
        let owner = if want.owner.first() == Some(&0) {
            0
        } else {
            self.owners.intern(&want.owner).map_err(host_oom)?
        };
        let mut flags = if want.key.is_device_order() { 0 } else { block_flags::STREAM_ORDERED };
        if want.own_allocation {
            flags |= block_flags::OWN_ALLOCATION;
        }
        Ok(BlockMeta { requested: want.size, handle: want.key.handle, owner, flags })
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
        self.addresses.address(off)
    }

    /// Makes the state of an arena that holds nothing as good as new. Counts of frees go on, so that the marks of before mean nothing new.
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

    /// Whether memory was freed on the stream that no mark covers.
    pub fn is_uncovered(&self, stream: StreamId) -> bool {
        self.streams.get(stream as usize).is_some_and(|s| self.heap.last_free_seq(stream) > s.covered)
    }

    /// Notes whether a call found its stream captured. While it is, its calls stay off the fast path, so that the end is seen.
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
}
