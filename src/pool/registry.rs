//! Which arenas there are, and which one a call means.
//!
//! Arenas are made once for each life of a context and never unmade, so that a stale pointer can always be told. A program with one device and
//! one context, as most are, is told apart from all others: there a stream-ordered call needs no word from the driver.

use super::arena::Arena;
use super::{config, host_oom};
use crate::arena::Mapper;
use crate::driver::context::{self, Context};
use crate::driver::lock::Lock;
use crate::driver::{self, Api};
use crate::error::{NoHostMemory, Result, Status, bail, fail};
use crate::logging::log_line;
use crate::pool::options::Backend;
use crate::pool::order::StreamKey;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::*};

/// Most arenas in the life of a process. A limit, because lost ones stay known and every free may have to look at them.
const MOST: usize = 1024;

static ARENAS: [AtomicPtr<Arena>; MOST] = [const { AtomicPtr::new(ptr::null_mut()) }; MOST];
static COUNT: AtomicUsize = AtomicUsize::new(0);
/// The arena of a program that has one device and has shown one context.
static ONLY: AtomicPtr<Arena> = AtomicPtr::new(ptr::null_mut());
static ADDING: Lock<()> = Lock::new(());

/// All arenas, newest first.
pub fn all() -> impl Iterator<Item = &'static Arena> {
    let count = COUNT.load(Acquire).min(MOST);
    ARENAS.iter().take(count).rev().filter_map(|slot| {
        // SAFETY: a slot below the count holds null or an arena that is never freed.
        unsafe { slot.load(Acquire).as_ref() }
    })
}

/// The other arenas on the same device that are alive.
pub fn others_on(this: &Arena) -> impl Iterator<Item = &'static Arena> {
    let (this_at, device) = (ptr::from_ref(this), this.device());
    all().filter(move |a| !ptr::eq(*a, this_at) && a.device() == device && !a.is_lost())
}

/// The only arena of a program that needs no more than one.
#[inline]
pub fn only() -> Option<&'static Arena> {
    // SAFETY: null or an arena that is never freed.
    unsafe { ONLY.load(Acquire).as_ref() }
}

/// Whether it is that arena.
pub fn is_only(arena: &Arena) -> bool {
    ptr::eq(ONLY.load(Acquire), arena)
}

/// The arena that an address belongs to.
#[inline]
pub fn by_address(address: u64) -> Result<&'static Arena> {
    if let Some(arena) = only().filter(|a| a.has_in_range(address)) {
        return Ok(arena);
    }
    // `cuMemAlloc` addresses of a context that is gone may be given again, so the living are asked first.
    let living = || all().filter(|a| !a.is_lost());
    let found = all().find(|a| a.has_in_range(address));
    let found = found.or_else(|| living().find(|a| a.has_in_chunks(address)));
    let found = found.or_else(|| all().find(|a| a.has_in_chunks(address)));
    found.ok_or_else(|| super::arena::not_a_block(address))
}

/// Counts an out-of-memory answer that no arena was asked for, because asking which one would be a driver call.
pub fn count_oom() {
    if let Some(Ok(mut state)) = all().find(|a| !a.is_lost()).map(Arena::lock) {
        state.counters.oom = state.counters.oom.wrapping_add(1);
    }
}

/// A lost arena serves no call any more.
pub fn forget(arena: &Arena) {
    let arena = ptr::from_ref(arena).cast_mut();
    let _ = ONLY.compare_exchange(arena, ptr::null_mut(), AcqRel, Relaxed);
}

/// The arena of the calling thread's current context, made if there is none.
pub fn current(api: &Api) -> Result<&'static Arena> {
    match known(api) {
        Some(arena) => Ok(arena),
        None => add(api, context::current_or_primary(api)?),
    }
}

/// The arena of the calling thread's current context, if there is one.
fn known(api: &Api) -> Option<&'static Arena> {
    match context::current_handle(api) {
        // As the runtime does, a thread without a context works on device 0's primary one.
        0 => all().find(|a| !a.is_lost() && a.device() == 0 && a.mapper.context.is_primary()),
        handle => all().find(|a| !a.is_lost() && a.mapper.context.handle == handle),
    }
}

/// The arena for a stream that no arena knows: of the stream's own context, where the driver tells it.
pub fn for_stream(api: &Api, key: StreamKey) -> Result<&'static Arena> {
    match context::of_stream(api, key.handle) {
        Some(handle) if handle != context::current_handle(api) => {
            match all().find(|a| !a.is_lost() && a.mapper.context.handle == handle) {
                Some(arena) => Ok(arena),
                None => add(api, context::by_handle(api, handle)?),
            }
        }
        _ => current(api),
    }
}

/// The arena of a device: of the current context if that is on it, else of its primary one.
pub fn on_device(api: &Api, device: i32) -> Result<&'static Arena> {
    let handle = context::current_handle(api);
    if handle != 0 && context::current_device(api)? == device {
        return current(api);
    }
    let known = all().find(|a| !a.is_lost() && a.device() == device && a.mapper.context.is_primary());
    match known {
        Some(arena) => Ok(arena),
        None => add(api, context::primary(api, device)?),
    }
}

/// The device that `POOL_DEVICE_CURRENT` or an ordinal means.
pub fn device(api: &Api, device: i32) -> Result<i32> {
    match device {
        -1 if context::current_handle(api) == 0 => Ok(0),
        -1 => context::current_device(api),
        0.. if device < driver::device_count() => Ok(device),
        0.. => bail!(
            POOL_ERROR_NO_DEVICE,
            "there is no device {device}; the driver sees {}",
            driver::device_count()
        ),
        _ => bail!(POOL_ERROR_INVALID_ARGUMENT, "{device} is no device ordinal"),
    }
}

fn add(api: &Api, context: Context) -> Result<&'static Arena> {
    let _adding = ADDING.lock();
    if let Some(arena) = all().find(|a| !a.is_lost() && a.mapper.context == context) {
        return Ok(arena);
    }
    // The same handle in an earlier life: that arena's memory is gone.
    for old in all().filter(|a| !a.is_lost() && a.mapper.context.handle == context.handle) {
        old.lose(api);
    }
    let options = config()?;
    let total = driver::total_memory(api, context.device)?;
    let mapper = match options.backend {
        Backend::Malloc => Mapper::with_malloc(context),
        Backend::Vmm => Mapper::with_range(api, context, total)?,
        Backend::Auto => match Mapper::with_range(api, context, total) {
            Ok(mapper) => mapper,
            Err(Status::POOL_ERROR_NOT_SUPPORTED) => {
                log_line!(Info, "device {}: no virtual memory, chunks come from cuMemAlloc", context.device);
                Mapper::with_malloc(context)
            }
            Err(status) => return Err(status),
        },
    };
    let count = COUNT.load(Acquire);
    let Some(slot) = ARENAS.get(count) else {
        bail!(POOL_ERROR_NOT_SUPPORTED, "contexts were destroyed or reset over {MOST} times in this process");
    };
    let arena = place(Arena::new(mapper, total, options).map_err(host_oom)?)?;
    slot.store(ptr::from_ref(arena).cast_mut(), Release);
    COUNT.store(count.saturating_add(1), Release);
    let alone = driver::device_count() == 1 && all().filter(|a| !a.is_lost()).count() == 1;
    ONLY.store(if alone { ptr::from_ref(arena).cast_mut() } else { ptr::null_mut() }, Release);
    log_line!(Info, "device {}: an arena of {} bytes, {:?}", context.device, total, arena.mapper.range);
    Ok(arena)
}

/// Puts an arena where it stays for good.
fn place(arena: Arena) -> Result<&'static Arena> {
    let mut home = Vec::new();
    home.try_reserve_exact(1).map_err(|_| host_oom(NoHostMemory))?;
    home.push(arena);
    home.leak().first().ok_or_else(|| fail(Status::POOL_ERROR_INTERNAL, format_args!("an arena was lost")))
}
