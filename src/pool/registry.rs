//! Which arenas there are, which one a call means, and what concerns a whole device or context.
//!
//! Arenas are made for each pool and life of a context and never unmade, so that a stale pointer can always
//! be told; those of a pool that was destroyed serve the next one in their context. A program with one device
//! and one context, as most are, is told apart from all others: there a stream-ordered call needs no word
//! from the driver.

use super::arena::{Arena, next_use, state};
use super::options::{Backend, Options};
use super::types::{PoolId, StreamKey};
use super::{settings, waiters};
use crate::driver::context::{self, Context};
use crate::driver::{self, Api, Ctx};
use crate::error::{Result, Status, bail, fail};
use crate::logging::{Size, log_line};
use crate::sync::clock::{self, Moment};
use crate::sync::lock::{Guard, Lock, Rank};
use crate::vmem::Mapper;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering::*};
use core::time::Duration;

/// Most arenas in the life of a process. A limit, because lost ones stay known and every free may have to
/// look at them.
const MAX_ARENAS: usize = 1024;
/// How long a wait for several arenas stays with one of them, at first and at most.
const SHORTEST_TURN: Duration = Duration::from_millis(1);
const LONGEST_TURN: Duration = Duration::from_millis(32);

static ARENAS: [AtomicPtr<Arena>; MAX_ARENAS] = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_ARENAS];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The default pool's arena in a program that has one device and has shown one context.
static ONLY: AtomicPtr<Arena> = AtomicPtr::new(ptr::null_mut());
/// The program has shown one device and one context.
static ONE_CONTEXT: AtomicBool = AtomicBool::new(false);
static ADDING: Lock<()> = Lock::new(Rank::Arenas, ());

// ---- Which there are ----

/// All arenas, newest first.
pub fn all() -> impl Iterator<Item = &'static Arena> {
    let count = COUNT.load(Acquire).min(MAX_ARENAS);
    ARENAS.iter().take(count).rev().filter_map(|slot| {
        // SAFETY: a slot below the count holds null or an arena that is never freed.
        unsafe { slot.load(Acquire).as_ref() }
    })
}

/// The arenas that are alive.
fn living() -> impl Iterator<Item = &'static Arena> {
    all().filter(|a| !a.is_lost())
}

/// The arenas on a device that are alive.
pub fn on(device: i32) -> impl Iterator<Item = &'static Arena> {
    living().filter(move |a| a.device() == device)
}

/// The living arenas in a context.
pub fn within(context: Context) -> impl Iterator<Item = &'static Arena> {
    living().filter(move |a| a.mapper.context == context)
}

/// The arenas of a pool, lost ones too.
pub fn of_pool(pool: PoolId) -> impl Iterator<Item = &'static Arena> {
    all().filter(move |a| a.pool() == pool)
}

/// The arenas of a pool that are alive.
pub fn living_of(pool: PoolId) -> impl Iterator<Item = &'static Arena> {
    of_pool(pool).filter(|a| !a.is_lost())
}

/// Arenas that are alive on a device: those without a pool first, then the least recently used.
pub fn idlest_first(device: i32) -> impl Iterator<Item = &'static Arena> {
    for arena in on(device) {
        arena.catch_up_use();
    }
    // Arenas that are used meanwhile become the latest once, not again and again: the walk comes to an end.
    let until = next_use();
    let order = move |a: &Arena| (a.pool() != PoolId::NONE, a.used().min(until), ptr::from_ref(a).addr());
    let mut before = (false, 0, 0);
    core::iter::from_fn(move || {
        let rest = on(device).filter(|a| order(a) > before);
        let next = rest.min_by_key(|a| order(a))?;
        before = order(next);
        Some(next)
    })
}

/// Notes that the arena is used now, where there are several to choose from when memory runs out.
#[inline]
pub fn note_use(arena: &Arena) {
    if COUNT.load(Relaxed) > 1 {
        arena.set_used();
    }
}

// ---- Which one a call means ----

/// The default pool's arena, in a program that needs no more than one context.
#[inline]
pub fn only() -> Option<&'static Arena> {
    // SAFETY: null or an arena that is never freed.
    unsafe { ONLY.load(Acquire).as_ref() }
}

/// Whether the program has shown one device and one context, so that the driver need not be asked for it.
pub fn is_one_context() -> bool {
    ONE_CONTEXT.load(Acquire)
}

/// The arena of any pool in such a program.
pub fn only_of(pool: PoolId) -> Option<&'static Arena> {
    living_of(pool).next().filter(|_| is_one_context())
}

/// The arena that an address belongs to.
#[inline]
pub fn by_address(address: u64) -> Result<&'static Arena> {
    if let Some(arena) = only().filter(|a| a.has_in_range(address)) {
        return Ok(arena);
    }
    // `cuMemAlloc` addresses of a context that is gone may be given again, so the living are asked first.
    let living = || living().filter(|a| a.has_in_chunks(address));
    let found = all().find(|a| a.has_in_range(address));
    if found.is_none()
        && living().nth(1).is_some()
        && let Some(api) = driver::loaded()
    {
        // Of several all but one are of contexts that are gone, which nobody has noticed yet.
        living().for_each(|a| _ = check_alive(api, a));
    }
    let found = found.or_else(|| living().next());
    let found = found.or_else(|| all().find(|a| a.has_in_chunks(address)));
    found.ok_or_else(|| state::not_ours(address))
}

/// Whether the address is in memory of any arena. What `cuMemAlloc` gave goes with its context, and the
/// driver may give the address to somebody else.
pub fn owns(address: u64) -> bool {
    all().any(|a| a.has_in_range(address)) || living().any(|a| a.has_in_chunks(address))
}

/// The living arena of a pool in a context.
fn known(pool: PoolId, handle: Ctx) -> Option<&'static Arena> {
    living_of(pool).find(|a| a.mapper.context.handle == handle)
}

/// The living arena of a pool in a device's primary context.
fn known_primary(pool: PoolId, device: i32) -> Option<&'static Arena> {
    living_of(pool).find(|a| a.device() == device && a.mapper.context.is_primary())
}

/// The pool's arena in the calling thread's current context, made if there is none.
pub fn current(api: &Api, pool: PoolId) -> Result<&'static Arena> {
    let known = match context::current_handle(api)? {
        // As the runtime does, a thread without a context works on device 0's primary one.
        0 => known_primary(pool, 0),
        handle => known(pool, handle),
    };
    match known {
        Some(arena) => Ok(arena),
        None => add(api, pool, context::current_or_primary(api)?),
    }
}

/// The pool's arena for a stream that no arena knows: of the stream's own context, where the driver tells it.
pub fn for_stream(api: &Api, pool: PoolId, key: StreamKey) -> Result<&'static Arena> {
    match context::of_stream(api, key.handle)? {
        Some(handle) if handle != context::current_handle(api)? => match known(pool, handle) {
            Some(arena) => Ok(arena),
            None => add(api, pool, context::by_handle(api, handle)?),
        },
        _ => current(api, pool),
    }
}

/// The pool's arena on a device: of the current context if that is on it, else of the device's primary one.
pub fn on_device(api: &Api, pool: PoolId, device: i32) -> Result<&'static Arena> {
    let handle = context::current_handle(api)?;
    if handle != 0 && context::current_device(api)? == device {
        return current(api, pool);
    }
    match known_primary(pool, device) {
        Some(arena) => Ok(arena),
        None => add(api, pool, context::primary(api, device)?),
    }
}

/// The device that `POOL_DEVICE_CURRENT` or an ordinal means.
pub fn device(api: &Api, device: i32) -> Result<i32> {
    match device {
        -1 if context::current_handle(api)? == 0 => Ok(0),
        -1 => context::current_device(api),
        0.. if device < driver::device_count() => Ok(device),
        0.. => bail!(
            POOL_ERROR_NO_DEVICE,
            "there is no device {device}; the driver sees {}",
            driver::device_count()
        ),
        _ => bail!(POOL_ERROR_INVALID_ARGUMENT, "{device} is not the number of a device"),
    }
}

// ---- What concerns a whole device or context ----

/// Whether some stream of the arena's context must be taken to be captured: any pool may have been told.
pub fn is_captured(arena: &Arena) -> bool {
    within(arena.mapper.context).any(|a| a.lock().is_ok_and(|state| state.is_captured()))
}

/// Bytes that all pools hold on a device.
pub fn held_on(device: i32) -> u64 {
    on(device).map(|a| a.lock().map_or(0, |state| state.on_device())).sum()
}

/// Bytes that the arena's pool holds, or is about to, in other contexts of the device.
pub fn held_elsewhere(arena: &Arena) -> u64 {
    let others = on(arena.device()).filter(|a| !ptr::eq(*a, arena) && a.pool() == arena.pool());
    others.map(|a| a.lock().map_or(0, |state| state.on_device_soon())).sum()
}

/// Bytes on a device that pools could give up, and how many of them the device may still be using.
pub fn idle_on(device: i32) -> (u64, u64) {
    let mut sums = (0, 0);
    for arena in on(device) {
        let Ok(state) = arena.lock() else { continue };
        let bytes = state.bytes();
        let idle = if state.options().pinned { 0 } else { bytes.cached + bytes.pending };
        sums.0 += idle;
        sums.1 += if state.is_pending() { idle } else { 0 };
    }
    sums
}

/// Counts an out-of-memory answer that no arena was asked for, because asking which one would be a driver
/// call.
pub fn count_oom(pool: PoolId) {
    if let Some(Ok(mut state)) = living_of(pool).next().map(Arena::lock) {
        state.count_oom();
    }
}

/// How far the arenas of a device were at some moment: waits for what had been freed until then come to an
/// end whatever others free meanwhile.
pub struct FreeEpochs {
    /// Counts of frees, by the arenas' slots.
    counts: [u64; MAX_ARENAS],
}

impl FreeEpochs {
    pub fn until_now(device: i32) -> FreeEpochs {
        let mut counts = [0; MAX_ARENAS];
        for arena in on(device) {
            if let (Some(count), Ok(state)) = (counts.get_mut(arena.slot), arena.lock()) {
                *count = state.seq();
            }
        }
        FreeEpochs { counts }
    }

    /// The count of frees of an arena then.
    pub fn of(&self, arena: &Arena) -> u64 {
        self.counts.get(arena.slot).copied().unwrap_or(0)
    }
}

/// Turns of a wait for several arenas: each gets a little time, because what one waits for long, another one
/// may have at once.
pub struct Turns {
    deadline: Moment,
    length: Duration,
}

impl Turns {
    pub fn until(deadline: Moment) -> Turns {
        Turns { deadline, length: SHORTEST_TURN }
    }

    /// The end of the turn that begins now. Each is twice as long as the one before.
    pub fn begin(&mut self) -> Moment {
        let end = self.deadline.min(clock::now().after(self.length));
        self.length = (self.length * 2).min(LONGEST_TURN);
        end
    }

    pub fn is_over(&self) -> bool {
        clock::now() >= self.deadline
    }
}

// ---- Contexts that go ----

/// Whether this life of the arena's context goes on. If not, the arena is lost, and serves no call any more.
pub fn check_alive(api: &Api, arena: &Arena) -> Result<()> {
    if !arena.is_lost() && arena.mapper.context.is_alive(api) {
        return Ok(());
    }
    lose(api, arena);
    Err(arena.lost_error())
}

fn lose(api: &Api, arena: &Arena) {
    if arena.lose(api) {
        let arena = ptr::from_ref(arena).cast_mut();
        let _ = ONLY.compare_exchange(arena, ptr::null_mut(), AcqRel, Relaxed);
        ONE_CONTEXT.store(false, Release);
        waiters::tell();
    }
}

/// Notices contexts of the device that are gone, and what the pools held in them. Whether there was any.
pub fn lose_the_dead(api: &Api, device: i32) -> bool {
    on(device).filter(|arena| check_alive(api, arena).is_err()).count() > 0
}

// ---- Arenas that come ----

/// While this is held no pool gets an arena.
pub fn stop_adding() -> Guard<'static, ()> {
    ADDING.lock()
}

/// Makes the pool an arena in the context, if it has none. Whether the pool is still there, and with which
/// options, is asked under the lock that the end of a pool takes.
fn add(api: &Api, pool: PoolId, context: Context) -> Result<&'static Arena> {
    // What destroyed pools left can be taken over once it is empty. Not under the lock: the driver may take
    // its time.
    if detached_in(context).next().is_some() {
        empty_detached(api, clock::now());
    }
    let _adding = ADDING.lock();
    if let Some(arena) = living_of(pool).find(|a| a.mapper.context == context) {
        return Ok(arena);
    }
    // The same handle in an earlier life: that arena's memory is gone.
    let is_earlier_life =
        |a: &&Arena| a.mapper.context.handle == context.handle && a.mapper.context != context;
    living().filter(is_earlier_life).for_each(|old| lose(api, old));
    let options = settings::of(pool)?;
    if let Some(arena) = take_over(pool, context, &options) {
        return Ok(arena);
    }
    let total = driver::total_memory(api, context.device)?;
    let count = COUNT.load(Acquire);
    let Some(slot) = ARENAS.get(count) else {
        bail!(
            POOL_ERROR_NOT_SUPPORTED,
            "the process has used {MAX_ARENAS} arenas: pools in contexts, counting those that were reset"
        );
    };
    let mapper = new_mapper(api, context, total, options.backend)?;
    let made = Arena::new(count, mapper.clone(), total, pool, options).map_err(Status::from).and_then(place);
    let arena = made.inspect_err(|_| mapper.give_up_range(api))?;
    slot.store(ptr::from_ref(arena).cast_mut(), Release);
    COUNT.store(count + 1, Release);
    find_only();
    announce(arena);
    Ok(arena)
}

fn announce(arena: &Arena) {
    let (device, total) = (arena.device(), Size(arena.total));
    match arena.mapper.range {
        Some(range) => log_line!(
            Info,
            "device {device}: the pool has begun, on {total} of memory; addresses {:#x} to {:#x} ({})",
            range.base,
            range.base + range.len,
            Size(range.len)
        ),
        None => log_line!(
            Info,
            "device {device}: the pool has begun, on {total} of memory; chunks come from cuMemAlloc"
        ),
    }
}

/// The arenas that destroyed pools left in a context.
fn detached_in(context: Context) -> impl Iterator<Item = &'static Arena> {
    living_of(PoolId::NONE).filter(move |a| a.mapper.context == context)
}

/// Gives the pool an arena that a destroyed one left in the context, if there is one that can serve it.
fn take_over(pool: PoolId, context: Context, options: &Options) -> Option<&'static Arena> {
    let made_so = |a: &Arena| a.lock().is_ok_and(|state| state.has_backend(options.backend));
    let fits = |a: &&Arena| made_so(a) || (options.backend != Backend::Malloc && a.mapper.range.is_some());
    let arena = detached_in(context).filter(fits).find(|a| a.start_over(pool, options))?;
    arena.set_used();
    find_only();
    Some(arena)
}

/// Gives the memory of destroyed pools back, as far as the device has completed its use by `deadline`.
pub fn empty_detached(api: &Api, deadline: Moment) {
    for arena in living_of(PoolId::NONE) {
        if arena.lock().is_ok_and(|state| state.bytes().mapped > 0) {
            // What fails now is tried again by the next call that gets here.
            let _ = arena.trim(api, &|| is_captured(arena), 0, deadline);
        }
    }
}

/// Finds out whether the program has shown one device and one context, in which the default pool has an
/// arena.
fn find_only() {
    let first = living().next().map(|a| a.mapper.context);
    let one = driver::device_count() == 1 && living().all(|a| Some(a.mapper.context) == first);
    let only = living().find(|a| a.pool() == PoolId::DEFAULT && one);
    ONE_CONTEXT.store(one, Release);
    ONLY.store(only.map_or(ptr::null_mut(), |only| ptr::from_ref(only).cast_mut()), Release);
}

fn new_mapper(api: &Api, context: Context, total: u64, backend: Backend) -> Result<Mapper> {
    match backend {
        Backend::Malloc => Ok(Mapper::with_malloc(context)),
        Backend::Vmm => Mapper::with_range(api, context, total),
        Backend::Auto => match Mapper::with_range(api, context, total) {
            Err(Status::POOL_ERROR_NOT_SUPPORTED) => Ok(Mapper::with_malloc(context)),
            answer => answer,
        },
    }
}

/// Puts an arena where it stays for good.
fn place(arena: Arena) -> Result<&'static Arena> {
    let mut place = Vec::new();
    place.try_reserve_exact(1)?;
    place.push(arena);
    place.leak().first().ok_or_else(|| fail(Status::POOL_ERROR_INTERNAL, format_args!("an arena was lost")))
}
