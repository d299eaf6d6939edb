//! What the shim is to do: `CUDAPOOL_PRELOAD`, read when CUDA is first used.

use crate::text::{Shown, say};
use crate::{pool, real};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering::*};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Mode {
    Unread = 0,
    /// Everything passes through.
    Off = 1,
    /// Allocations that fail for memory are rescued.
    Guard = 2,
    /// And the program's allocations are served by the pool.
    Pool = 3,
}

static MODE: AtomicU8 = AtomicU8::new(Mode::Unread as u8);
static ANNOUNCED: AtomicBool = AtomicBool::new(false);

#[inline]
pub fn get() -> Mode {
    match MODE.load(Relaxed) {
        1 => Mode::Off,
        2 => Mode::Guard,
        3 => Mode::Pool,
        _ => read(),
    }
}

#[cold]
fn read() -> Mode {
    // SAFETY: the name is terminated; the value is read at once.
    let value = unsafe { Shown::of_c(libc::getenv(c"CUDAPOOL_PRELOAD".as_ptr())) };
    let mode = match value.bytes() {
        b"" | b"guard" => Mode::Guard,
        b"pool" => Mode::Pool,
        _ => Mode::Off,
    };
    let first = MODE.compare_exchange(Mode::Unread as u8, mode as u8, Relaxed, Relaxed).is_ok();
    if first && mode == Mode::Off && value.bytes() != b"off" {
        say(format_args!("CUDAPOOL_PRELOAD is \"{value}\", not guard, pool or off: nothing is done"));
    }
    mode
}

/// Called by every wrapper of an allocation: the first one opens the library, and is logged.
#[inline]
pub fn note_use() {
    if !ANNOUNCED.load(Relaxed) {
        announce();
    }
}

#[cold]
fn announce() {
    if ANNOUNCED.swap(true, Relaxed) || get() == Mode::Off {
        return;
    }
    if let Some(pool) = pool::get()
        && pool.logs()
    {
        let mode = if get() == Mode::Pool { "pool" } else { "guard" };
        say(format_args!("{mode} mode, with {} and {}", pool.path(), real::driver_path()));
    }
}
