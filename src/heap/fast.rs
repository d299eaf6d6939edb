//! The fast path: a request that the stream's own slab or the extent it freed last serves, and the free that
//! puts it back. Everything else is answered with "no" and goes the general way, which does the same and
//! more.
//!
//! The budget is the time of one uncontended mutex for each of the two; `make bench` has the figures.

use super::node::{Kind, NIL, StreamId};
use super::size::{MAX_SMALL, QUANTUM, UNIT, class_of, round_up};
use super::slab::State;
use super::{BlockMeta, Heap, block_flags};

/// What a block must not be for its free to be simple.
const NOT_SIMPLE: u8 = block_flags::USED_ELSEWHERE | block_flags::USED_ON_OWN | block_flags::OWN_ALLOCATION;

impl Heap {
    /// Allocates `len` bytes (not 0) at the default alignment, if that needs no search. `info` has no owner.
    #[inline]
    pub fn allocate_fast(&mut self, stream: StreamId, len: u64, info: BlockMeta) -> Option<u64> {
        let queue = self.queues.get_mut(stream as usize)?;
        if len <= MAX_SMALL {
            let slab = self.slabs.at(*queue.slabs.get(class_of(len))?)?;
            // The last free block takes the slab off its list.
            if slab.free <= 1 {
                return None;
            }
            let (word_at, word) = slab.bits.iter_mut().enumerate().find(|(_, word)| **word != 0)?;
            let at = (word_at << 6) | word.trailing_zeros() as usize;
            let block = slab.blocks.get_mut(at)?;
            *word &= word.wrapping_sub(1);
            slab.free = slab.free.wrapping_sub(1);
            block.requested = len as u32;
            block.owner = 0;
            block.flags = info.flags;
            block.state = State::Live;
            block.handle_or_seq = info.handle;
            let (size, off) = (slab.block_len, slab.off.wrapping_add(slab.block_len.wrapping_mul(at as u64)));
            self.bytes.cached = self.bytes.cached.wrapping_sub(size);
            self.count_live(size, len);
            return Some(off);
        }
        let size = round_up(len, QUANTUM)?;
        let id = self.take_last_freed(stream, size)?;
        Some(self.hand_out(id, info))
    }

    /// Frees the block that starts at `off` on `stream`, if that is simple. Returns its length.
    #[inline]
    pub fn free_fast(&mut self, off: u64, stream: StreamId) -> Option<u64> {
        if !off.is_multiple_of(UNIT) {
            return None;
        }
        let id = self.pages.start(off & !(QUANTUM - 1));
        let node = self.nodes.find(id)?;
        let queue = self.queues.get_mut(stream as usize)?;
        if node.kind == Kind::Used {
            let simple = node.off == off && node.flags & NOT_SIMPLE == 0 && node.owner == 0;
            if !simple || queue.last_freed != NIL {
                return None;
            }
            (queue.last_freed, queue.last_freed_len) = (id, node.len);
            self.seq = self.seq.wrapping_add(1);
            queue.last_free_seq = self.seq;
            node.kind = Kind::LastFreed;
            node.stream = stream;
            node.seq = self.seq;
            let (len, requested) = (node.len, node.requested);
            self.bytes.cached = self.bytes.cached.wrapping_add(len);
            self.uncount_live(len, requested);
            return Some(len);
        }
        if node.kind != Kind::Slab {
            return None;
        }
        let slab = self.slabs.at(node.slab)?;
        let inside = off.wrapping_sub(slab.off);
        let at = slab.index_of(inside);
        let all = slab.blocks.len() as u64;
        let block = slab.blocks.get_mut(at)?;
        let simple = at as u64 * slab.block_len == inside
            && block.state == State::Live
            && block.flags & NOT_SIMPLE == 0
            && block.owner == 0
            && slab.stream == stream;
        // A full slab goes back on its list, and an empty one may be given up unless it is the only one.
        let alone = slab.prev == NIL && slab.next == NIL;
        if !simple || slab.free == 0 || (slab.free.wrapping_add(1) == all && !alone) {
            return None;
        }
        block.state = State::Free;
        let requested = u64::from(block.requested);
        *slab.bits.get_mut(at >> 6)? |= 1 << (at & 63);
        slab.free = slab.free.wrapping_add(1);
        self.seq = self.seq.wrapping_add(1);
        queue.last_free_seq = self.seq;
        slab.seq = self.seq;
        let len = slab.block_len;
        self.bytes.cached = self.bytes.cached.wrapping_add(len);
        self.uncount_live(len, requested);
        Some(len)
    }
}
