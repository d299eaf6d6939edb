//! Names and meanings of status codes, for any integer.

use crate::error::Status;
use core::ffi::{CStr, c_int};

macro_rules! statuses {
    ($($status:ident => $message:literal,)*) => {
        /// The name as it stands in the header.
        pub fn status_name(status: c_int) -> &'static CStr {
            $(if status == Status::$status as c_int {
                return const { text(concat!(stringify!($status), "\0")) };
            })*
            c"POOL_ERROR_UNKNOWN"
        }

        /// The meaning in a few words.
        pub fn status_message(status: c_int) -> &'static CStr {
            $(if status == Status::$status as c_int {
                return const { text(concat!($message, "\0")) };
            })*
            c"this is no status code of this library"
        }

        #[cfg(test)]
        const ALL: &[Status] = &[$(Status::$status,)*];
    };
}

const fn text(terminated: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(terminated.as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    }
}

statuses! {
    POOL_OK => "success",
    POOL_ERROR_INVALID_ARGUMENT => "an argument is NULL, out of range, or cannot be read",
    POOL_ERROR_INVALID_POINTER => "the pointer is not the start of a live block",
    POOL_ERROR_DOUBLE_FREE => "the block has been freed already",
    POOL_ERROR_INVALID_OPTION => "an option has an unknown key, a bad value, or can no longer be changed",
    POOL_ERROR_NOT_SUPPORTED => "the device, the driver or a limit of this library does not allow it",
    POOL_ERROR_IN_USE => "the pool cannot be destroyed yet: it is in use",
    POOL_ERROR_OUT_OF_MEMORY => "no device memory could be had",
    POOL_ERROR_HOST_OUT_OF_MEMORY => "the host has no memory for the bookkeeping",
    POOL_ERROR_NO_DRIVER => "there is no CUDA driver library",
    POOL_ERROR_NO_DEVICE => "the driver sees no such device",
    POOL_ERROR_DRIVER_VERSION => "the driver is too old",
    POOL_ERROR_DRIVER => "the driver failed",
    POOL_ERROR_CONTEXT_LOST => "the context was destroyed or reset",
    POOL_ERROR_FORKED => "CUDA does not work in a forked child",
    POOL_ERROR_SHUTTING_DOWN => "the process is exiting",
    POOL_ERROR_INTERNAL => "a bug in the pool was caught",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_integer_is_answered() {
        for status in ALL {
            assert!(!status_message(*status as c_int).is_empty());
            assert!(status_name(*status as c_int).to_str().unwrap().starts_with("POOL_"));
        }
        for other in [-1, 1, 99, 999, i32::MIN, i32::MAX] {
            assert_eq!(status_name(other), c"POOL_ERROR_UNKNOWN");
            assert!(!status_message(other).is_empty());
        }
    }
}
