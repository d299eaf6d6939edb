//! The reclaim ladder: what is tried, in which order, before a request is answered with out of memory.
//!
//! After every rung the arena's own lists are searched again. The lock is released across driver calls; what a thread has won there
//! is booked and handed out under one hold of it, so that no other thread can take it in between.

use super::arena::{Arena, State, Want, host_oom};
use super::owners::Owner;
use super::registry;
use crate::arena::{Calls, Debris, Left, Piece};
use crate::driver::{Api, relaxed};
use crate::error::{Result, Status, bail, fail};
use crate::heap::{Chunk, Growth, Heap, NIL, NoHostMemory, NodeId, PAGE, QUANTUM, SHARED, round_up};
use crate::logging::log_line;
use core::sync::atomic::Ordering::*;
use core::time::Duration;
use std::time::Instant;

/// A growth is made of about this many chunks: the driver's cost goes with their number, but large ones are trapped by small
/// survivors more easily.
const PIECES_PER_GROWTH: u64 = 16;
/// Requests of up to this many bytes share `cuMemAlloc` chunks of [`SHARED_CHUNK`]; larger ones get chunks of their own size, because
/// nothing can be unmapped from between two survivors here.
const SHARED_MOST: u64 = 2 << 20;
const SHARED_CHUNK: u64 = 16 << 20;

/// Room made before every operation that may leave debris, for as many threads as may be in one at once; failed moves leave two.
const ROOM_FOR_DEBRIS: usize = 64;

/// What became of an attempt to get more memory.
enum Attempt {
    Served(u64),
    /// No memory: from the driver, or within the limit.
    Refused,
}

/// Idle memory that may be unmapped for a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Idle {
    Keep,
    Remap,
}

impl Arena {
    /// Climbs the ladder for a request that the arena's lists could not serve.
    #[cold]
    pub(super) fn allocate_slowly(&self, api: &Api, want: &Want) -> Result<u64> {
        if self.is_lost() {
            bail!(POOL_ERROR_CONTEXT_LOST, "the context on device {} was destroyed or reset", self.device());
        }
        let answer = self.climb(api, want);
        match answer {
            // What the driver says of a context that is gone depends on the call; the arena finds out by asking.
            Err(Status::POOL_ERROR_DRIVER | Status::POOL_ERROR_CONTEXT_LOST) => {
                self.check_alive(api)?;
                answer
            }
            answer => answer,
        }
    }

    fn climb(&self, api: &Api, want: &Want) -> Result<u64> {
        let ordered = !want.key.is_device_order();
        let capturing = ordered && self.look_for_capture(api, want.key)?;
        // Rung 1: the stream's own memory, then what other streams are finished with.
        if !capturing {
            if ordered {
                self.mark_stream(api, want.key);
            }
            self.poll(api);
            if want.own_allocation {
                self.release_own(api)?;
            }
        }
        if let Some(address) = self.search(want)? {
            return Ok(address);
        }
        if !capturing && self.worth_marking(want)? && self.mark_context(api) && self.poll(api) {
            if let Some(address) = self.search(want)? {
                return Ok(address);
            }
        }
        self.clear_debris(api)?;
        // Rungs 2 and 3: grow; or, with much idle, remap before growing.
        let idle = if !capturing && self.is_idle_beyond_bound()? { Idle::Remap } else { Idle::Keep };
        if let Attempt::Served(address) = self.grow(api, want, idle)? {
            return Ok(address);
        }
        if !capturing {
            if let Some(address) = self.work_through(api, want)? {
                self.note_recovery(want)?;
                return Ok(address);
            }
        }
        Err(self.out_of_memory(api, want, capturing))
    }

    /// Rungs 3 to 7, for a request that was refused more memory.
    fn work_through(&self, api: &Api, want: &Want) -> Result<Option<u64>> {
        // Rung 3: remap what is idle here.
        if let Attempt::Served(address) = self.grow_after_release(api, want, want.size)? {
            return Ok(Some(address));
        }
        // Rung 4: what is idle elsewhere on the device.
        if self.release_elsewhere(api, want.size)? > 0 {
            if let Attempt::Served(address) = self.grow_after_release(api, want, want.size)? {
                return Ok(Some(address));
            }
        }
        // Rung 5: what is freed but not finished with.
        let deadline = Instant::now() + Duration::from_millis(u64::from(self.lock()?.options.settle_ms));
        let mut served = None;
        self.wait(api, deadline, |state| {
            served = state.search(want)?;
            Ok(served.is_some())
        })?;
        if served.is_some() {
            return Ok(served);
        }
        for arena in registry::others_on(self) {
            arena.wait(api, deadline, |_| Ok(false))?;
        }
        self.release_elsewhere(api, want.size)?;
        if let Attempt::Served(address) = self.grow_after_release(api, want, want.size)? {
            return Ok(Some(address));
        }
        // Rung 7: everything idle on the device.
        self.release_elsewhere(api, u64::MAX)?;
        if let Attempt::Served(address) = self.grow_after_release(api, want, u64::MAX)? {
            return Ok(Some(address));
        }
        self.search(want)
    }

    /// Searches the lists, after all that is idle has been made to coalesce.
    fn search(&self, want: &Want) -> Result<Option<u64>> {
        self.lock()?.search(want)
    }

    fn note_recovery(&self, want: &Want) -> Result<()> {
        let mut state = self.lock()?;
        state.counters.oom_recovered = state.counters.oom_recovered.wrapping_add(1);
        log_line!(Info, "device {}: worked through out of memory for {} bytes", self.device(), want.size);
        Ok(())
    }

    /// Whether enough memory lies in others' hands, uncovered by any mark, that an event of the whole context pays.
    fn worth_marking(&self, want: &Want) -> Result<bool> {
        let state = self.lock()?;
        let bytes = state.heap.bytes();
        let elsewhere = bytes.pending.saturating_add(if state.heap.merge_all { 0 } else { bytes.cached });
        Ok(state.covered < state.heap.seq() && elsewhere >= want.size && state.is_over_bound(elsewhere))
    }

    fn is_idle_beyond_bound(&self) -> Result<bool> {
        let state = self.lock()?;
        Ok(state.is_over_bound(state.heap.bytes().cached))
    }

    /// Takes more memory from the driver, or moves what is idle to where it serves the request.
    fn grow(&self, api: &Api, want: &Want, idle: Idle) -> Result<Attempt> {
        if self.mapper.range.is_some() && !want.own_allocation {
            self.grow_range(api, want, idle)
        } else {
            self.grow_by_malloc(api, want)
        }
    }

    /// The same, with idle memory used: moved where chunks can be moved, else returned first.
    fn grow_after_release(&self, api: &Api, want: &Want, wanted: u64) -> Result<Attempt> {
        let moves = self.mapper.range.is_some() && !want.own_allocation;
        if !moves || wanted == u64::MAX {
            self.release_idle(api, wanted)?;
            if let Some(address) = self.search(want)? {
                return Ok(Attempt::Served(address));
            }
        }
        self.grow(api, want, Idle::Remap)
    }

    fn grow_range(&self, api: &Api, want: &Want, idle: Idle) -> Result<Attempt> {
        let mut state = self.lock()?;
        let Some(step) = state.plan_step(want, idle, self.total)? else { return Ok(Attempt::Refused) };
        drop(state);

        let Step { plan, busy, fresh, mut pieces, mut moved } = step;
        let address = self.mapper.range.map_or(0, |r| r.base.wrapping_add(plan.off));
        let mut calls = Calls::default();
        let placed = relaxed(api, || self.mapper.place(api, address, &mut pieces, &mut calls));

        let mut state = self.lock()?;
        state.growing = state.growing.saturating_sub(fresh);
        state.counters.calls.add(calls);
        let moved_pieces = pieces.iter().filter(|p| p.from != 0);
        for ((chunk, node), piece) in moved.drain(..).zip(moved_pieces) {
            if piece.left == Left::Stuck {
                state.heap.strand(node, chunk);
                state.keep_stuck(*piece, node);
            } else if placed.is_ok() || piece.left != Left::Nothing {
                state.heap.commit_unmap(node, chunk);
            } else {
                state.heap.abort_unmap(node);
            }
        }
        if let Err(status) = placed {
            state.heap.note_mapped(calls.created);
            let mapped = pieces.iter().filter(|p| p.left == Left::Mapping).fold(0, |sum, p| sum + p.len);
            if mapped == 0 {
                state.heap.abort_map(busy, &plan);
            } else {
                state.heap.return_neighbours(busy, &plan);
            }
            pieces.retain(|p| matches!(p.left, Left::Memory | Left::Mapping));
            state.keep_debris(Debris { address, mapped, pieces }, (mapped > 0).then_some(busy));
            return if status == Status::POOL_ERROR_OUT_OF_MEMORY {
                Ok(Attempt::Refused)
            } else {
                Err(status)
            };
        }
        let stream = state.stream(want.key).map_err(host_oom)?;
        state.heap.commit_map(busy, &plan, pieces.iter().map(|p| (p.len, p.handle)), stream);
        log_line!(
            Debug,
            "device {}: mapped {} chunks for {} bytes, {fresh} of them new",
            self.device(),
            pieces.len(),
            want.size
        );
        Ok(state.try_allocate(want)?.map_or(Attempt::Refused, Attempt::Served))
    }

    fn grow_by_malloc(&self, api: &Api, want: &Want) -> Result<Attempt> {
        let Some(exact) = malloc_bytes(want) else { return Ok(Attempt::Refused) };
        let roomy = if want.own_allocation || exact > SHARED_MOST { exact } else { SHARED_CHUNK };
        for len in if roomy > exact { [roomy, exact] } else { [exact, 0] } {
            if len == 0 {
                break;
            }
            {
                let mut state = self.lock()?;
                if state.is_over_limit(len, self.total) {
                    continue;
                }
                state.regions.reserve(len).map_err(host_oom)?;
                state.growing = state.growing.saturating_add(len);
            }
            let mut calls = Calls::default();
            let taken = relaxed(api, || self.mapper.malloc(api, len, &mut calls));
            let mut state = self.lock()?;
            state.growing = state.growing.saturating_sub(len);
            state.counters.calls.add(calls);
            let address = match taken {
                Ok(address) => address,
                Err(Status::POOL_ERROR_OUT_OF_MEMORY) => continue,
                Err(status) => return Err(status),
            };
            match state.book_region(address, len, want) {
                Ok(Some(address)) => return Ok(Attempt::Served(address)),
                Ok(None) => return Ok(state.try_allocate(want)?.map_or(Attempt::Refused, Attempt::Served)),
                Err(status) => {
                    drop(state);
                    let mut calls = Calls::default();
                    let freed = relaxed(api, || self.mapper.free(api, address, &mut calls));
                    let mut state = self.lock()?;
                    state.counters.calls.add(calls);
                    if freed.is_err() {
                        state.heap.add_debris(len);
                    }
                    return Err(status);
                }
            }
        }
        Ok(Attempt::Refused)
    }

    /// Tries again to be rid of what the driver would not take back.
    fn clear_debris(&self, api: &Api) -> Result<()> {
        loop {
            let (mut debris, busy) = match self.lock()?.debris.pop() {
                Some(debris) => debris,
                None => return Ok(()),
            };
            let before = debris.bytes();
            let mut calls = Calls::default();
            let clear = self.mapper.clear(api, &mut debris, &mut calls);
            let mut state = self.lock()?;
            state.counters.calls.add(calls);
            state.heap.remove_debris(before.saturating_sub(debris.bytes()));
            let mut busy = busy;
            if debris.mapped == 0 {
                if let Some(busy) = busy.take() {
                    state.heap.abandon(busy);
                }
            }
            if !clear {
                let left = debris.bytes();
                state.heap.remove_debris(left);
                state.keep_debris(debris, busy);
                return Ok(());
            }
        }
    }

    /// Gives idle chunks back to the driver, least recently used first, until `wanted` bytes are. Returns the bytes.
    pub(super) fn release_idle(&self, api: &Api, wanted: u64) -> Result<u64> {
        self.release_where(api, wanted, &|_| true)
    }

    fn release_where(&self, api: &Api, wanted: u64, which: &dyn Fn(&Chunk) -> bool) -> Result<u64> {
        self.clear_debris(api)?;
        let mut state = self.lock()?;
        state.debris.try_reserve(ROOM_FOR_DEBRIS).map_err(|_| host_oom(NoHostMemory))?;
        state.flush();
        let mut out = Vec::new();
        let take = |chunk: &Chunk, _| which(chunk);
        state
            .heap
            .collect_idle(wanted, &|s| state.done_of(s), [NIL, NIL], &mut out, &take)
            .map_err(host_oom)?;
        let (mut pieces, mut nodes) = (Vec::new(), Vec::new());
        pieces.try_reserve_exact(out.len()).map_err(|_| host_oom(NoHostMemory))?;
        nodes.try_reserve_exact(out.len()).map_err(|_| host_oom(NoHostMemory))?;
        for chunk in out {
            let Some(record) = state.heap.chunk(chunk) else { continue };
            // What could be taken is released; the rest must wait for host memory.
            let Ok(node) = state.heap.begin_unmap(chunk) else { break };
            let from = state.regions.address(record.off);
            pieces.push(Piece::mapped(record.len, record.token, from));
            nodes.push((chunk, node));
        }
        drop(state);

        let mut calls = Calls::default();
        let (gone, result) = relaxed(api, || self.discard(api, &mut pieces, &mut calls));
        let mut state = self.lock()?;
        state.counters.calls.add(calls);
        let mut released = 0u64;
        for (at, ((chunk, node), piece)) in nodes.iter().zip(&pieces).enumerate() {
            if at < gone {
                let off = state.heap.chunk(*chunk).map_or(u64::MAX, |c| c.off);
                state.heap.commit_unmap(*node, *chunk);
                if !self.has_in_range(piece.from) {
                    state.regions.remove(off);
                }
                if piece.left == Left::Nothing {
                    released = released.saturating_add(piece.len);
                }
            } else {
                state.heap.abort_unmap(*node);
            }
        }
        pieces.retain(|p| p.left == Left::Memory);
        state.keep_debris(Debris { address: 0, mapped: 0, pieces }, None);
        if let Err(status) = result {
            log_line!(Warn, "device {}: the driver took back {released} bytes only", self.device());
            if released == 0 && status != Status::POOL_ERROR_OUT_OF_MEMORY {
                return Err(status);
            }
        }
        Ok(released)
    }

    /// Returns the pieces to the driver; the first `n` are gone when it stops.
    fn discard(&self, api: &Api, pieces: &mut [Piece], calls: &mut Calls) -> (usize, Result<()>) {
        let mut gone = 0;
        for run in pieces.chunk_by_mut(|a, b| self.has_in_range(a.from) == self.has_in_range(b.from)) {
            if run.first().is_some_and(|p| self.has_in_range(p.from)) {
                let (n, result) = self.mapper.discard(api, run, calls);
                gone += n;
                if result.is_err() {
                    return (gone, result);
                }
                continue;
            }
            for piece in run {
                if let Err(status) = self.mapper.free(api, piece.handle, calls) {
                    return (gone, Err(status));
                }
                gone += 1;
            }
        }
        (gone, Ok(()))
    }

    fn release_elsewhere(&self, api: &Api, wanted: u64) -> Result<u64> {
        let mut sum = 0u64;
        for arena in registry::others_on(self) {
            if sum >= wanted {
                break;
            }
            sum = sum.saturating_add(arena.release_idle(api, wanted.saturating_sub(sum))?);
        }
        Ok(sum)
    }

    /// Returns the memory of own allocations that are finished with: it serves no other request.
    fn release_own(&self, api: &Api) -> Result<u64> {
        self.release_where(api, u64::MAX, &|chunk| chunk.own)
    }

    /// Gives back idle memory until at most `keep` bytes stay cached.
    pub fn trim(&self, api: &Api, keep: u64) -> Result<u64> {
        if self.is_lost() {
            return Ok(0);
        }
        let deadline = Instant::now() + Duration::from_millis(u64::from(self.lock()?.options.settle_ms));
        if !self.lock()?.is_captured() {
            self.wait(api, deadline, |_| Ok(false))?;
        }
        let excess = {
            let mut state = self.lock()?;
            state.flush();
            state.heap.bytes().cached.saturating_sub(keep)
        };
        if excess == 0 { Ok(0) } else { self.release_idle(api, excess) }
    }

    /// The context is gone: its memory is returned, and only the addresses stay known.
    pub(super) fn lose(&self, api: &Api) {
        if self.lost.swap(true, AcqRel) {
            return;
        }
        registry::forget(self);
        log_line!(Info, "device {}: the context is gone, and the pool's memory in it", self.device());
        let Ok(mut state) = self.lock() else { return };
        let mut pieces = Vec::new();
        for chunk in state.heap.chunks().filter(|c| self.mapper.range.is_some_and(|r| c.off < r.len)) {
            if pieces.try_reserve(1).is_err() {
                break;
            }
            let from = state.regions.address(chunk.off);
            pieces.push(Piece::mapped(chunk.len, chunk.token, from));
        }
        if let Ok(empty) = Heap::new() {
            state.heap = empty;
        }
        drop(state);
        // Memory of handles outlives contexts, so it is ours to return; `cuMemAlloc` memory went with the context.
        let _ = relaxed(api, || self.mapper.discard(api, &mut pieces, &mut Calls::default()));
    }

    fn out_of_memory(&self, api: &Api, want: &Want, capturing: bool) -> Status {
        let device = relaxed(api, || self.mapper.device_memory(api)).unwrap_or((0, self.total));
        let Ok(mut state) = self.lock() else { return Status::POOL_ERROR_INTERNAL };
        state.counters.oom = state.counters.oom.wrapping_add(1);
        let bytes = state.heap.bytes();
        let stream = state.stream(want.key).unwrap_or(SHARED);
        let limit = state.options.limit(self.total);
        let foreign = device.1.saturating_sub(device.0).saturating_sub(bytes.mapped);
        let largest = state.heap.largest_free(stream);
        let why = if capturing {
            "; the stream is captured, so idle memory could not be moved or waited for"
        } else if bytes.mapped.saturating_add(want.size) > limit {
            "; the pool's limit is in the way"
        } else {
            ""
        };
        fail(
            Status::POOL_ERROR_OUT_OF_MEMORY,
            format_args!(
                "out of memory: {} bytes were requested on device {}; the pool holds {} (live {}, cached {}, pending {}, \
                 overhead {}; largest free extent {}; limit {}{}); the device has {} free of {}, others hold {}{why}",
                want.size,
                self.device(),
                bytes.mapped,
                bytes.live,
                bytes.cached,
                bytes.pending,
                bytes.overhead,
                largest,
                Limit(limit),
                MostOwned(state.owners.largest()),
                device.0,
                device.1,
                foreign,
            ),
        )
    }
}

struct Limit(u64);

impl core::fmt::Display for Limit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.0 == u64::MAX { f.write_str("none") } else { write!(f, "{}", self.0) }
    }
}

struct MostOwned(Option<Owner>);

impl core::fmt::Display for MostOwned {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Some(owner) = self.0 else { return Ok(()) };
        let tag = owner.tag.split(|byte| *byte == 0).next().unwrap_or_default();
        write!(f, "; most is {}'s: {}", tag.escape_ascii(), owner.live_bytes)
    }
}

/// A growth that has been taken out of the lists and waits for the driver.
struct Step {
    plan: Growth,
    busy: NodeId,
    /// Bytes to be created.
    fresh: u64,
    /// First the chunks that are moved, then those to be created.
    pieces: Vec<Piece>,
    moved: Vec<(u32, NodeId)>,
}

impl State {
    fn flush(&mut self) {
        for stream in 0..self.heap.streams() {
            self.heap.flush(stream);
        }
        self.settle();
    }

    /// Books what the driver would not take back. Room for it was made before.
    fn keep_debris(&mut self, debris: Debris, busy: Option<NodeId>) {
        if debris.pieces.is_empty() {
            return;
        }
        self.heap.add_debris(debris.bytes());
        if self.debris.len() < self.debris.capacity() {
            self.debris.push((debris, busy));
        } else {
            log_line!(Error, "{} bytes stay with the driver for good", debris.bytes());
        }
    }

    /// The same for a chunk that stays mapped where it was, in an extent that stays busy.
    fn keep_stuck(&mut self, piece: Piece, busy: NodeId) {
        let mut pieces = Vec::new();
        if pieces.try_reserve_exact(1).is_err() {
            self.heap.add_debris(piece.len);
            return;
        }
        pieces.push(piece);
        self.keep_debris(Debris { address: piece.from, mapped: piece.len, pieces }, Some(busy));
    }

    fn search(&mut self, want: &Want) -> Result<Option<u64>> {
        if want.own_allocation {
            return Ok(None);
        }
        let stream = self.stream(want.key).map_err(host_oom)?;
        self.heap.flush(stream);
        if let Some(address) = self.try_allocate(want)? {
            return Ok(Some(address));
        }
        let extent = Heap::extent_for(want.size, want.align).unwrap_or(u64::MAX);
        if self.heap.stitch(stream, extent, want.align) { self.try_allocate(want) } else { Ok(None) }
    }

    /// Whether so many idle bytes are more than the option `max_idle` leaves alone.
    fn is_over_bound(&self, idle: u64) -> bool {
        let percent = u128::from(self.options.max_idle_percent);
        u128::from(idle) * 100 > u128::from(self.heap.bytes().live) * percent
    }

    fn is_over_limit(&self, more: u64, total: u64) -> bool {
        let held = self.heap.bytes().mapped.saturating_add(self.growing);
        held.saturating_add(more) > self.options.limit(total)
    }

    /// Decides what to map where, and takes it out of the lists. `None` if there is no address space or the limit is in the way.
    fn plan_step(&mut self, want: &Want, idle: Idle, total: u64) -> Result<Option<Step>> {
        if idle == Idle::Remap {
            self.flush();
        }
        let stream = self.stream(want.key).map_err(host_oom)?;
        let Some(extent) = Heap::extent_for(want.size, want.align) else { return Ok(None) };
        let Some(plan) = self.heap.plan_growth(stream, extent, want.align) else { return Ok(None) };
        let mut chunks = Vec::new();
        let mut reused = 0;
        if idle == Idle::Remap {
            let fits = |chunk: &Chunk, sum: u64| !chunk.own && sum.saturating_add(chunk.len) <= plan.room;
            let done = |stream| self.done_of(stream);
            reused = self
                .heap
                .collect_idle(plan.need, &done, plan.neighbours, &mut chunks, &fits)
                .map_err(host_oom)?;
        }
        let fresh = plan.need.saturating_sub(reused);
        if fresh > 0 && self.is_over_limit(fresh, total) {
            return Ok(None);
        }
        self.take_step(plan, &chunks, fresh).map(Some).map_err(host_oom)
    }

    fn take_step(
        &mut self,
        plan: Growth,
        chunks: &[u32],
        fresh: u64,
    ) -> core::result::Result<Step, NoHostMemory> {
        self.debris.try_reserve(ROOM_FOR_DEBRIS).map_err(|_| NoHostMemory)?;
        let mut pieces = Vec::new();
        let mut moved = Vec::new();
        // A power of two each, largest first: at most one more for every bit of the rest.
        let most = chunks.len().saturating_add(2 * PIECES_PER_GROWTH as usize + u64::BITS as usize);
        pieces.try_reserve_exact(most).map_err(|_| NoHostMemory)?;
        moved.try_reserve_exact(chunks.len()).map_err(|_| NoHostMemory)?;
        let mut len = fresh;
        for chunk in chunks {
            let Some(chunk) = self.heap.chunk(*chunk) else { continue };
            let from = self.regions.address(chunk.off);
            pieces.push(Piece::mapped(chunk.len, chunk.token, from));
            len = len.saturating_add(chunk.len);
        }
        let largest = (fresh / PIECES_PER_GROWTH).max(1).next_power_of_two().max(PAGE);
        let mut left = fresh;
        while left >= PAGE {
            let piece = (1u64 << left.ilog2()).min(largest);
            pieces.push(Piece::fresh(piece));
            left = left.saturating_sub(piece);
        }
        let busy = self.heap.begin_map(&plan, len, pieces.len())?;
        for chunk in chunks {
            match self.heap.begin_unmap(*chunk) {
                Ok(node) => moved.push((*chunk, node)),
                Err(NoHostMemory) => {
                    for (_, node) in moved {
                        self.heap.abort_unmap(node);
                    }
                    self.heap.abort_map(busy, &plan);
                    return Err(NoHostMemory);
                }
            }
        }
        self.growing = self.growing.saturating_add(fresh);
        Ok(Step { plan, busy, fresh, pieces, moved })
    }

    /// Books what `cuMemAlloc` gave; a request for an own allocation is served with it. After an error nothing is booked.
    fn book_region(&mut self, address: u64, len: u64, want: &Want) -> Result<Option<u64>> {
        if address % QUANTUM != 0 || (want.own_allocation && address % want.align != 0) {
            bail!(
                POOL_ERROR_NOT_SUPPORTED,
                "cuMemAlloc of {len} bytes gave {address:#x}, which is not aligned to {}",
                want.align
            );
        }
        let info = self.block_info(want)?;
        // Again, because others may have taken the room that was made before the driver was called.
        self.regions.reserve(len).map_err(host_oom)?;
        let off = self.regions.add(address, len);
        let own = want.own_allocation.then_some(info);
        if self.heap.add_chunk_region(off, len, address, own).is_err() {
            self.regions.remove(off);
            return Err(host_oom(NoHostMemory));
        }
        if want.own_allocation {
            return Ok(Some(self.handed_out(off, want, info.owner)));
        }
        Ok(None)
    }
}

/// What a request takes from the driver where chunks are `cuMemAlloc` memory. Whole pages, because the driver aligns those to
/// pages, and smaller ones share a page with strangers.
fn malloc_bytes(want: &Want) -> Option<u64> {
    if want.own_allocation {
        return round_up(want.size, PAGE);
    }
    let slack = if want.align > PAGE { want.align } else { 0 };
    round_up(Heap::extent_for(want.size, want.align)?.checked_add(slack)?, PAGE)
}
