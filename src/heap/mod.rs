//! The heap: which bytes of an arena are in which block. Pure arithmetic on offsets; it knows no
//! driver and holds no device memory, so property tests check it with plain numbers.
//!
//! An arena's address space is cut into *extents*, which lie in address order without gaps. Small blocks come
//! from *slabs*, extents cut into equal blocks; larger ones are extents of their own, found best-fit in
//! the *bins* of their stream and coalesced when freed. Free memory belongs to the stream it was freed
//! on, or to everyone ([`SHARED`]) once the device is known to have got past its free; the pool layer
//! decides when that is. Operations that need host memory say so before they change anything, and
//! freeing never needs any.

mod bins;
mod chunk;
mod extent;
mod fast;
mod growth;
mod node;
mod pages;
mod size;
mod slab;
mod validate;

#[cfg(test)]
mod tests;

pub use chunk::Chunk;
pub use growth::{Growth, Part};
pub use node::{Kind, NIL, NodeId, SHARED, StreamId};
pub use size::{CLASSES, MAX_SIZE, MAX_SMALL, PAGE, QUANTUM, UNIT, class_of, class_size, round_up};

use crate::error::NoHostMemory;

use bins::Bins;
use chunk::Chunks;
use node::{AgeList, Nodes};
use pages::PageTable;
use slab::Slabs;

/// What the heap keeps for a block on the caller's behalf.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockMeta {
    /// Bytes that the caller asked for.
    pub requested: u64,
    /// The stream it was allocated on, as the caller named it.
    pub handle: u64,
    /// Index of the owner tag.
    pub owner: u16,
    /// [`block_flags`].
    pub flags: u8,
}

/// Facts about a block that matter when it is freed or asked about.
pub mod block_flags {
    /// Allocated stream-ordered.
    pub const STREAM_ORDERED: u8 = 1;
    /// Used on streams that the free will not name: it must be freed device-ordered.
    pub const USED_ELSEWHERE: u8 = 2;
    /// Named as used on the stream it was allocated on: freed on another one, it must wait for that.
    pub const USED_ON_OWN: u8 = 8;
    /// One driver allocation of its own: its memory serves no other block.
    pub const OWN_ALLOCATION: u8 = 4;
}

/// Flag of extents in a slab page, which serves slabs only. Slabs live long and are small; wherever they like
/// they would keep a page each from becoming idle.
const SLAB_PAGE: u8 = 0x80;
/// Flag of free extents in which a whole chunk lies, as they were when they were listed.
const HOLDS_CHUNK: u8 = 0x40;

/// A live block, found by an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// First byte.
    pub off: u64,
    /// Usable bytes.
    pub len: u64,
    pub info: BlockMeta,
    /// Whose memory it is cut from: for a small block the stream of its slab.
    pub stream: StreamId,
    place: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Extent(NodeId),
    Slab { slab: u32, index: u32 },
}

/// Why an address does not name a live block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotLive {
    /// It is no start of a block.
    Unknown,
    /// It was one, and has been freed.
    Freed,
}

/// Bytes by state, each counted where it changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bytes {
    pub live: u64,
    pub requested: u64,
    pub cached: u64,
    pub pending: u64,
    pub overhead: u64,
    /// All that is mapped.
    pub mapped: u64,
    pub live_blocks: u64,
    /// The most that `live` and `mapped` have been.
    pub live_peak: u64,
    pub mapped_peak: u64,
}

/// The memory of one stream, or with [`SHARED`] of everyone.
struct Queue {
    /// Free extents, and those in slab pages; boxed without an infallible allocation.
    bins: Vec<Bins>,
    /// Free extents in which a whole chunk lies, least recently used first: what can be given up.
    whole: AgeList,
    /// The same, those that are a driver allocation of their own.
    own: AgeList,
    /// The other free extents.
    parts: AgeList,
    /// The extent freed last, if it has not coalesced yet, and its length.
    last_freed: NodeId,
    last_freed_len: u64,
    /// For each size class the slabs with room, and the last of them: only that one can be wholly free,
    /// because a slab is kept when it becomes so only if it is alone, and others are put before it.
    slabs: [u32; CLASSES],
    last_slabs: [u32; CLASSES],
    /// Slabs of any fill.
    slab_count: usize,
    /// The count of frees when last one was freed on it.
    last_free_seq: u64,
    /// Free extents that are out of the lists while a thread maps or unmaps.
    busy: usize,
}

/// See the module.
pub struct Heap {
    nodes: Nodes,
    pages: PageTable,
    chunks: Chunks,
    slabs: Slabs,
    queues: Vec<Queue>,
    /// Address space that is not mapped.
    unmapped: Bins,
    /// Blocks freed device-ordered, oldest first.
    pending: AgeList,
    /// A slab may be cut from any extent: there is no page for slabs alone.
    pub slab_anywhere: bool,
    /// Counts frees; the age of free memory is told in it.
    seq: u64,
    /// With one stream in the arena everything idle is that stream's, and coalesces as such.
    pub merge_all: bool,
    /// Idle memory stays where it is: nothing is collected of it.
    pub pinned: bool,
    /// Bytes that the driver neither lets be used nor takes back; part of the overhead.
    unreclaimable: u64,
    bytes: Bytes,
}

impl Queue {
    fn new() -> Result<Queue, NoHostMemory> {
        let mut bins = Vec::new();
        bins.try_reserve_exact(2)?;
        bins.push(Bins::new());
        bins.push(Bins::new());
        Ok(Queue {
            bins,
            whole: AgeList::EMPTY,
            own: AgeList::EMPTY,
            parts: AgeList::EMPTY,
            last_freed: NIL,
            last_freed_len: 0,
            slabs: [NIL; CLASSES],
            last_slabs: [NIL; CLASSES],
            slab_count: 0,
            last_free_seq: 0,
            busy: 0,
        })
    }

    /// The bins that an extent with these flags is in.
    fn bins_for(&mut self, flags: u8) -> Option<&mut Bins> {
        self.bins.get_mut(usize::from(flags & SLAB_PAGE != 0))
    }

    /// The list of free extents with these flags.
    fn age_list(&mut self, flags: u8) -> &mut AgeList {
        match flags & (block_flags::OWN_ALLOCATION | HOLDS_CHUNK) {
            0 => &mut self.parts,
            HOLDS_CHUNK => &mut self.whole,
            _ => &mut self.own,
        }
    }

    fn age_lists(&self) -> [AgeList; 3] {
        [self.whole, self.own, self.parts]
    }

    fn is_empty(&self) -> bool {
        let held = self.slab_count + self.busy;
        self.last_freed == NIL && held == 0 && self.bins.iter().all(Bins::is_empty)
    }
}

impl Heap {
    pub fn new() -> Result<Heap, NoHostMemory> {
        let mut heap = Heap {
            nodes: Nodes::new(),
            pages: PageTable::new(),
            chunks: Chunks::new(),
            slabs: Slabs::new(),
            queues: Vec::new(),
            unmapped: Bins::new(),
            pending: AgeList::EMPTY,
            seq: 0,
            merge_all: false,
            pinned: false,
            slab_anywhere: false,
            unreclaimable: 0,
            bytes: Bytes::default(),
        };
        heap.add_stream()?; // SHARED
        Ok(heap)
    }

    /// A new stream. Its id is the next number, SHARED being 0.
    pub fn add_stream(&mut self) -> Result<StreamId, NoHostMemory> {
        self.queues.try_reserve(1)?;
        self.queues.push(Queue::new()?);
        Ok((self.queues.len() - 1) as StreamId)
    }

    /// The count of frees when a block was last freed on `stream`.
    pub fn last_free_seq(&self, stream: StreamId) -> u64 {
        self.queues.get(stream as usize).map_or(0, |queue| queue.last_free_seq)
    }

    /// Forgets a stream that holds nothing, so that its id can serve another.
    pub fn reset_stream(&mut self, stream: StreamId) {
        if let Some(queue) = self.queues.get_mut(stream as usize) {
            queue.last_free_seq = 0;
        }
    }

    /// Forgets the peaks of a heap that holds nothing.
    pub fn start_over(&mut self) {
        self.bytes.live_peak = self.bytes.live;
        self.bytes.mapped_peak = self.bytes.mapped;
        self.merge_all = false;
        self.slab_anywhere = false;
    }

    /// Notes what was mapped for a moment while a growth failed.
    pub fn note_mapped(&mut self, more: u64) {
        self.bytes.mapped_peak = self.bytes.mapped_peak.max(self.bytes.mapped + more);
    }

    /// Whether the stream holds neither idle memory nor slabs, so that its id may serve another.
    pub fn stream_is_empty(&self, stream: StreamId) -> bool {
        self.queues.get(stream as usize).is_none_or(Queue::is_empty)
    }

    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// The count of frees so far.
    pub fn seq(&self) -> u64 {
        self.seq
    }

    fn next_seq(&mut self) -> u64 {
        self.seq += 1;
        self.seq
    }

    /// Allocates from what is idle for `stream`, without host memory where the heap need not be cut.
    /// `len` is the caller's size, not 0 and at most [`MAX_SIZE`].
    pub fn allocate(
        &mut self,
        stream: StreamId,
        len: u64,
        align: u64,
        info: BlockMeta,
    ) -> Result<Option<u64>, NoHostMemory> {
        if len <= MAX_SMALL && align <= UNIT {
            return self.allocate_small(stream, len, info);
        }
        let Some(len) = round_up(len, QUANTUM) else {
            return Ok(None);
        };
        self.flush_last_freed(stream);
        Ok(self.take_extent(stream, len, align.max(QUANTUM))?.map(|id| self.hand_out(id, info)))
    }

    /// The extent that a request needs where nothing idle serves it, and its alignment: for a small one a
    /// page for its slab.
    pub fn extent_for(len: u64, align: u64) -> Option<(u64, u64)> {
        if len <= MAX_SMALL && align <= UNIT {
            return Some((PAGE, PAGE));
        }
        Some((round_up(len, QUANTUM)?, align.max(QUANTUM)))
    }

    #[inline]
    fn hand_out(&mut self, id: NodeId, info: BlockMeta) -> u64 {
        let node = self.nodes.at(id);
        node.kind = Kind::Used;
        node.requested = info.requested;
        node.handle = info.handle;
        node.owner = info.owner;
        node.flags = info.flags;
        let (off, len) = (node.off, node.len);
        self.bytes.cached -= len;
        self.count_live(len, info.requested);
        off
    }

    #[inline]
    fn count_live(&mut self, len: u64, requested: u64) {
        self.bytes.live += len;
        self.bytes.live_peak = self.bytes.live_peak.max(self.bytes.live);
        self.bytes.requested += requested;
        self.bytes.live_blocks += 1;
    }

    #[inline]
    fn uncount_live(&mut self, len: u64, requested: u64) {
        self.bytes.live -= len;
        self.bytes.requested -= requested;
        self.bytes.live_blocks -= 1;
    }

    /// The live block that starts at `off`.
    pub fn block_at(&self, off: u64) -> Result<Block, NotLive> {
        let id = if off.is_multiple_of(UNIT) { self.pages.start(off / QUANTUM * QUANTUM) } else { NIL };
        let node = self.nodes.get(id);
        match node.kind {
            Kind::Used if node.off == off => Ok(self.extent_block(id)),
            // Only where a block has been: not at the start of what never was one.
            Kind::Free | Kind::LastFreed | Kind::Pending if node.off == off && node.requested > 0 => {
                Err(NotLive::Freed)
            }
            Kind::Slab => self.slab_block(id, off, true),
            _ => Err(NotLive::Unknown),
        }
    }

    /// The live block that `off` lies in. `floor` is the start of the region.
    pub fn block_around(&self, off: u64, floor: u64) -> Result<Block, NotLive> {
        let id = self.pages.start_at_or_below(off, floor);
        let node = self.nodes.get(id);
        match node.kind {
            Kind::Used if off < node.end() => Ok(self.extent_block(id)),
            Kind::Slab if off < node.end() => self.slab_block(id, off, false),
            _ => Err(NotLive::Unknown),
        }
    }

    fn extent_block(&self, id: NodeId) -> Block {
        let node = self.nodes.get(id);
        Block {
            off: node.off,
            len: node.len,
            info: BlockMeta {
                requested: node.requested,
                handle: node.handle,
                owner: node.owner,
                flags: node.flags,
            },
            stream: node.stream,
            place: Place::Extent(id),
        }
    }

    /// Sets a flag of a live block.
    pub fn set_flag(&mut self, block: &Block, flag: u8) {
        match block.place {
            Place::Extent(id) => self.nodes.at(id).flags |= flag,
            Place::Slab { slab, index } => self.slabs.set_flag(slab, index, flag),
        }
    }

    /// Frees a live block on `stream`: that stream may have the memory again at once. A small block must be
    /// from a slab of that stream.
    pub fn free_on(&mut self, block: &Block, stream: StreamId) {
        let seq = self.next_seq();
        if let Some(queue) = self.queues.get_mut(stream as usize) {
            queue.last_free_seq = seq;
        }
        match block.place {
            Place::Extent(id) => {
                self.uncount_live(block.len, block.info.requested);
                self.bytes.cached += block.len;
                self.nodes.at(id).seq = seq;
                if block.info.flags & block_flags::OWN_ALLOCATION != 0 {
                    self.release_extent(id, stream);
                } else {
                    self.keep_last_freed(id, stream);
                }
            }
            Place::Slab { slab, index } => self.free_small(slab, index, stream),
        }
    }

    /// Frees a live block for nobody yet: it waits until [`Heap::complete_pending`] is told that the
    /// device has got past this moment.
    pub fn free_pending(&mut self, block: &Block) {
        let seq = self.next_seq();
        self.uncount_live(block.len, block.info.requested);
        self.bytes.pending += block.len;
        match block.place {
            Place::Extent(id) => {
                let node = self.nodes.at(id);
                node.kind = Kind::Pending;
                node.seq = seq;
                self.pending.push_back(&mut self.nodes, id);
            }
            Place::Slab { slab, index } => self.slabs.set_pending(slab, index, seq),
        }
    }

    /// Whether any block waits for the device.
    pub fn has_pending(&self) -> bool {
        self.bytes.pending > 0
    }

    /// The device has got past every free up to `done`: these blocks are idle for everyone.
    pub fn complete_pending(&mut self, done: u64) {
        loop {
            let id = self.pending.head;
            let node = *self.nodes.get(id);
            if id == NIL || node.seq > done {
                break;
            }
            self.pending.remove(&mut self.nodes, id);
            self.bytes.pending -= node.len;
            self.bytes.cached += node.len;
            self.insert_free(id, SHARED);
        }
        while let Some((slab, index)) = self.slabs.pop_pending(done) {
            let len = class_size(self.slabs.class(slab));
            self.bytes.pending -= len;
            self.bytes.cached += len;
            self.slab_gains(slab, index, 0);
        }
    }

    /// The device has got past what `stream` freed up to `done`: that memory becomes everyone's.
    pub fn retire(&mut self, stream: StreamId, done: u64) {
        if stream == SHARED {
            return;
        }
        self.retire_last_freed(stream, done);
        let count = self.queues.get(stream as usize).map_or(0, |queue| queue.age_lists().len());
        for list in 0..count {
            loop {
                let queue = self.queues.get(stream as usize);
                let id = queue.and_then(|q| q.age_lists().get(list).copied()).map_or(NIL, |list| list.head);
                if id == NIL || self.nodes.get(id).seq > done {
                    break;
                }
                self.unlink_free(id);
                self.insert_free(id, SHARED);
            }
        }
    }

    /// Lets the slabs of `stream` that are wholly free, and the extent it freed last, coalesce.
    pub fn flush(&mut self, stream: StreamId) {
        self.flush_last_freed(stream);
        self.release_empty_slabs(stream);
    }

    /// Number of streams, SHARED included.
    pub fn streams(&self) -> StreamId {
        self.queues.len() as StreamId
    }

    /// The largest free extent that a request of `stream` could have.
    pub fn largest_free(&self, stream: StreamId) -> u64 {
        let largest = |s: StreamId| {
            let bins = self.queues.get(s as usize).and_then(|q| q.bins.first());
            bins.map_or(0, |bins| bins.largest(&self.nodes))
        };
        largest(stream).max(largest(SHARED))
    }

    /// Checks every invariant of the heap; panics where one does not hold. For tests, and after a caught
    /// panic.
    pub fn validate(&self) {
        validate::validate(self);
    }
}
