//! A lock without poisoning and without memory: one word, waited on by the clock, as its holder may sleep
//! there.
//!
//! The fast path of the pool is two of these, so taking it is one atomic exchange and giving it back a plain
//! store. A panic while it is held leaves a mark instead of an error, and whoever locks next decides what
//! that means.

use crate::sync::clock;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering::*};
use core::time::Duration;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// The longest sleep. The holder looks for sleepers right after its plain store, and may look before that
/// store can be seen; a sleeper that is missed this way wakes by itself.
const NAP_TIME: Duration = Duration::from_millis(1);
/// How often a thread looks again before it sleeps: about as long as the pool holds the lock.
const SPINS: u32 = 100;

/// What the C library says of itself: whether the process has never had a second thread (glibc from 2.32).
static SINGLE_THREADED: AtomicPtr<u8> = AtomicPtr::new(&raw const MANY_THREADS as *mut u8);
static MANY_THREADS: u8 = 0;

/// Finds out whether the C library can tell that there is one thread only.
pub fn ask_for_threads() {
    // SAFETY: looks up a name; a data symbol of one byte, if there is one.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    if !symbol.is_null() {
        SINGLE_THREADED.store(symbol.cast(), Relaxed);
    }
}

#[inline]
fn is_single_threaded() -> bool {
    // SAFETY: our own byte, or the C library's. It changes only when this thread makes another one, or, back,
    // when none is left.
    unsafe { SINGLE_THREADED.load(Relaxed).read_volatile() != 0 }
}

/// What a lock is for, in the order of taking: a thread may take a lock only if its rank comes after the rank
/// of every lock that the thread holds. In builds with debug assertions a thread that does otherwise panics,
/// whether or not it would have met another one on the way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Rank {
    /// The table of graphs' private pools.
    Graphs,
    /// Held while arenas are made or change their pool.
    Arenas,
    /// The options of the default pool.
    Options,
    /// The table of created pools.
    Pools,
    /// The state of one arena. No thread holds two.
    Arena,
    /// The queue of requests that wait for memory.
    Waiters,
    /// The list of reclaim callbacks.
    Callbacks,
    /// What others were last known to need on each device.
    Headroom,
}

/// The ranks of the locks that this thread holds, in builds with debug assertions.
#[cfg(debug_assertions)]
mod witness {
    use super::Rank;
    use core::cell::Cell;

    thread_local! {
        /// One bit for each rank.
        static HELD: Cell<u32> = const { Cell::new(0) };
    }

    /// Before a lock is taken.
    pub fn take(rank: Rank) {
        let _ = HELD.try_with(|held| {
            let above = held.get() >> rank as u32;
            assert!(above == 0, "a lock of rank {rank:?} was taken out of order: held are {:#b}", held.get());
            held.set(held.get() | 1 << rank as u32);
        });
    }

    /// After it was given back.
    pub fn give(rank: Rank) {
        let _ = HELD.try_with(|held| held.set(held.get() & !(1 << rank as u32)));
    }
}

/// See the module.
pub struct Lock<T> {
    #[cfg(debug_assertions)]
    rank: Rank,
    word: AtomicU32,
    sleepers: AtomicU32,
    broken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is only reached through a guard, and there is one guard at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Holds a [`Lock`].
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
    /// A guard belongs to the thread that took it.
    _here: core::marker::PhantomData<*const ()>,
}

impl<T> Lock<T> {
    #[cfg_attr(not(debug_assertions), allow(unused_variables))] // The rank is for the witness alone.
    pub const fn new(rank: Rank, value: T) -> Self {
        Lock {
            #[cfg(debug_assertions)]
            rank,
            word: AtomicU32::new(FREE),
            sleepers: AtomicU32::new(0),
            broken: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    #[inline]
    pub fn lock(&self) -> Guard<'_, T> {
        #[cfg(debug_assertions)]
        witness::take(self.rank);
        // With one thread there is nobody to race with, and an atomic exchange is most of what a cached call
        // costs.
        let taken = if is_single_threaded() {
            let before = self.word.load(Relaxed);
            self.word.store(HELD, Relaxed);
            before
        } else {
            self.word.swap(HELD, Acquire)
        };
        if taken != FREE {
            self.wait();
        }
        Guard { lock: self, _here: core::marker::PhantomData }
    }

    /// Whether a panic ended an earlier hold of the lock. Cleared by the question.
    pub fn take_broken(&self) -> bool {
        self.broken.load(Relaxed) && self.broken.swap(false, Relaxed)
    }

    #[cold]
    fn wait(&self) {
        for _ in 0..SPINS {
            if self.word.load(Relaxed) == FREE && self.word.swap(HELD, Acquire) == FREE {
                return;
            }
            core::hint::spin_loop();
        }
        self.sleepers.fetch_add(1, Relaxed);
        while self.word.swap(HELD, Acquire) != FREE {
            clock::wait(&self.word, HELD, NAP_TIME);
        }
        self.sleepers.fetch_sub(1, Relaxed);
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard is the only one.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard is the only one, and it is borrowed mutably.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lock.broken.store(true, Relaxed);
        }
        self.lock.word.store(FREE, Release);
        if self.lock.sleepers.load(Relaxed) != 0 {
            clock::wake_one(&self.lock.word);
        }
        #[cfg(debug_assertions)]
        witness::give(self.lock.rank);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excludes() {
        let lock = Lock::new(Rank::Arena, 0u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        *lock.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 200_000);
    }

    #[test]
    fn a_panic_leaves_a_mark() {
        let lock = Lock::new(Rank::Arena, 0);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _held = lock.lock();
            std::panic::resume_unwind(Box::new(()));
        }));
        assert!(result.is_err());
        assert!(lock.take_broken());
        assert!(!lock.take_broken());
        assert_eq!(*lock.lock(), 0);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn the_order_of_ranks_is_kept() {
        let (outer, inner) = (Lock::new(Rank::Pools, ()), Lock::new(Rank::Arena, ()));
        let taken_within = |first: &Lock<()>, second: &Lock<()>| {
            let _first = first.lock();
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(second.lock()))).is_ok()
        };
        assert!(taken_within(&outer, &inner));
        assert!(!taken_within(&inner, &outer), "an inversion");
        assert!(!taken_within(&inner, &Lock::new(Rank::Arena, ())), "two of one rank");
        // A panic gave back what it held.
        assert!(taken_within(&outer, &inner));
    }
}
