//! Growth: taking more memory from the driver, and moving idle chunks to where they serve a request.
//!
//! What is to be done is decided and taken out of the lists under the lock, done without it, and booked and
//! handed out under one more hold of it, so that no other thread can take what this one has won.

use super::Arena;
use super::state::State;
use crate::driver::{Api, relaxed};
use crate::error::{NoHostMemory, Result, Status, bail};
use crate::heap::{Chunk, Growth, Heap, NIL, NodeId, PAGE, Part, QUANTUM, round_up};
use crate::logging::{Size, log_line};
use crate::pool::types::AllocRequest;
use crate::vmem::{Calls, ChunkOp, UndoFailure, Unreclaimable};

/// A growth is made of about this many chunks at most. The driver's cost goes with their number, but a chunk
/// is only given up whole, and a small survivor traps all of it.
const CHUNKS_PER_GROWTH: u64 = 64;
/// The same once memory was refused: then what a survivor traps is missed, and the driver's cost is not.
const CHUNKS_WHEN_SCARCE: u64 = 8 * CHUNKS_PER_GROWTH;
/// A chunk is at most this part of what the pool may hold, so that what is trapped is little beside it.
const CHUNKS_PER_DEVICE: u64 = 512;
/// Requests of up to this many bytes share `cuMemAlloc` chunks of [`SHARED_CHUNK`]; larger ones get chunks of
/// their own size, because nothing can be unmapped from between two survivors here.
const SHARED_MOST: u64 = 2 << 20;
const SHARED_CHUNK: u64 = 16 << 20;

/// Room made before every operation that may leave something unreclaimable, for as many threads as may be in
/// one at once; failed moves leave two.
pub(super) const ROOM_FOR_UNRECLAIMABLE: usize = 64;

/// What became of an attempt to get more memory.
pub enum Attempt {
    Served(u64),
    Refused(Why),
}

/// Why there is no more memory for a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// The driver has no more, or there is no more address space.
    Device,
    /// The pool's limit is in the way.
    Limit,
    /// What is left is the headroom kept free for others.
    Headroom,
}

/// What a growth must leave alone, as the arena cannot know by itself.
#[derive(Clone, Copy)]
pub struct Bounds {
    /// Bytes of the pool in other contexts of the device: the limit is one for all of them.
    pub elsewhere: u64,
    /// The most that may be new, for the headroom's sake.
    pub spare: u64,
    /// Memory was refused before: growths are cut finer.
    pub scarce: bool,
}

/// Idle memory that may be unmapped for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    Keep,
    Remap,
}

impl Arena {
    /// Whether idle chunks can be moved for the request.
    pub fn can_move_for(&self, request: &AllocRequest) -> bool {
        self.mapper.range.is_some() && !request.own_allocation
    }

    /// Takes more memory from the driver, or moves what is idle to where it serves the request.
    pub fn grow(&self, api: &Api, request: &AllocRequest, idle: Idle, bounds: Bounds) -> Result<Attempt> {
        if self.can_move_for(request) {
            self.grow_range(api, request, idle, bounds)
        } else {
            self.grow_by_malloc(api, request, bounds)
        }
    }

    /// Grows with idle memory: moved where chunks can be moved. Where that does not do, because chunks are
    /// too large for the unmapped extents or cannot be moved, `wanted` bytes of them are returned first.
    pub fn grow_with_idle(
        &self,
        api: &Api,
        request: &AllocRequest,
        wanted: u64,
        bounds: &dyn Fn() -> Bounds,
    ) -> Result<Attempt> {
        if self.can_move_for(request)
            && wanted != u64::MAX
            && let Attempt::Served(address) = self.grow_range(api, request, Idle::Remap, bounds())?
        {
            return Ok(Attempt::Served(address));
        }
        self.release_idle(api, wanted)?;
        let bounds = bounds();
        if let Some(address) = self.lock()?.search(request, bounds.scarce)? {
            return Ok(Attempt::Served(address));
        }
        self.grow(api, request, Idle::Remap, bounds)
    }

    fn grow_range(&self, api: &Api, request: &AllocRequest, idle: Idle, bounds: Bounds) -> Result<Attempt> {
        let base = self.mapper.range.map_or(0, |r| r.base);
        let planned = self.lock()?.plan(request, idle, base, self.total, bounds)?;
        let Step { plan, fresh, mut ops, moved } = match planned {
            Planned::Step(step) => step,
            Planned::Refused(why) => return Ok(Attempt::Refused(why)),
        };
        let mut calls = Calls::default();
        let placed = relaxed(api, || self.mapper.place(api, &mut ops, &mut calls));

        let mut state = self.lock()?;
        state.growing -= fresh;
        state.counters.calls.add(calls);
        if self.is_lost() {
            drop(state);
            if placed.is_ok() {
                ops.iter_mut().for_each(|op| op.from = op.to);
            }
            self.discard_lost(api, &mut ops);
            return Err(self.lost_error());
        }
        state.book_moves(&moved, &ops, placed.is_ok());
        if let Err(status) = placed {
            state.heap.note_mapped(calls.created);
            state.book_failure(plan, ops);
            let refused = status == Status::POOL_ERROR_OUT_OF_MEMORY;
            return if refused { Ok(Attempt::Refused(Why::Device)) } else { Err(status) };
        }
        let stream = state.stream(request.key)?;
        let mapped = ops.iter().map(|op| (op.to.wrapping_sub(base), op.len, op.handle));
        state.heap.commit_map(&plan, mapped, stream);
        let served = state.try_allocate(request)?;
        drop(state);
        log_line!(
            Debug,
            "device {}: mapped {} chunks for a request of {}, {} of them new memory",
            self.device(),
            ops.len(),
            Size(request.size),
            Size(fresh)
        );
        Ok(served.map_or(Attempt::Refused(Why::Device), Attempt::Served))
    }

    fn grow_by_malloc(&self, api: &Api, request: &AllocRequest, bounds: Bounds) -> Result<Attempt> {
        let Some(exact) = malloc_bytes(request) else { return Ok(Attempt::Refused(Why::Device)) };
        let roomy = if request.own_allocation || exact > SHARED_MOST { exact } else { SHARED_CHUNK };
        match self.malloc_chunk(api, request, roomy, bounds)? {
            Attempt::Refused(_) if roomy > exact => self.malloc_chunk(api, request, exact, bounds),
            answer => Ok(answer),
        }
    }

    /// Takes one chunk of `len` bytes by `cuMemAlloc`.
    fn malloc_chunk(&self, api: &Api, request: &AllocRequest, len: u64, bounds: Bounds) -> Result<Attempt> {
        {
            let mut state = self.lock()?;
            if let Some(bound) = state.bound_met(len, self.total, bounds) {
                return Ok(Attempt::Refused(bound));
            }
            state.addresses.reserve(len)?;
            state.growing += len;
        }
        let mut calls = Calls::default();
        let taken = relaxed(api, || self.mapper.malloc(api, len, &mut calls));
        let mut state = self.lock()?;
        state.growing -= len;
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
            Err(Status::POOL_ERROR_OUT_OF_MEMORY) => return Ok(Attempt::Refused(Why::Device)),
            Err(status) => return Err(status),
        };
        let status = match state.book_malloc(address, len, request) {
            Ok(Some(address)) => return Ok(Attempt::Served(address)),
            Ok(None) => {
                let found = state.try_allocate(request)?;
                return Ok(found.map_or(Attempt::Refused(Why::Device), Attempt::Served));
            }
            Err(status) => status,
        };
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
        Err(status)
    }
}

/// A growth that has been taken out of the lists and waits for the driver.
struct Step {
    plan: Growth,
    /// Bytes to be created.
    fresh: u64,
    ops: Vec<ChunkOp>,
    /// The chunks among the operations that are moved, with their busy extents, in the order of the
    /// operations.
    moved: Vec<(u32, NodeId)>,
}

/// What came of planning a growth.
enum Planned {
    Step(Step),
    Refused(Why),
}

/// Idle chunks by length, those first that are to be placed first.
struct Supply<'a> {
    chunks: &'a [u32],
    /// For each length, the longest first, the chunks that are not placed yet.
    unplaced: Vec<(u64, core::ops::Range<usize>)>,
    /// Bytes of all of them.
    bytes: u64,
}

impl<'a> Supply<'a> {
    fn new(heap: &Heap, chunks: &'a mut [u32]) -> core::result::Result<Supply<'a>, NoHostMemory> {
        let len_of = |id: u32| heap.chunk(id).map_or(0, |c| c.len);
        // Large chunks first, while the parts still have room for them.
        chunks.sort_unstable_by_key(|id| core::cmp::Reverse(len_of(*id)));
        let (mut unplaced, mut bytes): (Vec<(u64, core::ops::Range<usize>)>, u64) = (Vec::new(), 0);
        for (at, id) in chunks.iter().enumerate() {
            let len = len_of(*id);
            bytes += len;
            match unplaced.last_mut() {
                Some((same, range)) if *same == len => range.end = at + 1,
                _ => {
                    unplaced.try_reserve(1)?;
                    unplaced.push((len, at..at + 1));
                }
            }
        }
        Ok(Supply { chunks, unplaced, bytes })
    }

    /// The longest chunk that fits.
    fn take(&mut self, room: u64) -> Option<u32> {
        let (_, range) = self.unplaced.iter_mut().find(|(len, range)| *len <= room && !range.is_empty())?;
        range.next().and_then(|at| self.chunks.get(at).copied())
    }
}

impl State {
    /// Decides what to map where, and takes it out of the lists; or says what is in the way.
    fn plan(
        &mut self,
        request: &AllocRequest,
        idle: Idle,
        base: u64,
        total: u64,
        bounds: Bounds,
    ) -> Result<Planned> {
        if idle == Idle::Remap {
            self.flush();
        }
        let stream = self.stream(request.key)?;
        let Some((len, align)) = Heap::extent_for(request.size, request.align) else {
            return Ok(Planned::Refused(Why::Device));
        };
        let Some(plan) = self.heap.plan_growth(stream, len, align)? else {
            return Ok(Planned::Refused(Why::Device));
        };
        let mut chunks = Vec::new();
        if idle == Idle::Remap {
            // A chunk is moved whole, into one part.
            let largest = plan.parts.iter().map(|part| part.len).max().unwrap_or(0);
            let fits =
                |chunk: &Chunk, sum: u64| !chunk.own && chunk.len <= largest && sum + chunk.len <= plan.need;
            let done = |stream| self.done_of(stream);
            self.heap.collect_idle(plan.need, &done, &plan.frees, &mut chunks, &fits)?;
        }
        let step = self.cut(plan, &mut chunks, base, total, bounds.scarce)?;
        if step.fresh > 0
            && let Some(bound) = self.bound_met(step.fresh, total, bounds)
        {
            return Ok(Planned::Refused(bound));
        }
        Ok(Planned::Step(self.take_out(step)?))
    }

    /// The most that a chunk of this growth may have: see [`CHUNKS_PER_GROWTH`] and [`CHUNKS_PER_DEVICE`].
    fn largest_chunk(&self, fresh: u64, total: u64, scarce: bool) -> u64 {
        let count = if scarce { CHUNKS_WHEN_SCARCE } else { CHUNKS_PER_GROWTH };
        let bearable = self.options.limit(total).min(total) / CHUNKS_PER_DEVICE;
        let bearable = 1u64 << bearable.max(PAGE).ilog2();
        (fresh / count).max(PAGE).next_power_of_two().min(bearable)
    }

    /// Cuts a growth into chunks: idle ones that are moved, as far as they fit, and new ones.
    fn cut(
        &self,
        plan: Growth,
        chunks: &mut [u32],
        base: u64,
        total: u64,
        scarce: bool,
    ) -> core::result::Result<Step, NoHostMemory> {
        let mut supply = Supply::new(&self.heap, chunks)?;
        let largest = self.largest_chunk(plan.need.saturating_sub(supply.bytes), total, scarce);
        let (mut ops, mut moved, mut fresh) = (Vec::new(), Vec::new(), 0u64);
        for part in &plan.parts {
            let (mut at, end) = (part.off, part.off + part.len);
            while at < end {
                let room = end - at;
                let mut op = match supply.take(room) {
                    Some(id) => {
                        let Some(chunk) = self.heap.chunk(id) else { continue };
                        moved.try_reserve(1)?;
                        moved.push((id, NIL));
                        ChunkOp::mapped(chunk.len, chunk.token, self.addresses.address(chunk.off))
                    }
                    None => {
                        let len = (1u64 << room.ilog2()).min(largest);
                        fresh += len;
                        ChunkOp::fresh(len)
                    }
                };
                op.to = base.wrapping_add(at);
                at += op.len;
                ops.try_reserve(1)?;
                ops.push(op);
            }
        }
        Ok(Step { plan, fresh, ops, moved })
    }

    /// Takes out of the lists what a growth is made of. After an error nothing is taken out.
    fn take_out(&mut self, mut step: Step) -> core::result::Result<Step, NoHostMemory> {
        self.unreclaimable.try_reserve(ROOM_FOR_UNRECLAIMABLE)?;
        self.heap.begin_map(&mut step.plan, step.ops.len())?;
        for at in 0..step.moved.len() {
            let Some((chunk, node)) = step.moved.get_mut(at) else { break };
            match self.heap.begin_unmap(*chunk) {
                Ok(busy) => *node = busy,
                Err(NoHostMemory) => {
                    for (_, node) in step.moved.iter().take(at) {
                        self.heap.abort_unmap(*node);
                    }
                    self.heap.abort_map(&step.plan);
                    return Err(NoHostMemory);
                }
            }
        }
        self.growing += step.fresh;
        Ok(step)
    }

    /// Books where moved chunks are not any more, or still are. The operations that move come in the order of
    /// `moved`, whatever lies between them.
    fn book_moves(&mut self, moved: &[(u32, NodeId)], ops: &[ChunkOp], placed: bool) {
        for ((chunk, node), op) in moved.iter().zip(ops.iter().filter(|op| op.from != 0)) {
            if op.left == UndoFailure::Stuck {
                self.heap.defer_unmap(*node, *chunk);
                self.keep_stuck(*op, *node);
            } else if placed || op.left != UndoFailure::Nothing {
                self.heap.commit_unmap(*node, *chunk);
            } else {
                self.heap.abort_unmap(*node);
            }
        }
    }

    /// What is in the way of taking `more` bytes from the device.
    fn bound_met(&self, more: u64, total: u64, bounds: Bounds) -> Option<Why> {
        // Saturates where an own allocation is as large as numbers go: that is over any limit.
        let held = (self.on_device_soon() + bounds.elsewhere).saturating_add(more);
        if held > self.options.limit(total) {
            return Some(Why::Limit);
        }
        (more > bounds.spare).then_some(Why::Headroom)
    }

    /// After a growth that failed: its parts are unmapped extents again, unless something is mapped in them
    /// that could not be unmapped.
    fn book_failure(&mut self, plan: Growth, mut ops: Vec<ChunkOp>) {
        ops.retain(|p| matches!(p.left, UndoFailure::Memory | UndoFailure::Mapping));
        let mut parts = Vec::new();
        if ops.iter().any(|p| p.left == UndoFailure::Mapping) {
            self.heap.return_frees(&plan);
            parts = plan.parts;
        } else {
            self.heap.abort_map(&plan);
        }
        for op in &mut ops {
            op.from = if op.left == UndoFailure::Mapping { op.to } else { 0 };
        }
        self.keep_unreclaimable(Unreclaimable { ops }, parts);
    }

    /// Books what the driver would not take back. Room for it was made before.
    pub(super) fn keep_unreclaimable(&mut self, kept: Unreclaimable, busy: Vec<Part>) {
        if kept.ops.is_empty() {
            return;
        }
        self.count_unreclaimable(kept.bytes(), kept.host_bytes());
        if self.unreclaimable.len() < self.unreclaimable.capacity() {
            self.unreclaimable.push((kept, busy));
        } else {
            log_line!(Error, "{} stay with the driver for good", Size(kept.bytes()));
        }
    }

    fn count_unreclaimable(&mut self, bytes: u64, host: u64) {
        self.heap.add_unreclaimable(bytes);
        self.spilled.bytes += host;
    }

    /// The same for a chunk that stays mapped where it was, in an extent that stays busy.
    fn keep_stuck(&mut self, op: ChunkOp, node: NodeId) {
        let mut busy = Vec::new();
        if busy.try_reserve_exact(1).is_err() {
            self.heap.add_unreclaimable(op.len);
            return;
        }
        busy.push(Part { node, off: 0, len: op.len });
        self.keep_one(op, busy);
    }

    /// The same for one chunk. Without host memory to remember it, it stays with the driver, and in the
    /// counters.
    pub(super) fn keep_one(&mut self, op: ChunkOp, busy: Vec<Part>) {
        let mut ops = Vec::new();
        if ops.try_reserve_exact(1).is_err() {
            self.count_unreclaimable(op.len, if op.host { op.len } else { 0 });
            return;
        }
        ops.push(op);
        self.keep_unreclaimable(Unreclaimable { ops }, busy);
    }

    /// Books what `cuMemAlloc` gave; a request for an own allocation is served with it. After an error
    /// nothing is booked.
    fn book_malloc(&mut self, address: u64, len: u64, request: &AllocRequest) -> Result<Option<u64>> {
        let own = request.own_allocation;
        let align = if own { request.align } else { QUANTUM };
        if !address.is_multiple_of(align.max(QUANTUM)) {
            bail!(
                POOL_ERROR_NOT_SUPPORTED,
                "cuMemAlloc of {len} bytes gave {address:#x}, which is not aligned to {align} bytes"
            );
        }
        let meta = self.block_meta(request)?;
        // Again, because others may have taken the room that was made before the driver was called.
        self.addresses.reserve(len)?;
        let off = self.addresses.add(address, len);
        if let Err(no_memory) = self.heap.add_chunk_region(off, len, address, own.then_some(meta)) {
            self.addresses.remove(off);
            return Err(no_memory.into());
        }
        Ok(own.then(|| self.handed_out(off, request, meta.owner)))
    }
}

/// The whole pages that a request needs at least.
pub fn whole_pages(request: &AllocRequest) -> Option<u64> {
    Heap::extent_for(request.size, request.align).and_then(|(len, _)| round_up(len, PAGE))
}

/// What a request takes from the driver where chunks are `cuMemAlloc` memory. Whole pages, because the driver
/// aligns those to pages, and smaller ones share a page with strangers.
fn malloc_bytes(request: &AllocRequest) -> Option<u64> {
    if request.own_allocation {
        return round_up(request.size, PAGE);
    }
    let (len, align) = Heap::extent_for(request.size, request.align)?;
    let slack = if align > PAGE { align } else { 0 };
    round_up(len.checked_add(slack)?, PAGE)
}
