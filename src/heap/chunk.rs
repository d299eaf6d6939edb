//! Chunks: which physical allocation is behind which offsets, and which of them are idle and can be unmapped.
//!
//! The heap decides and books; the calls to the driver happen between a `begin_*` and the `commit_*` or
//! `abort_*` that follows, while the range is [`Kind::Busy`] and nobody else's. Where to map is in
//! [`super::growth`].

use super::node::{Kind, NIL, Node, NodeId, SHARED, StreamId};
use super::pages::PageTable;
use super::{Heap, PAGE, QUANTUM, block_flags};
use crate::error::NoHostMemory;

/// One physical allocation of the driver, mapped whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    pub off: u64,
    pub len: u64,
    /// What the arena knows it by: a handle, or an address.
    pub token: u64,
    /// It is one block's own allocation.
    pub own: bool,
    /// A thread is unmapping it.
    pub moving: bool,
    /// The last free of a block in it, in the arena's count of frees.
    pub(super) seq: u64,
    /// Free list link while blank.
    pub(super) next: u32,
}

/// All chunks of a heap.
pub struct Chunks {
    array: Vec<Chunk>,
    blank: u32,
    blanks: usize,
    /// Blank records that growths under way will take.
    promised: usize,
}

impl Chunks {
    pub const fn new() -> Self {
        Chunks { array: Vec::new(), blank: NIL, blanks: 0, promised: 0 }
    }

    pub fn get(&self, id: u32) -> Option<&Chunk> {
        self.array.get(id as usize)
    }

    /// Makes sure that `count` chunks can be added later, whatever others add before.
    pub(super) fn promise(&mut self, count: usize) -> Result<(), NoHostMemory> {
        let wanted = self.promised + count;
        while self.blanks < wanted {
            self.array.try_reserve(1)?;
            let id = self.array.len() as u32;
            self.array.push(Chunk {
                off: 0,
                len: 0,
                token: 0,
                own: false,
                moving: false,
                seq: 0,
                next: self.blank,
            });
            self.blank = id;
            self.blanks += 1;
        }
        self.promised = wanted;
        Ok(())
    }

    pub(super) fn break_promise(&mut self, count: usize) {
        self.promised -= count;
    }

    /// Adds a chunk that was promised.
    pub(super) fn add(&mut self, chunk: Chunk) -> u32 {
        let id = self.blank;
        debug_assert_ne!(id, NIL, "a chunk was added that was not reserved");
        if let Some(slot) = self.array.get_mut(id as usize) {
            self.blank = slot.next;
            self.blanks -= 1;
            self.promised -= 1;
            *slot = chunk;
        }
        id
    }

    fn set_moving(&mut self, id: u32, moving: bool) {
        if let Some(chunk) = self.array.get_mut(id as usize) {
            chunk.moving = moving;
        }
    }

    fn remove(&mut self, id: u32) {
        if let Some(slot) = self.array.get_mut(id as usize) {
            *slot = Chunk { off: 0, len: 0, token: 0, own: false, moving: false, seq: 0, next: self.blank };
            self.blank = id;
            self.blanks += 1;
        }
    }

    /// Whether a chunk lies wholly in the range, all of which is mapped: the first that it touches, or else
    /// the next.
    pub(super) fn has_whole(&self, pages: &PageTable, off: u64, len: u64) -> bool {
        let end = off + len;
        let mut at = off;
        for _ in 0..2 {
            let Some(chunk) = self.get(pages.chunk(at)).filter(|_| at < end) else { return false };
            let chunk_end = chunk.off + chunk.len;
            if chunk.off >= off {
                return chunk_end <= end;
            }
            at = chunk_end;
        }
        false
    }

    /// Notes that the chunks of the range were in use until `seq`.
    pub fn touch(&mut self, pages: &PageTable, off: u64, len: u64, seq: u64) {
        let end = off + len;
        let mut at = off;
        while at < end {
            match self.array.get_mut(pages.chunk(at) as usize) {
                Some(chunk) => {
                    chunk.seq = chunk.seq.max(seq);
                    at = (chunk.off + chunk.len).max(at + QUANTUM);
                }
                None => at += PAGE,
            }
        }
    }
}

/// How many chunks in a row may be refused, or extents be incomplete, before a list is left; a limit on the
/// work of one rung of the ladder.
const CHUNK_SCAN: u32 = 1024;

/// Where [`Heap::collect_idle`] is in one list.
struct Cursor {
    next: NodeId,
    refused: u32,
    incomplete: u32,
}

impl Heap {
    /// Adds address space with nothing mapped. `off` and `len` are multiples of [`PAGE`].
    pub fn add_unmapped(&mut self, off: u64, len: u64) -> Result<(), NoHostMemory> {
        self.nodes.reserve(1)?;
        self.pages.reserve_start(off)?;
        let id = self.nodes.take(Node { off, len, kind: Kind::Unmapped, ..Node::BLANK });
        self.pages.set_start(off, id);
        self.unmapped.insert(&mut self.nodes, id);
        Ok(())
    }

    /// Counts memory that the driver neither lets be used nor takes back.
    pub fn add_unreclaimable(&mut self, len: u64) {
        self.unreclaimable += len;
        self.bytes.overhead += len;
        self.bytes.mapped += len;
        self.bytes.mapped_peak = self.bytes.mapped_peak.max(self.bytes.mapped);
    }

    pub fn remove_unreclaimable(&mut self, len: u64) {
        self.unreclaimable -= len;
        self.bytes.overhead -= len;
        self.bytes.mapped -= len;
    }

    pub(super) fn insert_unmapped(&mut self, id: NodeId) {
        let mut id = id;
        self.nodes.at(id).kind = Kind::Unmapped;
        let prev = self.nodes.get(id).prev;
        if prev != NIL && self.nodes.get(prev).kind == Kind::Unmapped {
            self.unmapped.remove(&mut self.nodes, prev);
            self.join_unmapped(prev);
            id = prev;
        }
        let next = self.nodes.get(id).next;
        if next != NIL && self.nodes.get(next).kind == Kind::Unmapped {
            self.unmapped.remove(&mut self.nodes, next);
            self.join_unmapped(id);
        }
        self.unmapped.insert(&mut self.nodes, id);
    }

    fn join_unmapped(&mut self, id: NodeId) {
        let next = self.nodes.get(id).next;
        let Node { off, len, next: after, .. } = *self.nodes.get(next);
        self.pages.set_start(off, NIL);
        let node = self.nodes.at(id);
        node.len += len;
        node.next = after;
        if after != NIL {
            self.nodes.at(after).prev = id;
        }
        self.nodes.give(next);
    }

    /// Adds a region that is one chunk: memory that the driver placed itself. Free for everyone, or, with
    /// `own`, a live block of its own.
    pub fn add_chunk_region(
        &mut self,
        off: u64,
        len: u64,
        token: u64,
        own: Option<super::BlockMeta>,
    ) -> Result<(), NoHostMemory> {
        self.nodes.reserve(1)?;
        self.pages.reserve_start(off)?;
        self.pages.reserve_chunks(off, len)?;
        self.chunks.promise(1)?;
        let id = self.nodes.take(Node { off, len, kind: Kind::Busy, ..Node::BLANK });
        self.pages.set_start(off, id);
        let chunk = self.chunks.add(Chunk {
            off,
            len,
            token,
            own: own.is_some(),
            moving: false,
            seq: self.seq,
            next: NIL,
        });
        self.pages.set_chunk(off, len, chunk);
        self.bytes.mapped += len;
        self.bytes.mapped_peak = self.bytes.mapped_peak.max(self.bytes.mapped);
        self.bytes.cached += len;
        match own {
            Some(info) => {
                self.hand_out(id, info);
            }
            None => {
                self.insert_free(id, SHARED);
            }
        }
        Ok(())
    }

    /// Collects idle chunks, least recently used first, until they sum up to `wanted` bytes: chunks wholly
    /// inside free extents and complete on the device. `done` tells how far each stream has got, and `spared`
    /// are extents that lie side by side and are to be left alone. Returns the bytes collected. `take`
    /// decides about each chunk. Where it refuses many in a row, or many extents in a row are incomplete, the
    /// rest of their list is left out, except that all that is complete is found where everything is wanted.
    pub fn collect_idle(
        &self,
        wanted: u64,
        done: &dyn Fn(StreamId) -> u64,
        spared: &[NodeId],
        out: &mut Vec<u32>,
        take: &dyn Fn(&Chunk, u64) -> bool,
    ) -> Result<u64, NoHostMemory> {
        if self.pinned {
            return Ok(0);
        }
        let mut cursors = Vec::new();
        cursors.try_reserve_exact(self.queues.len() * 2)?;
        for queue in &self.queues {
            for next in [queue.whole.head, queue.own.head] {
                if next != NIL {
                    cursors.push(Cursor { next, refused: 0, incomplete: 0 });
                }
            }
        }
        let spared = match (spared.first(), spared.last()) {
            (Some(first), Some(last)) => self.nodes.get(*first).off..self.nodes.get(*last).end(),
            _ => 0..0,
        };
        let mut sum = 0;
        while sum < wanted {
            // The oldest extent of all lists; each is in order of age.
            let alive = cursors.iter_mut().filter(|cursor| cursor.next != NIL);
            let Some(cursor) = alive.min_by_key(|cursor| self.nodes.get(cursor.next).seq) else { break };
            let node = *self.nodes.get(cursor.next);
            cursor.next = node.age_next;
            if spared.contains(&node.off) {
                continue;
            }
            let done = if node.stream == SHARED { u64::MAX } else { done(node.stream) };
            let (mut at, mut all_complete) = (node.off, true);
            while at < node.end() && sum < wanted {
                let chunk_id = self.pages.chunk(at);
                let Some(chunk) = self.chunks.get(chunk_id) else {
                    break;
                };
                let end = chunk.off + chunk.len;
                at = end.max(at + QUANTUM);
                if chunk.off < node.off || end > node.end() {
                    continue;
                }
                if !take(chunk, sum) {
                    cursor.refused += 1;
                    if cursor.refused > CHUNK_SCAN {
                        break;
                    }
                } else if chunk.seq > done {
                    all_complete = false;
                } else {
                    out.try_reserve(1)?;
                    out.push(chunk_id);
                    sum += chunk.len;
                    (cursor.refused, cursor.incomplete) = (0, 0);
                }
            }
            if !all_complete {
                cursor.incomplete += 1;
            }
            if cursor.refused > CHUNK_SCAN || (cursor.incomplete > CHUNK_SCAN && wanted != u64::MAX) {
                cursor.next = NIL;
            }
        }
        Ok(sum)
    }

    pub fn chunk(&self, id: u32) -> Option<Chunk> {
        self.chunks.get(id).copied()
    }

    /// All chunks.
    pub fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.chunks.array.iter().filter(|chunk| chunk.len > 0)
    }

    /// Takes an idle chunk out of the free extent that it lies in.
    pub fn begin_unmap(&mut self, chunk_id: u32) -> Result<NodeId, NoHostMemory> {
        let Some(chunk) = self.chunk(chunk_id) else {
            return Err(NoHostMemory);
        };
        let id = self.pages.start_at_or_below(chunk.off, 0);
        let node = *self.nodes.get(id);
        let end = chunk.off + chunk.len;
        debug_assert!(
            node.kind == Kind::Free && node.off <= chunk.off && end <= node.end(),
            "the chunk is not idle"
        );
        let id = if node.flags & block_flags::OWN_ALLOCATION != 0
            || (node.off == chunk.off && node.end() == end)
        {
            self.unlink_free(id);
            id
        } else {
            self.cut_at(id, chunk.off, chunk.len)?
        };
        self.set_busy(id);
        self.chunks.set_moving(chunk_id, true);
        Ok(id)
    }

    /// Takes a free extent, in no list, out of use for a while. Its stream must keep its id meanwhile.
    pub(super) fn set_busy(&mut self, id: NodeId) {
        let node = self.nodes.at(id);
        node.kind = Kind::Busy;
        let stream = node.stream;
        if let Some(queue) = self.queues.get_mut(stream as usize) {
            queue.busy += 1;
        }
    }

    pub(super) fn end_busy(&mut self, id: NodeId) {
        let stream = self.nodes.get(id).stream;
        if let Some(queue) = self.queues.get_mut(stream as usize) {
            queue.busy -= 1;
        }
    }

    /// Cuts exactly the range out of a free extent.
    fn cut_at(&mut self, id: NodeId, off: u64, len: u64) -> Result<NodeId, NoHostMemory> {
        let node = *self.nodes.get(id);
        self.nodes.reserve(2)?;
        self.pages.reserve_start(off)?;
        let end = off + len;
        if end < node.end() {
            self.pages.reserve_start(end)?;
        }
        self.unlink_free(id);
        let mut middle = id;
        if off > node.off {
            middle = self.cut(id, off);
        }
        // Busy before its neighbours are put back, or they would coalesce with it.
        self.nodes.at(middle).kind = Kind::Busy;
        if end < node.end() {
            let rest = self.cut(middle, end);
            self.insert_free(rest, node.stream);
        }
        if middle != id {
            self.insert_free(id, node.stream);
        }
        Ok(middle)
    }

    /// The chunk was unmapped: its range is unmapped address space. Where the region is this one chunk, the
    /// region is gone.
    pub fn commit_unmap(&mut self, busy: NodeId, chunk: u32) {
        self.defer_unmap(busy, chunk);
        let Node { off, prev, next, .. } = *self.nodes.get(busy);
        if prev == NIL && next == NIL {
            self.pages.set_start(off, NIL);
            self.nodes.give(busy);
        } else {
            self.nodes.at(busy).flags = 0;
            self.insert_unmapped(busy);
        }
    }

    /// The chunk is no use any more, but its range is not unmapped yet: it stays busy until
    /// [`Heap::finish_unmap`].
    pub fn defer_unmap(&mut self, busy: NodeId, chunk: u32) {
        self.end_busy(busy);
        let Node { len, off, .. } = *self.nodes.get(busy);
        self.bytes.mapped -= len;
        self.bytes.cached -= len;
        self.pages.set_chunk(off, len, NIL);
        self.chunks.remove(chunk);
    }

    /// The chunk stays mapped: its range is idle again, for the stream that it was idle for.
    pub fn abort_unmap(&mut self, busy: NodeId) {
        let chunk = self.pages.chunk(self.nodes.get(busy).off);
        self.chunks.set_moving(chunk, false);
        self.end_busy(busy);
        let stream = self.nodes.get(busy).stream;
        self.insert_free(busy, stream);
    }
}
