//! The options in force: those of the default pool, and those of each pool that was created and not
//! destroyed.

use super::options::{self, Options, Order};
use super::types::PoolId;
use crate::error::{Result, Status, bail, fail};
use crate::host_alloc::without_failing;
use crate::logging;
use crate::sync::lock::{Lock, Rank};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use once_cell::sync::OnceCell;

/// Most pools at a time, the default one aside. A limit, so that the table needs no memory; a process has a
/// few.
const MAX_POOLS: usize = 256;

#[derive(Clone, Copy)]
struct Entry {
    id: PoolId,
    options: Options,
}

/// The default pool's options. Read from the environment at first use; a failure is answered again by the
/// next call.
static DEFAULT: OnceCell<Lock<Options>> = OnceCell::new();
static CREATED: Lock<[Option<Entry>; MAX_POOLS]> = Lock::new(Rank::Pools, [None; MAX_POOLS]);
static NEXT: AtomicU64 = AtomicU64::new(1);
/// The plain calls are ordered by the legacy stream.
static PLAIN_IS_LEGACY: AtomicBool = AtomicBool::new(false);

fn default_lock() -> Result<&'static Lock<Options>> {
    if let Some(options) = DEFAULT.get() {
        return Ok(options);
    }
    let read = || {
        let (options, environment) = options::initial();
        environment?;
        apply(&options);
        Ok(Lock::new(Rank::Options, options))
    };
    // A thread that waits for another one in here needs host memory for it.
    without_failing(|| DEFAULT.get_or_try_init(read))
}

/// What of the options is the process's, and not a pool's.
fn apply(options: &Options) {
    PLAIN_IS_LEGACY.store(options.order == Order::LegacyStream, Relaxed);
    logging::set_level(options.log);
}

/// The default pool's options.
pub fn default() -> Result<Options> {
    Ok(*default_lock()?.lock())
}

/// Changes the default pool's options.
pub fn set_default(options: &Options) -> Result<()> {
    *default_lock()?.lock() = *options;
    apply(options);
    Ok(())
}

/// Whether the plain calls are ordered by the legacy stream. To be asked after [`default`] has succeeded
/// once.
#[inline]
pub fn plain_is_legacy() -> bool {
    PLAIN_IS_LEGACY.load(Relaxed)
}

/// Adds a pool with options of its own.
pub fn add(options: &Options) -> Result<PoolId> {
    let mut pools = CREATED.lock();
    let Some(slot) = pools.iter_mut().find(|slot| slot.is_none()) else {
        bail!(POOL_ERROR_NOT_SUPPORTED, "there are {MAX_POOLS} pools already");
    };
    let id = PoolId(NEXT.fetch_add(1, Relaxed));
    *slot = Some(Entry { id, options: *options });
    Ok(id)
}

/// Takes a pool out.
pub fn remove(pool: PoolId) {
    if let Some(slot) = CREATED.lock().iter_mut().find(|slot| slot.is_some_and(|p| p.id == pool)) {
        *slot = None;
    }
}

/// Whether the pool was created and not destroyed.
pub fn exists(pool: PoolId) -> bool {
    CREATED.lock().iter().flatten().any(|p| p.id == pool)
}

/// The options of a pool.
pub fn of(pool: PoolId) -> Result<Options> {
    if pool == PoolId::DEFAULT {
        return default();
    }
    match CREATED.lock().iter().flatten().find(|p| p.id == pool) {
        Some(entry) => Ok(entry.options),
        None => Err(gone()),
    }
}

/// Lets the idle memory of a pool serve others, as that of most pools does.
pub fn unpin(pool: PoolId) {
    if let Some(entry) = CREATED.lock().iter_mut().flatten().find(|p| p.id == pool) {
        entry.options.pinned = false;
    }
}

/// The answer to a request that comes after its pool's end.
#[cold]
pub fn gone() -> Status {
    fail(Status::POOL_ERROR_INVALID_ARGUMENT, format_args!("the pool has been destroyed"))
}
