//! Slabs: extents cut into equal blocks of one size class, for small blocks.
//!
//! A slab belongs to one stream. A block freed there is that stream's again at once; a block freed elsewhere
//! waits as pending and returns to its slab once the device has got past its free. A slab that is wholly free
//! coalesces again, except for one of each class that the stream keeps. Slabs share pages of their own.

use super::node::{Kind, NIL, Node, NodeId, StreamId};
use super::size::{MAX_SLAB_BLOCKS, QUANTUM, UNIT, class_of, class_size, slab_blocks};
use super::{Block, BlockMeta, Heap, NotLive, PAGE, Place, SLAB_PAGE};
use crate::error::NoHostMemory;

const WORDS: usize = (MAX_SLAB_BLOCKS / 64) as usize;
/// No pending block.
const NO_LINK: u64 = u64::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Free,
    Live,
    Pending,
}

/// What is kept for each block of a slab.
#[derive(Clone, Copy, Debug)]
pub(super) struct Small {
    pub(super) requested: u32,
    pub(super) owner: u16,
    pub(super) flags: u8,
    pub(super) state: State,
    /// Live: the stream as the caller named it. Pending: when it was freed.
    pub(super) handle_or_seq: u64,
    /// Pending: the next one, as slab and index.
    link: u64,
}

pub(super) struct Slab {
    node: NodeId,
    pub(super) off: u64,
    class: usize,
    /// Bytes of a block, and what to multiply with instead of dividing by it.
    pub(super) block_len: u64,
    reciprocal: u64,
    pub(super) stream: StreamId,
    pub(super) free: u64,
    /// The last free of a block in it.
    pub(super) seq: u64,
    /// Bit i: block i is free.
    pub(super) bits: [u64; WORDS],
    pub(super) blocks: Vec<Small>,
    /// Neighbours among the slabs of a stream and class that have room.
    pub(super) prev: u32,
    pub(super) next: u32,
}

/// All slabs of a heap.
pub struct Slabs {
    array: Vec<Option<Slab>>,
    /// Indexes not in use.
    vacant: Vec<u32>,
    pending_head: u64,
    pending_tail: u64,
}

impl Slab {
    /// The block that `inside` bytes from the start lie in; past the end for addresses past it.
    pub(super) fn index_of(&self, inside: u64) -> usize {
        let units = inside / UNIT;
        (units.min(MAX_SLAB_UNITS).wrapping_mul(self.reciprocal) >> 32) as usize
    }
}

/// More units than any slab has; up to here [`Slab::index_of`] is exact.
const MAX_SLAB_UNITS: u64 = 1 << 10;

/// Rounded up, so that multiples come out whole.
const fn reciprocal(class: usize) -> u64 {
    (1u64 << 32).div_ceil(class_size(class) / UNIT)
}

/// Bytes of a slab of the class.
pub const fn slab_bytes(class: usize) -> u64 {
    slab_blocks(class) * class_size(class)
}

fn link(slab: u32, index: u32) -> u64 {
    u64::from(slab) << 32 | u64::from(index)
}

impl Slabs {
    pub const fn new() -> Self {
        Slabs { array: Vec::new(), vacant: Vec::new(), pending_head: NO_LINK, pending_tail: NO_LINK }
    }

    fn get(&self, slab: u32) -> Option<&Slab> {
        self.array.get(slab as usize)?.as_ref()
    }

    pub(super) fn at(&mut self, slab: u32) -> Option<&mut Slab> {
        self.array.get_mut(slab as usize)?.as_mut()
    }

    fn block(&mut self, slab: u32, index: u32) -> Option<&mut Small> {
        self.at(slab)?.blocks.get_mut(index as usize)
    }

    pub fn class(&self, slab: u32) -> usize {
        self.get(slab).map_or(0, |s| s.class)
    }

    pub fn set_flag(&mut self, slab: u32, index: u32, flag: u8) {
        if let Some(block) = self.block(slab, index) {
            block.flags |= flag;
        }
    }

    /// Puts a live block on the list of those that wait for the device.
    pub fn set_pending(&mut self, slab: u32, index: u32, seq: u64) {
        if let Some(block) = self.block(slab, index) {
            block.state = State::Pending;
            block.handle_or_seq = seq;
            block.link = NO_LINK;
        }
        let this = link(slab, index);
        let tail = self.pending_tail;
        match self.block((tail >> 32) as u32, tail as u32) {
            Some(last) if tail != NO_LINK => last.link = this,
            _ => self.pending_head = this,
        }
        self.pending_tail = this;
    }

    /// Takes the oldest pending block that was freed no later than `done`.
    pub fn pop_pending(&mut self, done: u64) -> Option<(u32, u32)> {
        let head = self.pending_head;
        if head == NO_LINK {
            return None;
        }
        let (slab, index) = ((head >> 32) as u32, head as u32);
        let block = self.block(slab, index)?;
        if block.handle_or_seq > done {
            return None;
        }
        self.pending_head = block.link;
        if self.pending_head == NO_LINK {
            self.pending_tail = NO_LINK;
        }
        Some((slab, index))
    }

    /// Bytes pending and live in all slabs, and their blocks; for validation.
    pub fn totals(&self) -> (u64, u64, u64, u64) {
        let (mut live, mut pending, mut requested, mut blocks) = (0, 0, 0, 0);
        for slab in self.array.iter().flatten() {
            let mut free = 0;
            for (i, small) in slab.blocks.iter().enumerate() {
                let bit = slab.bits.get(i / 64).map_or(0, |word| word >> (i % 64) & 1);
                assert_eq!(bit == 1, small.state == State::Free, "a slab's bits disagree with its blocks");
                match small.state {
                    State::Free => free += 1,
                    State::Live => {
                        live += class_size(slab.class);
                        requested += u64::from(small.requested);
                        blocks += 1;
                    }
                    State::Pending => pending += class_size(slab.class),
                }
            }
            assert_eq!(free, slab.free, "a slab counts its free blocks wrong");
        }
        (live, pending, requested, blocks)
    }

    /// Checks a list of slabs with room, of which only the last may be wholly free; for validation.
    pub fn check_list(&self, first: u32, last: u32, class: usize, stream: StreamId) {
        let (mut at, mut before) = (first, NIL);
        while let Some(slab) = self.get(at) {
            assert_eq!(
                (slab.class, slab.stream, slab.prev),
                (class, stream, before),
                "a list of slabs is broken"
            );
            let whole = slab.free == slab.blocks.len() as u64;
            assert!(
                slab.free > 0 && (!whole || slab.next == NIL),
                "a slab is in the wrong place of its list"
            );
            (before, at) = (at, slab.next);
        }
        assert_eq!((at, before), (NIL, last), "a list of slabs has a wrong end");
    }

    /// The node, length in blocks, and free blocks of a slab; for validation.
    pub fn describe(&self, slab: u32) -> Option<(NodeId, usize, u64, StreamId)> {
        self.get(slab).map(|s| (s.node, s.class, s.free, s.stream))
    }
}

impl Heap {
    pub(super) fn allocate_small(
        &mut self,
        stream: StreamId,
        len: u64,
        info: BlockMeta,
    ) -> Result<Option<u64>, NoHostMemory> {
        let class = class_of(len);
        let head = self.queues.get(stream as usize).and_then(|q| q.slabs.get(class)).copied().unwrap_or(NIL);
        let slab = if head != NIL {
            head
        } else {
            match self.new_slab(stream, class)? {
                Some(slab) => slab,
                None => return Ok(None),
            }
        };
        Ok(self.take_small(slab, info))
    }

    /// Hands out a block of a slab with room.
    fn take_small(&mut self, index: u32, info: BlockMeta) -> Option<u64> {
        let slab = self.slabs.at(index)?;
        let (w, word) = slab.bits.iter_mut().enumerate().find(|(_, word)| **word != 0)?;
        let bit = word.trailing_zeros() as usize;
        *word &= word.wrapping_sub(1);
        slab.free -= 1;
        let at = w * 64 + bit;
        *slab.blocks.get_mut(at)? = Small {
            requested: info.requested as u32, // At most MAX_SMALL.
            owner: info.owner,
            flags: info.flags,
            state: State::Live,
            handle_or_seq: info.handle,
            link: NO_LINK,
        };
        let len = class_size(slab.class);
        let off = slab.off + len * at as u64;
        if slab.free == 0 {
            self.unlist_slab(index);
        }
        self.bytes.cached -= len;
        self.count_live(len, info.requested);
        Some(off)
    }

    fn new_slab(&mut self, stream: StreamId, class: usize) -> Result<Option<u32>, NoHostMemory> {
        let len = slab_bytes(class);
        let count = slab_blocks(class) as usize;
        let mut blocks = Vec::new();
        blocks.try_reserve_exact(count)?;
        let blank =
            Small { requested: 0, owner: 0, flags: 0, state: State::Free, handle_or_seq: 0, link: NO_LINK };
        blocks.resize(count, blank);
        if self.slabs.vacant.is_empty() {
            // Room in `vacant` for every index, so that giving a slab up needs no memory.
            let more = self.slabs.array.len().clamp(16, 1 << 14);
            self.slabs.array.try_reserve(1)?;
            if self.slabs.vacant.capacity() <= self.slabs.array.len() {
                self.slabs.vacant.try_reserve(self.slabs.array.len() + more)?;
            }
        }
        self.flush_last_freed(stream);
        let Some(node) = self.take_for_slab(stream, len)? else {
            return Ok(None);
        };
        let Node { off, .. } = *self.nodes.get(node);
        // A slab is far smaller than a page: it lies in two at most, and both may need entries.
        if self.pages.reserve_start(off).and(self.pages.reserve_start(off + len - 1)).is_err() {
            self.insert_free(node, stream);
            return Err(NoHostMemory);
        }
        for at in (off..off + len).step_by(QUANTUM as usize) {
            self.pages.set_start(at, node);
        }
        let index = self.slabs.vacant.pop().unwrap_or(self.slabs.array.len() as u32);
        let mut bits = [0u64; WORDS];
        for (w, word) in bits.iter_mut().enumerate() {
            let here = count.saturating_sub(w * 64).min(64) as u32;
            *word = u64::MAX.checked_shr(64 - here).unwrap_or(0);
        }
        let slab = Slab {
            node,
            off,
            class,
            block_len: class_size(class),
            reciprocal: reciprocal(class),
            stream,
            free: count as u64,
            seq: 0,
            bits,
            blocks,
            prev: NIL,
            next: NIL,
        };
        match self.slabs.array.get_mut(index as usize) {
            Some(slot) => *slot = Some(slab),
            None => self.slabs.array.push(Some(slab)), // Reserved above.
        }
        let record = self.nodes.at(node);
        record.kind = Kind::Slab;
        record.slab = index;
        record.stream = stream;
        if let Some(queue) = self.queues.get_mut(stream as usize) {
            queue.slab_count += 1;
        }
        self.list_slab(index);
        Ok(Some(index))
    }

    /// An extent for a slab: in a slab page that has room, in a new one, or at worst anywhere.
    fn take_for_slab(&mut self, stream: StreamId, len: u64) -> Result<Option<NodeId>, NoHostMemory> {
        if let Some(node) = self.take_from_slab_pages(stream, len)? {
            return Ok(Some(node));
        }
        if let Some(page) = self.take_extent(stream, PAGE, PAGE)? {
            self.nodes.at(page).flags = SLAB_PAGE;
            // In no list it counts as free, so it can be cut; the rest goes to the bins of slab pages.
            let end = self.nodes.get(page).off + len;
            if self.nodes.reserve(1).and(self.pages.reserve_start(end)).is_err() {
                self.insert_free(page, stream);
                return Err(NoHostMemory);
            }
            let rest = self.cut(page, end);
            self.nodes.at(page).kind = Kind::Busy;
            self.insert_free(rest, stream);
            return Ok(Some(page));
        }
        if self.slab_anywhere { self.take_extent(stream, len, QUANTUM) } else { Ok(None) }
    }

    pub(super) fn slab_block(&self, id: NodeId, off: u64, exact: bool) -> Result<Block, NotLive> {
        let node = self.nodes.get(id);
        let slab = self.slabs.get(node.slab).ok_or(NotLive::Unknown)?;
        let len = class_size(slab.class);
        let inside = off.checked_sub(slab.off).ok_or(NotLive::Unknown)?;
        let index = slab.index_of(inside) as u64;
        if exact && index * len != inside {
            return Err(NotLive::Unknown);
        }
        let small = slab.blocks.get(index as usize).ok_or(NotLive::Unknown)?;
        if small.state != State::Live {
            return Err(if small.requested > 0 { NotLive::Freed } else { NotLive::Unknown });
        }
        Ok(Block {
            off: slab.off + index * len,
            len,
            info: BlockMeta {
                requested: u64::from(small.requested),
                handle: small.handle_or_seq,
                owner: small.owner,
                flags: small.flags,
            },
            stream: slab.stream,
            place: Place::Slab { slab: node.slab, index: index as u32 },
        })
    }

    /// Frees a small block on the stream of its slab.
    pub(super) fn free_small(&mut self, slab: u32, index: u32, stream: StreamId) {
        let Some(owner) = self.slabs.get(slab) else {
            return;
        };
        debug_assert_eq!(owner.stream, stream, "a small block was freed on a stream that its slab is not of");
        let len = class_size(owner.class);
        let requested = owner.blocks.get(index as usize).map_or(0, |b| u64::from(b.requested));
        self.uncount_live(len, requested);
        self.bytes.cached += len;
        self.slab_gains(slab, index, self.seq);
    }

    /// A block returns to its slab. `seq` is when it was freed, or 0 if the device has got past that.
    pub(super) fn slab_gains(&mut self, index: u32, at: u32, seq: u64) {
        let Some(slab) = self.slabs.at(index) else {
            return;
        };
        slab.seq = slab.seq.max(seq);
        if let Some(block) = slab.blocks.get_mut(at as usize) {
            block.state = State::Free;
            block.link = NO_LINK;
        }
        if let Some(word) = slab.bits.get_mut(at as usize / 64) {
            *word |= 1 << (at % 64);
        }
        slab.free += 1;
        let (free, all) = (slab.free, slab.blocks.len() as u64);
        if free == 1 {
            self.list_slab(index);
        } else if free == all {
            // Keep it if it is the only one with room: the next request of the class finds it.
            let Some(slab) = self.slabs.get(index) else {
                return;
            };
            if slab.prev != NIL || slab.next != NIL {
                self.release_slab(index);
            }
        }
    }

    /// Gives a wholly free slab back to the extents.
    fn release_slab(&mut self, index: u32) {
        self.unlist_slab(index);
        let Some(slab) = self.slabs.array.get_mut(index as usize).and_then(Option::take) else {
            return;
        };
        self.slabs.vacant.push(index); // Reserved when the slab was made.
        let len = slab_bytes(slab.class);
        for at in (slab.off..slab.off + len).step_by(QUANTUM as usize).skip(1) {
            self.pages.set_start(at, NIL);
        }
        if let Some(queue) = self.queues.get_mut(slab.stream as usize) {
            queue.slab_count -= 1;
        }
        let node = self.nodes.at(slab.node);
        node.slab = NIL;
        node.requested = 0;
        node.flags &= SLAB_PAGE;
        node.seq = slab.seq;
        self.release_extent(slab.node, slab.stream);
    }

    pub(super) fn release_empty_slabs(&mut self, stream: StreamId) {
        for class in 0..super::CLASSES {
            let Some(queue) = self.queues.get(stream as usize) else { return };
            let last = queue.last_slabs.get(class).copied().unwrap_or(NIL);
            if self.slabs.get(last).is_some_and(|slab| slab.free == slab.blocks.len() as u64) {
                self.release_slab(last);
            }
        }
    }

    fn list_slab(&mut self, index: u32) {
        let Some(slab) = self.slabs.get(index) else {
            return;
        };
        let (class, stream) = (slab.class, slab.stream);
        let Some(queue) = self.queues.get_mut(stream as usize) else { return };
        let (Some(head), Some(last)) = (queue.slabs.get_mut(class), queue.last_slabs.get_mut(class)) else {
            return;
        };
        let old = core::mem::replace(head, index);
        if old == NIL {
            *last = index;
        }
        if let Some(slab) = self.slabs.at(index) {
            slab.prev = NIL;
            slab.next = old;
        }
        if let Some(old) = self.slabs.at(old) {
            old.prev = index;
        }
    }

    fn unlist_slab(&mut self, index: u32) {
        let Some(slab) = self.slabs.at(index) else {
            return;
        };
        let (class, stream, prev, next) = (slab.class, slab.stream, slab.prev, slab.next);
        (slab.prev, slab.next) = (NIL, NIL);
        let queue = self.queues.get_mut(stream as usize);
        let ends = queue.map(|q| (q.slabs.get_mut(class), q.last_slabs.get_mut(class)));
        let Some((Some(head), Some(last))) = ends else { return };
        match self.slabs.at(prev) {
            Some(prev) => prev.next = next,
            None => *head = next,
        }
        match self.slabs.at(next) {
            Some(next) => next.prev = prev,
            None => *last = prev,
        }
    }
}

const _: () = assert!(MAX_SLAB_BLOCKS as usize <= WORDS * 64 && UNIT > 0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiplying_is_as_good_as_dividing() {
        for class in 0..super::super::CLASSES {
            assert!(slab_bytes(class) / UNIT < MAX_SLAB_UNITS);
            let per_block = class_size(class) / UNIT;
            for units in 0..=MAX_SLAB_UNITS {
                assert_eq!((units * reciprocal(class)) >> 32, units / per_block);
            }
        }
    }
}
