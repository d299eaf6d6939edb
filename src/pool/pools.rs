//! Pools: their handles, the options of each, and their end.
//!
//! A handle is a number that is never given twice and points nowhere, so a stale one is told apart from every other value. A pool's memory
//! is in its arenas, one for each context; when the pool goes they are retired, and serve the next pool in the same context.

use super::arena::Arena;
use super::options::{self, Options};
use super::{config, registry};
use crate::driver;
use crate::driver::lifecycle::{self, ProcessState};
use crate::error::{Result, bail};
use crate::sync::lock::Lock;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A pool, by a number that is never given twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolId(pub(super) u64);

impl PoolId {
    /// The process's pool, which is always there.
    pub const DEFAULT: PoolId = PoolId(0);
    /// Whose arenas wait for another pool.
    pub(super) const NONE: PoolId = PoolId(u64::MAX);
}

/// Most pools at a time, the default one aside. A limit, so that the table needs no memory; a process has a few.
const MOST: usize = 256;
/// Handles are multiples of this, so that none of them is taken for a small number or a pointer into a page that is there.
const STEP: u64 = 16;

#[derive(Clone, Copy)]
struct Entry {
    id: PoolId,
    options: Options,
}

static POOLS: Lock<[Option<Entry>; MOST]> = Lock::new([None; MOST]);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// `pool_create`. Returns the handle.
pub fn create(options: Option<Options>) -> Result<u64> {
    driver::api()?;
    let options = match options {
        Some(options) => options,
        None => config()?,
    };
    options::check(&options)?;
    let mut pools = POOLS.lock();
    let Some(slot) = pools.iter_mut().find(|slot| slot.is_none()) else {
        bail!(POOL_ERROR_NOT_SUPPORTED, "there are {MOST} pools already");
    };
    let id = PoolId(NEXT.fetch_add(1, Relaxed));
    *slot = Some(Entry { id, options });
    Ok(id.0.saturating_mul(STEP))
}

/// A pool whose idle memory stays where it is. Returns the handle.
pub fn create_pinned() -> Result<u64> {
    create(Some(Options { pinned: true, ..config()? }))
}

/// Lets the idle memory of such a pool serve others, as that of any pool does.
pub fn unpin(id: PoolId) {
    // An arena that is just being made with the options of before would stay pinned.
    let _no_new_arenas = registry::stop_adding();
    if let Some(entry) = POOLS.lock().iter_mut().flatten().find(|p| p.id == id) {
        entry.options.pinned = false;
    }
    for arena in registry::of_pool(id) {
        if let Ok(mut state) = arena.lock() {
            state.options.pinned = false;
            state.heap.pinned = false;
        }
    }
}

/// Whether nothing is live in the pool.
pub fn is_empty(id: PoolId) -> bool {
    registry::living_of(id).all(|arena| arena.lock().is_ok_and(|state| state.heap.bytes().live_blocks == 0))
}

/// The pool of a handle; 0 is the default one.
pub fn of_handle(handle: u64) -> Result<PoolId> {
    if handle == 0 {
        return Ok(PoolId::DEFAULT);
    }
    // A forked child must not wait for a lock that a thread of its parent holds.
    lifecycle::check_running()?;
    let id = PoolId(handle / STEP);
    if handle.is_multiple_of(STEP) && exists(id) {
        return Ok(id);
    }
    bail!(POOL_ERROR_INVALID_ARGUMENT, "{handle:#x} is no pool, or one that has been destroyed");
}

/// Whether the pool has not been destroyed.
pub fn exists(id: PoolId) -> bool {
    POOLS.lock().iter().flatten().any(|p| p.id == id)
}

/// The handle of a pool; 0 for the default one.
pub fn handle_of(pool: PoolId) -> u64 {
    if pool == PoolId::NONE { 0 } else { pool.0.saturating_mul(STEP) }
}

/// The options of a pool.
pub fn options_of(pool: PoolId) -> Result<Options> {
    if pool == PoolId::DEFAULT {
        return config();
    }
    match POOLS.lock().iter().flatten().find(|p| p.id == pool) {
        Some(entry) => Ok(entry.options),
        None => Err(gone()),
    }
}

/// For a request that comes after its pool's end.
#[cold]
pub fn gone() -> crate::error::Status {
    crate::error::fail(
        crate::error::Status::POOL_ERROR_INVALID_ARGUMENT,
        format_args!("the pool has been destroyed"),
    )
}

/// `pool_destroy`.
pub fn destroy(handle: u64) -> Result<()> {
    if handle == 0 {
        bail!(POOL_ERROR_INVALID_ARGUMENT, "the default pool cannot be destroyed");
    }
    if lifecycle::process_state() == ProcessState::Exiting {
        return Ok(());
    }
    let api = driver::api()?;
    let id = of_handle(handle)?;
    let options = options_of(id)?;
    if options.pinned {
        bail!(POOL_ERROR_IN_USE, "the pool cannot be destroyed: a graph that was captured uses its memory");
    }
    // Blocks that went with their context do not count, so the driver is asked before.
    for arena in registry::living_of(id) {
        let _ = arena.check_alive(api);
    }
    end(id)?;
    // What the device is not finished with, or the driver does not take back now, goes with a later call.
    registry::empty_retired(api, options.deadline());
    Ok(())
}

/// Takes the pool out of the table and its arenas from it, or changes nothing.
fn end(id: PoolId) -> Result<()> {
    let _no_new_arenas = registry::stop_adding();
    // Somebody else may have destroyed it first.
    options_of(id)?;
    for arena in registry::living_of(id) {
        arena.retire(false)?;
    }
    for arena in registry::living_of(id) {
        if let Err(status) = arena.retire(true) {
            registry::of_pool(id).for_each(|arena| arena.unretire(id));
            return Err(status);
        }
    }
    for arena in registry::of_pool(id) {
        arena.set_pool(PoolId::NONE);
    }
    if let Some(slot) = POOLS.lock().iter_mut().find(|slot| slot.is_some_and(|p| p.id == id)) {
        *slot = None;
    }
    Ok(())
}

impl Arena {
    /// Takes the arena from its pool, if nobody holds or is just getting memory of it. Without `really` it only looks whether that is so.
    fn retire(&self, really: bool) -> Result<()> {
        let mut state = self.lock()?;
        let bytes = state.heap.bytes();
        if bytes.live_blocks > 0 {
            bail!(
                POOL_ERROR_IN_USE,
                "the pool cannot be destroyed: {} blocks of {} bytes are live on device {}",
                bytes.live_blocks,
                bytes.live,
                self.device()
            );
        }
        if state.growing > 0 {
            bail!(
                POOL_ERROR_IN_USE,
                "the pool cannot be destroyed: a request of it is just taking memory on device {}",
                self.device()
            );
        }
        if really {
            state.pool = PoolId::NONE;
        }
        Ok(())
    }

    fn unretire(&self, id: PoolId) {
        if let Ok(mut state) = self.lock() {
            state.pool = id;
        }
    }
}
