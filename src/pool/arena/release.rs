//! Release: giving idle memory back to the driver, and what becomes of an arena whose context is gone.

use super::grow::ROOM_FOR_UNRECLAIMABLE;
use super::spilled::Spilled;
use super::state::State;
use super::{Arena, IsCaptured};
use crate::driver::{Api, relaxed};
use crate::error::{Result, Status};
use crate::heap::{Chunk, Heap, NodeId};
use crate::logging::{Size, log_line};
use crate::sync::clock::Moment;
use crate::vmem::{Calls, ChunkOp, UndoFailure, Unreclaimable};
use core::sync::atomic::Ordering::*;

/// How often a chunk of a lost context is offered to the driver: there is no later occasion.
const LAST_TRIES: usize = 3;

/// Which chunks a release is about.
type Which<'a> = &'a dyn Fn(&State, &Chunk) -> bool;

/// Idle chunks that have been taken out of the lists and wait for the driver.
#[derive(Default)]
struct Taken {
    ops: Vec<ChunkOp>,
    /// The chunks, with their busy extents, in the order of the operations.
    chunks: Vec<(u32, NodeId)>,
}

impl Arena {
    /// Tries again to be rid of what the driver would not take back.
    pub fn clear_unreclaimable(&self, api: &Api) -> Result<()> {
        loop {
            let Some((mut kept, busy)) = self.lock()?.unreclaimable.pop() else { return Ok(()) };
            let (before, host) = (kept.bytes(), kept.host_bytes());
            let mut calls = Calls::default();
            let clear = self.mapper.clear(api, &mut kept, &mut calls);
            let mut state = self.lock()?;
            state.counters.calls.add(calls);
            if self.is_lost() {
                return Err(self.lost_error());
            }
            state.heap.remove_unreclaimable(before);
            state.spilled.bytes -= host;
            if !clear {
                state.keep_unreclaimable(kept, busy);
                return Ok(());
            }
            for part in busy {
                state.heap.finish_unmap(part.node);
            }
        }
    }

    /// Gives idle chunks back to the driver, least recently used first, until `wanted` bytes are. Returns the
    /// bytes.
    pub fn release_idle(&self, api: &Api, wanted: u64) -> Result<u64> {
        self.release_spilled(api)?;
        self.release_where(api, wanted, &|state, chunk| !state.spilled.has(chunk.off))
    }

    /// Returns the memory of own allocations that is complete: it serves no other request.
    pub fn release_own(&self, api: &Api) -> Result<u64> {
        self.release_where(api, u64::MAX, &|_, chunk| chunk.own)
    }

    pub(super) fn release_where(&self, api: &Api, wanted: u64, which: Which) -> Result<u64> {
        self.clear_unreclaimable(api)?;
        let Taken { mut ops, chunks } = self.lock()?.take_idle(wanted, which)?;
        let mut calls = Calls::default();
        let (gone, result) = relaxed(api, || self.discard(api, &mut ops, &mut calls));
        let mut state = self.lock()?;
        state.counters.calls.add(calls);
        if self.is_lost() {
            // The records are gone with the context; what is still mapped is this thread's to return.
            drop(state);
            let rest = ops.get_mut(gone..).unwrap_or_default();
            self.discard_lost(api, rest);
            return Err(self.lost_error());
        }
        let released = state.book_release(ops, &chunks, gone, &|address| self.has_in_range(address));
        drop(state);
        if let Err(status) = result {
            log_line!(Warn, "device {}: the driver took back no more than {}", self.device(), Size(released));
            if released == 0 && status != Status::POOL_ERROR_OUT_OF_MEMORY {
                return Err(status);
            }
        }
        Ok(released)
    }

    /// Returns the chunks to the driver; the first `n` are gone when it stops.
    fn discard(&self, api: &Api, ops: &mut [ChunkOp], calls: &mut Calls) -> (usize, Result<()>) {
        let mut gone = 0;
        for run in ops.chunk_by_mut(|a, b| self.has_in_range(a.from) == self.has_in_range(b.from)) {
            if run.first().is_some_and(|op| self.has_in_range(op.from)) {
                let (n, result) = self.mapper.discard(api, run, calls);
                gone += n;
                if result.is_err() {
                    return (gone, result);
                }
                continue;
            }
            for op in run {
                let result = if op.host {
                    self.mapper.discard_host(api, op, calls)
                } else {
                    self.mapper.free(api, op.handle, calls)
                };
                if result.is_err() {
                    return (gone, result);
                }
                gone += 1;
            }
        }
        (gone, Ok(()))
    }

    /// Gives back idle memory until at most `keep` bytes stay cached, and waits until `deadline` for more of
    /// it. Returns the bytes given back, and those still cached.
    pub fn trim(
        &self,
        api: &Api,
        is_captured: IsCaptured,
        keep: u64,
        deadline: Moment,
    ) -> Result<(u64, u64)> {
        if !is_captured() {
            let freed = self.lock()?.heap.seq();
            self.wait(api, is_captured, deadline, freed, |_| Ok(false))?;
        }
        self.clear_unreclaimable(api)?;
        self.release_spilled(api)?;
        let excess = {
            let mut state = self.lock()?;
            state.flush();
            state.heap.bytes().cached.saturating_sub(keep)
        };
        let released = if excess == 0 { 0 } else { self.release_idle(api, excess)? };
        Ok((released, self.lock()?.heap.bytes().cached))
    }

    /// The context is gone: its memory is returned, and only the addresses stay known. False if that was so
    /// before. Chunks that another thread is just moving are that thread's to return: it finds the arena lost
    /// when it comes back for the lock.
    pub fn lose(&self, api: &Api) -> bool {
        let Ok(mut state) = self.lock() else { return false };
        if self.lost.swap(true, AcqRel) {
            return false;
        }
        let mut ops = Vec::new();
        let in_range = |off: u64| self.mapper.range.is_some_and(|r| off < r.len);
        let ours = |c: &&Chunk| (in_range(c.off) || state.spilled.has(c.off)) && !c.moving;
        for chunk in state.heap.chunks().filter(ours) {
            if ops.try_reserve(1).is_err() {
                break;
            }
            let (from, host) = (state.addresses.address(chunk.off), state.spilled.has(chunk.off));
            ops.push(ChunkOp { host, ..ChunkOp::mapped(chunk.len, chunk.token, from) });
        }
        state.spilled = Spilled::default();
        let unreclaimable = core::mem::take(&mut state.unreclaimable);
        if let Ok(empty) = Heap::new() {
            state.heap = empty;
        }
        drop(state);
        log_line!(Info, "device {}: the context is gone, and the pool's memory in it", self.device());
        // Memory of handles outlives contexts, so it is ours to return; `cuMemAlloc` memory went with the
        // context.
        self.discard_lost(api, &mut ops);
        for (mut kept, _) in unreclaimable {
            relaxed(api, || self.mapper.clear(api, &mut kept, &mut Calls::default()));
        }
        true
    }

    /// Returns chunks of a lost arena, each as far as the driver takes it.
    pub(super) fn discard_lost(&self, api: &Api, ops: &mut [ChunkOp]) {
        let discard = |op: &mut ChunkOp| {
            if op.host {
                return self.mapper.discard_host(api, op, &mut Calls::default()).is_ok();
            }
            let one = core::slice::from_mut(op);
            self.mapper.discard(api, one, &mut Calls::default()).0 > 0
        };
        relaxed(api, || {
            for op in ops.iter_mut().filter(|op| op.host || self.has_in_range(op.from)) {
                if !(0..LAST_TRIES).any(|_| discard(op)) {
                    log_line!(
                        Error,
                        "device {}: a chunk of {} of a lost context stays with the driver",
                        self.device(),
                        Size(op.len)
                    );
                }
            }
        });
    }
}

impl State {
    /// Takes idle chunks out of the lists, until they are `wanted` bytes. After an error nothing is taken
    /// out.
    fn take_idle(&mut self, wanted: u64, which: Which) -> Result<Taken> {
        self.unreclaimable.try_reserve(ROOM_FOR_UNRECLAIMABLE)?;
        self.flush();
        let mut idle = Vec::new();
        let take = |chunk: &Chunk, _| which(self, chunk);
        self.heap.collect_idle(wanted, &|s| self.done_of(s), &[], &mut idle, &take)?;
        let mut taken = Taken::default();
        taken.ops.try_reserve_exact(idle.len())?;
        taken.chunks.try_reserve_exact(idle.len())?;
        for chunk in idle {
            let Some(record) = self.heap.chunk(chunk) else { continue };
            // What could be taken is released; the rest must wait for host memory.
            let Ok(node) = self.heap.begin_unmap(chunk) else { break };
            let from = self.addresses.address(record.off);
            let host = self.spilled.has(record.off);
            taken.ops.push(ChunkOp { host, ..ChunkOp::mapped(record.len, record.token, from) });
            taken.chunks.push((chunk, node));
            self.addresses.hide(record.off, true);
        }
        Ok(taken)
    }

    /// Books that the first `gone` of the chunks are gone and the others still here. Returns the bytes that
    /// the driver has back.
    fn book_release(
        &mut self,
        mut ops: Vec<ChunkOp>,
        chunks: &[(u32, NodeId)],
        gone: usize,
        has_in_range: &dyn Fn(u64) -> bool,
    ) -> u64 {
        let mut released = 0;
        for (at, ((chunk, node), op)) in chunks.iter().zip(&ops).enumerate() {
            let off = self.heap.chunk(*chunk).map_or(u64::MAX, |c| c.off);
            if at >= gone {
                self.addresses.hide(off, false);
                self.heap.abort_unmap(*node);
                continue;
            }
            self.heap.commit_unmap(*node, *chunk);
            if !has_in_range(op.from) {
                self.addresses.remove(off);
                self.spilled.remove(off, op.len);
            }
            if op.left == UndoFailure::Nothing {
                released += op.len;
            }
        }
        ops.retain(|op| op.left == UndoFailure::Memory);
        ops.iter_mut().for_each(|op| op.from = 0);
        self.keep_unreclaimable(Unreclaimable { ops }, Vec::new());
        released
    }
}
