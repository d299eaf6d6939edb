//! The guard around every exported function: nothing unwinds into C.

use crate::driver::lifecycle::{ProcessState, process_state};
use crate::error::{Result, Status, fail};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of an exported function. A panic is caught and answered as an internal error; the arena
/// whose lock it broke checks itself before it goes on.
#[inline]
pub fn guard(body: impl FnOnce() -> Result<()>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Status::POOL_OK,
        Ok(Err(status)) => status,
        Err(payload) => caught(payload),
    }
}

/// The same for a free: a failure of the driver while the process exits is none.
#[inline]
pub fn guard_free(body: impl FnOnce() -> Result<()>) -> Status {
    match guard(body) {
        Status::POOL_OK => Status::POOL_OK,
        Status::POOL_ERROR_SHUTTING_DOWN => Status::POOL_OK,
        Status::POOL_ERROR_DRIVER | Status::POOL_ERROR_CONTEXT_LOST
            if process_state() == ProcessState::Exiting =>
        {
            Status::POOL_OK
        }
        status => status,
    }
}

#[cold]
fn caught(payload: Box<dyn core::any::Any + Send>) -> Status {
    let text = payload
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message");
    let status = fail(Status::POOL_ERROR_INTERNAL, format_args!("a bug in the pool was caught: {text}"));
    // A payload whose Drop panics would abort the process.
    core::mem::forget(payload);
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status_even_if_its_payload_panics() {
        struct Nasty;
        impl Drop for Nasty {
            fn drop(&mut self) {
                panic!("dropped");
            }
        }
        assert_eq!(guard(|| std::panic::resume_unwind(Box::new(Nasty))), Status::POOL_ERROR_INTERNAL);
        assert_eq!(guard(|| std::panic::resume_unwind(Box::new("why"))), Status::POOL_ERROR_INTERNAL);
        let mut buf = [0; 64];
        let n = crate::error::last_error(&mut buf);
        assert!(std::str::from_utf8(&buf[..n]).unwrap().ends_with("caught: why"));
        assert_eq!(guard(|| Ok(())), Status::POOL_OK);
    }
}
