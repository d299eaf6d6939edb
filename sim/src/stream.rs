//! Streams: queues of work, each drained by a thread of its own that exists only while there is something to
//! do.
//!
//! Order between streams is a matter of tickets. A ticket names an operation of a stream (by its number
//! there) and is done once that has run. When an operation is submitted it takes along the tickets it has to
//! wait for: the legacy stream's unfinished work for a blocking stream, all blocking streams' work for the
//! legacy stream, an event's for a waiting stream. Tickets only ever name operations submitted earlier, so no
//! cycle can arise.

use crate::call::Res;
use crate::capture::{self, Route};
use crate::clock::{self, Condition};
use crate::context::{self, Context};
use crate::graph::NodeWork;
use crate::registry::{Found, Registry};
use crate::sync::lock;
use crate::work::{self, Work};
use crate::{code, lifecycle, report};
use cudarc::driver::sys::CUstream_flags;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const LEAST_PRIORITY: i32 = 0;
pub const GREATEST_PRIORITY: i32 = -5;

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, which are macros of the header that cudarc does not have.
pub const LEGACY_HANDLE: usize = 1;
pub const PER_THREAD_HANDLE: usize = 2;

const DEFAULT: u32 = CUstream_flags::CU_STREAM_DEFAULT as u32;
const NON_BLOCKING: u32 = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Legacy,
    PerThread,
    Blocking,
    NonBlocking,
}

impl Kind {
    /// Whether it synchronises with the legacy stream.
    pub fn is_blocking(self) -> bool {
        matches!(self, Kind::PerThread | Kind::Blocking)
    }
}

/// A stream argument, and which default stream its call means by 0.
#[derive(Clone, Copy)]
pub struct StreamArg {
    pub raw: usize,
    per_thread: bool,
}

impl StreamArg {
    pub fn legacy(raw: usize) -> StreamArg {
        StreamArg { raw, per_thread: false }
    }

    pub fn per_thread(raw: usize) -> StreamArg {
        StreamArg { raw, per_thread: true }
    }

    /// The handle with 0 resolved.
    pub fn handle(self) -> usize {
        match (self.raw, self.per_thread) {
            (0, false) => LEGACY_HANDLE,
            (0, true) => PER_THREAD_HANDLE,
            (raw, _) => raw,
        }
    }
}

/// An operation of a stream.
#[derive(Clone)]
pub struct Ticket {
    stream: Arc<Stream>,
    number: u64,
}

impl Ticket {
    pub fn is_done(&self) -> bool {
        self.stream.finished.load(Ordering::Acquire) >= self.number
    }

    pub fn wait(&self) {
        if self.is_done() {
            return;
        }
        let mut queue = lock(&self.stream.queue);
        // At the process's end work stops, and nobody may be left waiting for it.
        while !self.is_done() && !lifecycle::exiting() {
            queue = self.stream.progress.wait(&self.stream.queue, queue);
        }
    }
}

struct Operation {
    waits: Vec<Ticket>,
    work: Option<Work>,
    /// The device memory it will touch: base and size.
    touches: [(u64, u64); 2],
}

struct Queue {
    /// The one in front is being done; it stays until it is finished.
    operations: VecDeque<Operation>,
    has_worker: bool,
    closed: bool,
}

pub struct Stream {
    pub id: u64,
    pub context: &'static Context,
    pub kind: Kind,
    pub flags: u32,
    pub priority: i32,
    /// The life of its context that it belongs to.
    life: u64,
    handle: AtomicUsize,
    submitted: AtomicU64,
    finished: AtomicU64,
    queue: Mutex<Queue>,
    /// The capture it takes part in.
    pub capture: Mutex<Option<capture::Joined>>,
    /// Something was submitted.
    arrival: Condition,
    /// Something was finished.
    progress: Condition,
}

static STREAMS: Registry<Stream> = Registry::new(0x5500_0000_1000);

/// Operations submitted and not finished, anywhere.
static INFLIGHT: AtomicU64 = AtomicU64::new(0);

/// An idle worker stays that long, because starting a thread is dear.
const WORKER_LINGERS: Duration = Duration::from_millis(200);
const WORKER_STACK: usize = 1 << 20;

/// A thread's own default streams; they close when the thread ends.
struct PerThread(Vec<Arc<Stream>>);

impl Drop for PerThread {
    fn drop(&mut self) {
        self.0.iter().for_each(|stream| stream.close());
    }
}

thread_local! {
    static PER_THREAD: RefCell<PerThread> = const { RefCell::new(PerThread(Vec::new())) };
}

pub fn live() -> u64 {
    STREAMS.live()
}

impl Stream {
    pub fn create(context: &'static Context, kind: Kind, flags: u32, priority: i32) -> Arc<Stream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Stream {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            context,
            kind,
            flags,
            priority: priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY),
            life: context.life(),
            handle: AtomicUsize::new(0),
            submitted: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            queue: Mutex::new(Queue { operations: VecDeque::new(), has_worker: false, closed: false }),
            capture: Mutex::new(None),
            arrival: Condition::new(),
            progress: Condition::new(),
        })
    }

    /// Its last operation, unless all are finished.
    pub fn pending(self: &Arc<Self>) -> Option<Ticket> {
        let number = self.submitted.load(Ordering::Acquire);
        (self.finished.load(Ordering::Acquire) < number).then(|| Ticket { stream: self.clone(), number })
    }

    /// Unfinished work of others that the next operation has to wait for.
    fn waits(self: &Arc<Self>) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        self.context.pending_barrier(&mut tickets);
        if self.context.inflight.load(Ordering::Acquire) > 0 {
            match self.kind {
                Kind::Legacy => self.context.pending_blocking(&mut tickets),
                Kind::PerThread | Kind::Blocking => tickets.extend(self.context.pending_legacy()),
                Kind::NonBlocking => {}
            }
        }
        tickets
    }

    /// Everything that an event recorded now stands for: empty if the stream is idle.
    pub fn outstanding(self: &Arc<Self>) -> Vec<Ticket> {
        let mut tickets = self.waits();
        tickets.extend(self.pending());
        tickets
    }

    pub fn is_idle(self: &Arc<Self>) -> bool {
        self.outstanding().is_empty()
    }

    /// Waits for the work submitted so far.
    pub fn wait(self: &Arc<Self>) {
        self.outstanding().iter().for_each(Ticket::wait);
    }

    /// Puts work into the queue, behind `more` tickets too.
    pub fn submit(self: &Arc<Self>, work: Work, more: Vec<Ticket>) -> Ticket {
        let mut waits = self.waits();
        waits.extend(more);
        let operation = Operation { waits, touches: work.touches(), work: Some(work) };
        INFLIGHT.fetch_add(1, Ordering::AcqRel);
        self.context.inflight.fetch_add(1, Ordering::AcqRel);
        let mut queue = lock(&self.queue);
        let number = self.submitted.fetch_add(1, Ordering::AcqRel) + 1;
        queue.operations.push_back(operation);
        let needs_worker = !std::mem::replace(&mut queue.has_worker, true);
        drop(queue);
        if needs_worker {
            let stream = self.clone();
            let builder =
                std::thread::Builder::new().name("cudasim stream".to_string()).stack_size(WORKER_STACK);
            clock::expect();
            let worker = move || {
                clock::enter();
                stream.work();
            };
            if builder.spawn(worker).is_err() {
                // No thread to be had: the work is done here and now.
                clock::unexpect();
                self.clone().work();
            }
        } else {
            self.arrival.notify_all();
        }
        Ticket { stream: self.clone(), number }
    }

    /// The worker: does what is in the queue, and ends when nothing came for a while.
    fn work(self: Arc<Self>) {
        loop {
            let (waits, work) = {
                let mut queue = lock(&self.queue);
                loop {
                    if let Some(operation) = queue.operations.front_mut() {
                        break (std::mem::take(&mut operation.waits), operation.work.take());
                    }
                    let lingering = !queue.closed;
                    let timed_out;
                    (queue, timed_out) = match lingering {
                        true => self.arrival.wait_for(&self.queue, queue, WORKER_LINGERS),
                        false => (queue, true),
                    };
                    if timed_out && queue.operations.is_empty() {
                        queue.has_worker = false;
                        let closed = queue.closed;
                        drop(queue);
                        if closed {
                            self.context.forget_stream(self.id);
                        }
                        return;
                    }
                }
            };
            waits.iter().for_each(Ticket::wait);
            if let Some(work) = work {
                work::run(&self, work);
            }
            {
                let mut queue = lock(&self.queue);
                queue.operations.pop_front();
                self.finished.fetch_add(1, Ordering::AcqRel);
                self.context.inflight.fetch_sub(1, Ordering::AcqRel);
                INFLIGHT.fetch_sub(1, Ordering::AcqRel);
            }
            self.progress.notify_all();
        }
    }

    /// No more work will come; the stream is gone when what is there is done.
    pub fn close(self: &Arc<Self>) {
        let idle = {
            let mut queue = lock(&self.queue);
            queue.closed = true;
            !queue.has_worker
        };
        if idle {
            self.context.forget_stream(self.id);
        } else {
            self.arrival.notify_all();
        }
    }

    /// Its context ended.
    pub fn orphan(self: &Arc<Self>) {
        STREAMS.orphan(self.handle.load(Ordering::Relaxed));
        capture::abandon(self);
        self.close();
    }

    fn touches(&self, base: u64, size: u64) -> bool {
        let queue = lock(&self.queue);
        let overlaps = |&(start, length): &(u64, u64)| {
            length > 0 && start < base.saturating_add(size) && base < start.saturating_add(length)
        };
        queue.operations.iter().any(|operation| operation.touches.iter().any(overlaps))
    }
}

/// Creates a stream with a handle in the current context.
pub fn create(flags: u32, priority: i32) -> Res<usize> {
    let context = context::current()?;
    let kind = match flags {
        DEFAULT => Kind::Blocking,
        NON_BLOCKING => Kind::NonBlocking,
        _ => return Err(code::INVALID_VALUE),
    };
    let made = STREAMS.add(|handle| {
        let stream = Stream::create(context, kind, flags, priority);
        stream.handle.store(handle, Ordering::Relaxed);
        stream
    });
    let (handle, stream) = made.ok_or(code::OUT_OF_MEMORY)?;
    context.add_stream(stream);
    Ok(handle)
}

pub fn destroy(handle: usize) -> Res {
    match handle {
        0..=PER_THREAD_HANDLE => Err(code::INVALID_HANDLE),
        _ => match STREAMS.remove(handle) {
            Found::Live(stream) => {
                capture::abandon(&stream);
                stream.close();
                Ok(())
            }
            Found::Orphaned => Err(code::INVALID_HANDLE),
            Found::Dead => Err(dead(handle)),
            Found::Unknown => Err(unknown(handle)),
        },
    }
}

fn dead(handle: usize) -> i32 {
    report::fatal_misuse(&format!("stream {handle:#x} is used after it was destroyed"))
}

fn unknown(handle: usize) -> i32 {
    report::fatal_misuse(&format!("{handle:#x} is no stream"))
}

fn per_thread(context: &'static Context) -> Arc<Stream> {
    let make = || {
        let stream = Stream::create(context, Kind::PerThread, 0, 0);
        context.add_stream(stream.clone());
        stream
    };
    let found = PER_THREAD.try_with(|streams| {
        let mut streams = streams.borrow_mut();
        let belongs =
            |stream: &&Arc<Stream>| stream.context.id == context.id && stream.life == context.life();
        if let Some(stream) = streams.0.iter().find(belongs) {
            return stream.clone();
        }
        streams.0.retain(|stream| stream.context.id != context.id);
        let stream = make();
        streams.0.push(stream.clone());
        stream
    });
    // The thread is ending: a stream for this one call.
    found.unwrap_or_else(|_| {
        let stream = make();
        stream.close();
        stream
    })
}

/// The stream an argument names, whatever the state of its context.
pub fn find(argument: StreamArg) -> Res<Arc<Stream>> {
    match argument.handle() {
        LEGACY_HANDLE => Ok(context::current()?.legacy().clone()),
        PER_THREAD_HANDLE => Ok(per_thread(context::current()?)),
        handle => match STREAMS.find(handle) {
            Found::Live(stream) => Ok(stream),
            Found::Orphaned => Err(code::CONTEXT_IS_DESTROYED),
            Found::Dead => Err(dead(handle)),
            Found::Unknown => Err(unknown(handle)),
        },
    }
}

/// The stream an argument names, ready for work.
pub fn usable(argument: StreamArg) -> Res<Arc<Stream>> {
    let stream = find(argument)?;
    stream.context.check()?;
    Ok(stream)
}

/// Submits work to the stream an argument names.
pub fn launch(argument: StreamArg, work: Work) -> Res {
    let stream = usable(argument)?;
    match capture::route(&stream)? {
        Route::Record => capture::record(&stream, NodeWork::Run(work)),
        Route::Run => {
            stream.submit(work, Vec::new());
            Ok(())
        }
    }
}

/// Whether nothing is submitted anywhere.
pub fn quiet() -> bool {
    INFLIGHT.load(Ordering::Acquire) == 0
}

/// Takes memory away from under pending work: that is reported, and the work's contexts are lost.
pub fn check_untouched(base: u64, size: u64, what: &str) {
    if quiet() {
        return;
    }
    for context in Context::all() {
        for stream in context.streams() {
            if stream.touches(base, size) {
                report::misuse(&format!(
                    "{what} of {base:#x} (+{size:#x}) under pending work of stream {} of context {}",
                    stream.id, context.id
                ));
                context.fail(code::ILLEGAL_ADDRESS);
            }
        }
    }
}
