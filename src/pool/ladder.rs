//! The reclaim ladder: what is tried, in which order, before a request is answered with out of memory.
//!
//! After every rung the arena's own lists are searched again. The lock is released across driver calls; what a thread has won there
//! is booked and handed out under one hold of it, so that no other thread can take it in between.

use super::arena::{Arena, Want, host_oom};
use super::callbacks;
use super::grow::{Attempt, Idle, Why, whole_pages};
use super::options::Spill;
use super::registry::FreeEpochs;
use super::report::Climb;
use super::settle::{Polled, Waited};
use super::state::State;
use super::{pools, registry, waiters};
use crate::driver::{Api, lifecycle};
use crate::error::{Result, Status};
use crate::heap::{Chunk, Heap, PAGE};
use crate::logging::log_line;
use crate::sync::clock::{self, Moment};
use core::time::Duration;

/// How often a request waits for freed memory that other threads then get. A limit, because others may go on for ever.
const SETTLE_ROUNDS: usize = 64;
/// How long it waits for one arena before it looks at the next, at first and at most.
pub(super) const SHORTEST_SLICE: Duration = Duration::from_millis(1);
pub(super) const LONGEST_SLICE: Duration = Duration::from_millis(32);
/// How long a request that waits for frees lets the device work on before it asks again, at first and at most.
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);
/// After which time it looks without a word from anybody: other processes free memory too.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

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
        // Who may not wait here may not be kept from the reserve either.
        let want = &Want { urgent: capturing, ..*want };
        let mut may_wait = !capturing && !callbacks::is_inside() && self.lock()?.options.oom_wait_ms > 0;
        if may_wait && waiters::any() && waiters::must_queue(self.device(), want.pool, want.size) {
            may_wait = false;
            if let Some(address) = climb.rung(8, || self.wait_for_frees(api, want))? {
                return Ok(address);
            }
        }
        // Rung 1: the stream's own memory, then what other streams are finished with.
        let found = climb.first_rung(1, || self.search_all(api, want, capturing))?;
        if let Some(address) = found {
            return Ok(address);
        }
        // Rungs 2 and 3: grow; or, with much idle, remap before growing.
        let idle = if !capturing && self.is_idle_beyond_bound()? { Idle::Remap } else { Idle::Keep };
        let why = match climb.first_rung(2, || self.grow(api, want, idle))? {
            Attempt::Served(address) => return Ok(address),
            Attempt::Refused(why) => why,
        };
        let want = &Want { refused: true, ..*want };
        if capturing {
            return match self.search(want)? {
                Some(address) => Ok(address),
                None => Err(climb.out_of_memory(api, want, true)),
            };
        }
        if let Some(address) = self.work_through(api, want, why, &mut climb)? {
            self.note_recovery(want, &climb)?;
            return Ok(address);
        }
        // Rung 8: what other threads free.
        if may_wait && let Some(address) = climb.rung(8, || self.wait_for_frees(api, want))? {
            self.note_recovery(want, &climb)?;
            return Ok(address);
        }
        // Rung 9: host memory.
        if self.lock()?.options.spill == Spill::Host
            && !want.own_allocation
            && let Some(address) = climb.rung(9, || self.spill(api, want))?
        {
            self.note_recovery(want, &climb)?;
            return Ok(address);
        }
        Err(climb.out_of_memory(api, want, false))
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
        } else {
            self.look_after_spilled(api)?;
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
        self.clear_unreclaimable(api)?;
        Ok(None)
    }

    /// Rungs 3 to 7, for a request that was refused more memory.
    fn work_through(&self, api: &Api, want: &Want, why: Why, climb: &mut Climb) -> Result<Option<u64>> {
        let mut why = why;
        climb.refused |= why != Why::Reserve;
        // Rung 3: remap what is idle here.
        let found = climb.rung(3, || match self.search(want)? {
            Some(address) => Ok(Attempt::Served(address)),
            None => self.grow_with_idle(api, want, want.size),
        })?;
        match found {
            Attempt::Served(address) => return Ok(Some(address)),
            Attempt::Refused(reason) => why = reason,
        }
        // Rung 4: what is idle elsewhere on the device.
        match climb.rung(4, || self.grow_with_others(api, want, why))? {
            Attempt::Served(address) => return Ok(Some(address)),
            Attempt::Refused(reason) => why = reason,
        }
        // Idle memory did not do, so the reserve is taken.
        let want = &Want { urgent: true, ..*want };
        if why == Why::Reserve {
            match climb.rung(2, || self.grow(api, want, Idle::Remap))? {
                Attempt::Served(address) => return Ok(Some(address)),
                Attempt::Refused(_) => {}
            }
        }
        climb.refused = true;
        // Rung 5: what is freed but not finished with.
        let deadline = self.lock()?.options.deadline();
        match climb.rung(5, || self.settle_for(api, want, deadline))? {
            Attempt::Served(address) => return Ok(Some(address)),
            Attempt::Refused(reason) => why = reason,
        }
        // Rung 6: other runtimes' caches.
        if !callbacks::is_inside() && callbacks::any() {
            match climb.rung(6, || self.ask_callbacks(api, want, why, deadline))? {
                Attempt::Served(address) => return Ok(Some(address)),
                Attempt::Refused(reason) => why = reason,
            }
        }
        // Rung 7: everything idle on the device.
        climb.rung(7, || self.empty_everything(api, want, why))
    }

    fn empty_everything(&self, api: &Api, want: &Want, why: Why) -> Result<Option<u64>> {
        let mut why = why;
        // Once more where the pool's limit was in the way, and the device is now.
        for _ in 0..2 {
            self.release_elsewhere(api, u64::MAX, why);
            match self.grow_with_idle(api, want, u64::MAX)? {
                Attempt::Served(address) => return Ok(Some(address)),
                Attempt::Refused(reason) if reason == why => break,
                Attempt::Refused(reason) => why = reason,
            }
        }
        self.search(want)
    }

    /// Waits for what is freed but not finished with, here and in the arenas that help, until the request can be served. Again while other
    /// threads win what this one waited for.
    fn settle_for(&self, api: &Api, want: &Want, deadline: Moment) -> Result<Attempt> {
        // Something may have come after the search before this one.
        let mut seen = self.lock()?.progress().wrapping_sub(1);
        let (mut slice, mut rounds) = (SHORTEST_SLICE, 0);
        let mut freed = FreeEpochs::until_now(self.device());
        loop {
            // What is finished may do, once it is moved; but in the end all of it is waited for.
            let enough = if rounds < SETTLE_ROUNDS / 2 { want.size } else { u64::MAX };
            // Each arena gets a little time in turn: what one waits for long, another one may have at once.
            let until = deadline.min(clock::now().after(slice));
            slice = (slice * 2).min(LONGEST_SLICE);
            let (waited, served) =
                self.wait_and_search(api, want, until, freed.of(self), Some((enough, &mut seen)))?;
            if let Some(address) = served {
                return Ok(Attempt::Served(address));
            }
            let mut unsettled = waited == Waited::TimeIsUp;
            let why = match self.grow_with_idle(api, want, want.size)? {
                Attempt::Refused(why) => why,
                served => return Ok(served),
            };
            for arena in self.helpers(why) {
                // One whose context is gone, or that is in trouble itself, is no help, and no reason to fail.
                let waited = arena.wait_for_idle(api, until, freed.of(arena), want.size);
                unsettled |= waited == Ok(Waited::TimeIsUp);
            }
            let why = match self.grow_with_others(api, want, why)? {
                Attempt::Refused(why) => why,
                served => return Ok(served),
            };
            if unsettled && clock::now() < deadline {
                continue;
            }
            rounds += 1;
            if waited != Waited::Settled || rounds == SETTLE_ROUNDS || !self.lock()?.is_unsettled() {
                return Ok(Attempt::Refused(why));
            }
            freed = FreeEpochs::until_now(self.device());
        }
    }

    /// Rung 8: waits its turn, and for what other threads free.
    fn wait_for_frees(&self, api: &Api, want: &Want) -> Result<Option<u64>> {
        let want = &Want { urgent: true, refused: true, ..*want };
        let Some(place) = waiters::Place::take(self.device(), want.pool, want.size) else { return Ok(None) };
        let deadline = {
            let mut state = self.lock()?;
            state.counters.waits = state.counters.waits.wrapping_add(1);
            state.options.oom_deadline()
        };
        let mut pause = SHORTEST_PAUSE;
        loop {
            let seen = waiters::changes();
            let first = place.is_first();
            if first {
                match self.search_again(api, want)? {
                    Attempt::Served(address) => return Ok(Some(address)),
                    Attempt::Refused(why) => place.set_limited(why == Why::Limit),
                }
            }
            let left = deadline.since(clock::now());
            if left.is_zero() {
                return Ok(None);
            }
            // No word comes when the device is finished with something.
            let unsettled = |arena: &Arena| arena.lock().is_ok_and(|state| state.is_unsettled());
            if first && registry::on(self.device()).any(unsettled) {
                place.sleep(seen, pause.min(left));
                pause = (pause * 2).min(LONGEST_PAUSE);
            } else {
                place.sleep(seen, LOOK_AGAIN.min(left));
                pause = SHORTEST_PAUSE;
            }
            lifecycle::check_running()?;
            if self.is_lost() {
                return Err(self.lost_error());
            }
            // One whose turn it is not would only learn of it then.
            if self.lock()?.pool != want.pool {
                return Err(pools::gone());
            }
        }
    }

    /// Rungs 1 to 5 in short, without waiting.
    fn search_again(&self, api: &Api, want: &Want) -> Result<Attempt> {
        let now = clock::now();
        if let (_, Some(address)) = self.wait_and_search(api, want, now, 0, None)? {
            return Ok(Attempt::Served(address));
        }
        let why = match self.grow_with_idle(api, want, want.size)? {
            Attempt::Refused(why) => why,
            served => return Ok(served),
        };
        for arena in self.helpers(why) {
            let _ = arena.wait(api, now, 0, |_| Ok(false));
        }
        self.grow_with_others(api, want, why)
    }

    /// Waits until a search finds something, nothing is left to wait for, or, with `enough`, until chunks of so many bytes are idle after the
    /// device has got further than it was seen.
    fn wait_and_search(
        &self,
        api: &Api,
        want: &Want,
        deadline: Moment,
        freed: u64,
        mut enough: Option<(u64, &mut u64)>,
    ) -> Result<(Waited, Option<u64>)> {
        let mut served = None;
        let waited = self.wait(api, deadline, freed, |state| {
            served = state.search(want)?;
            let idle = enough.as_mut().is_some_and(|(bytes, seen)| state.has_more_idle(*bytes, seen));
            Ok(served.is_some() || idle)
        })?;
        Ok((waited, served))
    }

    /// Waits until chunks of so many bytes are idle, or nothing is left to wait for.
    pub(super) fn wait_for_idle(
        &self,
        api: &Api,
        deadline: Moment,
        freed: u64,
        bytes: u64,
    ) -> Result<Waited> {
        if self.lock()?.has_idle(bytes) {
            return Ok(Waited::Settled);
        }
        let mut seen = self.lock()?.progress();
        self.wait(api, deadline, freed, |state| Ok(state.has_more_idle(bytes, &mut seen)))
    }

    /// Whatever callbacks claim, what counts is whether the request can be served. Their frees may have come to any pool, or have gone to the driver.
    fn ask_callbacks(&self, api: &Api, want: &Want, why: Why, deadline: Moment) -> Result<Attempt> {
        let mut why = why;
        let ask = |_| match self.settle_for(api, want, deadline)? {
            Attempt::Served(address) => Ok(Some(address)),
            Attempt::Refused(reason) => {
                why = reason;
                Ok(None)
            }
        };
        let served = callbacks::ask(self.device(), || want.size, ask)?;
        Ok(served.map_or(Attempt::Refused(why), Attempt::Served))
    }

    /// Searches the lists, after all that is idle has been made to coalesce.
    fn search(&self, want: &Want) -> Result<Option<u64>> {
        self.lock()?.search(want)
    }

    /// Counts a request that was served although it had been refused memory.
    fn note_recovery(&self, want: &Want, climb: &Climb) -> Result<()> {
        if climb.refused {
            let mut state = self.lock()?;
            state.counters.oom_recovered = state.counters.oom_recovered.wrapping_add(1);
            log_line!(Info, "device {}: worked through out of memory for {} bytes", self.device(), want.size);
        }
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
    pub(super) fn grow_with_idle(&self, api: &Api, want: &Want, wanted: u64) -> Result<Attempt> {
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

    /// Rung 4: grows with what is idle in other arenas. First they give up what is missing by the numbers; but numbers are no promise, so then as
    /// much as the request.
    fn grow_with_others(&self, api: &Api, want: &Want, why: Why) -> Result<Attempt> {
        let mut why = why;
        if registry::lose_the_dead(api, self.device()) {
            match self.grow_with_idle(api, want, want.size)? {
                Attempt::Refused(reason) => why = reason,
                served => return Ok(served),
            }
        }
        let whole = whole_pages(want).unwrap_or(want.size);
        let missing = match self.free_on_device(api) {
            Some(free) if why != Why::Limit => {
                let reserve = if want.urgent { 0 } else { self.reserve() };
                whole.saturating_add(reserve).saturating_sub(free)
            }
            _ => whole,
        };
        for wanted in [missing.max(PAGE), whole] {
            if self.release_elsewhere(api, wanted, why) == 0 {
                break;
            }
            match self.grow_with_idle(api, want, want.size)? {
                Attempt::Refused(reason) => why = reason,
                served => return Ok(served),
            }
        }
        Ok(Attempt::Refused(why))
    }

    /// The arenas whose idle memory helps, least recently used first: with the pool's limit in the way only the pool's own.
    fn helpers(&self, why: Why) -> impl Iterator<Item = &'static Arena> {
        let (here, pool) = (core::ptr::from_ref(self), self.pool());
        registry::idlest_first(self.device())
            .filter(move |a| !core::ptr::eq(*a, here) && (why != Why::Limit || a.pool() == pool))
    }

    fn release_elsewhere(&self, api: &Api, wanted: u64, why: Why) -> u64 {
        let mut sum = 0u64;
        for arena in self.helpers(why) {
            if sum >= wanted {
                break;
            }
            arena.poll(api);
            // As above: what another arena cannot give is no failure of this request.
            sum = sum.saturating_add(arena.release_idle(api, wanted.saturating_sub(sum)).unwrap_or(0));
        }
        sum
    }
}

impl State {
    pub(super) fn flush(&mut self) {
        for stream in 0..self.heap.streams() {
            self.heap.flush(stream);
        }
        self.settle();
    }

    /// The same, where the device has got further than it was seen; else there is no more than there was.
    fn has_more_idle(&mut self, bytes: u64, seen: &mut u64) -> bool {
        let now = self.progress();
        core::mem::replace(seen, now) != now && self.has_idle(bytes)
    }

    /// Changes when something freed turns out to be finished with.
    fn progress(&self) -> u64 {
        self.streams.iter().fold(self.done, |sum, stream| sum.wrapping_add(stream.done))
    }

    /// Whether chunks of so many bytes could be given back. Without host memory to find out, no.
    fn has_idle(&mut self, bytes: u64) -> bool {
        self.flush();
        let mut chunks = Vec::new();
        let ours = |chunk: &Chunk, _| !self.spilled.has(chunk.off);
        let idle = self.heap.collect_idle(bytes, &|s| self.done_of(s), &[], &mut chunks, &ours);
        idle.is_ok_and(|idle| idle >= bytes)
    }

    fn search(&mut self, want: &Want) -> Result<Option<u64>> {
        if want.own_allocation {
            return Ok(None);
        }
        let stream = self.stream(want.key).map_err(host_oom)?;
        self.heap.flush(stream);
        self.heap.slab_anywhere = want.refused;
        let found = self.try_allocate(want);
        self.heap.slab_anywhere = false;
        if let Some(address) = found? {
            return Ok(Some(address));
        }
        let Some((len, align)) = Heap::extent_for(want.size, want.align) else { return Ok(None) };
        if self.heap.coalesce_across_streams(stream, len, align) { self.try_allocate(want) } else { Ok(None) }
    }

    /// Whether so many idle bytes are more than the option `max_idle` leaves alone.
    fn is_over_bound(&self, idle: u64) -> bool {
        let percent = u128::from(self.options.max_idle_percent);
        u128::from(idle) * 100 > u128::from(self.heap.bytes().live) * percent
    }
}
