//! Reclaim callbacks: caches of other runtimes in the process, asked to give way before a request is answered
//! with out of memory.
//!
//! A callback runs without any lock of the pool, may use the pool itself, and may be removed while it runs.
//! What it claims to have freed is not believed: the pool looks for itself whether the request can now be
//! served.

use crate::driver::lifecycle::check_running;
use crate::error::{Result, bail};
use crate::sync::clock;
use crate::sync::lock::{Lock, Rank};
use core::cell::Cell;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU64, Ordering::*};
use core::time::Duration;

/// A callback as C passes it: the bytes it freed on `device`, of which `wanted` are wanted.
pub type Callback = unsafe extern "C" fn(user: *mut c_void, device: c_int, wanted: usize) -> usize;

/// Most callbacks at a time. A limit, so that the list needs no memory when memory has run out; a process has
/// a few runtimes.
const MAX_CALLBACKS: usize = 64;

/// How often the callbacks are gone through while they claim to free memory. A limit, because a claim need
/// not be true.
const ROUNDS: usize = 8;

#[derive(Clone, Copy)]
struct Entry {
    id: u64,
    priority: c_int,
    callback: Callback,
    user: usize,
    /// Calls under way.
    running: u32,
    removed: bool,
}

struct List {
    entries: [Option<Entry>; MAX_CALLBACKS],
}

static LIST: Lock<List> = Lock::new(Rank::Callbacks, List { entries: [None; MAX_CALLBACKS] });
static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// This thread is in a callback.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Adds a callback; its id is never used again.
pub fn add(callback: Callback, user: *mut c_void, priority: c_int) -> Result<u64> {
    check_running()?;
    let mut list = LIST.lock();
    let Some(slot) = list.entries.iter_mut().find(|entry| entry.is_none()) else {
        bail!(POOL_ERROR_NOT_SUPPORTED, "there are {MAX_CALLBACKS} reclaim callbacks already");
    };
    let id = NEXT.fetch_add(1, Relaxed);
    *slot = Some(Entry { id, priority, callback, user: user as usize, running: 0, removed: false });
    Ok(id)
}

/// Removes a callback. When this returns it runs nowhere; but called from inside a callback it waits for
/// nothing, because others may be waiting for the caller.
pub fn remove(id: u64) -> Result<()> {
    check_running()?;
    let mut found = false;
    loop {
        let mut list = LIST.lock();
        let slot =
            list.entries.iter_mut().find(|entry| entry.is_some_and(|e| e.id == id && (found || !e.removed)));
        let Some(slot) = slot else {
            if found {
                return Ok(());
            }
            bail!(POOL_ERROR_INVALID_ARGUMENT, "there is no reclaim callback {id}");
        };
        found = true;
        let Some(entry) = slot else { return Ok(()) };
        entry.removed = true;
        if entry.running == 0 {
            *slot = None;
            return Ok(());
        }
        if is_inside() {
            // The last call that is under way clears the slot when it ends.
            return Ok(());
        }
        drop(list);
        clock::sleep(Duration::from_micros(50));
    }
}

/// Whether there is any.
pub fn any() -> bool {
    LIST.lock().entries.iter().flatten().any(|entry| !entry.removed)
}

/// Whether this thread is inside a callback, whose own requests must not run callbacks again.
pub fn is_inside() -> bool {
    INSIDE.try_with(Cell::get).unwrap_or(false)
}

/// Goes through the callbacks in order, and again while any of them claims to have freed something. After
/// each one `look` is told what was claimed in this round, and ends it by finding something. `wanted` is what
/// is still wanted then.
pub fn ask<T>(
    device: c_int,
    wanted: impl Fn() -> u64,
    mut look: impl FnMut(u64) -> Result<Option<T>>,
) -> Result<Option<T>> {
    for _ in 0..ROUNDS {
        let (mut after, mut claimed) = (None, 0u64);
        while let Some((place, freed)) = run_next(after, device, wanted()) {
            after = Some(place);
            claimed = claimed.saturating_add(freed);
            if let Some(found) = look(claimed)? {
                return Ok(Some(found));
            }
        }
        if claimed == 0 {
            break;
        }
    }
    Ok(None)
}

/// Runs the callback that comes after `(priority, id)`, higher priorities first, older ones first among
/// equals. Returns its place in that order and what it claims to have freed, or `None` when all have run.
fn run_next(after: Option<(c_int, u64)>, device: c_int, wanted: u64) -> Option<((c_int, u64), u64)> {
    let order = |priority: c_int, id: u64| (core::cmp::Reverse(priority), id);
    let entry = {
        let mut list = LIST.lock();
        let due = list.entries.iter_mut().flatten().filter(|e| {
            !e.removed && after.is_none_or(|(priority, id)| order(e.priority, e.id) > order(priority, id))
        });
        let entry = due.min_by_key(|e| order(e.priority, e.id))?;
        entry.running = entry.running.saturating_add(1);
        *entry
    };
    let outer = INSIDE.try_with(|inside| inside.replace(true)).unwrap_or(false);
    let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
    // SAFETY: the caller of `add` promised a function that may be called with its pointer until it has been
    // removed, and `remove` waits for this call.
    let freed = unsafe { (entry.callback)(entry.user as *mut c_void, device, wanted) };
    let _ = INSIDE.try_with(|inside| inside.set(outer));
    let mut list = LIST.lock();
    let slot = list.entries.iter_mut().find(|slot| slot.is_some_and(|e| e.id == entry.id));
    if let Some(slot) = slot
        && let Some(e) = slot
    {
        e.running = e.running.saturating_sub(1);
        if e.removed && e.running == 0 {
            *slot = None;
        }
    }
    Some(((entry.priority, entry.id), freed as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    static SEEN: Mutex<Vec<usize>> = Mutex::new(Vec::new());

    unsafe extern "C" fn note(user: *mut c_void, _: c_int, wanted: usize) -> usize {
        SEEN.lock().unwrap().push(user as usize);
        assert!(is_inside());
        wanted
    }

    unsafe extern "C" fn remove_myself(user: *mut c_void, _: c_int, _: usize) -> usize {
        // SAFETY: the test passes a pointer to its own variable.
        remove(unsafe { *(user as *const u64) }).unwrap();
        7
    }

    #[test]
    fn runs_in_order_and_can_be_removed_from_inside() {
        let ids: Vec<_> =
            [(1, 0), (2, 5), (3, -3), (4, 5)].map(|(n, p)| add(note, n as *mut c_void, p).unwrap()).to_vec();
        let mut after = None;
        while let Some((place, freed)) = run_next(after, 0, 9) {
            assert_eq!(freed, 9);
            after = Some(place);
        }
        assert_eq!(*SEEN.lock().unwrap(), [2, 4, 1, 3]);
        for id in ids {
            remove(id).unwrap();
            assert!(remove(id).is_err());
        }
        let mut id = 0u64;
        id = add(remove_myself, (&raw mut id).cast(), 0).unwrap();
        assert_eq!(run_next(None, 0, 1).map(|r| r.1), Some(7));
        assert!(run_next(None, 0, 1).is_none());
        assert!(!is_inside());
        assert!(remove(id).is_err());
    }
}
