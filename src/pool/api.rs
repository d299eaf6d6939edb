//! What the C functions do, with checked arguments and Rust results.

use super::arena::Arena;
use super::arena::state::Counters;
use super::oom::{climb, headroom, reclaim, report};
use super::options::{self, Options};
use super::types::{AllocRequest, BlockInfo, FreeOrder, LEGACY, PoolId, StreamKey};
use super::{registry, settings, waiters};
use crate::driver::context;
use crate::driver::lifecycle::{self, ProcessState};
use crate::driver::{self, Api};
use crate::error::{Result, bail};
use crate::heap::{Bytes, MAX_SIZE};
use crate::sync::clock;

/// In a request: the device of the stream, or of the current context.
pub const ANY_DEVICE: i32 = -1;

/// The counters of a pool on a device.
#[derive(Clone, Copy, Default, Debug)]
pub struct Stats {
    pub bytes: Bytes,
    pub counters: Counters,
    /// Bytes that the pool leaves free for others.
    pub headroom: u64,
    /// Host memory among what is mapped.
    pub spilled: u64,
}

// ---- Options ----

/// `pool_configure`.
pub fn configure(new: Options) -> Result<()> {
    lifecycle::check_running()?;
    options::check(&new)?;
    let old = settings::default()?;
    if old.backend != new.backend && registry::of_pool(PoolId::DEFAULT).next().is_some() {
        bail!(POOL_ERROR_INVALID_OPTION, "backend can no longer be changed: the pool has been used");
    }
    settings::set_default(&new)?;
    for arena in registry::living_of(PoolId::DEFAULT) {
        arena.lock()?.set_options(&new);
    }
    waiters::tell();
    Ok(())
}

/// Makes the option `limit` a share of the device; 0 percent for none.
pub fn limit_to_percent(percent: u32) -> Result<()> {
    // Before the options' lock: a forked child must not wait for a thread that it does not have.
    lifecycle::check_running()?;
    configure(Options { limit_percent: percent, ..settings::default()? })
}

/// The stream that the plain calls are ordered by; `None` for device order.
pub fn plain_stream() -> Result<Option<u64>> {
    lifecycle::check_running()?;
    settings::default()?;
    Ok(settings::plain_is_legacy().then_some(LEGACY))
}

// ---- Allocation ----

/// `pool_alloc`.
pub fn allocate_default(size: usize) -> Result<u64> {
    if size == 0 {
        return Ok(0);
    }
    let api = driver::api()?;
    settings::default()?;
    if settings::plain_is_legacy() {
        return allocate_on_stream(size, LEGACY);
    }
    let request = AllocRequest::plain(size as u64, StreamKey::DEVICE);
    check_size(&request)?;
    let arena = living(api, || registry::current(api, request.pool))?;
    allocate_in(api, arena, &request)
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
        // Those who wait may have to come first.
        && !waiters::any()
        && let Some(address) = arena.allocate_fast(size as u64, key)?
    {
        return Ok(address);
    }
    allocate_on_current(size as u64, key)
}

#[cold]
fn allocate_on_current(size: u64, key: StreamKey) -> Result<u64> {
    let api = driver::api()?;
    let request = AllocRequest::plain(size, key);
    check_size(&request)?;
    with_retry(api, &request, || match registry::only() {
        // A stream that the only arena knows is of its context; about any other the driver is asked.
        Some(arena) if arena.knows(key) => Ok(arena),
        _ => registry::for_stream(api, request.pool, key),
    })
}

/// `pool_alloc_with`. The device is [`ANY_DEVICE`] or an ordinal.
pub fn allocate(request: &AllocRequest, device: i32) -> Result<u64> {
    if request.size == 0 {
        return Ok(0);
    }
    let api = driver::api()?;
    check_size(request)?;
    if request.key.is_device_order() {
        let arena = living(api, || find_for(api, request, device))?;
        allocate_in(api, arena, request)
    } else {
        with_retry(api, request, || find_for(api, request, device))
    }
}

/// The arena that a request means.
fn find_for(api: &Api, request: &AllocRequest, device: i32) -> Result<&'static Arena> {
    let AllocRequest { pool, key, .. } = *request;
    let named = device != ANY_DEVICE;
    let device = if named { registry::device(api, device)? } else { ANY_DEVICE };
    let known = registry::only_of(pool).filter(|a| !key.is_device_order() && a.knows(key));
    if key.is_created() {
        // The stream says which context: no event of another one would cover what is freed on it.
        let arena = known.map_or_else(|| registry::for_stream(api, pool, key), Ok)?;
        if named && arena.device() != device {
            bail!(
                POOL_ERROR_INVALID_ARGUMENT,
                "the stream is on device {}, the request for device {device}",
                arena.device()
            );
        }
        return Ok(arena);
    }
    match known {
        Some(arena) => Ok(arena),
        None if named => registry::on_device(api, pool, device),
        None => registry::current(api, pool),
    }
}

/// Sizes that no device has, before the driver is asked anything.
fn check_size(request: &AllocRequest) -> Result<()> {
    let largest = driver::largest_device().min(MAX_SIZE);
    if request.size > largest {
        registry::count_oom(request.pool);
        return Err(report::too_large(request.size, largest));
    }
    Ok(())
}

/// An arena whose context is alive: one that turns out lost makes way for a new one.
fn living(api: &Api, find: impl Fn() -> Result<&'static Arena>) -> Result<&'static Arena> {
    let arena = find()?;
    if registry::check_alive(api, arena).is_ok() { Ok(arena) } else { find() }
}

/// Allocates where the driver is not asked beforehand whether the context is alive.
fn with_retry(api: &Api, request: &AllocRequest, find: impl Fn() -> Result<&'static Arena>) -> Result<u64> {
    let arena = find()?;
    match allocate_in(api, arena, request) {
        Err(_) if arena.is_lost() => allocate_in(api, find()?, request),
        answer => answer,
    }
}

/// Allocates from what is idle in the arena, or climbs the ladder.
fn allocate_in(api: &Api, arena: &Arena, request: &AllocRequest) -> Result<u64> {
    if request.size > arena.total {
        return Err(climb::refuse(api, arena, request));
    }
    registry::note_use(arena);
    if !request.own_allocation
        && !waiters::any()
        && let Some(address) = arena.allocate_idle(request)?
    {
        return Ok(address);
    }
    climb::climb(api, arena, request)
}

// ---- Frees ----

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
    if settings::plain_is_legacy() {
        return free_on_stream(address, LEGACY);
    }
    let api = driver::api()?;
    let arena = registry::by_address(address)?;
    registry::check_alive(api, arena)?;
    free_in(api, arena, address, FreeOrder::Device)
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
        waiters::tell();
        return Ok(());
    }
    free_anywhere(address, key)
}

#[cold]
fn free_anywhere(address: u64, key: StreamKey) -> Result<()> {
    let api = driver::api()?;
    let arena = registry::by_address(address)?;
    if arena.is_lost() {
        return Err(arena.lost_error());
    }
    free_in(api, arena, address, FreeOrder::Stream(key))
}

fn free_in(api: &Api, arena: &Arena, address: u64, order: FreeOrder) -> Result<()> {
    registry::note_use(arena);
    arena.free(api, address, order, registry::is_one_context())?;
    waiters::tell();
    Ok(())
}

// ---- Blocks and streams ----

/// `pool_use_on_stream`.
pub fn use_on_stream(address: u64, stream: u64) -> Result<()> {
    let api = driver::api()?;
    if address == 0 {
        return name_stream(api, stream);
    }
    let arena = registry::by_address(address)?;
    registry::check_alive(api, arena)?;
    let key = StreamKey::of(stream);
    if context::of_stream(api, key.handle)?.is_some_and(|handle| handle != arena.mapper.context.handle) {
        bail!(
            POOL_ERROR_NOT_SUPPORTED,
            "the stream is of another context than the block; order that use with an event before the block \
             is freed"
        );
    }
    arena.use_elsewhere(address, key)
}

/// The use of no block still names a stream: the pool looks whether it is captured, which it may not be able
/// to see otherwise.
fn name_stream(api: &Api, stream: u64) -> Result<()> {
    let key = StreamKey::of(stream);
    if key.is_created() {
        let arena = registry::for_stream(api, PoolId::DEFAULT, key)?;
        arena.look_for_capture(api, key)?;
        // Other pools may have seen the capture too, and must see its end.
        let others = registry::within(arena.mapper.context).filter(|a| !core::ptr::eq(*a, arena));
        for other in others.filter(|a| a.knows(key)) {
            other.look_for_capture(api, key)?;
        }
    }
    Ok(())
}

/// `pool_query`.
pub fn query(address: u64) -> Result<BlockInfo> {
    let api = driver::api()?;
    let arena = registry::by_address(address)?;
    registry::check_alive(api, arena)?;
    arena.query(address)
}

/// `pool_owns`.
pub fn owns(address: u64) -> Result<bool> {
    match lifecycle::process_state() {
        ProcessState::Forked => lifecycle::check_running().map(|()| false),
        _ => Ok(registry::owns(address)),
    }
}

// ---- Pools ----

/// `pool_trim`.
pub fn trim(pool: PoolId, device: i32, keep: u64) -> Result<u64> {
    let api = driver::api()?;
    let device = registry::device(api, device)?;
    let (mut released, mut keep) = (0, keep);
    registry::empty_detached(api, clock::now());
    let deadline = settings::of(pool)?.deadline();
    registry::lose_the_dead(api, device);
    for arena in registry::living_of(pool).filter(|a| a.device() == device) {
        match arena.trim(api, &|| registry::is_captured(arena), keep, deadline) {
            Ok((bytes, kept)) => {
                released += bytes;
                // More may be idle again by the time it is counted.
                keep = keep.saturating_sub(kept);
            }
            // The memory is gone with the context, which is what a trim is for.
            Err(_) if registry::check_alive(api, arena).is_err() => {}
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
        let bytes = if arena.is_lost() { Bytes::default() } else { state.bytes() };
        sum.add(&bytes, &state.counters());
        sum.spilled += state.spilled();
        drop(state);
        // One for all contexts of the device.
        sum.headroom = sum.headroom.max(headroom::of(arena));
    }
    Ok(sum)
}

impl Stats {
    fn add(&mut self, bytes: &Bytes, counters: &Counters) {
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
