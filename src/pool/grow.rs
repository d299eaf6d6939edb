//! Growth: taking more memory from the driver, and moving idle chunks to where they serve a request.
//!
//! What is to be done is decided and taken out of the lists under the lock, done without it, and booked and handed out under
//! one more hold of it, so that no other thread can take what this one has won.

use super::arena::{Arena, Want, host_oom};
use super::registry;
use super::state::State;
use crate::driver::{Api, relaxed};
use crate::error::{NoHostMemory, Result, Status, bail};
use crate::heap::{Chunk, Growth, Heap, NIL, NodeId, PAGE, Part, QUANTUM, round_up};
use crate::logging::log_line;
use crate::vmem::{Calls, ChunkOp, UndoFailure, Unreclaimable};

/// A growth is made of about this many chunks at most. The driver's cost goes with their number, but a chunk is only given up whole, and a small
/// survivor traps all of it.
const PIECES_PER_GROWTH: u64 = 64;
/// The same once memory was refused: then what a survivor traps is missed, and the driver's cost is not.
const PIECES_WHEN_SCARCE: u64 = 8 * PIECES_PER_GROWTH;
/// A chunk is at most this part of what the pool may hold, so that what is trapped is little beside it.
const CHUNKS_PER_DEVICE: u64 = 512;
/// Requests of up to this many bytes share `cuMemAlloc` chunks of [`SHARED_CHUNK`]; larger ones get chunks of their own size, because
/// nothing can be unmapped from between two survivors here.
const SHARED_MOST: u64 = 2 << 20;
const SHARED_CHUNK: u64 = 16 << 20;

/// Room made before every operation that may leave debris, for as many threads as may be in one at once; failed moves leave two.
pub(super) const ROOM_FOR_UNRECLAIMABLE: usize = 64;

/// What became of an attempt to get more memory.
pub(super) enum Attempt {
    Served(u64),
    Refused(Why),
}

/// Why there is no more memory for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// The driver has no more, or there is no more address space.
    Device,
    /// The pool's limit is in the way.
    Limit,
    /// What is left is the device reserve.
    Reserve,
}

/// What a growth must leave alone.
#[derive(Clone, Copy)]
struct Bounds {
    /// Bytes of the pool in other contexts of the device: the limit is one for all of them.
    elsewhere: u64,
    /// Bytes of the device.
    total: u64,
    /// The most that may be new, for the reserve's sake.
    spare: u64,
}

/// Idle memory that may be unmapped for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Idle {
    Keep,
    Remap,
}

impl Arena {
    /// Takes more memory from the driver, or moves what is idle to where it serves the request.
    pub(super) fn grow(&self, api: &Api, want: &Want, idle: Idle) -> Result<Attempt> {
        if self.mapper.range.is_some() && !want.own_allocation {
            self.grow_range(api, want, idle)
        } else {
            self.grow_by_malloc(api, want)
        }
    }

    fn bounds(&self, api: &Api, want: &Want) -> Bounds {
        let spare = if want.urgent { u64::MAX } else { self.spare_on_device(api) };
        Bounds { elsewhere: self.held_elsewhere(), total: self.total, spare }
    }

    /// Device memory that the pool holds, or is about to, in other contexts of this device.
    pub(super) fn held_elsewhere(&self) -> u64 {
        let held =
            |arena: &Arena| arena.lock().map_or(0, |state| state.on_device().saturating_add(state.growing));
        registry::others_on(self).filter(|a| a.pool() == self.pool()).map(held).fold(0, u64::saturating_add)
    }

    fn grow_range(&self, api: &Api, want: &Want, idle: Idle) -> Result<Attempt> {
        let base = self.mapper.range.map_or(0, |r| r.base);
        let bounds = self.bounds(api, want);
        let mut state = self.lock()?;
        let step = match state.plan_step(want, idle, base, bounds)? {
            Ok(step) => step,
            Err(why) => return Ok(Attempt::Refused(why)),
        };
        drop(state);

        let Step { plan, fresh, mut pieces, moved } = step;
        let mut calls = Calls::default();
        let placed = relaxed(api, || self.mapper.place(api, &mut pieces, &mut calls));

        let mut state = self.lock()?;
        state.growing = state.growing.saturating_sub(fresh);
        state.counters.calls.add(calls);
        if self.is_lost() {
            drop(state);
            if placed.is_ok() {
                pieces.iter_mut().for_each(|p| p.from = p.to);
            }
            self.discard_lost(api, &mut pieces);
            return Err(self.lost_error());
        }
        // The moved pieces come in the order of `moved`, whatever lies between them.
        for ((chunk, node), piece) in moved.iter().zip(pieces.iter().filter(|p| p.from != 0)) {
            if piece.left == UndoFailure::Stuck {
                state.heap.defer_unmap(*node, *chunk);
                state.keep_stuck(*piece, *node);
            } else if placed.is_ok() || piece.left != UndoFailure::Nothing {
                state.heap.commit_unmap(*node, *chunk);
            } else {
                state.heap.abort_unmap(*node);
            }
        }
        if let Err(status) = placed {
            state.heap.note_mapped(calls.created);
            state.book_failure(plan, pieces);
            let refused = status == Status::POOL_ERROR_OUT_OF_MEMORY;
            return if refused { Ok(Attempt::Refused(Why::Device)) } else { Err(status) };
        }
        let stream = state.stream(want.key).map_err(host_oom)?;
        let placed = pieces.iter().map(|p| (p.to.wrapping_sub(base), p.len, p.handle));
        state.heap.commit_map(&plan, placed, stream);
        log_line!(
            Debug,
            "device {}: mapped {} chunks for {} bytes, {fresh} of them new",
            self.device(),
            pieces.len(),
            want.size
        );
        Ok(state.try_allocate(want)?.map_or(Attempt::Refused(Why::Device), Attempt::Served))
    }

    fn grow_by_malloc(&self, api: &Api, want: &Want) -> Result<Attempt> {
        let Some(exact) = malloc_bytes(want) else { return Ok(Attempt::Refused(Why::Device)) };
        let mut why = Why::Device;
        let roomy = if want.own_allocation || exact > SHARED_MOST { exact } else { SHARED_CHUNK };
        for len in if roomy > exact { [roomy, exact] } else { [exact, 0] } {
            if len == 0 {
                break;
            }
            {
                let bounds = self.bounds(api, want);
                let mut state = self.lock()?;
                if let Some(bound) = state.bound_met(len, bounds) {
                    why = bound;
                    continue;
                }
                state.addresses.reserve(len).map_err(host_oom)?;
                state.growing = state.growing.saturating_add(len);
            }
            let mut calls = Calls::default();
            let taken = relaxed(api, || self.mapper.malloc(api, len, &mut calls));
            let mut state = self.lock()?;
            state.growing = state.growing.saturating_sub(len);
            state.counters.calls.add(calls);
            if self.is_lost() {
                // What the driver gave belongs to the context's next life, if to any.
                drop(state);
                if let Ok(address) = taken {
                    let _ = relaxed(api, || self.mapper.free(api, address, &mut Calls::default()));
                }
                return Err(self.lost_error());
            }
            let address = match taken {
                Ok(address) => address,
                Err(Status::POOL_ERROR_OUT_OF_MEMORY) => {
                    why = Why::Device;
                    continue;
                }
                Err(status) => return Err(status),
            };
            match state.book_region(address, len, want) {
                Ok(Some(address)) => return Ok(Attempt::Served(address)),
                Ok(None) => {
                    let found = state.try_allocate(want)?;
                    return Ok(found.map_or(Attempt::Refused(Why::Device), Attempt::Served));
                }
                Err(status) => {
                    drop(state);
                    let mut calls = Calls::default();
                    let freed = relaxed(api, || self.mapper.free(api, address, &mut calls));
                    let mut state = self.lock()?;
                    state.counters.calls.add(calls);
                    if self.is_lost() {
                        return Err(self.lost_error());
                    }
                    if freed.is_err() {
                        state.heap.add_unreclaimable(len);
                    }
                    return Err(status);
                }
            }
        }
        Ok(Attempt::Refused(why))
    }
}

/// A growth that has been taken out of the lists and waits for the driver.
struct Step {
    plan: Growth,
    /// Bytes to be created.
    fresh: u64,
    pieces: Vec<ChunkOp>,
    /// The chunks among the pieces that are moved, with their busy extents, in the order of the pieces.
    moved: Vec<(u32, NodeId)>,
}

impl State {
    /// Decides what to map where, and takes it out of the lists; or says what is in the way.
    fn plan_step(
        &mut self,
        want: &Want,
        idle: Idle,
        base: u64,
        bounds: Bounds,
    ) -> Result<core::result::Result<Step, Why>> {
        if idle == Idle::Remap {
            self.flush();
        }
        let stream = self.stream(want.key).map_err(host_oom)?;
        let Some((len, align)) = Heap::extent_for(want.size, want.align) else {
            return Ok(Err(Why::Device));
        };
        let Some(plan) = self.heap.plan_growth(stream, len, align).map_err(host_oom)? else {
            return Ok(Err(Why::Device));
        };
        let mut chunks = Vec::new();
        if idle == Idle::Remap {
            // A chunk is moved whole, into one part.
            let largest = plan.parts.iter().map(|part| part.len).max().unwrap_or(0);
            let fits = |chunk: &Chunk, sum: u64| {
                !chunk.own && chunk.len <= largest && sum.saturating_add(chunk.len) <= plan.need
            };
            let done = |stream| self.done_of(stream);
            self.heap.collect_idle(plan.need, &done, &plan.frees, &mut chunks, &fits).map_err(host_oom)?;
        }
        self.take_step(plan, &mut chunks, want.refused, base, bounds).map_err(host_oom)
    }

    fn take_step(
        &mut self,
        mut plan: Growth,
        chunks: &mut [u32],
        refused: bool,
        base: u64,
        bounds: Bounds,
    ) -> core::result::Result<core::result::Result<Step, Why>, NoHostMemory> {
        let len_of = |heap: &Heap, id: u32| heap.chunk(id).map_or(0, |c| c.len);
        // Large chunks first, while the parts still have room for them.
        chunks.sort_unstable_by_key(|id| core::cmp::Reverse(len_of(&self.heap, *id)));
        let mut sum = 0u64;
        // For each length, the chunks that are not placed yet.
        let mut unplaced: Vec<(u64, core::ops::Range<usize>)> = Vec::new();
        for (at, id) in chunks.iter().enumerate() {
            let len = len_of(&self.heap, *id);
            sum = sum.saturating_add(len);
            match unplaced.last_mut() {
                Some((same, range)) if *same == len => range.end = at.saturating_add(1),
                _ => {
                    unplaced.try_reserve(1).map_err(|_| NoHostMemory)?;
                    unplaced.push((len, at..at.saturating_add(1)));
                }
            }
        }
        let pieces = if refused { PIECES_WHEN_SCARCE } else { PIECES_PER_GROWTH };
        let bearable = self.options.limit(bounds.total).min(bounds.total) / CHUNKS_PER_DEVICE;
        let bearable = 1u64 << bearable.max(PAGE).ilog2();
        let largest = (plan.need.saturating_sub(sum) / pieces).max(PAGE).next_power_of_two().min(bearable);
        let (mut pieces, mut moved) = (Vec::new(), Vec::new());
        let mut fresh = 0u64;
        for part in &plan.parts {
            let (mut at, end) = (part.off, part.off.saturating_add(part.len));
            while at < end {
                let room = end.saturating_sub(at);
                let next = unplaced.iter_mut().find(|(len, range)| *len <= room && !range.is_empty());
                let next = next.and_then(|(_, range)| range.next());
                let mut piece = match next.and_then(|next| chunks.get(next).copied()) {
                    Some(id) => {
                        let Some(chunk) = self.heap.chunk(id) else { continue };
                        moved.try_reserve(1).map_err(|_| NoHostMemory)?;
                        moved.push((id, NIL));
                        ChunkOp::mapped(chunk.len, chunk.token, self.addresses.address(chunk.off))
                    }
                    None => {
                        let len = (1u64 << room.ilog2()).min(largest);
                        fresh = fresh.saturating_add(len);
                        ChunkOp::fresh(len)
                    }
                };
                piece.to = base.wrapping_add(at);
                at = at.saturating_add(piece.len);
                pieces.try_reserve(1).map_err(|_| NoHostMemory)?;
                pieces.push(piece);
            }
        }
        if fresh > 0
            && let Some(bound) = self.bound_met(fresh, bounds)
        {
            return Ok(Err(bound));
        }
        self.unreclaimable.try_reserve(ROOM_FOR_UNRECLAIMABLE).map_err(|_| NoHostMemory)?;
        self.heap.begin_map(&mut plan, pieces.len())?;
        for at in 0..moved.len() {
            let Some((chunk, node)) = moved.get_mut(at) else { break };
            match self.heap.begin_unmap(*chunk) {
                Ok(busy) => *node = busy,
                Err(NoHostMemory) => {
                    for (_, node) in moved.iter().take(at) {
                        self.heap.abort_unmap(*node);
                    }
                    self.heap.abort_map(&plan);
                    return Err(NoHostMemory);
                }
            }
        }
        self.growing = self.growing.saturating_add(fresh);
        Ok(Ok(Step { plan, fresh, pieces, moved }))
    }

    /// What is in the way of taking `more` bytes from the device.
    fn bound_met(&self, more: u64, bounds: Bounds) -> Option<Why> {
        let held = self.on_device().saturating_add(self.growing).saturating_add(bounds.elsewhere);
        if held.saturating_add(more) > self.options.limit(bounds.total) {
            return Some(Why::Limit);
        }
        (more > bounds.spare).then_some(Why::Reserve)
    }

    /// After a growth that failed: its parts are holes again, unless something is mapped in them that could not be unmapped.
    fn book_failure(&mut self, plan: Growth, mut pieces: Vec<ChunkOp>) {
        pieces.retain(|p| matches!(p.left, UndoFailure::Memory | UndoFailure::Mapping));
        let mut parts = Vec::new();
        if pieces.iter().any(|p| p.left == UndoFailure::Mapping) {
            self.heap.return_frees(&plan);
            parts = plan.parts;
        } else {
            self.heap.abort_map(&plan);
        }
        for piece in &mut pieces {
            piece.from = if piece.left == UndoFailure::Mapping { piece.to } else { 0 };
        }
        self.keep_unreclaimable(Unreclaimable { pieces }, parts);
    }

    /// Books what the driver would not take back. Room for it was made before.
    pub(super) fn keep_unreclaimable(&mut self, debris: Unreclaimable, busy: Vec<Part>) {
        if debris.pieces.is_empty() {
            return;
        }
        self.count_unreclaimable(debris.bytes(), debris.host_bytes());
        if self.unreclaimable.len() < self.unreclaimable.capacity() {
            self.unreclaimable.push((debris, busy));
        } else {
            log_line!(Error, "{} bytes stay with the driver for good", debris.bytes());
        }
    }

    fn count_unreclaimable(&mut self, bytes: u64, host: u64) {
        self.heap.add_unreclaimable(bytes);
        self.spilled.bytes = self.spilled.bytes.saturating_add(host);
    }

    /// The same for a chunk that stays mapped where it was, in an extent that stays busy.
    fn keep_stuck(&mut self, piece: ChunkOp, node: NodeId) {
        let mut busy = Vec::new();
        if busy.try_reserve_exact(1).is_err() {
            self.heap.add_unreclaimable(piece.len);
            return;
        }
        busy.push(Part { node, off: 0, len: piece.len });
        self.keep_one(piece, busy);
    }

    /// The same for one piece. Without host memory to remember it, it stays with the driver, and in the counters.
    pub(super) fn keep_one(&mut self, piece: ChunkOp, busy: Vec<Part>) {
        let mut pieces = Vec::new();
        if pieces.try_reserve_exact(1).is_err() {
            self.count_unreclaimable(piece.len, if piece.host { piece.len } else { 0 });
            return;
        }
        pieces.push(piece);
        self.keep_unreclaimable(Unreclaimable { pieces }, busy);
    }

    /// Books what `cuMemAlloc` gave; a request for an own allocation is served with it. After an error nothing is booked.
    fn book_region(&mut self, address: u64, len: u64, want: &Want) -> Result<Option<u64>> {
        if !address.is_multiple_of(QUANTUM) || (want.own_allocation && !address.is_multiple_of(want.align)) {
            bail!(
                POOL_ERROR_NOT_SUPPORTED,
                "cuMemAlloc of {len} bytes gave {address:#x}, which is not aligned to {}",
                want.align
            );
        }
        let info = self.block_info(want)?;
        // Again, because others may have taken the room that was made before the driver was called.
        self.addresses.reserve(len).map_err(host_oom)?;
        let off = self.addresses.add(address, len);
        let own = want.own_allocation.then_some(info);
        if self.heap.add_chunk_region(off, len, address, own).is_err() {
            self.addresses.remove(off);
            return Err(host_oom(NoHostMemory));
        }
        if want.own_allocation {
            return Ok(Some(self.handed_out(off, want, info.owner)));
        }
        Ok(None)
    }
}

/// The whole pages that a request needs at least.
pub(super) fn whole_pages(want: &Want) -> Option<u64> {
    Heap::extent_for(want.size, want.align).and_then(|(len, _)| round_up(len, PAGE))
}

/// What a request takes from the driver where chunks are `cuMemAlloc` memory. Whole pages, because the driver aligns those to
/// pages, and smaller ones share a page with strangers.
fn malloc_bytes(want: &Want) -> Option<u64> {
    if want.own_allocation {
        return round_up(want.size, PAGE);
    }
    let (len, align) = Heap::extent_for(want.size, want.align)?;
    let slack = if align > PAGE { align } else { 0 };
    round_up(len.checked_add(slack)?, PAGE)
}
