//! Host memory for code that cannot do without: a small reserve behind the allocator.
//!
//! The pool's own bookkeeping is fallible everywhere. The driver loader and the logger are not ours and abort
//! the process when the host has no memory; inside [`without_failing`] they get theirs from here then.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::{Cell, UnsafeCell};
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering::*};
use std::alloc::System;

/// Enough for the loader's list of library names and for a log line; measured use is below 8 KiB.
const RESERVE: usize = 128 << 10;

#[repr(align(64))]
struct Reserve {
    bytes: UnsafeCell<[u8; RESERVE]>,
    /// Bytes handed out from the front, and allocations that have not come back. When all have, the reserve
    /// is whole.
    state: UnsafeCell<(usize, usize)>,
    locked: AtomicBool,
}

// SAFETY: `state` is only touched while `locked` is held, and `bytes` only by whoever was handed a part of
// it.
unsafe impl Sync for Reserve {}

static SPARE: Reserve = Reserve {
    bytes: UnsafeCell::new([0; RESERVE]),
    state: UnsafeCell::new((0, 0)),
    locked: AtomicBool::new(false),
};

thread_local! {
    static MUST_NOT_FAIL: Cell<bool> = const { Cell::new(false) };
}

/// Runs foreign code whose allocations must not fail.
pub fn without_failing<R>(f: impl FnOnce() -> R) -> R {
    let set = |on| MUST_NOT_FAIL.try_with(|flag| flag.replace(on)).unwrap_or(false);
    struct Restore<F: Fn(bool) -> bool>(F, bool);
    impl<F: Fn(bool) -> bool> Drop for Restore<F> {
        fn drop(&mut self) {
            (self.0)(self.1);
        }
    }
    let _restore = Restore(set, set(true));
    f()
}

impl Reserve {
    fn with<R>(&self, f: impl FnOnce(&mut (usize, usize)) -> R) -> R {
        while self.locked.swap(true, Acquire) {
            core::hint::spin_loop();
        }
        // SAFETY: the flag just taken makes this thread the only one here, and `f` cannot come back in.
        let result = f(unsafe { &mut *self.state.get() });
        self.locked.store(false, Release);
        result
    }

    fn alloc(&self, layout: Layout) -> *mut u8 {
        self.with(|(used, count)| {
            let base = self.bytes.get() as *mut u8;
            let start = used.checked_next_multiple_of(layout.align());
            let end = start.and_then(|s| s.checked_add(layout.size()));
            match (start, end) {
                (Some(start), Some(end)) if end <= RESERVE && layout.align() <= 64 => {
                    *used = end;
                    *count = count.saturating_add(1); // An allocator must not panic.
                    base.wrapping_add(start)
                }
                _ => ptr::null_mut(),
            }
        })
    }

    fn owns(&self, p: *mut u8) -> bool {
        (p as usize).wrapping_sub(self.bytes.get() as usize) < RESERVE
    }

    fn free(&self) {
        self.with(|(used, count)| {
            *count = count.saturating_sub(1);
            if *count == 0 {
                *used = 0;
            }
        });
    }
}

/// The system's allocator, with the reserve behind it for [`without_failing`].
pub struct HostMemory;

// SAFETY: every block comes from `System` or from the reserve, which hands out disjoint parts with the asked
// alignment, and goes back to where its address says it came from.
unsafe impl GlobalAlloc for HostMemory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc`.
        let p = unsafe { System.alloc(layout) };
        if p.is_null() && MUST_NOT_FAIL.try_with(Cell::get).unwrap_or(false) {
            SPARE.alloc(layout)
        } else {
            p
        }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        if SPARE.owns(p) {
            SPARE.free();
        } else {
            // SAFETY: not from the reserve, hence from `System`, with this layout.
            unsafe { System.dealloc(p, layout) }
        }
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !SPARE.owns(p) {
            // SAFETY: from `System`, with this layout; the caller keeps the rest of the contract.
            let grown = unsafe { System.realloc(p, layout, new_size) };
            if !grown.is_null() || !MUST_NOT_FAIL.try_with(Cell::get).unwrap_or(false) {
                return grown;
            }
        }
        // SAFETY: `new_size` is not 0 and does not overflow when aligned, says the contract of `realloc`.
        let new = unsafe { self.alloc(Layout::from_size_align_unchecked(new_size, layout.align())) };
        if !new.is_null() {
            // SAFETY: two live blocks, each at least as long as what is copied.
            unsafe { ptr::copy_nonoverlapping(p, new, layout.size().min(new_size)) };
            // SAFETY: `p` was allocated with `layout` and is not used again.
            unsafe { self.dealloc(p, layout) };
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_hands_out_disjoint_parts_and_becomes_whole_again() {
        let layout = Layout::from_size_align(100, 64).unwrap();
        let (a, b) = (SPARE.alloc(layout), SPARE.alloc(layout));
        assert!(SPARE.owns(a) && SPARE.owns(b) && b as usize >= a as usize + 100);
        assert_eq!(b as usize % 64, 0);
        assert!(SPARE.alloc(Layout::from_size_align(RESERVE, 1).unwrap()).is_null());
        SPARE.free();
        SPARE.free();
        assert_eq!(SPARE.alloc(layout), a);
        SPARE.free();
    }
}
