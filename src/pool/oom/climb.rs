//! The reclaim ladder: what is tried, in which order, before a request is answered with out of memory.
//!
//! After every rung the arena's own lists are searched again. The lock is released across driver calls; what
//! a thread has won there is booked and handed out under one hold of it, so that no other thread can take it
//! in between.

use super::report::{self, RungLog};
use super::{callbacks, headroom};
use crate::driver::{Api, lifecycle};
use crate::error::{Result, Status};
use crate::heap::PAGE;
use crate::logging::{Size, log_line};
use crate::pool::arena::Arena;
use crate::pool::arena::events::Waited;
use crate::pool::arena::grow::{Attempt, Bounds, Idle, Why, whole_pages};
use crate::pool::options::Spill;
use crate::pool::registry::{self, FreeEpochs, Turns};
use crate::pool::settings;
use crate::pool::types::AllocRequest;
use crate::pool::waiters;
use crate::sync::clock::{self, Moment};
use core::time::Duration;

/// How often a request waits for freed memory that other threads then get. A limit, because others may go on
/// for ever.
const SETTLE_ROUNDS: usize = 64;
/// How long a request that waits for frees lets the device work on before it asks again, at first and at
/// most.
const SHORTEST_PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);
/// After which time it looks without a word from anybody: other processes free memory too.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Serves a request that the arena's lists could not serve at first sight, or says why not.
#[cold]
pub fn climb(api: &Api, arena: &Arena, request: &AllocRequest) -> Result<u64> {
    // What is about to be taken or moved must be of the context's present life.
    registry::check_alive(api, arena)?;
    let answer = Climb::begin(api, arena, request).and_then(|mut climb| climb.run());
    match answer {
        // What the driver says of a context that is gone depends on the call; the arena finds out by asking.
        // Out of memory may be for blocks that went with it.
        Err(
            Status::POOL_ERROR_DRIVER | Status::POOL_ERROR_CONTEXT_LOST | Status::POOL_ERROR_OUT_OF_MEMORY,
        ) => {
            // The sentence of the answer must survive the question.
            if arena.is_lost() || !arena.mapper.context.is_alive(api) {
                registry::check_alive(api, arena)?;
            }
            answer
        }
        answer => answer,
    }
}

/// Answers a request that is larger than the device: nothing need be tried, but the numbers are the device's
/// all the same.
#[cold]
pub fn refuse(api: &Api, arena: &Arena, request: &AllocRequest) -> Status {
    report::out_of_memory(api, arena, request, false, &RungLog::default())
}

/// One request on its way up.
struct Climb<'a> {
    api: &'a Api,
    arena: &'a Arena,
    request: &'a AllocRequest,
    /// The request's stream is captured: nothing may wait, ask events or unmap.
    capturing: bool,
    /// It may take the headroom.
    urgent: bool,
    /// Memory has been refused: growths are cut finer, and a slab may do without a page for slabs.
    scarce: bool,
    /// The driver or the limit has refused it, not only the headroom.
    refused: bool,
    log: RungLog,
}

impl<'a> Climb<'a> {
    fn begin(api: &'a Api, arena: &'a Arena, request: &'a AllocRequest) -> Result<Climb<'a>> {
        let ordered = !request.key.is_device_order();
        let capturing = ordered && arena.look_for_capture(api, request.key)?;
        // Who may not wait may not be kept from the headroom either.
        let urgent = capturing;
        Ok(Climb {
            api,
            arena,
            request,
            capturing,
            urgent,
            scarce: false,
            refused: false,
            log: RungLog::default(),
        })
    }

    fn run(&mut self) -> Result<u64> {
        let mut may_wait =
            !self.capturing && !callbacks::is_inside() && self.arena.lock()?.options().oom_wait_ms > 0;
        let (device, pool, size) = (self.arena.device(), self.request.pool, self.request.size);
        if may_wait && waiters::any() && waiters::must_queue(device, pool, size) {
            may_wait = false;
            if let Some(address) = self.queue()? {
                return Ok(address);
            }
        }
        let why = match self.first_rungs()? {
            Attempt::Served(address) => return Ok(address),
            Attempt::Refused(why) => why,
        };
        self.scarce = true;
        let found = if self.capturing { self.search()? } else { self.last_rungs(why, may_wait)? };
        match found {
            Some(address) => {
                self.note_recovery()?;
                Ok(address)
            }
            None => {
                let (arena, request) = (self.arena, self.request);
                Err(report::out_of_memory(self.api, arena, request, self.capturing, &self.log))
            }
        }
    }

    /// Rungs 1 to 3 as every miss climbs them, with what costs little.
    fn first_rungs(&mut self) -> Result<Attempt> {
        // Rung 1: the stream's own memory, then what other streams have completed.
        if let Some(address) = self.first_rung(1, Self::search_all)? {
            return Ok(Attempt::Served(address));
        }
        // Rungs 2 and 3: grow; or, with much idle, remap before growing.
        let remap = !self.capturing && self.arena.lock()?.is_idle_beyond_bound();
        let idle = if remap { Idle::Remap } else { Idle::Keep };
        self.first_rung(2, |climb| climb.grow(idle))
    }

    /// Rungs 3 to 9, for a request that was refused more memory.
    fn last_rungs(&mut self, why: Why, may_wait: bool) -> Result<Option<u64>> {
        if let Some(address) = self.work_through(why)? {
            return Ok(Some(address));
        }
        // Rung 8: what other threads free.
        if may_wait && let Some(address) = self.queue()? {
            return Ok(Some(address));
        }
        // Rung 9: host memory.
        if self.request.own_allocation || self.arena.lock()?.options().spill != Spill::Host {
            return Ok(None);
        }
        self.rung(9, |climb| climb.arena.spill(climb.api, climb.request))
    }

    /// Rungs 3 to 7.
    fn work_through(&mut self, why: Why) -> Result<Option<u64>> {
        let mut why = why;
        self.refused |= why != Why::Headroom;
        // Rung 3: remap what is idle here.
        let found = self.rung(3, |climb| match climb.search()? {
            Some(address) => Ok(Attempt::Served(address)),
            None => climb.grow_with_idle(),
        })?;
        match found {
            Attempt::Served(address) => return Ok(Some(address)),
            Attempt::Refused(reason) => why = reason,
        }
        // Rung 4: what is idle elsewhere on the device.
        match self.rung(4, |climb| climb.grow_with_others(why))? {
            Attempt::Served(address) => return Ok(Some(address)),
            Attempt::Refused(reason) => why = reason,
        }
        // Idle memory did not do, so the headroom is taken.
        self.urgent = true;
        if why == Why::Headroom {
            match self.rung(2, |climb| climb.grow(Idle::Remap))? {
                Attempt::Served(address) => return Ok(Some(address)),
                Attempt::Refused(_) => {}
            }
        }
        self.refused = true;
        // Rung 5: what is freed, but not complete.
        let deadline = self.arena.lock()?.options().deadline();
        match self.rung(5, |climb| climb.retire_pending(deadline))? {
            Attempt::Served(address) => return Ok(Some(address)),
            Attempt::Refused(reason) => why = reason,
        }
        // Rung 6: other runtimes' caches.
        if !callbacks::is_inside() && callbacks::any() {
            match self.rung(6, |climb| climb.ask_callbacks(why, deadline))? {
                Attempt::Served(address) => return Ok(Some(address)),
                Attempt::Refused(reason) => why = reason,
            }
        }
        // Rung 7: everything idle on the device.
        self.rung(7, |climb| climb.empty_everything(why))
    }

    /// Runs a rung that every miss goes through, and notes its time alone: what it gains serves the request.
    fn first_rung<R>(&mut self, rung: usize, f: impl FnOnce(&mut Self) -> R) -> R {
        let start = clock::now();
        let result = f(self);
        self.log.note(rung, 0, start);
        result
    }

    /// Runs a rung, and notes what became idle or went back to the driver meanwhile.
    fn rung<R>(&mut self, rung: usize, f: impl FnOnce(&mut Self) -> R) -> R {
        let (cached, held) = self.measure();
        let start = clock::now();
        let result = f(self);
        let (cached_after, held_after) = self.measure();
        // Other threads take and free meanwhile: only what became more counts.
        let gain = cached_after.saturating_sub(cached) + held.saturating_sub(held_after);
        self.log.note(rung, gain, start);
        result
    }

    /// Bytes idle in the arena, and bytes that all pools hold on the device.
    fn measure(&self) -> (u64, u64) {
        let cached = self.arena.lock().map_or(0, |state| state.bytes().cached);
        (cached, registry::held_on(self.arena.device()))
    }

    /// Counts a request that was served although it had been refused memory.
    fn note_recovery(&self) -> Result<()> {
        if self.refused {
            self.arena.lock()?.count_recovery();
            log_line!(
                Info,
                "device {}: a request of {} was refused memory and served all the same",
                self.arena.device(),
                Size(self.request.size)
            );
        }
        Ok(())
    }
}

/// Rungs 1 to 3.
impl Climb<'_> {
    /// Searches the lists, after all that is idle has been made to coalesce.
    fn search(&self) -> Result<Option<u64>> {
        self.arena.lock()?.search(self.request, self.scarce)
    }

    /// The same, after looking what the device has completed; by an event of the whole context where that
    /// pays.
    fn search_all(&mut self) -> Result<Option<u64>> {
        if self.capturing {
            return self.search();
        }
        let (api, arena) = (self.api, self.arena);
        let is_captured = || registry::is_captured(arena);
        if !self.request.key.is_device_order() {
            arena.fence_stream(api, self.request.key);
        }
        arena.poll(api);
        if self.request.own_allocation {
            arena.release_own(api)?;
        } else {
            arena.look_after_spilled(api, &is_captured)?;
        }
        if let Some(address) = self.search()? {
            return Ok(Some(address));
        }
        let worth_it = arena.lock()?.is_context_fence_worth(self.request.size);
        if worth_it
            && arena.ask_about_context(api, &is_captured)?
            && let Some(address) = self.search()?
        {
            return Ok(Some(address));
        }
        arena.clear_unreclaimable(api)?;
        Ok(None)
    }

    /// What a growth must leave alone now.
    fn bounds(&self) -> Bounds {
        let elsewhere = registry::held_elsewhere(self.arena);
        let spare = if self.urgent { u64::MAX } else { headroom::spare(self.api, self.arena) };
        Bounds { elsewhere, spare, scarce: self.scarce }
    }

    fn grow(&self, idle: Idle) -> Result<Attempt> {
        self.arena.grow(self.api, self.request, idle, self.bounds())
    }

    /// Grows with as much of what is idle here as the request needs.
    fn grow_with_idle(&self) -> Result<Attempt> {
        self.arena.grow_with_idle(self.api, self.request, self.request.size, &|| self.bounds())
    }
}

/// Rungs 4 to 7.
impl Climb<'_> {
    /// Rung 4: grows with what is idle in other arenas. First they give up what is missing by the numbers;
    /// but numbers are no promise, so then as much as the request.
    fn grow_with_others(&self, why: Why) -> Result<Attempt> {
        let mut why = why;
        if registry::lose_the_dead(self.api, self.arena.device()) {
            match self.grow_with_idle()? {
                Attempt::Refused(reason) => why = reason,
                served => return Ok(served),
            }
        }
        let whole = whole_pages(self.request).unwrap_or(self.request.size);
        let missing = match headroom::free_on_device(self.api, self.arena) {
            Some(free) if why != Why::Limit => {
                let headroom = if self.urgent { 0 } else { headroom::of(self.arena) };
                // The headroom is any number that somebody asked for.
                whole.saturating_add(headroom).saturating_sub(free)
            }
            _ => whole,
        };
        for wanted in [missing.max(PAGE), whole] {
            if self.release_elsewhere(wanted, why) == 0 {
                break;
            }
            match self.grow_with_idle()? {
                Attempt::Refused(reason) => why = reason,
                served => return Ok(served),
            }
        }
        Ok(Attempt::Refused(why))
    }

    /// The arenas whose idle memory helps, least recently used first: with the pool's limit in the way only
    /// the pool's own.
    fn helpers(&self, why: Why) -> impl Iterator<Item = &'static Arena> {
        let (here, pool) = (core::ptr::from_ref(self.arena), self.arena.pool());
        registry::idlest_first(self.arena.device())
            .filter(move |a| !core::ptr::eq(*a, here) && (why != Why::Limit || a.pool() == pool))
    }

    fn release_elsewhere(&self, wanted: u64, why: Why) -> u64 {
        let mut sum = 0;
        for arena in self.helpers(why) {
            if sum >= wanted {
                break;
            }
            arena.poll(self.api);
            // What another arena cannot give is no failure of this request.
            sum += arena.release_idle(self.api, wanted - sum).unwrap_or(0);
        }
        sum
    }

    /// Rung 5: waits for what is freed but not complete, here and in the arenas that help, until the request
    /// can be served. Again while other threads win what this one waited for.
    fn retire_pending(&self, deadline: Moment) -> Result<Attempt> {
        // Something may have come after the search before this one.
        let mut seen = self.arena.lock()?.progress().wrapping_sub(1);
        let (mut turns, mut rounds) = (Turns::until(deadline), 0);
        let mut freed = FreeEpochs::until_now(self.arena.device());
        loop {
            // What is complete may do, once it is moved; but in the end all of it is waited for.
            let enough = if rounds < SETTLE_ROUNDS / 2 { self.request.size } else { u64::MAX };
            let until = turns.begin();
            let (waited, served) =
                self.wait_and_search(until, freed.of(self.arena), Some((enough, &mut seen)))?;
            if let Some(address) = served {
                return Ok(Attempt::Served(address));
            }
            let mut pending = waited == Waited::TimeIsUp;
            let why = match self.grow_with_idle()? {
                Attempt::Refused(why) => why,
                served => return Ok(served),
            };
            for arena in self.helpers(why) {
                let is_captured = || registry::is_captured(arena);
                let (freed, size) = (freed.of(arena), self.request.size);
                // One whose context is gone, or that is in trouble itself, is no help, and no reason to fail.
                let waited = arena.wait_for_idle(self.api, &is_captured, until, freed, size);
                pending |= waited == Ok(Waited::TimeIsUp);
            }
            let why = match self.grow_with_others(why)? {
                Attempt::Refused(why) => why,
                served => return Ok(served),
            };
            if pending && !turns.is_over() {
                continue;
            }
            rounds += 1;
            if waited != Waited::Complete || rounds == SETTLE_ROUNDS || !self.arena.lock()?.is_pending() {
                return Ok(Attempt::Refused(why));
            }
            freed = FreeEpochs::until_now(self.arena.device());
        }
    }

    /// Waits until a search finds something, nothing is left to wait for, or, with `enough`, until chunks of
    /// so many bytes are idle after the device has got further than it was seen.
    fn wait_and_search(
        &self,
        deadline: Moment,
        freed: u64,
        mut enough: Option<(u64, &mut u64)>,
    ) -> Result<(Waited, Option<u64>)> {
        let is_captured = || registry::is_captured(self.arena);
        let mut served = None;
        let waited = self.arena.wait(self.api, &is_captured, deadline, freed, |state| {
            served = state.search(self.request, self.scarce)?;
            let idle = enough.as_mut().is_some_and(|(bytes, seen)| state.has_more_idle(*bytes, seen));
            Ok(served.is_some() || idle)
        })?;
        Ok((waited, served))
    }

    /// Rung 6. Whatever callbacks claim, what counts is whether the request can be served. Their frees may
    /// have come to any pool, or have gone to the driver.
    fn ask_callbacks(&self, why: Why, deadline: Moment) -> Result<Attempt> {
        let mut why = why;
        let ask = |_| match self.retire_pending(deadline)? {
            Attempt::Served(address) => Ok(Some(address)),
            Attempt::Refused(reason) => {
                why = reason;
                Ok(None)
            }
        };
        let served = callbacks::ask(self.arena.device(), || self.request.size, ask)?;
        Ok(served.map_or(Attempt::Refused(why), Attempt::Served))
    }

    /// Rung 7.
    fn empty_everything(&self, why: Why) -> Result<Option<u64>> {
        let mut why = why;
        // Once more where the pool's limit was in the way, and the device is now.
        for _ in 0..2 {
            self.release_elsewhere(u64::MAX, why);
            match self.arena.grow_with_idle(self.api, self.request, u64::MAX, &|| self.bounds())? {
                Attempt::Served(address) => return Ok(Some(address)),
                Attempt::Refused(reason) if reason == why => break,
                Attempt::Refused(reason) => why = reason,
            }
        }
        self.search()
    }
}

/// Rung 8.
impl Climb<'_> {
    /// Waits its turn, and for what other threads free. Whoever has waited takes the headroom.
    fn queue(&mut self) -> Result<Option<u64>> {
        let before = (self.urgent, self.scarce);
        (self.urgent, self.scarce) = (true, true);
        let served = self.rung(8, |climb| climb.wait_for_frees());
        (self.urgent, self.scarce) = before;
        served
    }

    fn wait_for_frees(&self) -> Result<Option<u64>> {
        let (arena, request) = (self.arena, self.request);
        let Some(place) = waiters::Place::take(arena.device(), request.pool, request.size) else {
            return Ok(None);
        };
        let deadline = {
            let mut state = arena.lock()?;
            state.count_wait();
            state.options().oom_deadline()
        };
        let mut pause = SHORTEST_PAUSE;
        loop {
            let seen = waiters::changes();
            lifecycle::check_running()?;
            if arena.is_lost() {
                return Err(arena.lost_error());
            }
            // One whose turn it is not would only learn of it then.
            if arena.lock()?.pool() != request.pool {
                return Err(settings::gone());
            }
            let first = place.is_first();
            if first {
                match self.search_again()? {
                    Attempt::Served(address) => return Ok(Some(address)),
                    Attempt::Refused(why) => place.set_limited(why == Why::Limit),
                }
            }
            let left = deadline.since(clock::now());
            if left.is_zero() {
                return Ok(None);
            }
            // No word comes when the device has completed something.
            let pending = |arena: &Arena| arena.lock().is_ok_and(|state| state.is_pending());
            if first && registry::on(arena.device()).any(pending) {
                place.sleep(seen, pause.min(left));
                pause = (pause * 2).min(LONGEST_PAUSE);
            } else {
                place.sleep(seen, LOOK_AGAIN.min(left));
                pause = SHORTEST_PAUSE;
            }
        }
    }

    /// Rungs 1 to 5 in short, without waiting.
    fn search_again(&self) -> Result<Attempt> {
        let now = clock::now();
        if let (_, Some(address)) = self.wait_and_search(now, 0, None)? {
            return Ok(Attempt::Served(address));
        }
        let why = match self.grow_with_idle()? {
            Attempt::Refused(why) => why,
            served => return Ok(served),
        };
        for arena in self.helpers(why) {
            let _ = arena.wait(self.api, &|| registry::is_captured(arena), now, 0, |_| Ok(false));
        }
        self.grow_with_others(why)
    }
}
