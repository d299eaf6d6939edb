//! Pools: their handles and their end.
//!
//! A handle is a number that is never given twice and points nowhere, so a stale one is told apart from every
//! other value. A pool's memory is in its arenas, one for each context; when the pool goes they are detached
//! from it, and serve the next pool in the same context.

use super::options::{self, Options};
use super::types::PoolId;
use super::{registry, settings, waiters};
use crate::driver;
use crate::driver::lifecycle::{self, ProcessState};
use crate::error::{Result, bail};

/// Handles are multiples of this, so that none of them is taken for a small number or a pointer into a page
/// that is there.
const STEP: u64 = 16;

/// `pool_create`.
pub fn create(options: Option<Options>) -> Result<PoolId> {
    driver::api()?;
    let options = match options {
        Some(options) => options,
        None => settings::default()?,
    };
    options::check(&options)?;
    settings::add(&options)
}

/// A pool whose idle memory stays where it is.
pub fn create_pinned() -> Result<PoolId> {
    create(Some(Options { pinned: true, ..settings::default()? }))
}

/// Lets the idle memory of such a pool serve others, as that of any pool does.
pub fn unpin(pool: PoolId) {
    // An arena that is just being made with the options of before would stay pinned.
    let _no_new_arenas = registry::stop_adding();
    settings::unpin(pool);
    for arena in registry::of_pool(pool) {
        if let Ok(mut state) = arena.lock() {
            state.unpin();
        }
    }
    waiters::tell();
}

/// Whether nothing is live in the pool.
pub fn is_empty(pool: PoolId) -> bool {
    registry::living_of(pool).all(|arena| arena.lock().is_ok_and(|state| state.bytes().live_blocks == 0))
}

/// The pool of a handle; 0 is the default one.
pub fn of_handle(handle: u64) -> Result<PoolId> {
    if handle == 0 {
        return Ok(PoolId::DEFAULT);
    }
    // A forked child must not wait for a lock that a thread of its parent holds.
    lifecycle::check_running()?;
    let pool = PoolId(handle / STEP);
    if handle.is_multiple_of(STEP) && settings::exists(pool) {
        return Ok(pool);
    }
    bail!(POOL_ERROR_INVALID_ARGUMENT, "{handle:#x} is not a pool, or one that has been destroyed");
}

/// The handle of a pool; 0 for the default one.
pub fn handle_of(pool: PoolId) -> u64 {
    // Ids are counted from 1, and a process does not get to where the product wraps.
    if pool == PoolId::NONE { 0 } else { pool.0.wrapping_mul(STEP) }
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
    let pool = of_handle(handle)?;
    let options = settings::of(pool)?;
    if options.pinned {
        bail!(POOL_ERROR_IN_USE, "the pool cannot be destroyed: a graph that was captured uses its memory");
    }
    // Blocks that went with their context do not count, so the driver is asked before.
    for arena in registry::living_of(pool) {
        let _ = registry::check_alive(api, arena);
    }
    end(pool)?;
    // Before the wait below: requests that wait in the pool wait for nothing now.
    waiters::tell();
    // What the device still uses, or the driver does not take back now, goes with a later call.
    registry::empty_detached(api, options.deadline());
    Ok(())
}

/// Takes the pool out of the table and its arenas from it, or changes nothing.
fn end(pool: PoolId) -> Result<()> {
    let _no_new_arenas = registry::stop_adding();
    // Somebody else may have destroyed it first.
    settings::of(pool)?;
    for arena in registry::living_of(pool) {
        arena.detach(false)?;
    }
    for arena in registry::living_of(pool) {
        if let Err(status) = arena.detach(true) {
            registry::of_pool(pool).for_each(|arena| arena.reattach(pool));
            return Err(status);
        }
    }
    for arena in registry::of_pool(pool) {
        arena.set_pool(PoolId::NONE);
    }
    settings::remove(pool);
    Ok(())
}
