//! Waiters: requests that found no memory and wait for what other threads free, first come first served.
//!
//! A free only looks at one counter unless somebody waits. No wake-up is lost: a waiter counts itself before it searches, and both the search
//! and the free take the arena's lock, so that either the search sees the memory or the free sees the waiter. Memory that
//! comes from outside the pool wakes nobody; for its sake waiters look by themselves now and then.

use super::pools::PoolId;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use core::time::Duration;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Most requests that wait at a time. A limit, so that waiting needs no memory; further ones do not wait.
const MOST: usize = 256;
/// A request of at most this share of one that waits is served before it: the thread that has the memory may need a little more of it
/// to get done.
const SMALL_SHARE: u64 = 16;

#[derive(Clone, Copy)]
struct Waiter {
    ticket: u64,
    device: i32,
    pool: PoolId,
    size: u64,
    /// What is in its way is its pool's limit, not the device.
    limited: bool,
}

struct Queue {
    waiting: [Option<Waiter>; MOST],
    next: u64,
    /// Counts frees while somebody waited, and changes of the queue.
    changes: u64,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { waiting: [None; MOST], next: 0, changes: 0 });
static CHANGED: Condvar = Condvar::new();
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether any request waits.
#[inline]
pub fn any() -> bool {
    COUNT.load(Relaxed) != 0
}

fn queue() -> MutexGuard<'static, Queue> {
    // Nothing in here panics halfway; what another thread left is in order.
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells the waiters that something was freed.
#[cold]
pub fn wake() {
    queue().change();
}

/// The count of changes: to be read before a search whose failure is to be waited on.
pub fn changes() -> u64 {
    queue().changes
}

impl Queue {
    fn change(&mut self) {
        self.changes = self.changes.wrapping_add(1);
        CHANGED.notify_all();
    }
}

impl Waiter {
    /// Whether the two may need the same bytes.
    fn competes_with(&self, other: &Waiter) -> bool {
        self.device == other.device && (self.pool == other.pool || !(self.limited || other.limited))
    }
}

/// Whether a new request has to queue behind others.
pub fn must_queue(device: i32, pool: PoolId, size: u64) -> bool {
    let newcomer = Waiter { ticket: u64::MAX, device, pool, size, limited: false };
    queue().waiting.iter().flatten().any(|w| w.competes_with(&newcomer) && size > w.size / SMALL_SHARE)
}

/// A place in the queue.
pub struct Place {
    ticket: u64,
}

impl Place {
    /// Queues a request; `None` if too many wait already.
    pub fn take(device: i32, pool: PoolId, size: u64) -> Option<Place> {
        let mut queue = queue();
        let ticket = queue.next;
        let slot = queue.waiting.iter_mut().find(|slot| slot.is_none())?;
        *slot = Some(Waiter { ticket, device, pool, size, limited: false });
        queue.next = ticket.wrapping_add(1);
        COUNT.fetch_add(1, Relaxed);
        Some(Place { ticket })
    }

    /// Says what is in the way of the request now.
    pub fn set_limited(&self, limited: bool) {
        let mut queue = queue();
        let mine = queue.waiting.iter_mut().flatten().find(|w| w.ticket == self.ticket);
        if mine.is_some_and(|mine| core::mem::replace(&mut mine.limited, limited) != limited) {
            queue.change();
        }
    }

    /// Whether nobody who competes came before.
    pub fn is_first(&self) -> bool {
        let queue = queue();
        let Some(mine) = queue.waiting.iter().flatten().find(|w| w.ticket == self.ticket) else {
            return true;
        };
        !queue.waiting.iter().flatten().any(|w| w.ticket < mine.ticket && w.competes_with(mine))
    }

    /// Sleeps until there has been a change after the count was `seen`, or time runs out.
    pub fn sleep(&self, seen: u64, longest: Duration) {
        let queue = queue();
        if queue.changes == seen {
            // A false alarm only makes the waiter look again.
            drop(CHANGED.wait_timeout(queue, longest));
        }
    }
}

impl Drop for Place {
    /// The next one may be served by what is left.
    fn drop(&mut self) {
        let mut queue = queue();
        if let Some(slot) = queue.waiting.iter_mut().find(|w| w.is_some_and(|w| w.ticket == self.ticket)) {
            *slot = None;
            COUNT.fetch_sub(1, Relaxed);
            queue.change();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn first_come_first_served_among_those_who_compete() {
        let device = 77;
        let (a, b) = (PoolId(1), PoolId(2));
        let first = Place::take(device, a, 1000).unwrap();
        let second = Place::take(device, b, 10).unwrap();
        let elsewhere = Place::take(device + 1, a, 10).unwrap();
        assert!(any() && first.is_first() && !second.is_first() && elsewhere.is_first());
        assert!(must_queue(device, b, 1000));
        assert!(!must_queue(device + 2, b, 1000));
        drop(second);
        assert!(!must_queue(device, b, 1000 / SMALL_SHARE));
        // The first one's own limit is nobody else's matter.
        let second = Place::take(device, b, 10).unwrap();
        first.set_limited(true);
        assert!(second.is_first());
        first.set_limited(false);
        assert!(!second.is_first());
        let seen = changes();
        wake();
        let start = Instant::now();
        second.sleep(seen, Duration::from_secs(60));
        assert!(start.elapsed() < Duration::from_secs(30));
        drop(first);
        assert!(second.is_first());
    }
}
