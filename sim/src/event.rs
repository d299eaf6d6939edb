//! Events: what a stream (or a context) had still to do when the event was recorded.

use crate::call::{Out, Res};
use crate::capture::{self, CapturedPoint, Route};
use crate::context::{self, Context};
use crate::graph::NodeWork;
use crate::registry::{Found, Registry};
use crate::stream::{self, Stream, StreamArg, Ticket};
use crate::sync::lock;
use crate::work::Work;
use crate::{clock, code, report};
use cudarc::driver::sys::{CUevent_flags, CUevent_record_flags, CUevent_wait_flags};
use std::sync::{Arc, Mutex, OnceLock};

const BLOCKING_SYNC: u32 = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
const DISABLE_TIMING: u32 = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
const INTERPROCESS: u32 = CUevent_flags::CU_EVENT_INTERPROCESS as u32;

/// The only flags of recording and waiting: in a capture, a node instead of a dependency.
const RECORD_EXTERNAL: u32 = CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
const WAIT_EXTERNAL: u32 = CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as u32;

/// When a recorded event was reached.
#[derive(Default)]
pub struct Stamp(OnceLock<u64>);

impl Stamp {
    pub fn set(&self) {
        let _ = self.0.set(clock::now());
    }
}

enum State {
    /// Counts as complete.
    Never,
    Recorded {
        /// Empty: complete.
        waits: Vec<Ticket>,
        stamp: Option<Arc<Stamp>>,
    },
    /// On a capturing stream: it only means something inside that capture.
    Captured(CapturedPoint),
}

pub struct Event {
    flags: u32,
    pub context: &'static Context,
    state: Mutex<State>,
}

static EVENTS: Registry<Event> = Registry::new(0x5600_0000_1000);

pub fn live() -> u64 {
    EVENTS.live()
}

impl Event {
    pub fn is_interprocess(&self) -> bool {
        self.flags & INTERPROCESS != 0
    }

    fn has_timing(&self) -> bool {
        self.flags & DISABLE_TIMING == 0
    }

    /// What it still waits for.
    fn pending(&self) -> Vec<Ticket> {
        match &mut *lock(&self.state) {
            State::Never | State::Captured(_) => Vec::new(),
            State::Recorded { waits, .. } => {
                waits.retain(|ticket| !ticket.is_done());
                waits.clone()
            }
        }
    }

    fn is_complete(&self) -> bool {
        match &mut *lock(&self.state) {
            State::Never | State::Captured(_) => true,
            State::Recorded { waits, .. } => {
                waits.retain(|ticket| !ticket.is_done());
                waits.is_empty()
            }
        }
    }

    fn record(&self, waits: Vec<Ticket>, stamp: Option<Arc<Stamp>>) {
        *lock(&self.state) = State::Recorded { waits, stamp };
    }

    /// A stamp of now, if the event keeps time.
    fn stamp_now(&self) -> Option<Arc<Stamp>> {
        self.has_timing().then(|| {
            let stamp = Arc::new(Stamp::default());
            stamp.set();
            stamp
        })
    }

    /// Asking about an event recorded in a capture is an error, about another one potentially unsafe.
    fn observe(&self) -> Res {
        if matches!(&*lock(&self.state), State::Captured(_)) {
            return Err(code::CAPTURED_EVENT);
        }
        capture::unsafe_call()
    }

    fn record_on(&self, stream: &Arc<Stream>) {
        if stream.is_idle() {
            self.record(Vec::new(), self.stamp_now());
            return;
        }
        let stamp = Arc::new(Stamp::default());
        let ticket = stream.submit(Work::Stamp(stamp.clone()), Vec::new());
        self.record(vec![ticket], Some(stamp));
    }
}

pub fn find(handle: usize) -> Res<Arc<Event>> {
    if handle == 0 {
        return Err(code::INVALID_HANDLE);
    }
    match EVENTS.find(handle) {
        Found::Live(event) => Ok(event),
        other => Err(lost(handle, other)),
    }
}

fn lost(handle: usize, found: Found<Event>) -> i32 {
    match found {
        Found::Orphaned => code::CONTEXT_IS_DESTROYED,
        Found::Dead => report::fatal_misuse(&format!("event {handle:#x} is used after it was destroyed")),
        _ => report::fatal_misuse(&format!("{handle:#x} is no event")),
    }
}

pub fn orphan(handle: usize) {
    EVENTS.orphan(handle);
}

fn create(out: Out<usize>, flags: u32) -> Res {
    out.check()?;
    let context = context::current()?;
    let interprocess_with_timing = flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0;
    if flags & !(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) != 0 || interprocess_with_timing {
        return Err(code::INVALID_VALUE);
    }
    let made = EVENTS.add(|_| Arc::new(Event { flags, context, state: Mutex::new(State::Never) }));
    let (handle, _) = made.ok_or(code::OUT_OF_MEMORY)?;
    lock(&context.events).insert(handle);
    out.put(handle)
}

fn destroy(handle: usize) -> Res {
    if handle == 0 {
        return Err(code::INVALID_HANDLE);
    }
    match EVENTS.remove(handle) {
        Found::Live(event) => {
            lock(&event.context.events).remove(&handle);
            Ok(())
        }
        other => Err(lost(handle, other)),
    }
}

pub fn record(handle: usize, argument: StreamArg, flags: u32) -> Res {
    let event = find(handle)?;
    let stream = stream::usable(argument)?;
    if flags & !RECORD_EXTERNAL != 0 {
        return Err(code::INVALID_VALUE);
    }
    if event.context.id != stream.context.id {
        return Err(code::INVALID_HANDLE);
    }
    match capture::route(&stream)? {
        Route::Run => event.record_on(&stream),
        Route::Record if flags == RECORD_EXTERNAL => capture::record(&stream, NodeWork::RecordEvent(handle))?,
        Route::Record => {
            if let Some(point) = capture::point(&stream) {
                *lock(&event.state) = State::Captured(point);
            }
        }
    }
    Ok(())
}

fn query(handle: usize) -> Res {
    let event = find(handle)?;
    crate::lifecycle::usable()?;
    event.context.check()?;
    event.observe()?;
    match event.is_complete() {
        true => event.context.check_error(),
        false => Err(code::NOT_READY),
    }
}

fn synchronize(handle: usize) -> Res {
    let event = find(handle)?;
    crate::lifecycle::usable()?;
    event.context.check()?;
    event.observe()?;
    event.pending().iter().for_each(Ticket::wait);
    crate::mempool::settle_all();
    event.context.check_error()
}

/// `cuStreamWaitEvent`: later work of the stream waits for what the event stands for now.
pub fn wait_on_stream(argument: StreamArg, handle: usize, flags: u32) -> Res {
    let event = find(handle)?;
    let stream = stream::usable(argument)?;
    if flags & !WAIT_EXTERNAL != 0 {
        return Err(code::INVALID_VALUE);
    }
    let captured = match &*lock(&event.state) {
        State::Captured(point) => Some(point.clone()),
        _ => None,
    };
    if let Some(point) = captured {
        return capture::join(&stream, &point);
    }
    match capture::route(&stream)? {
        Route::Record if flags == WAIT_EXTERNAL => {
            return capture::record(&stream, NodeWork::WaitEvent(handle));
        }
        Route::Record if matches!(&*lock(&event.state), State::Recorded { .. }) => {
            return Err(capture::wait_outside(&stream));
        }
        Route::Record => return Ok(()),
        Route::Run if flags == WAIT_EXTERNAL => return Err(code::INVALID_VALUE),
        Route::Run => {}
    }
    let waits = event.pending();
    if !waits.is_empty() {
        stream.submit(Work::Nothing, waits);
    }
    Ok(())
}

/// The context that an argument of `cuCtxRecordEvent` and its kin names.
fn context_of(handle: usize) -> Res<&'static Context> {
    let context = match handle {
        0 => return context::current(),
        _ => Context::of(handle)?,
    };
    context.check()?;
    Ok(context)
}

fn record_context(handle: usize, event: usize) -> Res {
    let context = context_of(handle)?;
    let event = find(event)?;
    if event.context.id != context.id {
        return Err(code::INVALID_HANDLE);
    }
    // The time of completion is nobody's operation; a stamp of now will do for idle contexts only.
    capture::disturbed(context)?;
    let waits = context.pending();
    let stamp = waits.is_empty().then(|| event.stamp_now()).flatten();
    event.record(waits, stamp);
    Ok(())
}

fn wait_context(handle: usize, event: usize) -> Res {
    let context = context_of(handle)?;
    let event = find(event)?;
    if matches!(&*lock(&event.state), State::Captured(_)) {
        return Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    capture::disturbed(context)?;
    let waits = event.pending();
    if !waits.is_empty() {
        context.add_barrier(waits);
    }
    Ok(())
}

fn elapsed(out: Out<f32>, start: usize, end: usize) -> Res {
    out.check()?;
    let (start, end) = (find(start)?, find(end)?);
    if !start.has_timing() || !end.has_timing() || start.context.device != end.context.device {
        return Err(code::INVALID_HANDLE);
    }
    let time = |event: &Event| {
        let complete = event.is_complete();
        match &*lock(&event.state) {
            State::Never => Err(code::INVALID_HANDLE),
            State::Captured(_) => Err(code::CAPTURED_EVENT),
            _ if !complete => Err(code::NOT_READY),
            State::Recorded { stamp, .. } => {
                let reached = stamp.as_ref().and_then(|stamp| stamp.0.get().copied());
                reached.ok_or(code::INVALID_HANDLE)
            }
        }
    };
    let (start, end) = (time(&start)?, time(&end)?);
    let nanoseconds = i128::from(end) - i128::from(start);
    out.put(nanoseconds as f32 / 1e6)
}

exports! {
    fn cuEventCreate(out: Out<usize>, flags: u32) => create(out, flags);
    early fn cuEventDestroy(event: usize) => early(event).and_then(|()| destroy(event));
    early fn cuEventDestroy_v2(event: usize) => early(event).and_then(|()| destroy(event));
    stream fn cuEventRecord, cuEventRecord_ptsz(event: usize; s) => record(event, s, 0);
    early fn cuEventQuery(event: usize) => early(event).and_then(|()| query(event));
    early fn cuEventSynchronize(event: usize) => early(event).and_then(|()| synchronize(event));
    fn cuEventElapsedTime(out: Out<f32>, start: usize, end: usize) => elapsed(out, start, end);
    fn cuEventElapsedTime_v2(out: Out<f32>, start: usize, end: usize) => elapsed(out, start, end);
    fn cuCtxRecordEvent(context: usize, event: usize) => record_context(context, event);
    fn cuCtxWaitEvent(context: usize, event: usize) => wait_context(context, event);
    stream fn cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz(event: usize; s; flags: u32)
        => record(event, s, flags);
}

/// A null event is refused even before the driver is initialised.
fn early(handle: usize) -> Res {
    match handle {
        0 => Err(code::INVALID_HANDLE),
        _ => crate::lifecycle::usable(),
    }
}
