//! Contexts, and the stack of current ones that each thread has.
//!
//! Contexts are never freed (there are few, and destroyed ones stay on other threads' stacks), so plain
//! references to them are safe, and finding the current one is a read of a thread-local.

use crate::call::{Out, Res};
use crate::settings::{DEFAULT_LIMITS, LIMITS};
use crate::stream::{Kind, Stream, Ticket};
use crate::sync::{lock, read, write};
use crate::{capture, classic, code, device, event, lifecycle, mempool, primary, report};
use cudarc::driver::sys::CUctx_flags;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

const ACTIVE: u8 = 0;
/// A primary context that nobody retains, or that was reset: its handle comes back to life when it is
/// retained.
const INACTIVE: u8 = 1;
const DESTROYED: u8 = 2;

pub struct Context {
    pub handle: usize,
    pub id: u64,
    pub device: usize,
    pub primary: bool,
    pub flags: AtomicU32,
    state: AtomicU8,
    /// How often it was reset; streams of threads belong to one life.
    life: AtomicU64,
    /// The sticky error, 0 for none.
    error: AtomicI32,
    /// Operations submitted and not finished, in all its streams.
    pub inflight: AtomicU64,
    streams: Mutex<Vec<Arc<Stream>>>,
    legacy: OnceLock<Arc<Stream>>,
    /// What all later work of the context waits for.
    barrier: Mutex<Vec<Ticket>>,
    has_barrier: AtomicBool,
    pub events: Mutex<HashSet<usize>>,
    /// Bit n: access to device n's memory is enabled.
    pub peers: AtomicU32,
    pub limits: Mutex<[usize; LIMITS]>,
}

static CONTEXTS: RwLock<Option<HashMap<usize, &'static Context>>> = RwLock::new(None);

/// A thread's stack is a list that needs no destructor, so that it works in other thread-locals' destructors.
/// What a thread leaves on it when it ends stays allocated.
struct Level {
    context: &'static Context,
    below: *mut Level,
}

thread_local! {
    static STACK: Cell<*mut Level> = const { Cell::new(std::ptr::null_mut()) };
}

impl Context {
    pub fn create(device: usize, primary: bool, flags: u32, active: bool) -> &'static Context {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let context: &'static Context = Box::leak(Box::new(Context {
            handle: 0x5c00_0000_0000 + id as usize * 4096,
            id,
            device,
            primary,
            flags: AtomicU32::new(flags),
            state: AtomicU8::new(if active { ACTIVE } else { INACTIVE }),
            life: AtomicU64::new(0),
            error: AtomicI32::new(0),
            inflight: AtomicU64::new(0),
            streams: Mutex::new(Vec::new()),
            legacy: OnceLock::new(),
            barrier: Mutex::new(Vec::new()),
            has_barrier: AtomicBool::new(false),
            events: Mutex::new(HashSet::new()),
            peers: AtomicU32::new(0),
            limits: Mutex::new(DEFAULT_LIMITS),
        }));
        write(&CONTEXTS).get_or_insert_with(HashMap::new).insert(context.handle, context);
        context
    }

    /// Finds the context of a handle; one that never existed is misuse (the real driver crashes).
    pub fn of(handle: usize) -> Res<&'static Context> {
        let found = read(&CONTEXTS).as_ref().and_then(|all| all.get(&handle).copied());
        found.ok_or_else(|| {
            report::fatal_misuse(&format!("{handle:#x} is no context"));
            code::INVALID_CONTEXT
        })
    }

    pub fn all() -> Vec<&'static Context> {
        let contexts = read(&CONTEXTS);
        contexts.as_ref().map_or(Vec::new(), |all| all.values().copied().collect())
    }

    pub fn is_active(&self) -> bool {
        self.state.load(Ordering::Acquire) == ACTIVE
    }

    pub fn is_destroyed(&self) -> bool {
        self.state.load(Ordering::Acquire) == DESTROYED
    }

    pub fn life(&self) -> u64 {
        self.life.load(Ordering::Acquire)
    }

    /// Whether work may be given to it: 709 once it is destroyed or reset, then its sticky error.
    pub fn check(&self) -> Res {
        if !self.is_active() {
            return Err(code::CONTEXT_IS_DESTROYED);
        }
        self.check_error()
    }

    pub fn check_error(&self) -> Res {
        if lifecycle::exiting() {
            return Err(code::DEINITIALIZED);
        }
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// Makes the error stick; the first one stays.
    pub fn fail(&self, code: i32) {
        let _ = self.error.compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
    }

    pub fn legacy(&'static self) -> &'static Arc<Stream> {
        self.legacy.get_or_init(|| Stream::create(self, Kind::Legacy, 0, 0))
    }

    pub fn add_stream(&self, stream: Arc<Stream>) {
        lock(&self.streams).push(stream);
    }

    pub fn forget_stream(&self, id: u64) {
        lock(&self.streams).retain(|stream| stream.id != id);
    }

    /// Its streams, the legacy one included.
    pub fn streams(&self) -> Vec<Arc<Stream>> {
        let mut all = lock(&self.streams).clone();
        all.extend(self.legacy.get().cloned());
        all
    }

    /// What the blocking streams have not finished.
    pub fn pending_blocking(&self, tickets: &mut Vec<Ticket>) {
        let streams = lock(&self.streams);
        let blocking = streams.iter().filter(|stream| stream.kind.is_blocking());
        tickets.extend(blocking.filter_map(|stream| stream.pending()));
    }

    pub fn pending_legacy(&self) -> Option<Ticket> {
        self.legacy.get().and_then(|stream| stream.pending())
    }

    /// What no stream of the context has finished, later work's barrier included.
    pub fn pending(&self) -> Vec<Ticket> {
        let mut tickets = Vec::new();
        self.pending_barrier(&mut tickets);
        if self.inflight.load(Ordering::Acquire) > 0 {
            let streams = self.streams();
            tickets.extend(streams.iter().filter_map(|stream| stream.pending()));
        }
        tickets
    }

    /// All work submitted later waits for these.
    pub fn add_barrier(&self, tickets: Vec<Ticket>) {
        let mut barrier = lock(&self.barrier);
        barrier.extend(tickets);
        self.has_barrier.store(true, Ordering::Release);
    }

    pub fn pending_barrier(&self, tickets: &mut Vec<Ticket>) {
        if !self.has_barrier.load(Ordering::Acquire) {
            return;
        }
        let mut barrier = lock(&self.barrier);
        barrier.retain(|ticket| !ticket.is_done());
        self.has_barrier.store(!barrier.is_empty(), Ordering::Release);
        tickets.extend(barrier.iter().cloned());
    }

    /// Waits for the work submitted so far.
    pub fn wait(&self) {
        self.pending().iter().for_each(Ticket::wait);
    }

    /// Ends the context's present life: its work is waited for, its streams, events and memory are gone.
    fn end(&self, state: u8) {
        self.state.store(state, Ordering::Release);
        self.life.fetch_add(1, Ordering::AcqRel);
        self.wait();
        // Both take locks of their own, so not under these.
        let streams = std::mem::take(&mut *lock(&self.streams));
        streams.iter().for_each(|stream| stream.orphan());
        let events = std::mem::take(&mut *lock(&self.events));
        events.into_iter().for_each(event::orphan);
        classic::free_all_of(self);
        self.peers.store(0, Ordering::Release);
    }

    pub fn deactivate(&self) {
        self.end(INACTIVE);
        self.error.store(0, Ordering::Release);
    }

    pub fn activate(&self) {
        self.state.store(ACTIVE, Ordering::Release);
    }
}

/// The top of the calling thread's stack, whatever its state.
#[inline]
pub fn top() -> Option<&'static Context> {
    let level = STACK.get();
    // SAFETY: levels are only freed by `pop`, on the same thread, after they left the stack.
    (!level.is_null()).then(|| unsafe { (*level).context })
}

/// The current context, ready for work.
#[inline]
pub fn current() -> Res<&'static Context> {
    let context = top().ok_or(code::INVALID_CONTEXT)?;
    context.check()?;
    Ok(context)
}

fn push(context: &'static Context) {
    STACK.set(Box::into_raw(Box::new(Level { context, below: STACK.get() })));
}

fn pop() -> Option<&'static Context> {
    let level = STACK.get();
    if level.is_null() {
        return None;
    }
    // SAFETY: every level comes from `push`, and this one is taken off the stack here.
    let level = unsafe { Box::from_raw(level) };
    STACK.set(level.below);
    Some(level.context)
}

fn create(out: Out<usize>, flags: u32, ordinal: i32) -> Res {
    out.check()?;
    primary::check_flags(flags, CUctx_flags::CU_CTX_FLAGS_MASK as u32)?;
    let device = device::get(ordinal)?;
    let context = Context::create(device.ordinal, false, flags, true);
    push(context);
    out.put(context.handle)
}

fn destroy(handle: usize) -> Res {
    if handle == 0 {
        return Err(code::INVALID_VALUE);
    }
    let context = Context::of(handle)?;
    if context.primary {
        return Err(code::INVALID_CONTEXT);
    }
    if context.is_destroyed() {
        return Err(code::CONTEXT_IS_DESTROYED);
    }
    context.end(DESTROYED);
    if top().is_some_and(|top| top.id == context.id) {
        pop();
    }
    Ok(())
}

fn push_current(handle: usize) -> Res {
    if handle == 0 {
        return Err(code::INVALID_VALUE);
    }
    push(Context::of(handle)?);
    Ok(())
}

fn pop_current(out: Out<usize>) -> Res {
    let context = pop().ok_or(code::INVALID_CONTEXT)?;
    out.put_if_wanted(context.handle);
    Ok(())
}

fn set_current(handle: usize) -> Res {
    if handle == 0 {
        pop();
        return Ok(());
    }
    let context = Context::of(handle)?;
    if top().is_some_and(|top| top.id == context.id) {
        return Ok(());
    }
    pop();
    push(context);
    Ok(())
}

fn get_current(out: Out<usize>) -> Res {
    out.put(top().map_or(0, |context| context.handle))
}

/// Queries that work for inactive contexts too, and only destroyed ones refuse.
fn existing(handle: usize) -> Res<&'static Context> {
    let context = match handle {
        0 => top().ok_or(code::INVALID_CONTEXT)?,
        _ => Context::of(handle)?,
    };
    if context.is_destroyed() {
        return Err(code::CONTEXT_IS_DESTROYED);
    }
    Ok(context)
}

fn get_device(out: Out<i32>, handle: usize) -> Res {
    out.check()?;
    out.put(existing(handle)?.device as i32)
}

fn synchronize(handle: usize) -> Res {
    let context = match handle {
        0 => current()?,
        _ => {
            let context = Context::of(handle)?;
            context.check()?;
            context
        }
    };
    capture::disturbed(context)?;
    context.wait();
    mempool::settle_all();
    context.check_error()
}

fn api_version(handle: usize, out: Out<u32>) -> Res {
    out.check()?;
    let context = match handle {
        0 => top().ok_or(code::INVALID_CONTEXT)?,
        _ => Context::of(handle)?,
    };
    if !context.is_active() {
        return Err(code::INVALID_CONTEXT);
    }
    out.put(3020)
}

fn get_id(handle: usize, out: Out<u64>) -> Res {
    out.check()?;
    let context = match handle {
        0 => current()?,
        _ => Context::of(handle)?,
    };
    if context.is_destroyed() {
        return Err(code::CONTEXT_IS_DESTROYED);
    }
    // A primary context that was reset is another one.
    out.put(context.id << 20 | context.life())
}

fn get_flags(out: Out<u32>) -> Res {
    out.check()?;
    out.put(existing(0)?.flags.load(Ordering::Relaxed))
}

fn set_flags(flags: u32) -> Res {
    let context = current()?;
    primary::check_flags(flags, primary::KNOWN_FLAGS)?;
    context.flags.store(flags, Ordering::Relaxed);
    Ok(())
}

fn priority_range(least: Out<i32>, greatest: Out<i32>) -> Res {
    current()?;
    least.put_if_wanted(crate::stream::LEAST_PRIORITY);
    greatest.put_if_wanted(crate::stream::GREATEST_PRIORITY);
    Ok(())
}

fn enable_peer(handle: usize, flags: u32, enable: bool) -> Res {
    let context = current()?;
    if flags != 0 || handle == 0 {
        return Err(code::INVALID_VALUE);
    }
    let peer = Context::of(handle)?;
    if peer.device == context.device {
        return Err(code::INVALID_DEVICE);
    }
    let bit = 1u32 << peer.device;
    let before = if enable {
        context.peers.fetch_or(bit, Ordering::AcqRel)
    } else {
        context.peers.fetch_and(!bit, Ordering::AcqRel)
    };
    match (enable, before & bit != 0) {
        (true, true) => Err(code::PEER_ACCESS_ALREADY_ENABLED),
        (false, false) => Err(code::PEER_ACCESS_NOT_ENABLED),
        _ => Ok(()),
    }
}

exports! {
    fn cuCtxCreate_v2(out: Out<usize>, flags: u32, device: i32) => create(out, flags, device);
    fn cuCtxCreate_v3(out: Out<usize>, _affinity: usize, _count: i32, flags: u32, device: i32)
        => create(out, flags, device);
    fn cuCtxCreate_v4(out: Out<usize>, _parameters: usize, flags: u32, device: i32)
        => create(out, flags, device);
    fn cuCtxDestroy(context: usize) => destroy(context);
    fn cuCtxDestroy_v2(context: usize) => destroy(context);
    fn cuCtxPushCurrent(context: usize) => push_current(context);
    fn cuCtxPushCurrent_v2(context: usize) => push_current(context);
    fn cuCtxPopCurrent(out: Out<usize>) => pop_current(out);
    fn cuCtxPopCurrent_v2(out: Out<usize>) => pop_current(out);
    fn cuCtxSetCurrent(context: usize) => set_current(context);
    fn cuCtxGetCurrent(out: Out<usize>) => get_current(out);
    fn cuCtxGetDevice(out: Out<i32>) => get_device(out, 0);
    fn cuCtxGetDevice_v2(out: Out<i32>, context: usize) => get_device(out, context);
    fn cuCtxSynchronize() => synchronize(0);
    fn cuCtxSynchronize_v2(context: usize) => synchronize(context);
    fn cuCtxGetApiVersion(context: usize, out: Out<u32>) => api_version(context, out);
    fn cuCtxGetId(context: usize, out: Out<u64>) => get_id(context, out);
    fn cuCtxGetFlags(out: Out<u32>) => get_flags(out);
    fn cuCtxSetFlags(flags: u32) => set_flags(flags);
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) => priority_range(least, greatest);
    fn cuCtxEnablePeerAccess(peer: usize, flags: u32) => enable_peer(peer, flags, true);
    fn cuCtxDisablePeerAccess(peer: usize) => enable_peer(peer, 0, false);
}
