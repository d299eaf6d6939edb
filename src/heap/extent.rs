//! Extents: cutting, coalescing, and finding the best place.

use super::bins::fits;
use super::node::{Kind, NIL, Node, NodeId, SHARED, StreamId};
use super::{HOLDS_CHUNK, Heap, PAGE, QUANTUM, SLAB_PAGE, block_flags};
use crate::error::NoHostMemory;

impl Heap {
    /// Keeps a freed extent as it is, in case the next request of `stream` is of its size.
    pub(super) fn keep_last_freed(&mut self, id: NodeId, stream: StreamId) {
        self.flush_last_freed(stream);
        let node = self.nodes.at(id);
        node.kind = Kind::LastFreed;
        node.stream = stream;
        if let Some(queue) = self.queues.get_mut(stream as usize) {
            (queue.last_freed, queue.last_freed_len) = (id, node.len);
        }
    }

    /// Lets the extent that the stream freed last coalesce.
    pub(super) fn flush_last_freed(&mut self, stream: StreamId) {
        self.flush_last_freed_for(stream, stream);
    }

    fn flush_last_freed_for(&mut self, stream: StreamId, whose: StreamId) {
        let Some(queue) = self.queues.get_mut(stream as usize) else { return };
        let id = core::mem::replace(&mut queue.last_freed, NIL);
        queue.last_freed_len = 0;
        if id != NIL {
            self.release_extent(id, whose);
        }
    }

    /// Gives the extent that the stream freed last to everyone, if it was freed no later than `done`.
    pub(super) fn retire_last_freed(&mut self, stream: StreamId, done: u64) {
        let Some(queue) = self.queues.get(stream as usize) else { return };
        if queue.last_freed != NIL && self.nodes.get(queue.last_freed).seq <= done {
            self.flush_last_freed_for(stream, SHARED);
        }
    }

    /// The extent freed last, if it is of `len` bytes and just where a search would put a request of `len`
    /// bytes once the extent has coalesced. So keeping it apart saves time, and changes nothing else.
    #[inline]
    pub(super) fn take_last_freed(&mut self, stream: StreamId, len: u64) -> Option<NodeId> {
        let queue = self.queues.get(stream as usize)?;
        if queue.last_freed_len != len {
            return None;
        }
        let id = queue.last_freed;
        let node = self.nodes.get(id);
        if self.merges(node.prev, id) {
            return None;
        }
        let behind = if self.merges(node.next, id) { self.nodes.get(node.next).len } else { 0 };
        let whole = len + behind;
        let bins = queue.bins.first()?;
        let shared = self.queues.first().filter(|_| stream != SHARED).and_then(|q| q.bins.first());
        for bins in core::iter::once(bins).chain(shared) {
            if bins.has_better(&self.nodes, len, (whole, node.off), node.next) {
                return None;
            }
        }
        let queue = self.queues.get_mut(stream as usize)?;
        (queue.last_freed, queue.last_freed_len) = (NIL, 0);
        Some(id)
    }

    /// Lets a freed extent coalesce, and notes in its chunks that they were used until now.
    pub(super) fn release_extent(&mut self, id: NodeId, stream: StreamId) {
        let Node { off, len, seq, .. } = *self.nodes.get(id);
        self.chunks.touch(&self.pages, off, len, seq);
        self.insert_free(id, stream);
    }

    /// Makes an extent that is in no list free for `stream`, and coalesces it with its neighbours as far
    /// as they are in the same hands. Needs no memory.
    pub(super) fn insert_free(&mut self, id: NodeId, stream: StreamId) -> NodeId {
        let node = self.nodes.at(id);
        node.kind = Kind::Free;
        node.stream = stream;
        if node.flags & block_flags::OWN_ALLOCATION != 0 {
            // Serves no other block: in no bin, but with an age, so that it is given back.
            self.link_age(id);
            return id;
        }
        let mut id = self.coalesce(id);
        let node = self.nodes.at(id);
        if node.flags & SLAB_PAGE != 0 && node.len >= PAGE {
            // No slab is left here: it is ordinary memory again.
            node.flags &= !SLAB_PAGE;
            id = self.coalesce(id);
        }
        self.relink(id);
        id
    }

    /// Joins a free extent in no list with those of its free neighbours that are in the same hands.
    fn coalesce(&mut self, id: NodeId) -> NodeId {
        let mut id = id;
        let prev = self.nodes.get(id).prev;
        if self.merges(prev, id) {
            self.unlink_free(prev);
            self.absorb_next(prev);
            id = prev;
        }
        let next = self.nodes.get(id).next;
        if self.merges(next, id) {
            self.unlink_free(next);
            self.absorb_next(id);
        }
        id
    }

    /// Puts a free extent into the lists of its stream.
    fn relink(&mut self, id: NodeId) {
        self.link_age(id);
        let Node { stream, flags, .. } = *self.nodes.get(id);
        if let Some(bins) = self.queues.get_mut(stream as usize).and_then(|q| q.bins_for(flags)) {
            bins.insert(&mut self.nodes, id);
        }
    }

    /// Whether the free neighbour and the extent `id` may become one.
    fn merges(&self, neighbour: NodeId, id: NodeId) -> bool {
        if neighbour == NIL {
            return false;
        }
        let (a, b) = (self.nodes.get(neighbour), self.nodes.get(id));
        a.kind == Kind::Free
            && a.flags & block_flags::OWN_ALLOCATION == 0
            && a.flags & SLAB_PAGE == b.flags & SLAB_PAGE
            && (a.flags & SLAB_PAGE == 0 || a.off / PAGE == b.off / PAGE)
            && (a.stream == b.stream || (self.merge_all && (a.stream == SHARED || b.stream == SHARED)))
    }

    /// Joins the extent behind `id` to it. The result is everyone's only if both were.
    fn absorb_next(&mut self, id: NodeId) {
        let next = self.nodes.get(id).next;
        let Node { off, len, next: after, stream, seq, .. } = *self.nodes.get(next);
        self.pages.set_start(off, NIL);
        let node = self.nodes.at(id);
        node.len += len;
        node.next = after;
        if (node.stream == SHARED) == (stream == SHARED) {
            node.seq = node.seq.max(seq);
        } else if node.stream == SHARED {
            // Shared memory is complete, so only the stream's part has an age.
            (node.stream, node.seq) = (stream, seq);
        }
        if after != NIL {
            self.nodes.at(after).prev = id;
        }
        self.nodes.give(next);
    }

    /// Gives an extent in no list to `stream`.
    pub(super) fn assign(&mut self, id: NodeId, stream: StreamId) {
        let node = self.nodes.at(id);
        if node.stream == SHARED && stream != SHARED {
            node.seq = 0;
        }
        node.stream = stream;
    }

    fn link_age(&mut self, id: NodeId) {
        let Node { off, len, stream, seq, flags, .. } = *self.nodes.get(id);
        let holds = len >= PAGE && self.chunks.has_whole(&self.pages, off, len);
        let flags = if holds { flags | HOLDS_CHUNK } else { flags & !HOLDS_CHUNK };
        self.nodes.at(id).flags = flags;
        if let Some(queue) = self.queues.get_mut(stream as usize) {
            let list = queue.age_list(flags);
            // The list stays in order of age, so an extent that comes late counts as being as young as the
            // last.
            let youngest = if list.tail == NIL { 0 } else { self.nodes.get(list.tail).seq };
            self.nodes.at(id).seq = seq.max(youngest);
            list.push_back(&mut self.nodes, id);
        }
    }

    /// Takes a free extent out of bins and age list.
    pub(super) fn unlink_free(&mut self, id: NodeId) {
        let Node { stream, flags, .. } = *self.nodes.get(id);
        let Some(queue) = self.queues.get_mut(stream as usize) else {
            return;
        };
        queue.age_list(flags).remove(&mut self.nodes, id);
        if flags & block_flags::OWN_ALLOCATION == 0
            && let Some(bins) = queue.bins_for(flags)
        {
            bins.remove(&mut self.nodes, id);
        }
    }

    /// Cuts an extent at `off`, which lies inside it. The part from `off` on is a new extent that has
    /// the kind of the first and is in no list. Nodes and page entry must have been reserved.
    pub(super) fn cut(&mut self, id: NodeId, off: u64) -> NodeId {
        let whole = *self.nodes.get(id);
        let tail = self.nodes.take(Node {
            off,
            len: whole.end() - off,
            prev: id,
            next: whole.next,
            requested: 0,
            ..whole
        });
        if whole.next != NIL {
            self.nodes.at(whole.next).prev = tail;
        }
        let head = self.nodes.at(id);
        head.len = off - whole.off;
        head.next = tail;
        self.pages.set_start(off, tail);
        tail
    }

    /// The best place for `stream`, out of its own and everyone's memory, cut to `len`; in no list, and
    /// still counted as cached.
    pub(super) fn take_extent(
        &mut self,
        stream: StreamId,
        len: u64,
        align: u64,
    ) -> Result<Option<NodeId>, NoHostMemory> {
        self.take_from(stream, len, align, 0)
    }

    /// The same out of slab pages.
    pub(super) fn take_from_slab_pages(
        &mut self,
        stream: StreamId,
        len: u64,
    ) -> Result<Option<NodeId>, NoHostMemory> {
        self.take_from(stream, len, QUANTUM, SLAB_PAGE)
    }

    fn take_from(
        &mut self,
        stream: StreamId,
        len: u64,
        align: u64,
        flags: u8,
    ) -> Result<Option<NodeId>, NoHostMemory> {
        let find = |s: StreamId| {
            let at = usize::from(flags & SLAB_PAGE != 0);
            let bins = self.queues.get(s as usize)?.bins.get(at)?;
            let (rank, id) = bins.best(&self.nodes, len, align)?;
            Some((rank.0, s != stream, id))
        };
        let own = find(stream);
        let shared = if stream == SHARED { None } else { find(SHARED) };
        let Some((_, _, id)) = own.into_iter().chain(shared).min() else { return Ok(None) };
        self.cut_out(id, len, align).map(Some)
    }

    /// Cuts `len` bytes at a multiple of `align` out of a free extent that holds them.
    pub(super) fn cut_out(&mut self, id: NodeId, len: u64, align: u64) -> Result<NodeId, NoHostMemory> {
        let free = *self.nodes.get(id);
        debug_assert!(fits(free.off, free.len, len, align));
        let mask = align - 1;
        let start = (free.off + mask) & !mask;
        let end = start + len;
        self.nodes.reserve(2)?;
        self.pages.reserve_start(start)?;
        if end < free.end() {
            self.pages.reserve_start(end)?;
        }
        self.unlink_free(id);
        let mut id = id;
        if start > free.off {
            let gap = id;
            id = self.cut(id, start);
            self.relink(gap);
        }
        if end < free.end() {
            let rest = self.cut(id, end);
            self.relink(rest);
        }
        Ok(id)
    }

    /// Joins neighbouring free extents of `stream` and of everyone, where together they hold the request.
    /// They stay apart otherwise, so that memory that is everyone's remains so.
    pub fn coalesce_across_streams(&mut self, stream: StreamId, len: u64, align: u64) -> bool {
        if stream == SHARED || self.merge_all {
            return false;
        }
        let Some(queue) = self.queues.get(stream as usize) else {
            return false;
        };
        let heads = [queue.whole.head, queue.parts.head];
        let mut seen = 0;
        for head in heads {
            let mut id = head;
            while id != NIL && seen < COALESCE_SCAN {
                let (first, off, end) = self.run_around(id, stream);
                if self.usable(id, stream) && fits(off, end - off, len, align.max(QUANTUM)) {
                    self.claim_run(first, end, stream);
                    return true;
                }
                id = self.nodes.get(id).age_next;
                seen += 1;
            }
        }
        false
    }

    /// Whether the extent is free and `stream` may have it.
    pub(super) fn usable(&self, id: NodeId, stream: StreamId) -> bool {
        let node = self.nodes.get(id);
        node.kind == Kind::Free
            && node.flags & (block_flags::OWN_ALLOCATION | SLAB_PAGE) == 0
            && (node.stream == stream || node.stream == SHARED)
    }

    /// The run of free extents around `id` that `stream` may have: its first extent, start and end.
    fn run_around(&self, id: NodeId, stream: StreamId) -> (NodeId, u64, u64) {
        let (mut first, mut last) = (id, id);
        let mut steps = 0;
        while steps < COALESCE_SCAN && self.usable(self.nodes.get(first).prev, stream) {
            steps += 1;
            first = self.nodes.get(first).prev;
        }
        while steps < 2 * COALESCE_SCAN && self.usable(self.nodes.get(last).next, stream) {
            steps += 1;
            last = self.nodes.get(last).next;
        }
        (first, self.nodes.get(first).off, self.nodes.get(last).end())
    }

    /// Makes one free extent of `stream` out of the usable ones from `first` up to `end`.
    pub(super) fn claim_run(&mut self, first: NodeId, end: u64, stream: StreamId) -> NodeId {
        self.unlink_free(first);
        self.assign(first, stream);
        loop {
            let next = self.nodes.get(first).next;
            if self.nodes.get(first).end() >= end || !self.usable(next, stream) {
                break;
            }
            self.unlink_free(next);
            self.absorb_next(first);
        }
        self.insert_free(first, stream)
    }
}

/// How many extents [`Heap::coalesce_across_streams`] looks at in each age list; a limit on the work of one
/// miss.
const COALESCE_SCAN: usize = 256;
