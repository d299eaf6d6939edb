//! Events: recording fences, finding out which are complete, and waiting for them.
//!
//! The lock is never held across a driver call: fences are copied out, asked about, and taken off
//! afterwards if they are still there.

use super::fence::{Fence, Whose};
use super::state::State;
use super::{Arena, IsCaptured};
use crate::driver::{Api, Event, code, is_capturing, is_non_blocking, relaxed};
use crate::error::Result;
use crate::heap::{SHARED, StreamId};
use crate::logging::log_line;
use crate::pool::types::{LEGACY, StreamKey};
use crate::sync::clock::{self, Moment};
use core::time::Duration;

/// `CU_EVENT_DISABLE_TIMING`: a plain event, the cheapest to record and to query.
const EVENT_FLAGS: u32 = 2;
/// In place of whose a fence is, if it is not complete.
const NOT_DONE: Whose = StreamId::MAX;
/// Most fences asked about at once; the others come next time.
const MAX_POLLED: usize = 32;

/// What asking about fences came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polled {
    /// Some were complete.
    Progress,
    Nothing,
    /// The driver answers with an error, which will not pass.
    Failed,
}

/// How a wait for the device ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waited {
    /// Nothing is left to wait for.
    Complete,
    /// Time ran out.
    TimeIsUp,
    /// No word will come: a capture forbids asking, or the driver answers with an error.
    InVain,
}

impl Arena {
    /// An event that is not in use.
    fn take_event(&self, api: &Api) -> Option<Event> {
        if let Some(event) = self.lock().ok()?.spare.pop() {
            return Some(event);
        }
        let mut event = 0;
        // SAFETY: the pointer is to a local; the context is current meanwhile.
        let result = self.mapper.context.with(api, || unsafe { (api.event_create)(&mut event, EVENT_FLAGS) });
        matches!(result, Ok(code::SUCCESS)).then_some(event)
    }

    fn give_event(&self, event: Event) {
        if let Ok(mut state) = self.lock() {
            state.keep_event(event);
        }
    }

    /// Looks whether the stream that the current call carries is captured, and remembers it where a look at
    /// the legacy stream would not tell: for non-blocking streams.
    pub fn look_for_capture(&self, api: &Api, key: StreamKey) -> Result<bool> {
        let capturing = self.mapper.context.with(api, || is_capturing(api, key.handle))?;
        let hidden = capturing == Some(true) && is_non_blocking(api, key.handle);
        let mut state = self.lock()?;
        let stream = state.stream(key)?;
        state.set_captured(stream, hidden);
        // Where the driver cannot tell, the caller keeps to what is allowed in a capture.
        Ok(capturing.unwrap_or(true))
    }

    /// Records a fence on the stream that the current call carries. Does nothing while the stream is
    /// captured: the event would become part of the graph. A failure leaves the frees to a later fence.
    pub fn fence_stream(&self, api: &Api, key: StreamKey) {
        if !matches!(self.look_for_capture(api, key), Ok(false)) {
            return;
        }
        let Ok(mut state) = self.lock() else { return };
        let Ok(stream) = state.stream(key) else { return };
        let seq = state.heap.seq();
        if !state.is_uncovered(stream) {
            return;
        }
        drop(state);
        let Some(event) = self.take_event(api) else { return };
        // SAFETY: the stream is the caller's own, in this call; the event is ours and not in use.
        let recorded = self.mapper.context.with(api, || unsafe { (api.event_record)(event, key.handle) });
        if !matches!(recorded, Ok(code::SUCCESS)) {
            return self.give_event(event);
        }
        let Ok(mut state) = self.lock() else { return };
        let stream = state.stream(key).ok();
        let unused = match stream.and_then(|stream| state.streams.get_mut(stream as usize)) {
            Some(stream) => {
                stream.covered = stream.covered.max(seq);
                stream.fences.push(Fence { event, seq })
            }
            None => Some(event),
        };
        if let Some(event) = unused {
            state.keep_event(event);
        }
    }

    /// Records a fence of the whole context, which covers every free so far, if the driver can (from 12.5)
    /// and nothing is known to be captured in the context: the call would break the capture.
    pub fn fence_context(&self, api: &Api, is_captured: IsCaptured) -> bool {
        let Some(record) = api.ctx_record_event else { return false };
        let seq = {
            let Ok(state) = self.lock() else { return false };
            if state.covered >= state.heap.seq() {
                return true;
            }
            state.heap.seq()
        };
        if is_captured() || self.legacy_is_captured(api) {
            return false;
        }
        let Some(event) = self.take_event(api) else { return false };
        let context = self.mapper.context;
        // SAFETY: the context and the event are ours.
        let result = relaxed(api, || context.with(api, || unsafe { record(context.handle, event) }));
        if !matches!(result, Ok(code::SUCCESS)) {
            log_line!(Warn, "cuCtxRecordEvent answered {result:?}: freed memory waits for a later fence");
            self.give_event(event);
            return false;
        }
        let Ok(mut state) = self.lock() else { return false };
        let replaced = state.fences.push(Fence { event, seq });
        state.cover_all(seq);
        if let Some(event) = replaced {
            state.keep_event(event);
        }
        true
    }

    /// Whether a blocking stream of the context is captured; the legacy stream tells without harm.
    fn legacy_is_captured(&self, api: &Api) -> bool {
        let asked = self.mapper.context.with(api, || is_capturing(api, LEGACY));
        asked.ok().flatten().unwrap_or(true)
    }

    /// Asks about fences, and retires what they covered.
    pub fn poll(&self, api: &Api) -> Polled {
        let mut polled = Polled::Nothing;
        loop {
            let mut asked: [(Whose, Fence); MAX_POLLED] = [(SHARED, Fence::default()); MAX_POLLED];
            let Ok(state) = self.lock() else { return polled };
            let count = state.oldest_fences(&mut asked);
            drop(state);
            let asked = asked.get_mut(..count).unwrap_or_default();
            let (mut complete, mut failed) = (0, None);
            if !asked.is_empty() {
                relaxed(api, || {
                    for (whose, fence) in asked.iter_mut() {
                        // SAFETY: the pool never destroys an event. If another thread took the fence off
                        // meanwhile and the event serves another one, the answer finds no such fence below.
                        match unsafe { (api.event_query)(fence.event) } {
                            code::SUCCESS => complete += 1,
                            result => {
                                *whose = NOT_DONE;
                                failed = failed.or((result != code::NOT_READY).then_some(result));
                            }
                        }
                    }
                });
            }
            if let Some(result) = failed {
                log_line!(Warn, "cuEventQuery answered {result}: freed memory cannot be told to be complete");
                polled = Polled::Failed;
            }
            if complete == 0 {
                return polled;
            }
            let Ok(mut state) = self.lock() else { return polled };
            for (whose, fence) in asked.iter().filter(|(whose, _)| *whose != NOT_DONE) {
                state.complete(*whose, *fence);
            }
            state.retire();
            if polled == Polled::Failed {
                return polled;
            }
            polled = Polled::Progress;
        }
    }

    /// Waits until everything freed by the count of `freed` is complete, `served` says that it is enough, or
    /// time runs out. Must not be called in a capture.
    pub fn wait(
        &self,
        api: &Api,
        is_captured: IsCaptured,
        deadline: Moment,
        freed: u64,
        mut served: impl FnMut(&mut State) -> Result<bool>,
    ) -> Result<Waited> {
        let mut pause = Duration::from_micros(10);
        loop {
            // Whether all that was freed will be told to be complete, sooner or later.
            let covered = !self.lock()?.needs_context()
                || self.fence_context(api, is_captured)
                || (api.ctx_record_event.is_none() && self.synchronize(api, is_captured)?);
            let polled = self.poll(api);
            let mut state = self.lock()?;
            if served(&mut state)? || !state.is_pending_since(freed) {
                return Ok(Waited::Complete);
            }
            let fenced = !state.fences.is_empty() || state.streams.iter().any(|s| !s.fences.is_empty());
            drop(state);
            if !(covered || fenced) || polled == Polled::Failed {
                return Ok(Waited::InVain);
            }
            if clock::now() >= deadline {
                return Ok(Waited::TimeIsUp);
            }
            clock::sleep(pause);
            pause = (pause * 2).min(Duration::from_micros(500));
        }
    }

    /// Waits until chunks of so many bytes are idle, or nothing is left to wait for.
    pub fn wait_for_idle(
        &self,
        api: &Api,
        is_captured: IsCaptured,
        deadline: Moment,
        freed: u64,
        bytes: u64,
    ) -> Result<Waited> {
        if self.lock()?.has_idle(bytes) {
            return Ok(Waited::Complete);
        }
        let mut seen = self.lock()?.progress();
        self.wait(api, is_captured, deadline, freed, |state| Ok(state.has_more_idle(bytes, &mut seen)))
    }

    /// Finds out what of all that was freed is complete now; on drivers without events of the context, by
    /// waiting for it. True if some of it is.
    pub fn ask_about_context(&self, api: &Api, is_captured: IsCaptured) -> Result<bool> {
        if !self.lock()?.needs_context() {
            return Ok(false);
        }
        if api.ctx_record_event.is_none() {
            return self.synchronize(api, is_captured);
        }
        Ok(self.fence_context(api, is_captured) && self.poll(api) == Polled::Progress)
    }

    /// For drivers without fences of the context: waits for all of its work. False where that cannot be done.
    fn synchronize(&self, api: &Api, is_captured: IsCaptured) -> Result<bool> {
        let seq = self.lock()?.heap.seq();
        if is_captured() || self.legacy_is_captured(api) {
            return Ok(false);
        }
        // SAFETY: waits for the context, which is current meanwhile.
        let result = relaxed(api, || self.mapper.context.with(api, || unsafe { (api.ctx_synchronize)() }))?;
        let mut state = self.lock()?;
        state.counters.calls.sync = state.counters.calls.sync.wrapping_add(1);
        if result == code::SUCCESS {
            state.cover_all(seq);
            state.done = state.done.max(seq);
            state.retire();
        }
        Ok(result == code::SUCCESS)
    }
}

impl State {
    /// Keeps an event for later. Where the host has no room for it, it is left to its context: destroying it
    /// could pull it from under a thread that is just asking about it.
    fn keep_event(&mut self, event: Event) {
        if self.spare.try_reserve(1).is_ok() {
            self.spare.push(event);
        }
    }

    fn cover_all(&mut self, seq: u64) {
        self.covered = self.covered.max(seq);
        for stream in &mut self.streams {
            stream.covered = stream.covered.max(seq);
        }
    }

    fn oldest_fences(&self, out: &mut [(Whose, Fence); MAX_POLLED]) -> usize {
        let context = self.fences.oldest().map(|m| (SHARED, m));
        let streams = self.streams.iter().enumerate().skip(1);
        let streams = streams.filter_map(|(id, s)| s.fences.oldest().map(|m| (id as Whose, m)));
        let mut count = 0;
        for (slot, fence) in out.iter_mut().zip(context.into_iter().chain(streams)) {
            *slot = fence;
            count += 1;
        }
        count
    }

    /// A fence was seen complete; everything it covers is complete.
    fn complete(&mut self, whose: Whose, fence: Fence) {
        if whose == SHARED {
            if self.fences.pop(fence) {
                self.done = self.done.max(fence.seq);
                self.keep_event(fence.event);
            }
        } else if let Some(stream) = self.streams.get_mut(whose as usize)
            && stream.fences.pop(fence)
        {
            stream.done = stream.done.max(fence.seq);
            self.keep_event(fence.event);
        }
    }

    /// Makes everyone's what is complete.
    pub(super) fn retire(&mut self) {
        self.heap.complete_pending(self.done);
        if self.heap.merge_all {
            return;
        }
        for id in 1..self.heap.streams() {
            let done = self.done_of(id);
            self.heap.retire(id, done);
        }
    }

    /// Whether something was freed that only a word about the whole context can retire.
    pub fn needs_context(&self) -> bool {
        self.heap.has_pending() || (1..self.heap.streams()).any(|id| self.is_uncovered(id))
    }

    /// Whether freed memory waits for the device, as pending blocks or as free memory of a stream.
    pub fn is_pending(&self) -> bool {
        self.is_pending_since(u64::MAX)
    }

    /// Whether some of that may have been freed by the count of `freed`.
    pub fn is_pending_since(&self, freed: u64) -> bool {
        let mut streams = self.streams.iter().enumerate().skip(1);
        (self.heap.has_pending() && self.done < freed)
            || streams.any(|(id, s)| {
                let done = s.done.max(self.done);
                self.heap.last_free_seq(id as StreamId) > done && done < freed
            })
    }
}
