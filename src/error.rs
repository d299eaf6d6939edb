//! The status codes, and the calling thread's last error in words.
//!
//! The bottom of the crate: every layer answers with a [`pool_status`] and leaves the sentence that
//! explains it here, at the place where the facts are known.
#![allow(non_camel_case_types)]

use core::cell::UnsafeCell;
use core::fmt::{self, Write};
use std::collections::TryReserveError;

/// What every function but the text functions returns. The numbers are fixed and never reused:
/// 1xx argument, 2xx memory, 3xx driver, 4xx lifecycle, 9xx internal.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum pool_status {
    /// Success.
    POOL_OK = 0,
    /// An argument is NULL, out of range, an unknown flag, or a struct that cannot be read.
    POOL_ERROR_INVALID_ARGUMENT = 100,
    /// The pointer is not the start of a live block.
    POOL_ERROR_INVALID_POINTER = 101,
    /// The block has been freed already.
    POOL_ERROR_DOUBLE_FREE = 102,
    /// An option has an unknown key, a bad value, or can no longer be changed.
    POOL_ERROR_INVALID_OPTION = 103,
    /// The device, the driver or a limit of this library does not allow what was asked.
    POOL_ERROR_NOT_SUPPORTED = 104,
    /// The pool cannot be destroyed yet: it has live blocks, another thread is taking memory for it, or a
    /// captured graph uses it.
    POOL_ERROR_IN_USE = 105,
    /// No device memory could be had, whatever idle memory was given up for it.
    POOL_ERROR_OUT_OF_MEMORY = 200,
    /// The host has no memory for the bookkeeping. Nothing has changed.
    POOL_ERROR_HOST_OUT_OF_MEMORY = 201,
    /// There is no CUDA driver library, or it is a stub.
    POOL_ERROR_NO_DRIVER = 300,
    /// The driver sees no such device.
    POOL_ERROR_NO_DEVICE = 301,
    /// The driver is too old: it lacks a function that the pool needs.
    POOL_ERROR_DRIVER_VERSION = 302,
    /// Any other result of the driver; `pool_last_error` has its number and name.
    POOL_ERROR_DRIVER = 303,
    /// The context of the block was destroyed or reset; the block is gone with it.
    POOL_ERROR_CONTEXT_LOST = 304,
    /// The process was forked after the driver was initialised: CUDA does not work in the child.
    POOL_ERROR_FORKED = 400,
    /// The process is exiting.
    POOL_ERROR_SHUTTING_DOWN = 401,
    /// A bug in the pool, caught at the boundary.
    POOL_ERROR_INTERNAL = 900,
}

pub use pool_status as Status;

/// The host has no memory for the bookkeeping; nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoHostMemory;

impl From<TryReserveError> for NoHostMemory {
    fn from(_: TryReserveError) -> NoHostMemory {
        NoHostMemory
    }
}

impl From<NoHostMemory> for Status {
    #[cold]
    fn from(_: NoHostMemory) -> Status {
        fail(
            Status::POOL_ERROR_HOST_OUT_OF_MEMORY,
            format_args!("the host has no memory for the pool's bookkeeping"),
        )
    }
}

impl From<TryReserveError> for Status {
    fn from(_: TryReserveError) -> Status {
        NoHostMemory.into()
    }
}

/// The result of everything inside the crate that can fail.
pub type Result<T> = core::result::Result<T, Status>;

/// Longest sentence kept, in bytes. A longer one is cut: the buffer must not need memory.
const LAST_ERROR_CAPACITY: usize = 1536;

struct LastError {
    status: Status,
    len: usize,
    text: [u8; LAST_ERROR_CAPACITY],
}

impl LastError {
    const NONE: LastError = LastError { status: Status::POOL_OK, len: 0, text: [0; LAST_ERROR_CAPACITY] };
}

// Const-initialised and without Drop: a destructor would be registered through an allocation that
// cannot fail gracefully, and would run after a dlclose.
thread_local! {
    static LAST: UnsafeCell<LastError> = const { UnsafeCell::new(LastError::NONE) };
}

impl Write for LastError {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let room = self.text.get_mut(self.len..).unwrap_or_default();
        let mut n = s.len().min(room.len());
        while !s.is_char_boundary(n) {
            n -= 1; // Not below 0, which is a boundary.
        }
        for (to, from) in room.iter_mut().zip(s.as_bytes().iter().take(n)) {
            *to = *from;
        }
        self.len += n;
        Ok(())
    }
}

fn with_last<R>(f: impl FnOnce(&mut LastError) -> R) -> Option<R> {
    LAST.try_with(|cell| {
        // SAFETY: the cell is this thread's own, and no `f` in this file calls back into `with_last`
        // except through a Display impl of a message, and those only format plain values.
        f(unsafe { &mut *cell.get() })
    })
    .ok()
}

/// Records `message` as the calling thread's last error and returns `status`.
#[cold]
pub fn fail(status: Status, message: fmt::Arguments<'_>) -> Status {
    with_last(|last| {
        last.status = status;
        last.len = 0;
        // Writing to the fixed buffer cannot fail; a broken Display impl only shortens the text.
        let _ = last.write_fmt(message);
    });
    status
}

/// The status of the calling thread's last error; success if there was none.
pub fn last_status() -> Status {
    with_last(|last| last.status).unwrap_or(Status::POOL_OK)
}

/// Copies the calling thread's last error into `buf`, cut to fit and terminated, and returns its
/// whole length.
pub fn last_error(buf: &mut [u8]) -> usize {
    with_last(|last| {
        let text = last.text.get(..last.len).unwrap_or_default();
        if let Some(room) = buf.len().checked_sub(1) {
            let n = text.len().min(room);
            for (to, from) in buf.iter_mut().zip(text.iter().take(n).chain(core::iter::once(&0))) {
                *to = *from;
            }
        }
        text.len()
    })
    .unwrap_or_else(|| {
        if let Some(first) = buf.first_mut() {
            *first = 0;
        }
        0
    })
}

/// Shorthand for `Err(fail(..))` with a format string.
macro_rules! bail {
    ($status:ident, $($arg:tt)*) => {
        return Err($crate::error::fail($crate::error::Status::$status, format_args!($($arg)*)))
    };
}
pub(crate) use bail;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_cut_and_terminated() {
        fail(Status::POOL_ERROR_INTERNAL, format_args!("abc{}", "def"));
        let mut four = [0xffu8; 4];
        assert_eq!(last_error(&mut four), 6);
        assert_eq!(&four, b"abc\0");
        assert_eq!(last_error(&mut []), 6);
        assert_eq!(last_status(), Status::POOL_ERROR_INTERNAL);
    }

    #[test]
    fn an_overlong_message_is_cut_at_a_character() {
        let long = "é".repeat(LAST_ERROR_CAPACITY);
        fail(Status::POOL_ERROR_INTERNAL, format_args!("x{long}"));
        let mut buf = [0u8; LAST_ERROR_CAPACITY + 1];
        let n = last_error(&mut buf);
        assert!(n <= LAST_ERROR_CAPACITY && n > LAST_ERROR_CAPACITY - 3);
        assert!(core::str::from_utf8(&buf[..n]).is_ok());
    }
}
