//! Waiters: requests that found no memory and wait for what others free or give back, first come first
//! served. Whatever makes memory available, or the wait pointless, tells them.
//!
//! A free only looks at one counter unless somebody waits. No wake-up is lost: a waiter counts itself before
//! it searches, and both the search and the free take the arena's lock, so that either the search sees the
//! memory or the free sees the waiter. Memory that comes from outside the pool wakes nobody; for its sake
//! waiters look by themselves now and then.

use crate::pool::types::PoolId;
use crate::sync::clock;
use crate::sync::lock::{Lock, Rank};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering::*};
use core::time::Duration;

/// Most requests that wait at a time. A limit, so that waiting needs no memory; further ones do not wait.
const MAX_WAITERS: usize = 256;
/// A request of at most this share of one that waits is served before it: the thread that has the memory may
/// need a little more of it to get done.
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
    waiting: [Option<Waiter>; MAX_WAITERS],
    next: u64,
}

static QUEUE: Lock<Queue> = Lock::new(Rank::Waiters, Queue { waiting: [None; MAX_WAITERS], next: 0 });
/// Counts what waiters were told, and changes of the queue. Waiters sleep on it.
static CHANGES: AtomicU32 = AtomicU32::new(0);
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Whether any request waits.
#[inline]
pub fn any() -> bool {
    COUNT.load(Relaxed) != 0
}

/// Tells the waiters, if there are any, that something was freed, given back or allowed, or that their pool
/// or context has gone.
#[inline]
pub fn tell() {
    if any() {
        wake();
    }
}

#[cold]
fn wake() {
    CHANGES.fetch_add(1, Release);
    clock::wake_all(&CHANGES);
}

/// The count of changes: to be read before a search whose failure is to be waited on.
pub fn changes() -> u32 {
    CHANGES.load(Acquire)
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
    QUEUE.lock().waiting.iter().flatten().any(|w| w.competes_with(&newcomer) && size > w.size / SMALL_SHARE)
}

/// A place in the queue.
pub struct Place {
    ticket: u64,
}

impl Place {
    /// Queues a request; `None` if too many wait already.
    pub fn take(device: i32, pool: PoolId, size: u64) -> Option<Place> {
        let mut queue = QUEUE.lock();
        let ticket = queue.next;
        let slot = queue.waiting.iter_mut().find(|slot| slot.is_none())?;
        *slot = Some(Waiter { ticket, device, pool, size, limited: false });
        queue.next = ticket.wrapping_add(1);
        COUNT.fetch_add(1, Relaxed);
        Some(Place { ticket })
    }

    /// Says what is in the way of the request now.
    pub fn set_limited(&self, limited: bool) {
        let mut queue = QUEUE.lock();
        let mine = queue.waiting.iter_mut().flatten().find(|w| w.ticket == self.ticket);
        let changed = mine.is_some_and(|mine| core::mem::replace(&mut mine.limited, limited) != limited);
        drop(queue);
        if changed {
            wake();
        }
    }

    /// Whether nobody who competes came before.
    pub fn is_first(&self) -> bool {
        let queue = QUEUE.lock();
        let Some(mine) = queue.waiting.iter().flatten().find(|w| w.ticket == self.ticket) else {
            return true;
        };
        !queue.waiting.iter().flatten().any(|w| w.ticket < mine.ticket && w.competes_with(mine))
    }

    /// Sleeps until there has been a change after the count was `seen`, or time runs out.
    pub fn sleep(&self, seen: u32, longest: Duration) {
        clock::wait(&CHANGES, seen, longest);
    }
}

impl Drop for Place {
    /// The next one may be served by what is left.
    fn drop(&mut self) {
        let mut queue = QUEUE.lock();
        let slot = queue.waiting.iter_mut().find(|w| w.is_some_and(|w| w.ticket == self.ticket));
        if let Some(slot) = slot {
            *slot = None;
            COUNT.fetch_sub(1, Relaxed);
        }
        drop(queue);
        wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let start = clock::now();
        second.sleep(seen, Duration::from_secs(60));
        assert!(start.elapsed() < Duration::from_secs(30));
        drop(first);
        assert!(second.is_first());
    }
}
