//! The life of the process around the driver: before it is used, fork, exit.

use crate::error::{Result, bail};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering::*};

const RUNNING: u8 = 0;
const FORKED: u8 = 1;
const EXITING: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(RUNNING);
static WATCHED: AtomicBool = AtomicBool::new(false);
/// The driver is being initialised, or has been.
static STARTED: AtomicBool = AtomicBool::new(false);
static FORK_WATCHED: AtomicBool = AtomicBool::new(false);

/// Where the process stands, for a function that frees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ProcessState {
    Running,
    /// A child of a process that used the driver: CUDA does not work here.
    Forked,
    /// `exit` has begun: the driver may be gone.
    Exiting,
}

#[inline]
pub fn process_state() -> ProcessState {
    match STATE.load(Relaxed) {
        RUNNING => ProcessState::Running,
        FORKED => ProcessState::Forked,
        _ => ProcessState::Exiting,
    }
}

/// For everything but freeing: goes on only in a running process.
#[inline]
pub fn check_running() -> Result<()> {
    match process_state() {
        ProcessState::Running => Ok(()),
        ProcessState::Forked => {
            bail!(
                POOL_ERROR_FORKED,
                "this process was forked after its parent had used CUDA; exec a program to use it here"
            )
        }
        ProcessState::Exiting => bail!(POOL_ERROR_SHUTTING_DOWN, "the process is exiting"),
    }
}

extern "C" fn on_exit() {
    // A forked child keeps saying so.
    let _ = STATE.compare_exchange(RUNNING, EXITING, Relaxed, Relaxed);
}

extern "C" fn in_child() {
    // A child of a process that had not begun to use the driver can use it itself.
    if STARTED.load(Relaxed) {
        STATE.store(FORKED, Relaxed);
    }
}

/// Starts to watch for fork. Called before anything is locked for the driver, so that a child does not wait
/// for a thread that it does not have.
pub fn watch_for_fork() {
    if !FORK_WATCHED.swap(true, Relaxed) {
        // SAFETY: the function is plain, never unloaded (`-z nodelete`), and only touches atomics. If there
        // is no memory to register it, fork is found out by the driver's own answers.
        unsafe {
            libc::pthread_atfork(None, None, Some(in_child));
        }
    }
    STARTED.store(true, Relaxed);
}

/// There is no driver after all.
pub fn not_started() {
    STARTED.store(false, Relaxed);
}

/// Starts to watch for exit. Called right after the driver was initialised, so that the exit handler runs
/// before the driver's own.
pub fn watch() {
    if !WATCHED.swap(true, Relaxed) {
        // SAFETY: as for fork.
        unsafe {
            libc::atexit(on_exit);
        }
    }
}
