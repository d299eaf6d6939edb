//! Growth: where to map memory so that a request fits.
//!
//! A request may lie across free and unmapped extents in any order, so that what is left between survivors is
//! used in place; the plan with the least to map is taken. Between planning and booking these extents are
//! busy, and nobody else's.

use super::chunk::Chunk;
use super::node::{Kind, NIL, Node, NodeId, SHARED, StreamId};
use super::{Heap, PAGE, QUANTUM};
use crate::error::NoHostMemory;

/// How many unmapped extents of each kind are compared, once one serves; a limit on the work of one growth.
const UNMAPPED_SCAN: usize = 256;
/// How many extents before an unmapped one a request may begin; a limit for the same reason.
const RUN_SCAN: usize = 32;

/// A range that is to be mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// The unmapped extent; from [`Heap::begin_map`] on the busy extent of exactly this range.
    pub node: NodeId,
    pub off: u64,
    /// A multiple of [`PAGE`].
    pub len: u64,
}

/// Where memory is to be mapped so that a request fits.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Growth {
    pub parts: Vec<Part>,
    /// Free extents that the request will lie in too; not to be unmapped for it.
    pub frees: Vec<NodeId>,
    /// Bytes of all parts.
    pub need: u64,
    /// Chunk records that were promised.
    promised: usize,
}

impl Heap {
    /// The place where the least memory need be mapped so that `stream` can have `len` bytes at a multiple of
    /// `align`.
    pub fn plan_growth(
        &self,
        stream: StreamId,
        len: u64,
        align: u64,
    ) -> Result<Option<Growth>, NoHostMemory> {
        let align = align.max(QUANTUM);
        let mut best = (u64::MAX, u64::MAX, NIL);
        // Those that are large enough come first, smallest first, so that where there are many one is soon
        // found that serves; then those that need what lies beside them, largest first.
        for above in [true, false] {
            let mut seen = 0;
            self.unmapped.visit(&self.nodes, len, above, |unmapped| {
                // Candidates: the request begins at the start of one of the extents before it that are free
                // or unmapped.
                let (mut first, mut steps) = (unmapped, 0);
                loop {
                    if let Some((need, start)) = self.measure(first, stream, len, align)
                        && (need, start) < (best.0, best.1)
                    {
                        best = (need, start, first);
                    }
                    let before = self.nodes.get(first).prev;
                    steps += 1;
                    if steps >= RUN_SCAN || !self.mappable(before, stream) {
                        break;
                    }
                    first = before;
                }
                seen += 1;
                seen < UNMAPPED_SCAN || best.2 == NIL
            });
        }
        if best.2 == NIL { Ok(None) } else { self.plan_from(best.2, stream, len, align).map(Some) }
    }

    /// Whether a request of `stream` may lie in the extent, once it is mapped.
    fn mappable(&self, id: NodeId, stream: StreamId) -> bool {
        id != NIL && (self.nodes.get(id).kind == Kind::Unmapped || self.usable(id, stream))
    }

    /// The part of an unmapped extent that must be mapped for the range.
    fn part_of(extent: &Node, start: u64, end: u64) -> (u64, u64) {
        // It begins and ends at pages. Nothing of it, where the range begins behind it.
        let off = extent.off.max(start / PAGE * PAGE);
        let to = extent.end().min(end.next_multiple_of(PAGE));
        (off, to.saturating_sub(off))
    }

    /// What must be mapped for a request that begins in the extent `first`, and where it begins.
    fn measure(&self, first: NodeId, stream: StreamId, len: u64, align: u64) -> Option<(u64, u64)> {
        let mut node = self.nodes.get(first);
        let start = node.off.checked_add(align - 1)? & !(align - 1);
        let end = start.checked_add(len)?;
        let mut need = 0u64;
        loop {
            if node.kind == Kind::Unmapped {
                need += Self::part_of(node, start, end).1;
            }
            if node.end() >= end {
                return (need > 0).then_some((need, start));
            }
            if !self.mappable(node.next, stream) {
                return None;
            }
            node = self.nodes.get(node.next);
        }
    }

    fn plan_from(
        &self,
        first: NodeId,
        stream: StreamId,
        len: u64,
        align: u64,
    ) -> Result<Growth, NoHostMemory> {
        let mut plan = Growth::default();
        let mut id = first;
        let start = (self.nodes.get(first).off + align - 1) & !(align - 1);
        let end = start + len;
        while id != NIL && self.mappable(id, stream) {
            let node = self.nodes.get(id);
            if node.kind == Kind::Unmapped {
                let (off, len) = Self::part_of(node, start, end);
                if len > 0 && off < end {
                    plan.parts.try_reserve(1)?;
                    plan.parts.push(Part { node: id, off, len });
                    plan.need += len;
                }
            } else {
                plan.frees.try_reserve(1)?;
                plan.frees.push(id);
            }
            if node.end() >= end {
                break;
            }
            id = node.next;
        }
        Ok(plan)
    }

    /// Takes what is planned out of the lists. The plan must be from the same hold of the lock, and at most
    /// `chunks` chunks will fill it. Afterwards [`Heap::commit_map`] or [`Heap::abort_map`] needs no memory.
    pub fn begin_map(&mut self, plan: &mut Growth, chunks: usize) -> Result<(), NoHostMemory> {
        self.nodes.reserve(plan.parts.len() * 2)?;
        for part in &plan.parts {
            let end = part.off + part.len;
            self.pages.reserve_start(part.off)?;
            self.pages.reserve_chunks(part.off, part.len)?;
            if end < self.nodes.get(part.node).end() {
                self.pages.reserve_start(end)?;
            }
        }
        self.chunks.promise(chunks)?;
        plan.promised = chunks;
        for part in &mut plan.parts {
            let extent = *self.nodes.get(part.node);
            let end = part.off + part.len;
            self.unmapped.remove(&mut self.nodes, part.node);
            if part.off > extent.off {
                let rest = part.node;
                part.node = self.cut(rest, part.off);
                self.unmapped.insert(&mut self.nodes, rest);
            }
            if end < extent.end() {
                let rest = self.cut(part.node, end);
                self.unmapped.insert(&mut self.nodes, rest);
            }
            self.nodes.at(part.node).kind = Kind::Busy;
        }
        for id in &plan.frees {
            self.unlink_free(*id);
            self.set_busy(*id);
        }
        Ok(())
    }

    /// Books chunks (offset, length and token) that fill all parts, and joins these to the free extents of
    /// the plan. The memory is everyone's, or `stream`'s if one of those extents is not everyone's.
    pub fn commit_map(
        &mut self,
        plan: &Growth,
        chunks: impl Iterator<Item = (u64, u64, u64)>,
        stream: StreamId,
    ) {
        let mut filled = 0u64;
        let mut promised = plan.promised;
        for (off, len, token) in chunks {
            let id = self.chunks.add(Chunk { off, len, token, own: false, moving: false, seq: 0, next: NIL });
            self.pages.set_chunk(off, len, id);
            filled += len;
            promised -= 1;
        }
        self.chunks.break_promise(promised);
        debug_assert_eq!(filled, plan.need, "the chunks do not fill the growth");
        self.bytes.mapped += plan.need;
        self.bytes.mapped_peak = self.bytes.mapped_peak.max(self.bytes.mapped);
        self.bytes.cached += plan.need;
        let all_shared = plan.frees.iter().all(|id| self.nodes.get(*id).stream == SHARED);
        let whose = if all_shared { SHARED } else { stream };
        for part in &plan.parts {
            let node = self.nodes.at(part.node);
            (node.flags, node.seq) = (0, 0);
            self.insert_free(part.node, whose);
        }
        for id in &plan.frees {
            self.end_busy(*id);
            self.assign(*id, whose);
            self.insert_free(*id, whose);
        }
    }

    /// Nothing was mapped: the parts are unmapped extents again, and the free extents what they were.
    pub fn abort_map(&mut self, plan: &Growth) {
        self.return_frees(plan);
        for part in &plan.parts {
            self.insert_unmapped(part.node);
        }
    }

    /// The growth failed, but its parts cannot be used: the free extents are what they were, the parts stay
    /// busy until [`Heap::finish_unmap`].
    pub fn return_frees(&mut self, plan: &Growth) {
        self.chunks.break_promise(plan.promised);
        for id in &plan.frees {
            self.end_busy(*id);
            let stream = self.nodes.get(*id).stream;
            self.insert_free(*id, stream);
        }
    }

    /// A range that could not be unmapped was, after all.
    pub fn finish_unmap(&mut self, busy: NodeId) {
        self.insert_unmapped(busy);
    }
}
