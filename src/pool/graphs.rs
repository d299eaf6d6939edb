//! Private pools of CUDA graphs, as PyTorch asks for them: what is allocated while a graph is captured comes
//! from a pool of the graph's own, whose memory stays where it is, idle or not, until the graph is gone. A
//! launch of the graph uses the addresses that the capture saw.
//!
//! PyTorch also passes a C++ object that tells which streams are meant; it cannot be called from here. Meant
//! are the thread that began, and streams that are being captured.

use super::types::{PoolId, this_thread};
use super::{api, pools, registry, settings};
use crate::driver::lifecycle::check_running;
use crate::driver::{self, Api, is_capturing};
use crate::error::{Result, bail};
use crate::sync::lock::{Lock, Rank};
use core::sync::atomic::{AtomicUsize, Ordering::*};

/// A graph's pool as PyTorch names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GraphId {
    pub device: i32,
    pub id: (u64, u64),
}

/// Most private pools at a time, those included that wait for their last block. A limit, so that the table
/// needs no memory.
const MAX_PRIVATE: usize = 256;
/// Most captures under way at a time.
const MAX_OPEN: usize = 64;

#[derive(Clone, Copy)]
struct Private {
    graph: GraphId,
    pool: PoolId,
    /// Captures into it that have begun, less those that were released; 0 when it only waits for its last
    /// block.
    uses: u64,
}

/// Allocations on the graph's device go to its pool, or nowhere if it could not be made.
#[derive(Clone, Copy)]
struct Open {
    graph: GraphId,
    pool: Option<PoolId>,
    thread: u64,
}

struct Table {
    privates: [Option<Private>; MAX_PRIVATE],
    open: [Option<Open>; MAX_OPEN],
}

static TABLE: Lock<Table> =
    Lock::new(Rank::Graphs, Table { privates: [None; MAX_PRIVATE], open: [None; MAX_OPEN] });
/// Captures under way, so that an allocation outside of any does not take the lock.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// From now on allocations of this thread and of captured streams come from the graph's pool, which is made
/// if there is none.
pub fn begin(graph: GraphId) -> Result<()> {
    check_running()?;
    if graph.device < 0 {
        // The current device may be another one by the time of the end.
        bail!(POOL_ERROR_INVALID_ARGUMENT, "a graph's device is a number, not {}", graph.device);
    }
    sweep();
    // Made outside the table's lock, because the driver may have to be loaded for it.
    let made =
        driver::api().and_then(|api| registry::device(api, graph.device)).and_then(|_| find_or_make(graph));
    let open = Open { graph, pool: made.ok(), thread: this_thread() };
    let mut table = TABLE.lock();
    let Some(slot) = table.open.iter_mut().find(|slot| slot.is_none()) else {
        drop(table);
        if made.is_ok() {
            release(graph)?;
        }
        bail!(POOL_ERROR_NOT_SUPPORTED, "{MAX_OPEN} graphs are being captured already");
    };
    *slot = Some(open);
    OPEN.fetch_add(1, Release);
    made.map(drop)
}

fn find_or_make(graph: GraphId) -> Result<PoolId> {
    let mut table = TABLE.lock();
    if let Some(found) = table.privates.iter_mut().flatten().find(|p| p.graph == graph && p.uses > 0) {
        found.uses += 1;
        return Ok(found.pool);
    }
    let Some(slot) = table.privates.iter_mut().find(|slot| slot.is_none()) else {
        bail!(POOL_ERROR_NOT_SUPPORTED, "there are {MAX_PRIVATE} pools of graphs already");
    };
    let pool = pools::create_pinned()?;
    *slot = Some(Private { graph, pool, uses: 1 });
    Ok(pool)
}

/// The graph's capture is over, in whichever thread.
pub fn end(graph: GraphId) -> Result<()> {
    // A forked child must not wait for a lock that a thread of its parent holds.
    check_running()?;
    let mut table = TABLE.lock();
    let me = this_thread();
    let is_mine = |slot: &&mut Option<Open>| slot.is_some_and(|o| o.graph == graph && o.thread == me);
    let mine = table.open.iter_mut().find(is_mine).map(|slot| *slot = None);
    let any =
        || table.open.iter_mut().find(|slot| slot.is_some_and(|o| o.graph == graph)).map(|slot| *slot = None);
    if mine.or_else(any).is_none() {
        bail!(
            POOL_ERROR_INVALID_ARGUMENT,
            "no capture into the pool ({}, {}) of device {} is under way",
            graph.id.0,
            graph.id.1,
            graph.device
        );
    }
    OPEN.fetch_sub(1, Release);
    Ok(())
}

/// One user of the graph's pool is gone. With the last one its idle memory is everyone's, and the pool goes
/// with its last block.
pub fn release(graph: GraphId) -> Result<()> {
    check_running()?;
    let last = {
        let mut table = TABLE.lock();
        let Some(found) = table.privates.iter_mut().flatten().find(|p| p.graph == graph && p.uses > 0) else {
            return Ok(());
        };
        found.uses -= 1;
        (found.uses == 0).then_some(found.pool)
    };
    if let Some(pool) = last {
        pools::unpin(pool);
    }
    sweep();
    Ok(())
}

/// Whether a capture is under way, of which the pool may not have been told by a call that names its stream.
pub fn is_capturing_any() -> bool {
    OPEN.load(Acquire) > 0
}

/// Destroys the pools that nobody uses and in which nothing is live. That waits for the device, so it is put
/// off during captures.
pub fn sweep() {
    if is_capturing_any() {
        return;
    }
    for at in 0..MAX_PRIVATE {
        let unused = TABLE.lock().privates.get(at).copied().flatten().filter(|p| p.uses == 0);
        let Some(unused) = unused else { continue };
        // Not under the lock: it waits for the device. Somebody else may have destroyed the pool first, which
        // is as good.
        if pools::is_empty(unused.pool)
            && (!settings::exists(unused.pool) || pools::destroy(pools::handle_of(unused.pool)).is_ok())
        {
            let mut table = TABLE.lock();
            if let Some(slot) = table.privates.get_mut(at)
                && slot.is_some_and(|p| p.pool == unused.pool)
            {
                *slot = None;
            }
        }
    }
}

/// The pool that an allocation of this thread on a device and stream is to come from.
#[inline]
pub fn pool_for(device: i32, stream: u64) -> Result<PoolId> {
    if OPEN.load(Acquire) == 0 { Ok(PoolId::DEFAULT) } else { open_pool_for(driver::api()?, device, stream) }
}

#[cold]
fn open_pool_for(api: &Api, device: i32, stream: u64) -> Result<PoolId> {
    let device = registry::device(api, device)?;
    let me = this_thread();
    let (mine, any) = {
        let table = TABLE.lock();
        let here = || table.open.iter().flatten().filter(|o| o.graph.device == device);
        (here().find(|o| o.thread == me).copied(), here().next().copied())
    };
    let Some(any) = any else { return Ok(PoolId::DEFAULT) };
    let captured = is_capturing(api, stream) == Some(true);
    if captured {
        // The default pool has to know of the capture too, and sees that of a non-blocking stream only where
        // it is named.
        api::use_on_stream(0, stream)?;
    }
    let Some(open) = mine.or_else(|| captured.then_some(any)) else { return Ok(PoolId::DEFAULT) };
    match open.pool {
        Some(pool) => Ok(pool),
        None => {
            bail!(POOL_ERROR_NOT_SUPPORTED, "the pool of the graph that is being captured could not be made")
        }
    }
}
