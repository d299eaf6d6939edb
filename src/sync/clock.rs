//! The clock: what time it is, and sleeping until a time or a word from another thread.
//!
//! It is the host's monotonic clock, unless the driver brings one of its own. The simulated driver does where
//! its time is virtual: tests then decide by order what would otherwise depend on how fast the machine is.

use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};
use core::time::Duration;

/// The functions of a driver's own clock (`struct cudasim_clock` in the simulated driver's header). Times are
/// nanoseconds since an origin of its own.
#[repr(C)]
pub struct DriverClock {
    now: unsafe extern "C" fn() -> u64,
    /// Sleeps until the word is woken, or the time has come; not at all if the word is not `seen`.
    wait: unsafe extern "C" fn(word: *const u32, seen: u32, until: u64),
    /// Wakes all who sleep on the word.
    wake: unsafe extern "C" fn(word: *const u32),
}

/// Null: the host's clock.
static DRIVERS: AtomicPtr<DriverClock> = AtomicPtr::new(ptr::null_mut());

/// Goes by the driver's clock from now on; by the host's if it is null.
///
/// # Safety
/// It points to a clock that lasts as long as the process.
pub unsafe fn install(clock: *const DriverClock) {
    DRIVERS.store(clock.cast_mut(), Release);
}

#[inline]
fn drivers() -> Option<&'static DriverClock> {
    // SAFETY: null, or a clock that lasts as long as the process, says the contract of `install`.
    unsafe { DRIVERS.load(Acquire).as_ref() }
}

/// A moment of the clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Moment(u64);

impl Moment {
    /// This one, so much later; the end of time where that is later still.
    pub fn after(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_add(nanoseconds(duration)))
    }

    /// From an earlier moment to this one; none if it is a later one.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// From this moment to now.
    pub fn elapsed(self) -> Duration {
        now().since(self)
    }
}

/// Nanoseconds of a duration, of which a process sees no more than 2^64.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The present moment.
pub fn now() -> Moment {
    if let Some(clock) = drivers() {
        // SAFETY: the clock's function, which takes nothing.
        return Moment(unsafe { (clock.now)() });
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local. The call cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Moment(nanoseconds(Duration::new(time.tv_sec as u64, time.tv_nsec as u32)))
}

/// Sleeps for `duration`.
pub fn sleep(duration: Duration) {
    match drivers() {
        // Nobody wakes this word.
        Some(_) => wait(&AtomicU32::new(0), 0, duration),
        None => std::thread::sleep(duration),
    }
}

/// Sleeps until somebody calls [`wake_all`] with the word, or `longest` is over; not at all if the word is no
/// longer `seen`. May return without either.
pub fn wait(word: &AtomicU32, seen: u32, longest: Duration) {
    if let Some(clock) = drivers() {
        let until = now().after(longest);
        // SAFETY: the word outlives the call.
        return unsafe { (clock.wait)(word.as_ptr(), seen, until.0) };
    }
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(longest.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: longest.subsec_nanos().into(),
    };
    // SAFETY: word and time outlive the call; any answer leads back to the caller, who looks again.
    unsafe {
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        libc::syscall(libc::SYS_futex, word.as_ptr(), operation, seen, &raw const time);
    }
}

/// Wakes all threads that sleep on the word. To be called after the word was changed.
pub fn wake_all(word: &AtomicU32) {
    wake(word, i32::MAX);
}

/// Wakes at least one of them, if any.
pub fn wake_one(word: &AtomicU32) {
    wake(word, 1);
}

#[cold]
fn wake(word: &AtomicU32, at_least: i32) {
    if let Some(clock) = drivers() {
        // SAFETY: the word is only an address here.
        return unsafe { (clock.wake)(word.as_ptr()) };
    }
    // SAFETY: wakes waiters by the word's address and touches nothing else.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, at_least);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_by_a_word_and_by_time() {
        let start = now();
        let word = AtomicU32::new(0);
        wait(&word, 1, Duration::from_secs(3600));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                word.store(1, Release);
                wake_all(&word);
            });
            while word.load(Acquire) == 0 {
                wait(&word, 0, Duration::from_secs(3600));
            }
        });
        wait(&word, 1, Duration::from_millis(1));
        sleep(Duration::from_millis(1));
        assert!(start.elapsed() >= Duration::from_millis(1));
        assert!(start < start.after(Duration::from_nanos(1)));
        assert_eq!(start.after(Duration::MAX).since(start), Duration::from_nanos(u64::MAX - start.0));
        assert_eq!(start.since(now().after(Duration::from_secs(1))), Duration::ZERO);
    }
}
