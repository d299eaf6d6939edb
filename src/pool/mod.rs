//! The pool: policy. Which arena serves a call, in which order memory is reused, what is given up when it runs out.
//!
//! The functions here are what the C functions do, with checked arguments and Rust results.

mod arena;
pub mod callbacks;
pub mod graphs;
mod grow;
mod ladder;
pub mod options;
mod order;
mod owners;
pub mod pools;
mod reclaim;
mod registry;
mod release;
pub mod report;
mod reserve;
mod settle;
mod spill;
mod state;
mod waiters;

use crate::driver::lifecycle::{self, ProcessState};
use crate::driver::{self, Api};
use crate::error::{Result, bail};
use crate::heap::MAX_SIZE;
use crate::logging;
use crate::sync::clock;
use crate::sync::lock::Lock;
use arena::{Arena, Release, Want, host_oom};
use core::sync::atomic::{AtomicBool, Ordering::*};
use options::{Options, Order};
use order::StreamKey;
use pools::PoolId;

pub use arena::Found;
pub use owners::{TAG_SIZE, Tag};

/// A request of `pool_alloc_with`, read but not checked.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub pool: PoolId,
    pub size: u64,
    /// Power of two, 512 at least.
    pub align: u64,
    pub device: i32,
    /// `None` for device order.
    pub stream: Option<u64>,
    pub owner: Tag,
    pub own_allocation: bool,
}

/// The counters of a pool on a device.
#[derive(Clone, Copy, Default, Debug)]
pub struct Stats {
    pub bytes: crate::heap::Bytes,
    pub counters: state::Counters,
    /// The device reserve.
    pub reserve: u64,
    /// Host memory among what is mapped.
    pub spilled: u64,
}

/// Alignment of every block for which no other is asked.
pub const DEFAULT_ALIGN: u64 = crate::heap::UNIT;
// What the heap hands out, the arena can map.
const _: () = assert!(crate::heap::PAGE == crate::vmem::PAGE);

/// In a request: the device of the stream, or of the current context.
const ANY_DEVICE: i32 = -1;
const NO_OWNER: Tag = [0; TAG_SIZE];

/// Options as configured; `None` until first used.
static CONFIG: Lock<Option<Options>> = Lock::new(None);
/// The plain calls are ordered by the legacy stream.
static PLAIN_IS_LEGACY: AtomicBool = AtomicBool::new(false);

/// The options in force. Reads the environment at first use.
fn config() -> Result<Options> {
    let mut config = CONFIG.lock();
    if let Some(options) = *config {
        return Ok(options);
    }
    let (options, environment) = options::initial();
    environment?;
    *config = Some(options);
    apply(&options);
    Ok(options)
}

fn apply(options: &Options) {
    PLAIN_IS_LEGACY.store(options.order == Order::LegacyStream, Relaxed);
    logging::set_level(options.log);
}

/// `pool_configure`.
pub fn configure(new: Options) -> Result<()> {
    lifecycle::check_running()?;
    options::check(&new)?;
    let old = config()?;
    if old.backend != new.backend && registry::of_pool(PoolId::DEFAULT).next().is_some() {
        bail!(POOL_ERROR_INVALID_OPTION, "backend can no longer be changed: the pool has been used");
    }
    *CONFIG.lock() = Some(new);
    apply(&new);
    for arena in registry::living_of(PoolId::DEFAULT) {
        arena.lock()?.options = new;
    }
    Ok(())
}

/// Makes the option `limit` a share of the device; 0 percent for none.
pub fn limit_to_percent(percent: u32) -> Result<()> {
    // Before the lock in `config`: a forked child must not wait for a thread that it does not have.
    lifecycle::check_running()?;
    configure(Options { limit_percent: percent, ..config()? })
}

/// The stream that the plain calls are ordered by; `None` for device order.
pub fn plain_stream() -> Result<Option<u64>> {
    lifecycle::check_running()?;
    config()?;
    Ok(PLAIN_IS_LEGACY.load(Relaxed).then_some(order::LEGACY))
}

/// `pool_alloc`.
pub fn allocate_default(size: usize) -> Result<u64> {
    if size == 0 {
        return Ok(0);
    }
    let api = driver::api()?;
    config()?;
    if PLAIN_IS_LEGACY.load(Relaxed) {
        return allocate_on_stream(size, order::LEGACY);
    }
    let want = Want {
        pool: PoolId::DEFAULT,
        size: size as u64,
        align: DEFAULT_ALIGN,
        key: StreamKey::DEVICE,
        owner: NO_OWNER,
        own_allocation: false,
        urgent: false,
        refused: false,
    };
    check_size(want.pool, want.size)?;
    living(api, || registry::current(api, want.pool))?.allocate(api, &want)
}

/// `pool_alloc_async`.
#[inline]
pub fn allocate_on_stream(size: usize, stream: u64) -> Result<u64> {
    if size == 0 {
        return Ok(0);
    }
    let key = StreamKey::of(stream);
    if let Some(arena) = registry::only()
        && lifecycle::process_state() == ProcessState::Running
    {
        let address = arena.allocate_fast(size as u64, key)?;
        if address != 0 {
            return Ok(address);
        }
    }
    allocate_on_current(size as u64, key)
}

#[cold]
fn allocate_on_current(size: u64, key: StreamKey) -> Result<u64> {
    let api = driver::api()?;
    let pool = PoolId::DEFAULT;
    check_size(pool, size)?;
    let want = Want {
        pool,
        size,
        align: DEFAULT_ALIGN,
        key,
        owner: NO_OWNER,
        own_allocation: false,
        urgent: false,
        refused: false,
    };
    // A stream that the only arena knows is of its context; about any other the driver is asked.
    let knows = |arena: &&'static Arena| arena.knows(key);
    with_retry(api, &want, || {
        registry::only().filter(knows).map_or_else(|| registry::for_stream(api, pool, key), Ok)
    })
}

/// `pool_alloc_with`.
pub fn allocate(request: &Request) -> Result<u64> {
    if request.size == 0 {
        return Ok(0);
    }
    let api = driver::api()?;
    let pool = request.pool;
    check_size(pool, request.size)?;
    let want = Want {
        pool,
        size: request.size,
        align: request.align,
        key: request.stream.map_or(StreamKey::DEVICE, StreamKey::of),
        owner: request.owner,
        own_allocation: request.own_allocation,
        urgent: false,
        refused: false,
    };
    let find = || {
        let named = request.device != ANY_DEVICE;
        let device = if named { registry::device(api, request.device)? } else { ANY_DEVICE };
        if want.key.handle > order::PER_THREAD {
            // The stream says which context: no event of another one would cover what is freed on it.
            let known = registry::only_of(pool).filter(|a| a.knows(want.key));
            let arena = known.map_or_else(|| registry::for_stream(api, pool, want.key), Ok)?;
            if named && arena.device() != device {
                bail!(
                    POOL_ERROR_INVALID_ARGUMENT,
                    "the stream is on device {}, the request for device {device}",
                    arena.device()
                );
            }
            return Ok(arena);
        }
        let known = registry::only_of(pool).filter(|a| !want.key.is_device_order() && a.knows(want.key));
        match known {
            Some(arena) => Ok(arena),
            None if named => registry::on_device(api, pool, device),
            None => registry::current(api, pool),
        }
    };
    if request.stream.is_none() {
        living(api, find)?.allocate(api, &want)
    } else {
        with_retry(api, &want, find)
    }
}

/// Sizes that no device has, before the driver is asked anything.
fn check_size(pool: PoolId, size: u64) -> Result<()> {
    let largest = driver::largest_device().min(MAX_SIZE);
    if size > largest {
        registry::count_oom(pool);
        return Err(report::too_large(size, largest));
    }
    Ok(())
}

/// An arena whose context is alive: one that turns out lost makes way for a new one.
fn living(api: &Api, find: impl Fn() -> Result<&'static Arena>) -> Result<&'static Arena> {
    let arena = find()?;
    if arena.check_alive(api).is_ok() { Ok(arena) } else { find() }
}

/// Allocates where the driver is not asked beforehand whether the context is alive.
fn with_retry(api: &Api, want: &Want, find: impl Fn() -> Result<&'static Arena>) -> Result<u64> {
    let arena = find()?;
    match arena.allocate(api, want) {
        Err(_) if arena.is_lost() => find()?.allocate(api, want),
        answer => answer,
    }
}

/// What a free does where it cannot do its work: nothing at exit, and an error in a forked child.
fn may_free() -> Result<bool> {
    match lifecycle::process_state() {
        ProcessState::Running => Ok(true),
        ProcessState::Exiting => Ok(false),
        ProcessState::Forked => lifecycle::check_running().map(|()| false),
    }
}

/// `pool_free`.
pub fn free_default(address: u64) -> Result<()> {
    if address == 0 || !may_free()? {
        return Ok(());
    }
    if PLAIN_IS_LEGACY.load(Relaxed) {
        return free_on_stream(address, order::LEGACY);
    }
    let api = driver::api()?;
    let arena = registry::by_address(address)?;
    arena.check_alive(api)?;
    arena.free(api, address, Release::Device)
}

/// `pool_free_async`.
#[inline]
pub fn free_on_stream(address: u64, stream: u64) -> Result<()> {
    if address == 0 || !may_free()? {
        return Ok(());
    }
    let key = StreamKey::of(stream);
    if let (Some(arena), Some(api)) = (registry::only(), driver::loaded())
        && arena.free_fast(api, address, key)?
    {
        return Ok(());
    }
    free_anywhere(address, key)
}

/// The use of no block still names a stream: the pool looks whether it is captured, which it may not be able to see otherwise.
fn name_stream(api: &Api, stream: u64) -> Result<()> {
    let key = StreamKey::of(stream);
    if key.handle > order::PER_THREAD {
        let arena = registry::for_stream(api, PoolId::DEFAULT, key)?;
        arena.look_for_capture(api, key)?;
        // Other pools may have seen the capture too, and must see its end.
        let others = registry::others_on(arena).filter(|a| a.mapper.context == arena.mapper.context);
        for other in others.filter(|a| a.knows(key)) {
            other.look_for_capture(api, key)?;
        }
    }
    Ok(())
}

#[cold]
fn free_anywhere(address: u64, key: StreamKey) -> Result<()> {
    let api = driver::api()?;
    let arena = registry::by_address(address)?;
    if arena.is_lost() {
        return arena.check_alive(api);
    }
    arena.free(api, address, Release::Stream(key))
}

/// `pool_use_on_stream`.
pub fn use_on_stream(address: u64, stream: u64) -> Result<()> {
    let api = driver::api()?;
    if address == 0 {
        return name_stream(api, stream);
    }
    let arena = registry::by_address(address)?;
    arena.check_alive(api)?;
    let key = StreamKey::of(stream);
    let mut context = 0;
    if let (Some(stream_ctx), true) = (api.stream_ctx, key.handle > order::PER_THREAD) {
        // SAFETY: the stream is the caller's own, in this call; the pointer is to a local.
        driver::check(api, unsafe { stream_ctx(stream, &mut context) }, "cuStreamGetCtx")?;
        if context != arena.mapper.context.handle {
            bail!(
                POOL_ERROR_NOT_SUPPORTED,
                "the stream is of another context than the block; order that use with an event before the block is freed"
            );
        }
    }
    arena.use_elsewhere(address, key)
}

/// `pool_query`.
pub fn query(address: u64) -> Result<Found> {
    let api = driver::api()?;
    let arena = registry::by_address(address)?;
    arena.check_alive(api)?;
    arena.query(address)
}

/// `pool_owns`.
pub fn owns(address: u64) -> Result<bool> {
    match lifecycle::process_state() {
        ProcessState::Forked => lifecycle::check_running().map(|()| false),
        _ => Ok(registry::owns(address)),
    }
}

/// `pool_trim`.
pub fn trim(pool: PoolId, device: i32, keep: u64) -> Result<u64> {
    let api = driver::api()?;
    let device = registry::device(api, device)?;
    let mut released = 0u64;
    let mut keep = keep;
    registry::empty_retired(api, clock::now());
    let deadline = pools::options_of(pool)?.deadline();
    registry::lose_the_dead(api, device);
    for arena in registry::living_of(pool).filter(|a| a.device() == device) {
        match arena.trim(api, keep, deadline) {
            Ok((bytes, kept)) => {
                released = released.saturating_add(bytes);
                keep = keep.saturating_sub(kept);
            }
            // The memory is gone with the context, which is what a trim is for.
            Err(_) if arena.check_alive(api).is_err() => {}
            Err(status) => return Err(status),
        }
    }
    Ok(released)
}

/// `pool_reclaim`.
pub fn reclaim(device: i32, wanted: u64) -> Result<u64> {
    let api = driver::api()?;
    reclaim::reclaim(api, registry::device(api, device)?, wanted)
}

/// `pool_get_stats`.
pub fn stats(pool: PoolId, device: i32) -> Result<Stats> {
    let api = driver::api()?;
    let device = registry::device(api, device)?;
    let mut sum = Stats::default();
    for arena in registry::of_pool(pool).filter(|a| a.device() == device) {
        let state = arena.lock()?;
        // What was counted stays counted when a context goes; what was held does not.
        let bytes = if arena.is_lost() { crate::heap::Bytes::default() } else { state.heap.bytes() };
        sum.add(&bytes, &state.counters);
        sum.spilled = sum.spilled.saturating_add(state.spilled.bytes);
        drop(state);
        // One for all contexts of the device.
        sum.reserve = sum.reserve.max(arena.reserve());
    }
    Ok(sum)
}

impl Stats {
    fn add(&mut self, bytes: &crate::heap::Bytes, counters: &state::Counters) {
        let (b, c) = (&mut self.bytes, &mut self.counters);
        for (sum, more) in [
            (&mut b.live, bytes.live),
            (&mut b.requested, bytes.requested),
            (&mut b.cached, bytes.cached),
            (&mut b.pending, bytes.pending),
            (&mut b.overhead, bytes.overhead),
            (&mut b.mapped, bytes.mapped),
            (&mut b.live_blocks, bytes.live_blocks),
            (&mut b.live_peak, bytes.live_peak),
            (&mut b.mapped_peak, bytes.mapped_peak),
            (&mut c.allocs, counters.allocs),
            (&mut c.frees, counters.frees),
            (&mut c.oom, counters.oom),
            (&mut c.oom_recovered, counters.oom_recovered),
            (&mut c.waits, counters.waits),
            (&mut c.spills, counters.spills),
        ] {
            *sum = sum.wrapping_add(more);
        }
        c.calls.add(counters.calls);
    }
}
