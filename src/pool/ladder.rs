//! The reclaim ladder: what is tried, in which order, before a request is answered with out of memory.
//!
//! After every rung the arena's own lists are searched again. The lock is released across driver calls; what a thread has won there
//! is booked and handed out under one hold of it, so that no other thread can take it in between.

use super::arena::{Arena, State, Want, host_oom};
use super::callbacks;
use super::grow::{Attempt, Idle};
use super::registry;
use super::report::Climb;
use super::settle::{Polled, Waited};
use crate::driver::Api;
use crate::error::{Result, Status};
use crate::heap::Heap;
use crate::logging::log_line;
use core::cell::Cell;
use std::time::Instant;

/// How often a request waits for freed memory that other threads then get. A limit, because others may go on for ever.
const SETTLE_ROUNDS: usize = 64;

/// Somebody else on the device needs `wanted` bytes: gives back to the driver at least so much of what is idle in any pool, and
/// waits for what is freed but not finished with, and asks the callbacks, if there is less. Returns the bytes given back.
pub fn reclaim(api: &Api, device: i32, wanted: u64) -> Result<u64> {
    let arenas = || registry::all().filter(move |a| a.device() == device && !a.is_lost());
    let mut deadline = Instant::now();
    for arena in arenas() {
        deadline = arena.lock()?.options.deadline().max(deadline);
    }
    let released = Cell::new(0u64);
    let missing = || wanted.saturating_sub(released.get());
    let release = |wait: bool| -> Result<bool> {
        for arena in arenas() {
            let least = missing();
            if least == 0 {
                break;
            }
            if wait && !arena.lock()?.is_captured() {
                arena.wait(api, deadline, |state| Ok(state.has_idle(least)))?;
            } else {
                arena.poll(api);
            }
            released.set(released.get().saturating_add(arena.release_idle(api, least)?));
        }
        Ok(missing() == 0)
    };
    if !release(false)? && !release(true)? && !callbacks::is_inside() {
        callbacks::ask(device, missing, |claimed| {
            // What a callback freed through a pool is idle there now; what it gave to the driver is out of our books.
            Ok((release(true)? || claimed >= missing()).then_some(()))
        })?;
    }
    Ok(released.get())
}

impl Arena {
    /// Climbs the ladder for a request that the arena's lists could not serve.
    #[cold]
    pub(super) fn allocate_slowly(&self, api: &Api, want: &Want) -> Result<u64> {
        // What is about to be taken or moved must be of the context's present life.
        self.check_alive(api)?;
        let answer = self.climb(api, want);
        match answer {
            // What the driver says of a context that is gone depends on the call; the arena finds out by asking.
            // Out of memory may be for blocks that went with it.
            Err(
                Status::POOL_ERROR_DRIVER
                | Status::POOL_ERROR_CONTEXT_LOST
                | Status::POOL_ERROR_OUT_OF_MEMORY,
            ) => {
                // The sentence of the answer must survive the question.
                if self.is_lost() || !self.mapper.context.is_alive(api) {
                    self.check_alive(api)?;
                }
                answer
            }
            answer => answer,
        }
    }

    fn climb(&self, api: &Api, want: &Want) -> Result<u64> {
        let mut climb = Climb::new(self);
        let ordered = !want.key.is_device_order();
        let capturing = ordered && self.look_for_capture(api, want.key)?;
        // Rung 1: the stream's own memory, then what other streams are finished with.
        let found = climb.first_rung(1, || self.search_all(api, want, capturing))?;
        if let Some(address) = found {
            return Ok(address);
        }
        // Rungs 2 and 3: grow; or, with much idle, remap before growing.
        let idle = if !capturing && self.is_idle_beyond_bound()? { Idle::Remap } else { Idle::Keep };
        if let Attempt::Served(address) = climb.first_rung(2, || self.grow(api, want, idle))? {
            return Ok(address);
        }
        if !capturing && let Some(address) = self.work_through(api, want, &mut climb)? {
            self.note_recovery(want)?;
            return Ok(address);
        }
        Err(climb.out_of_memory(api, want, capturing))
    }

    fn search_all(&self, api: &Api, want: &Want, capturing: bool) -> Result<Option<u64>> {
        if capturing {
            return self.search(want);
        }
        if !want.key.is_device_order() {
            self.mark_stream(api, want.key);
        }
        self.poll(api);
        if want.own_allocation {
            self.release_own(api)?;
        }
        if let Some(address) = self.search(want)? {
            return Ok(Some(address));
        }
        if self.worth_marking(want)?
            && self.ask_about_context(api)?
            && let Some(address) = self.search(want)?
        {
            return Ok(Some(address));
        }
        self.clear_debris(api)?;
        Ok(None)
    }

    /// Rungs 3 to 7, for a request that was refused more memory.
    fn work_through(&self, api: &Api, want: &Want, climb: &mut Climb) -> Result<Option<u64>> {
        // Rung 3: remap what is idle here. A slab may do without a home now.
        let found = climb.rung(3, || match self.search_anywhere(want)? {
            Some(address) => Ok(Attempt::Served(address)),
            None => self.grow_with_idle(api, want, want.size),
        })?;
        if let Attempt::Served(address) = found {
            return Ok(Some(address));
        }
        // Rung 4: what is idle elsewhere on the device.
        let found = climb.rung(4, || match self.release_elsewhere(api, want.size)? {
            0 => Ok(Attempt::Refused),
            _ => self.grow_with_idle(api, want, want.size),
        })?;
        if let Attempt::Served(address) = found {
            return Ok(Some(address));
        }
        // Rung 5: what is freed but not finished with.
        let deadline = self.lock()?.options.deadline();
        if let Some(address) = climb.rung(5, || self.settle_for(api, want, deadline))? {
            return Ok(Some(address));
        }
        // Rung 6: other runtimes' caches.
        if !callbacks::is_inside()
            && callbacks::any()
            && let Some(address) = climb.rung(6, || self.ask_callbacks(api, want, deadline))?
        {
            return Ok(Some(address));
        }
        // Rung 7: everything idle on the device.
        climb.rung(7, || {
            self.release_elsewhere(api, u64::MAX)?;
            match self.grow_with_idle(api, want, u64::MAX)? {
                Attempt::Served(address) => Ok(Some(address)),
                Attempt::Refused => self.search(want),
            }
        })
    }

    fn search_anywhere(&self, want: &Want) -> Result<Option<u64>> {
        let mut state = self.lock()?;
        state.heap.scatter = true;
        let found = state.search(want);
        state.heap.scatter = false;
        found
    }

    /// Waits for what is freed but not finished with. Again while other threads win what this one waited for.
    fn settle_for(&self, api: &Api, want: &Want, deadline: Instant) -> Result<Option<u64>> {
        for _ in 0..SETTLE_ROUNDS {
            let (waited, served) = self.wait_and_search(api, want, deadline)?;
            if served.is_some() {
                return Ok(served);
            }
            for arena in registry::others_on(self) {
                arena.wait(api, deadline, |_| Ok(false))?;
            }
            self.release_elsewhere(api, want.size)?;
            if let Attempt::Served(address) = self.grow_with_idle(api, want, want.size)? {
                return Ok(Some(address));
            }
            if waited == Waited::GaveUp || !self.lock()?.is_unsettled() {
                break;
            }
        }
        Ok(None)
    }

    fn wait_and_search(&self, api: &Api, want: &Want, deadline: Instant) -> Result<(Waited, Option<u64>)> {
        let mut served = None;
        let waited = self.wait(api, deadline, |state| {
            served = state.search(want)?;
            Ok(served.is_some())
        })?;
        Ok((waited, served))
    }

    /// Whatever callbacks claim, what counts is whether the request can be served.
    fn ask_callbacks(&self, api: &Api, want: &Want, deadline: Instant) -> Result<Option<u64>> {
        callbacks::ask(
            self.device(),
            || want.size,
            |_| {
                // Their frees may have come to this pool, or have gone to the driver.
                if let (_, Some(address)) = self.wait_and_search(api, want, deadline)? {
                    return Ok(Some(address));
                }
                match self.grow_with_idle(api, want, want.size)? {
                    Attempt::Served(address) => Ok(Some(address)),
                    Attempt::Refused => Ok(None),
                }
            },
        )
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

    /// Finds out what of all that was freed is finished with now; on drivers without events of the context, by waiting for it.
    fn ask_about_context(&self, api: &Api) -> Result<bool> {
        if !self.lock()?.needs_context() {
            return Ok(false);
        }
        if api.ctx_record_event.is_none() {
            return self.synchronize(api);
        }
        Ok(self.mark_context(api) && self.poll(api) == Polled::Progress)
    }

    fn is_idle_beyond_bound(&self) -> Result<bool> {
        let state = self.lock()?;
        Ok(state.is_over_bound(state.heap.bytes().cached))
    }

    /// Grows with idle memory: moved where chunks can be moved. Where that does not do, because chunks are too large for the
    /// holes or cannot be moved, `wanted` bytes of them are returned first.
    fn grow_with_idle(&self, api: &Api, want: &Want, wanted: u64) -> Result<Attempt> {
        let moves = self.mapper.range.is_some() && !want.own_allocation;
        if moves
            && wanted != u64::MAX
            && let Attempt::Served(address) = self.grow(api, want, Idle::Remap)?
        {
            return Ok(Attempt::Served(address));
        }
        self.release_idle(api, wanted)?;
        if let Some(address) = self.search(want)? {
            return Ok(Attempt::Served(address));
        }
        self.grow(api, want, Idle::Remap)
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
}

impl State {
    pub(super) fn flush(&mut self) {
        for stream in 0..self.heap.streams() {
            self.heap.flush(stream);
        }
        self.settle();
    }

    /// Whether chunks of so many bytes could be given back. Without host memory to find out, no.
    fn has_idle(&mut self, bytes: u64) -> bool {
        self.flush();
        let mut chunks = Vec::new();
        let idle = self.heap.collect_idle(bytes, &|s| self.done_of(s), &[], &mut chunks, &|_, _| true);
        idle.is_ok_and(|idle| idle >= bytes)
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
        let Some((len, align)) = Heap::extent_for(want.size, want.align) else { return Ok(None) };
        if self.heap.stitch(stream, len, align) { self.try_allocate(want) } else { Ok(None) }
    }

    /// Whether so many idle bytes are more than the option `max_idle` leaves alone.
    fn is_over_bound(&self, idle: u64) -> bool {
        let percent = u128::from(self.options.max_idle_percent);
        u128::from(idle) * 100 > u128::from(self.heap.bytes().live) * percent
    }

    /// Whether the pool would hold too much on the device with `more` bytes, of which it holds `elsewhere` in other contexts.
    pub(super) fn is_over_limit(&self, more: u64, elsewhere: u64, total: u64) -> bool {
        let held = self.heap.bytes().mapped.saturating_add(self.growing).saturating_add(elsewhere);
        held.saturating_add(more) > self.options.limit(total)
    }
}
