//! Release: giving idle memory back to the driver, and what becomes of an arena whose context is gone.

use super::arena::{Arena, host_oom};
use super::grow::ROOM_FOR_UNRECLAIMABLE;
use super::registry;
use super::spill::Spilled;
use super::state::State;
use crate::driver::{Api, relaxed};
use crate::error::{NoHostMemory, Result, Status, fail};
use crate::heap::{Chunk, Heap};
use crate::logging::log_line;
use crate::sync::clock::Moment;
use crate::vmem::{Calls, ChunkOp, UndoFailure, Unreclaimable};
use core::sync::atomic::Ordering::*;

impl Arena {
    /// Tries again to be rid of what the driver would not take back.
    pub(super) fn clear_unreclaimable(&self, api: &Api) -> Result<()> {
        loop {
            let Some((mut debris, busy)) = self.lock()?.unreclaimable.pop() else { return Ok(()) };
            let (before, host) = (debris.bytes(), debris.host_bytes());
            let mut calls = Calls::default();
            let clear = self.mapper.clear(api, &mut debris, &mut calls);
            let mut state = self.lock()?;
            state.counters.calls.add(calls);
            if self.is_lost() {
                return Err(self.lost_error());
            }
            state.heap.remove_unreclaimable(before);
            state.spilled.bytes = state.spilled.bytes.saturating_sub(host);
            if !clear {
                state.keep_unreclaimable(debris, busy);
                return Ok(());
            }
            for part in busy {
                state.heap.finish_unmap(part.node);
            }
        }
    }

    /// Gives idle chunks back to the driver, least recently used first, until `wanted` bytes are. Returns the bytes.
    pub(super) fn release_idle(&self, api: &Api, wanted: u64) -> Result<u64> {
        self.release_spilled(api)?;
        self.release_where(api, wanted, &|state, chunk| !state.spilled.has(chunk.off))
    }

    pub(super) fn release_where(
        &self,
        api: &Api,
        wanted: u64,
        which: &dyn Fn(&State, &Chunk) -> bool,
    ) -> Result<u64> {
        self.clear_unreclaimable(api)?;
        let mut state = self.lock()?;
        state.unreclaimable.try_reserve(ROOM_FOR_UNRECLAIMABLE).map_err(|_| host_oom(NoHostMemory))?;
        state.flush();
        let mut out = Vec::new();
        let take = |chunk: &Chunk, _| which(&state, chunk);
        state.heap.collect_idle(wanted, &|s| state.done_of(s), &[], &mut out, &take).map_err(host_oom)?;
        let (mut pieces, mut nodes) = (Vec::new(), Vec::new());
        pieces.try_reserve_exact(out.len()).map_err(|_| host_oom(NoHostMemory))?;
        nodes.try_reserve_exact(out.len()).map_err(|_| host_oom(NoHostMemory))?;
        for chunk in out {
            let Some(record) = state.heap.chunk(chunk) else { continue };
            // What could be taken is released; the rest must wait for host memory.
            let Ok(node) = state.heap.begin_unmap(chunk) else { break };
            let from = state.addresses.address(record.off);
            let host = state.spilled.has(record.off);
            pieces.push(ChunkOp { host, ..ChunkOp::mapped(record.len, record.token, from) });
            nodes.push((chunk, node));
            state.addresses.hide(record.off, true);
        }
        drop(state);

        let mut calls = Calls::default();
        let (gone, result) = relaxed(api, || self.discard(api, &mut pieces, &mut calls));
        let mut state = self.lock()?;
        state.counters.calls.add(calls);
        if self.is_lost() {
            // The records are gone with the context; what is still mapped is this thread's to return.
            drop(state);
            let rest = pieces.get_mut(gone..).unwrap_or_default();
            self.discard_lost(api, rest);
            return Err(self.lost_error());
        }
        let mut released = 0u64;
        for (at, ((chunk, node), piece)) in nodes.iter().zip(&pieces).enumerate() {
            let off = state.heap.chunk(*chunk).map_or(u64::MAX, |c| c.off);
            if at < gone {
                state.heap.commit_unmap(*node, *chunk);
                if !self.has_in_range(piece.from) {
                    state.addresses.remove(off);
                    state.spilled.remove(off, piece.len);
                }
                if piece.left == UndoFailure::Nothing {
                    released = released.saturating_add(piece.len);
                }
            } else {
                state.addresses.hide(off, false);
                state.heap.abort_unmap(*node);
            }
        }
        pieces.retain(|p| p.left == UndoFailure::Memory);
        pieces.iter_mut().for_each(|p| p.from = 0);
        state.keep_unreclaimable(Unreclaimable { pieces }, Vec::new());
        if let Err(status) = result {
            log_line!(Warn, "device {}: the driver took back {released} bytes only", self.device());
            if released == 0 && status != Status::POOL_ERROR_OUT_OF_MEMORY {
                return Err(status);
            }
        }
        Ok(released)
    }

    /// Returns the pieces to the driver; the first `n` are gone when it stops.
    fn discard(&self, api: &Api, pieces: &mut [ChunkOp], calls: &mut Calls) -> (usize, Result<()>) {
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
                let result = if piece.host {
                    self.mapper.discard_host(api, piece, calls)
                } else {
                    self.mapper.free(api, piece.handle, calls)
                };
                if result.is_err() {
                    return (gone, result);
                }
                gone += 1;
            }
        }
        (gone, Ok(()))
    }

    /// Returns the memory of own allocations that are finished with: it serves no other request.
    pub(super) fn release_own(&self, api: &Api) -> Result<u64> {
        self.release_where(api, u64::MAX, &|_, chunk| chunk.own)
    }

    /// Gives back idle memory until at most `keep` bytes stay cached, and waits until `deadline` for more of it. Returns the bytes given back,
    /// and those still cached.
    pub fn trim(&self, api: &Api, keep: u64, deadline: Moment) -> Result<(u64, u64)> {
        if !self.is_captured() {
            let freed = self.lock()?.heap.seq();
            self.wait(api, deadline, freed, |_| Ok(false))?;
        }
        self.clear_unreclaimable(api)?;
        let excess = {
            self.release_spilled(api)?;
            let mut state = self.lock()?;
            state.flush();
            state.heap.bytes().cached.saturating_sub(keep)
        };
        let released = if excess == 0 { 0 } else { self.release_idle(api, excess)? };
        Ok((released, self.lock()?.heap.bytes().cached))
    }

    /// The context is gone: its memory is returned, and only the addresses stay known. Chunks that another thread is just moving are
    /// that thread's to return: it finds the arena lost when it comes back for the lock.
    pub(super) fn lose(&self, api: &Api) {
        let Ok(mut state) = self.lock() else { return };
        if self.lost.swap(true, AcqRel) {
            return;
        }
        registry::forget(self);
        log_line!(Info, "device {}: the context is gone, and the pool's memory in it", self.device());
        let mut pieces = Vec::new();
        let in_range = |off: u64| self.mapper.range.is_some_and(|r| off < r.len);
        let ours = |c: &&Chunk| (in_range(c.off) || state.spilled.has(c.off)) && !c.moving;
        for chunk in state.heap.chunks().filter(ours) {
            if pieces.try_reserve(1).is_err() {
                break;
            }
            let (from, host) = (state.addresses.address(chunk.off), state.spilled.has(chunk.off));
            pieces.push(ChunkOp { host, ..ChunkOp::mapped(chunk.len, chunk.token, from) });
        }
        state.spilled = Spilled::default();
        let debris = core::mem::take(&mut state.unreclaimable);
        if let Ok(empty) = Heap::new() {
            state.heap = empty;
        }
        drop(state);
        // Memory of handles outlives contexts, so it is ours to return; `cuMemAlloc` memory went with the context.
        self.discard_lost(api, &mut pieces);
        for (mut debris, _) in debris {
            relaxed(api, || self.mapper.clear(api, &mut debris, &mut Calls::default()));
        }
    }

    /// Returns pieces of a lost arena, each as far as the driver takes it.
    pub(super) fn discard_lost(&self, api: &Api, pieces: &mut [ChunkOp]) {
        relaxed(api, || {
            for piece in pieces.iter_mut().filter(|p| p.host || self.has_in_range(p.from)) {
                let mut discard = || {
                    if piece.host {
                        return self.mapper.discard_host(api, piece, &mut Calls::default()).is_ok();
                    }
                    let one = core::slice::from_mut(piece);
                    self.mapper.discard(api, one, &mut Calls::default()).0 > 0
                };
                // More than once, because there is no later occasion.
                let gone = (0..3).any(|_| discard());
                if !gone {
                    log_line!(
                        Error,
                        "device {}: a chunk of a lost context stays with the driver",
                        self.device()
                    );
                }
            }
        });
    }

    #[cold]
    pub(super) fn lost_error(&self) -> Status {
        let device = self.device();
        fail(
            Status::POOL_ERROR_CONTEXT_LOST,
            format_args!("the context on device {device} was destroyed or reset"),
        )
    }
}
