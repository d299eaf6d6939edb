//! The clock of the simulated driver: the host's, or a virtual one whose time does not depend on the machine.
//!
//! Virtual time passes only while every participant sleeps: then it jumps to the moment at which the first of
//! them is to wake, and that one goes on alone. Participants are the threads of the program from their first
//! call on, and the workers of streams while they have work. Whoever wakes a sleeper counts it as running at
//! once, on its behalf, so that no time passes between being woken and going on. A thread that blocks
//! elsewhere than here leaves the clock meanwhile (`cudasim_thread_leave`), or time stands still until it
//! goes on.

use crate::report;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once};
use std::time::{Duration, Instant};

/// Not decided: the first use decides.
const UNSET: u8 = 0;
const HOST: u8 = 1;
const VIRTUAL: u8 = 2;

static MODE: AtomicU8 = AtomicU8::new(UNSET);

/// The end of a sleep that has none.
const NEVER: u64 = u64::MAX;

/// What a query that answers "not ready" takes, so that a program that polls lets time pass.
const QUERY_NS: u64 = 1_000;

/// A sleeper that nobody woke for so long (of the host's time) looks whether the clock is stuck.
const LOOK_AFTER: Duration = Duration::from_secs(2);
/// Time that stands still for so long, while somebody sleeps, is reported.
const STILL_FOR: Duration = Duration::from_secs(20);

/// Virtual time in nanoseconds; it changes under the state's lock.
static NOW: AtomicU64 = AtomicU64::new(0);

/// Where a thread sleeps.
struct Seat {
    woken: Condvar,
    is_woken: AtomicBool,
    by_time: AtomicBool,
}

struct Sleeper {
    until: u64,
    /// Counts the sleeps, so that who slept first wakes first.
    number: u64,
    /// The address it can be woken by; 0: none.
    word: usize,
    thread: libc::pid_t,
    seat: Arc<Seat>,
}

struct State {
    /// Participants that do not sleep.
    running: usize,
    /// Of these, the ones that were announced and have not entered yet.
    expected: usize,
    sleepers: Vec<Sleeper>,
    count: u64,
    /// When time last changed, by the host's clock.
    moved: Instant,
    is_reported: bool,
}

/// Null until it is first used. A child of `fork` gets one of its own: the lock of the old one may be held by
/// a thread that does not exist there.
static STATE: AtomicPtr<Mutex<State>> = AtomicPtr::new(std::ptr::null_mut());

fn new_state(running: usize) -> *mut Mutex<State> {
    Box::into_raw(Box::new(Mutex::new(State {
        running,
        expected: 0,
        sleepers: Vec::with_capacity(64),
        count: 0,
        moved: Instant::now(),
        is_reported: false,
    })))
}

fn state() -> MutexGuard<'static, State> {
    static MAKE: Once = Once::new();
    MAKE.call_once(|| {
        STATE.store(new_state(0), Ordering::Release);
        // SAFETY: the handler is a function of this library, which is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
    });
    // SAFETY: it points to a leaked box, made above or in the child of a fork.
    crate::sync::lock(unsafe { &*STATE.load(Ordering::Acquire) })
}

/// The child has this one thread.
extern "C" fn after_fork_in_child() {
    let enrolled = ENROLLED.try_with(|place| place.0.get()).unwrap_or(false);
    STATE.store(new_state(usize::from(enrolled)), Ordering::Release);
}

impl State {
    fn wake(&mut self, index: usize, by_time: bool) {
        let sleeper = self.sleepers.remove(index);
        self.running += 1;
        sleeper.seat.by_time.store(by_time, Ordering::Relaxed);
        sleeper.seat.is_woken.store(true, Ordering::Relaxed);
        sleeper.seat.woken.notify_one();
    }

    fn wake_all(&mut self, word: usize) {
        while let Some(index) = self.sleepers.iter().position(|sleeper| sleeper.word == word) {
            self.wake(index, false);
        }
    }

    /// One participant less runs. If that was the last, time goes on.
    fn stop_one(&mut self) {
        self.running = self.running.saturating_sub(1);
        if self.running > 0 {
            return;
        }
        let timed = self.sleepers.iter().enumerate().filter(|(_, sleeper)| sleeper.until != NEVER);
        let first = timed.min_by_key(|(_, sleeper)| (sleeper.until, sleeper.number));
        let Some((index, until)) = first.map(|(index, sleeper)| (index, sleeper.until)) else { return };
        if until > NOW.load(Ordering::Relaxed) {
            NOW.store(until, Ordering::Release);
            self.moved = Instant::now();
            self.is_reported = false;
        }
        self.wake(index, true);
    }

    /// What is wrong, if time does not pass though somebody sleeps.
    fn stuck(&self) -> Option<String> {
        let still = self.moved.elapsed();
        let why = if self.running == 0 {
            "nobody runs, and nobody sleeps until a time".to_string()
        } else if still >= STILL_FOR {
            format!("no time passed for {} s, {} threads run", still.as_secs(), self.running)
        } else {
            return None;
        };
        let mut text = format!("the virtual clock is stuck at {} ns: {why}", NOW.load(Ordering::Relaxed));
        if self.expected > 0 {
            text += &format!(" ({} were announced and have not entered)", self.expected);
        }
        for sleeper in &self.sleepers {
            text += &format!("\n  thread {} sleeps", sleeper.thread);
            if sleeper.word != 0 {
                text += &format!(" on {:#x}", sleeper.word);
            }
            if sleeper.until != NEVER {
                text += &format!(" until {} ns", sleeper.until);
            }
        }
        Some(text)
    }
}

/// Whether this thread takes part; it leaves when it ends.
struct Place(Cell<bool>);

impl Drop for Place {
    fn drop(&mut self) {
        if self.0.replace(false) {
            state().stop_one();
        }
    }
}

thread_local! {
    static ENROLLED: Place = const { Place(Cell::new(false)) };
}

/// The mode of a process that did not choose one, when it comes to use.
pub fn decide(is_virtual: bool) {
    let mode = if is_virtual { VIRTUAL } else { HOST };
    let _ = MODE.compare_exchange(UNSET, mode, Ordering::AcqRel, Ordering::Acquire);
}

/// The first use of the clock is a choice.
fn choose() {
    if MODE.load(Ordering::Acquire) == UNSET {
        crate::knobs::choose_clock();
    }
}

#[inline]
pub fn is_virtual() -> bool {
    MODE.load(Ordering::Relaxed) == VIRTUAL
}

/// Makes this thread a participant, unless it is one. False: the thread is ending, and cannot be one any
/// more.
#[inline]
pub fn enrol() -> bool {
    let enrolled = ENROLLED.try_with(|place| {
        if !place.0.replace(true) {
            state().running += 1;
        }
    });
    enrolled.is_ok()
}

/// This thread takes no part any more; whether it did.
pub fn leave() -> bool {
    let left = ENROLLED.try_with(|place| place.0.replace(false)).unwrap_or(false);
    if left {
        state().stop_one();
    }
    left
}

/// Keeps a place for a thread that is about to start: it counts as running, and so does who starts it.
pub fn expect() {
    if !is_virtual() {
        return;
    }
    enrol();
    let mut state = state();
    state.running += 1;
    state.expected += 1;
}

/// Nobody will take the place that was kept.
pub fn unexpect() {
    if !is_virtual() {
        return;
    }
    let mut state = state();
    state.expected = state.expected.saturating_sub(1);
    state.stop_one();
}

/// Makes this thread a participant, in a place that was kept, if there is one.
pub fn enter() {
    if !is_virtual() {
        return;
    }
    let _ = ENROLLED.try_with(|place| {
        if !place.0.replace(true) {
            let mut state = state();
            match state.expected {
                0 => state.running += 1,
                _ => state.expected -= 1,
            }
        }
    });
}

/// Sleeps until time or a wake by the word; true: it was the time. `unlock` is dropped once the sleeper is
/// listed, so that no wake is missed.
fn sleep_on<G>(word: usize, until: u64, unlock: G, still: impl FnOnce() -> bool) -> bool {
    let takes_part = enrol();
    let mut state = state();
    if !still() {
        return false;
    }
    if !takes_part {
        state.running += 1;
    }
    let (woken, is_woken, by_time) = (Condvar::new(), AtomicBool::new(false), AtomicBool::new(false));
    let seat = Arc::new(Seat { woken, is_woken, by_time });
    state.count += 1;
    // SAFETY: takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() };
    let sleeper = Sleeper { until, number: state.count, word, thread, seat: seat.clone() };
    state.sleepers.push(sleeper);
    drop(unlock);
    state.stop_one();
    while !seat.is_woken.load(Ordering::Relaxed) {
        let waited =
            seat.woken.wait_timeout(state, LOOK_AFTER).unwrap_or_else(|poisoned| poisoned.into_inner());
        state = waited.0;
        if waited.1.timed_out()
            && !state.is_reported
            && !seat.is_woken.load(Ordering::Relaxed)
            && let Some(text) = state.stuck()
        {
            report::note(&text);
            state.is_reported = true;
        }
    }
    if !takes_part {
        state.stop_one();
    }
    seat.by_time.load(Ordering::Relaxed)
}

/// Nanoseconds since some origin.
pub fn now() -> u64 {
    if is_virtual() {
        return NOW.load(Ordering::Acquire);
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local. The call cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

/// Sleeps until then; virtual sleep may end early, by [`wake_everyone`]. On the host's clock the last bit is
/// spun through, because sleeping overshoots.
pub fn sleep_until(moment: u64) {
    const OVERSHOOT: u64 = 150_000;
    if is_virtual() {
        if moment > now() {
            sleep_on(0, moment, (), || true);
        }
        return;
    }
    loop {
        match moment.saturating_sub(now()) {
            0 => return,
            1..=OVERSHOOT => std::hint::spin_loop(),
            left => std::thread::sleep(Duration::from_nanos(left - OVERSHOOT)),
        }
    }
}

/// Sleeps so long, without spinning on the host's clock.
pub fn sleep(duration: Duration) {
    match is_virtual() {
        true => sleep_until(now().saturating_add(nanoseconds(duration))),
        false => std::thread::sleep(duration),
    }
}

/// Nanoseconds of a duration, of which a process sees no more than 2^64.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A query answers that something is not ready. That takes a little virtual time, for the sake of who polls.
pub fn pass_query() {
    sleep_until(now().saturating_add(QUERY_NS));
}

/// Ends every sleep: what was slept for may not come any more.
pub fn wake_everyone() {
    if is_virtual() {
        let mut state = state();
        while !state.sleepers.is_empty() {
            state.wake(0, false);
        }
    }
}

/// Something that threads wait for under a lock.
pub struct Condition {
    host: Condvar,
}

impl Condition {
    pub const fn new() -> Condition {
        Condition { host: Condvar::new() }
    }

    fn word(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Gives the lock back until a notification, `limit` is over, or for no reason; true: it is over.
    pub fn wait_for<'a, T>(
        &self,
        mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
        limit: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        if is_virtual() {
            let until = now().saturating_add(nanoseconds(limit));
            let timed_out = sleep_on(self.word(), until, guard, || true);
            return (crate::sync::lock(mutex), timed_out);
        }
        let result = self.host.wait_timeout(guard, limit).unwrap_or_else(|poisoned| poisoned.into_inner());
        (result.0, result.1.timed_out())
    }

    /// The same without a limit.
    pub fn wait<'a, T>(&self, mutex: &'a Mutex<T>, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        // On the host's clock nobody wakes all who wait when the process ends: they look for themselves.
        const LOOK: Duration = Duration::from_millis(100);
        let limit = if is_virtual() { Duration::MAX } else { LOOK };
        self.wait_for(mutex, guard, limit).0
    }

    pub fn notify_all(&self) {
        match is_virtual() {
            true => state().wake_all(self.word()),
            false => self.host.notify_all(),
        }
    }
}

/// A lock that may be held while its holder sleeps: who waits for it sleeps by the clock too.
pub struct Turn {
    taken: Mutex<bool>,
    over: Condition,
}

/// Holds a [`Turn`].
pub struct Held<'a>(&'a Turn);

impl Turn {
    pub const fn new() -> Turn {
        Turn { taken: Mutex::new(false), over: Condition::new() }
    }

    pub fn take(&self) -> Held<'_> {
        let mut taken = crate::sync::lock(&self.taken);
        while *taken {
            taken = self.over.wait(&self.taken, taken);
        }
        *taken = true;
        Held(self)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *crate::sync::lock(&self.0.taken) = false;
        self.0.over.notify_all();
    }
}

/// `struct cudasim_clock` of the header.
#[repr(C)]
pub struct Functions {
    now: extern "C" fn() -> u64,
    wait: unsafe extern "C" fn(word: *const u32, seen: u32, until: u64),
    wake: extern "C" fn(word: *const u32),
}

static FUNCTIONS: Functions = Functions { now: cudasim_now_ns, wait, wake };

unsafe extern "C" fn wait(word: *const u32, seen: u32, until: u64) {
    sleep_on(word as usize, until, (), || {
        drain_stores();
        // SAFETY: by the contract of the header the word is aligned and lives during the call.
        until > now() && unsafe { AtomicU32::from_ptr(word.cast_mut()) }.load(Ordering::SeqCst) == seen
    });
}

extern "C" fn wake(word: *const u32) {
    state().wake_all(word as usize);
}

/// A barrier in every thread of the process. Who changes a word and then, without a barrier of its own, looks
/// whether somebody sleeps on it, either sees the sleeper or is seen by it: a missed wake would last for ever
/// here.
fn drain_stores() {
    const REGISTER: libc::c_int = 1 << 4;
    const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
    static REGISTERED: Once = Once::new();
    // SAFETY: the call touches no memory. A kernel without it answers an error.
    let barrier = |command: libc::c_int| unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    REGISTERED.call_once(|| {
        barrier(REGISTER);
    });
    barrier(PRIVATE_EXPEDITED);
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_clock() -> *const Functions {
    choose();
    match is_virtual() {
        true => &FUNCTIONS,
        false => std::ptr::null(),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_use_virtual_clock() -> i32 {
    decide(true);
    match is_virtual() {
        true => crate::code::SUCCESS,
        false => crate::code::NOT_PERMITTED,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_now_ns() -> u64 {
    choose();
    now()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_sleep_ns(nanoseconds: u64) {
    choose();
    sleep(Duration::from_nanos(nanoseconds));
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_thread_expect() {
    choose();
    expect();
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_thread_enter() {
    choose();
    enter();
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_thread_leave() {
    leave();
}
