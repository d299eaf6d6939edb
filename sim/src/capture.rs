//! Stream capture: while a stream captures, its operations become nodes of a graph instead of being run, and
//! calls that would disturb a capture are refused and spoil it.
//!
//! Three classes of calls meet it: potentially unsafe ones, barred according to the modes of thread and
//! capture (`unsafe_call`); those in conflict with the capture itself, barred in every mode (`disturbed`,
//! `legacy_use`); and all others.

use crate::call::{In, Out, Res};
use crate::code;
use crate::context::Context;
use crate::graph::{Graph, Node, NodeWork};
use crate::stream::{self, Kind, Stream, StreamArg};
use crate::sync::{lock, read, write};
use cudarc::driver::sys::{
    CUstreamCaptureMode, CUstreamCaptureStatus, CUstreamUpdateCaptureDependencies_flags,
};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};

const GLOBAL: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL as u32;
const THREAD_LOCAL: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as u32;
const RELAXED: u32 = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;

/// One capture, from `cuStreamBeginCapture` to `cuStreamEndCapture`.
pub struct Capture {
    id: u64,
    mode: u32,
    /// The thread that began it.
    thread: u64,
    /// The stream that it began on.
    origin: u64,
    graph: usize,
    nodes: Mutex<Vec<Node>>,
    streams: Mutex<Vec<Arc<Stream>>>,
    invalid: AtomicBool,
    ended: AtomicBool,
}

/// What a capturing stream knows of its capture.
#[derive(Clone)]
pub struct Joined {
    capture: Arc<Capture>,
    /// The nodes that the stream's next operation depends on.
    frontier: Vec<usize>,
    /// Handed out by `cuStreamGetCaptureInfo`; valid until the stream's next operation.
    shown: Vec<usize>,
}

/// What an event recorded in a capture stands for.
#[derive(Clone)]
pub struct CapturedPoint {
    capture: Arc<Capture>,
    frontier: Vec<usize>,
}

/// Captures that go on; nearly always there are none.
static ACTIVE: RwLock<Vec<Arc<Capture>>> = RwLock::new(Vec::new());
static ACTIVE_COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    if THREAD.get() == 0 {
        THREAD.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    THREAD.get()
}

#[inline]
fn any() -> bool {
    ACTIVE_COUNT.load(Ordering::Acquire) > 0
}

impl Capture {
    fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }

    fn check(&self) -> Res {
        match self.invalid.load(Ordering::Acquire) {
            true => Err(code::STREAM_CAPTURE_INVALIDATED),
            false => Ok(()),
        }
    }

    /// Takes its streams out of the capture.
    fn end(&self) {
        self.ended.store(true, Ordering::Release);
        let streams = std::mem::take(&mut *lock(&self.streams));
        for stream in streams {
            *lock(&stream.capture) = None;
        }
        let mut active = write(&ACTIVE);
        active.retain(|capture| capture.id != self.id);
        ACTIVE_COUNT.store(active.len(), Ordering::Release);
    }

    fn uses(&self, wanted: impl Fn(&Stream) -> bool) -> bool {
        lock(&self.streams).iter().any(|stream| wanted(stream))
    }
}

/// Invalidates the captures that `wanted` picks; whether there were any.
fn spoil(wanted: impl Fn(&Capture) -> bool) -> bool {
    let active = read(&ACTIVE);
    let mut found = false;
    for capture in active.iter().filter(|capture| wanted(capture)) {
        capture.invalidate();
        found = true;
    }
    found
}

/// For potentially unsafe calls: refused if a capture and the thread's mode say so.
#[inline]
pub fn unsafe_call() -> Res {
    if !any() {
        return Ok(());
    }
    let (thread, mode) = (this_thread(), MODE.get());
    let conflicts = |capture: &Capture| match (mode, capture.thread == thread) {
        (RELAXED, _) => false,
        (_, true) => capture.mode != RELAXED,
        (_, false) => mode == GLOBAL && capture.mode == GLOBAL,
    };
    match spoil(conflicts) {
        true => Err(code::STREAM_CAPTURE_UNSUPPORTED),
        false => Ok(()),
    }
}

/// For calls that no capture of the context survives, such as its synchronisation.
pub fn disturbed(context: &Context) -> Res {
    let of_context = |stream: &Stream| stream.context.id == context.id;
    match any() && spoil(|capture| capture.uses(of_context)) {
        true => Err(code::STREAM_CAPTURE_UNSUPPORTED),
        false => Ok(()),
    }
}

fn is_blocking_of(context: &Context) -> impl Fn(&Stream) -> bool + '_ {
    |stream| stream.context.id == context.id && stream.kind.is_blocking()
}

/// For uses of the legacy stream, which would have to wait for the context's capturing blocking streams.
fn legacy_use(context: &Context) -> Res {
    match spoil(|capture| capture.uses(is_blocking_of(context))) {
        true => Err(code::STREAM_CAPTURE_IMPLICIT),
        false => Ok(()),
    }
}

/// What becomes of an operation given to a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Route {
    Run,
    Record,
}

pub fn route(stream: &Arc<Stream>) -> Res<Route> {
    if !any() {
        return Ok(Route::Run);
    }
    if let Some(joined) = &*lock(&stream.capture) {
        joined.capture.check()?;
        return Ok(Route::Record);
    }
    if stream.kind == Kind::Legacy {
        legacy_use(stream.context)?;
    }
    Ok(Route::Run)
}

/// For what waits or asks for a stream's work: in conflict with its own capture, potentially unsafe with
/// others'.
pub fn observed(stream: &Arc<Stream>) -> Res {
    if !any() {
        return Ok(());
    }
    if let Some(joined) = &*lock(&stream.capture) {
        joined.capture.invalidate();
        return Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    if stream.kind == Kind::Legacy {
        legacy_use(stream.context)?;
    }
    unsafe_call()
}

/// For calls that cannot be captured: the capture is spoilt.
pub fn not_capturable(stream: &Arc<Stream>) -> Res {
    match route(stream)? {
        Route::Run => Ok(()),
        Route::Record => {
            if let Some(joined) = &*lock(&stream.capture) {
                joined.capture.invalidate();
            }
            Err(code::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// Adds an operation of a capturing stream to its graph.
pub fn record(stream: &Arc<Stream>, work: NodeWork) -> Res {
    let mut slot = lock(&stream.capture);
    let joined = slot.as_mut().ok_or(code::ILLEGAL_STATE)?;
    joined.capture.check()?;
    let mut nodes = lock(&joined.capture.nodes);
    nodes.push(Node { after: std::mem::take(&mut joined.frontier), work });
    joined.frontier = vec![nodes.len() - 1];
    Ok(())
}

/// Whether the capture of this stream allocated the address, and has not freed it yet.
pub fn owns_allocation(stream: &Arc<Stream>, address: u64) -> bool {
    let slot = lock(&stream.capture);
    slot.as_ref().is_some_and(|joined| {
        let nodes = lock(&joined.capture.nodes);
        let count = |wanted: fn(&NodeWork) -> Option<u64>| {
            let matches = |node: &&Node| wanted(&node.work) == Some(address);
            nodes.iter().filter(matches).count()
        };
        count(NodeWork::allocates) > count(NodeWork::frees)
    })
}

/// Recording an event on a capturing stream.
pub fn point(stream: &Arc<Stream>) -> Option<CapturedPoint> {
    lock(&stream.capture)
        .as_ref()
        .map(|joined| CapturedPoint { capture: joined.capture.clone(), frontier: joined.frontier.clone() })
}

/// A stream waits for an event recorded in a capture: it joins that capture.
pub fn join(stream: &Arc<Stream>, point: &CapturedPoint) -> Res {
    if point.capture.ended.load(Ordering::Acquire) {
        return Err(code::CAPTURED_EVENT);
    }
    point.capture.check()?;
    if stream.kind == Kind::Legacy {
        point.capture.invalidate();
        return Err(code::STREAM_CAPTURE_IMPLICIT);
    }
    let mut slot = lock(&stream.capture);
    match &mut *slot {
        None => {
            *slot = Some(Joined {
                capture: point.capture.clone(),
                frontier: point.frontier.clone(),
                shown: Vec::new(),
            });
            lock(&point.capture.streams).push(stream.clone());
            Ok(())
        }
        Some(joined) if joined.capture.id == point.capture.id => {
            for &node in &point.frontier {
                if !joined.frontier.contains(&node) {
                    joined.frontier.push(node);
                }
            }
            Ok(())
        }
        Some(joined) => {
            joined.capture.invalidate();
            point.capture.invalidate();
            Err(code::STREAM_CAPTURE_MERGE)
        }
    }
}

/// A capturing stream waits for work outside its capture.
pub fn wait_outside(stream: &Arc<Stream>) -> i32 {
    if let Some(joined) = &*lock(&stream.capture) {
        joined.capture.invalidate();
    }
    code::STREAM_CAPTURE_ISOLATION
}

/// A stream that captures is destroyed.
pub fn abandon(stream: &Arc<Stream>) {
    let joined = lock(&stream.capture).take();
    let Some(Joined { capture, .. }) = joined else {
        return;
    };
    capture.invalidate();
    // Nobody could end it any more.
    if capture.origin == stream.id {
        capture.end();
        let nodes = std::mem::take(&mut *lock(&capture.nodes));
        Graph::discard(capture.graph, nodes);
    }
}

fn begin(argument: StreamArg, mode: u32) -> Res {
    let stream = stream::usable(argument)?;
    if stream.kind == Kind::Legacy {
        return Err(code::STREAM_CAPTURE_UNSUPPORTED);
    }
    if mode > RELAXED {
        return Err(code::INVALID_VALUE);
    }
    let mut slot = lock(&stream.capture);
    if slot.is_some() {
        return Err(code::ILLEGAL_STATE);
    }
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let capture = Arc::new(Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        mode,
        thread: this_thread(),
        origin: stream.id,
        graph: Graph::create(Vec::new())?,
        nodes: Mutex::new(Vec::new()),
        streams: Mutex::new(vec![stream.clone()]),
        invalid: AtomicBool::new(false),
        ended: AtomicBool::new(false),
    });
    *slot = Some(Joined { capture: capture.clone(), frontier: Vec::new(), shown: Vec::new() });
    let mut active = write(&ACTIVE);
    active.push(capture);
    ACTIVE_COUNT.store(active.len(), Ordering::Release);
    Ok(())
}

fn end(argument: StreamArg, out: Out<usize>) -> Res {
    let stream = stream::usable(argument)?;
    out.put(0)?;
    let joined = lock(&stream.capture).clone().ok_or(code::ILLEGAL_STATE)?;
    let capture = &joined.capture;
    if capture.mode != RELAXED && capture.thread != this_thread() {
        return Err(code::STREAM_CAPTURE_WRONG_THREAD);
    }
    if capture.origin != stream.id {
        capture.invalidate();
        return Err(code::STREAM_CAPTURE_UNMATCHED);
    }
    capture.end();
    let nodes = std::mem::take(&mut *lock(&capture.nodes));
    let mut result = capture.check();
    let is_leaf = |index: &usize| !nodes.iter().any(|node| node.after.contains(index));
    let mut leaves = (0..nodes.len()).filter(is_leaf);
    if result.is_ok() && leaves.any(|leaf| !joined.frontier.contains(&leaf)) {
        result = Err(code::STREAM_CAPTURE_UNJOINED);
    }
    if result.is_err() {
        Graph::discard(capture.graph, nodes);
        return result;
    }
    Graph::fill(capture.graph, nodes);
    out.put(capture.graph)
}

const STATUS_NONE: i32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as i32;
const STATUS_ACTIVE: i32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as i32;
const STATUS_INVALIDATED: i32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as i32;

/// The capture of a stream, for questions about it. The legacy stream cannot be asked while it would matter.
fn asked(argument: StreamArg) -> Res<(Arc<Stream>, i32)> {
    let stream = stream::usable(argument)?;
    if stream.kind == Kind::Legacy {
        let concerned = is_blocking_of(stream.context);
        if any() && read(&ACTIVE).iter().any(|capture| capture.uses(&concerned)) {
            return Err(code::STREAM_CAPTURE_IMPLICIT);
        }
    }
    let status = match &*lock(&stream.capture) {
        None => STATUS_NONE,
        Some(joined) if joined.capture.check().is_err() => STATUS_INVALIDATED,
        Some(_) => STATUS_ACTIVE,
    };
    Ok((stream, status))
}

fn is_capturing(argument: StreamArg, out: Out<i32>) -> Res {
    out.check()?;
    out.put(asked(argument)?.1)
}

/// Where `cuStreamGetCaptureInfo` puts what it tells; every form of it fills some of these.
struct Info {
    id: Out<u64>,
    graph: Out<usize>,
    dependencies: Out<*const usize>,
    edges: Out<usize>,
    count: Out<usize>,
}

fn info(argument: StreamArg, status: Out<i32>, wanted: Info) -> Res {
    status.check()?;
    let (stream, state) = asked(argument)?;
    status.put(state)?;
    if state != STATUS_ACTIVE {
        return Ok(());
    }
    if let Some(joined) = &mut *lock(&stream.capture) {
        let handle = |&node: &usize| Graph::node_handle(joined.capture.graph, node);
        joined.shown = joined.frontier.iter().map(handle).collect();
        wanted.id.put_if_wanted(joined.capture.id);
        wanted.graph.put_if_wanted(joined.capture.graph);
        wanted.dependencies.put_if_wanted(joined.shown.as_ptr());
        wanted.edges.put_if_wanted(0);
        wanted.count.put_if_wanted(joined.shown.len());
    }
    Ok(())
}

/// The only flag of `cuStreamUpdateCaptureDependencies`.
const SET_DEPENDENCIES: u32 =
    CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;

fn update_dependencies(argument: StreamArg, nodes: In<usize>, count: usize, flags: u32) -> Res {
    let stream = stream::usable(argument)?;
    if flags & !SET_DEPENDENCIES != 0 {
        return Err(code::INVALID_VALUE);
    }
    let handles = nodes.list(count)?;
    let mut slot = lock(&stream.capture);
    let joined = slot.as_mut().ok_or(code::ILLEGAL_STATE)?;
    joined.capture.check()?;
    let known = lock(&joined.capture.nodes).len();
    let index = |handle| Graph::node_index(joined.capture.graph, handle).filter(|&i| i < known);
    let indices: Option<Vec<usize>> = handles.into_iter().map(index).collect();
    let indices = indices.ok_or(code::INVALID_VALUE)?;
    if flags == SET_DEPENDENCIES {
        joined.frontier.clear();
    }
    joined.frontier.extend(indices);
    Ok(())
}

/// The thread's mode is swapped with the caller's.
fn exchange_mode(mode: Out<u32>) -> Res {
    mode.check()?;
    // SAFETY: not null, and by the C contract a readable value.
    let wanted = unsafe { mode.as_ptr().read() };
    if !matches!(wanted, GLOBAL | THREAD_LOCAL | RELAXED) {
        return Err(code::INVALID_VALUE);
    }
    mode.put(MODE.replace(wanted))
}

exports! {
    stream fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz(; s) => begin(s, GLOBAL);
    stream fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(; s; mode: u32) => begin(s, mode);
    stream fn cuStreamEndCapture, cuStreamEndCapture_ptsz(; s; graph: Out<usize>) => end(s, graph);
    stream fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz(; s; status: Out<i32>) => is_capturing(s, status);
    stream fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz(; s; status: Out<i32>, id: Out<u64>)
        => info(s, status, Info {
            id, graph: Out::NULL, dependencies: Out::NULL, edges: Out::NULL, count: Out::NULL,
        });
    stream fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz(; s; status: Out<i32>, id: Out<u64>,
        graph: Out<usize>, dependencies: Out<*const usize>, count: Out<usize>)
        => info(s, status, Info { id, graph, dependencies, edges: Out::NULL, count });
    stream fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(; s; status: Out<i32>, id: Out<u64>,
        graph: Out<usize>, dependencies: Out<*const usize>, edges: Out<usize>, count: Out<usize>)
        => info(s, status, Info { id, graph, dependencies, edges, count });
    stream fn cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_ptsz(; s; nodes: In<usize>,
        count: usize, flags: u32) => update_dependencies(s, nodes, count, flags);
    stream fn cuStreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies_v2_ptsz(; s;
        nodes: In<usize>, _edges: usize, count: usize, flags: u32)
        => update_dependencies(s, nodes, count, flags);
    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) => exchange_mode(mode);
}
