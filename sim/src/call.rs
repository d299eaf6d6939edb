//! What happens around every exported function: it is counted, may be made to fail or to take time, needs an
//! initialised driver, and cannot let a panic out.
//!
//! `exports!` turns lines such as `fn cuMemFree_v2(ptr: u64) => classic::free(ptr);` into exported functions
//! and collects them in the module's `TABLE`, from which symbol lookup, counting and the knobs find them by
//! name.

use crate::{clock, code, knobs, lifecycle, report};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// `Err` carries the driver's result code.
pub type Res<T = ()> = Result<T, i32>;

/// An output pointer of the C interface.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    pub const NULL: Out<T> = Out(std::ptr::null_mut());

    pub fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Refuses a null pointer, before anything is done.
    pub fn check(self) -> Res {
        if self.0.is_null() { Err(code::INVALID_VALUE) } else { Ok(()) }
    }

    pub fn put(self, value: T) -> Res {
        self.check()?;
        // SAFETY: by the C contract a non-null output points to writable, aligned memory of this type.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// For outputs that may be null.
    pub fn put_if_wanted(self, value: T) {
        let _ = self.put(value);
    }

    pub fn as_ptr(self) -> *mut T {
        self.0
    }
}

/// A pointer to constant data of the C interface.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T: Copy> In<T> {
    pub fn get(self) -> Res<T> {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: by the C contract a non-null input points to a readable value of this type.
        Ok(unsafe { self.0.read_unaligned() })
    }

    pub fn as_ptr(self) -> *const T {
        self.0
    }

    /// The first `count` elements.
    pub fn list(self, count: usize) -> Res<Vec<T>> {
        if self.0.is_null() && count > 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: by the C contract the array has that many readable elements.
        Ok((0..count).map(|i| unsafe { self.0.add(i).read_unaligned() }).collect())
    }
}

/// One exported function.
pub struct Call {
    pub name: &'static str,
    count: AtomicU64,
    /// Which of the rare paths below this call must look at; 0 for nearly all calls.
    special: AtomicU32,
    latency_ns: AtomicU64,
    spent_ns: AtomicU64,
}

/// The call takes time.
pub const SLOW: u32 = 1;
/// A failure rule names this call.
pub const FAILING: u32 = 2;
/// The call is newer than the driver version that is played.
pub const TOO_NEW: u32 = 4;
/// The time that the call takes is counted.
pub const TIMED: u32 = 8;
/// The thread that makes the call takes part in the virtual clock.
pub const CLOCKED: u32 = 16;

impl Call {
    pub const fn new(name: &'static str) -> Call {
        let (count, special) = (AtomicU64::new(0), AtomicU32::new(0));
        Call { name, count, special, latency_ns: AtomicU64::new(0), spent_ns: AtomicU64::new(0) }
    }

    /// Whether `wanted` names this call: exactly, by its base name, or as `*`.
    pub fn is_named(&self, wanted: &str) -> bool {
        wanted == "*" || wanted == self.name || wanted == base_name(self.name)
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// What it took while it was timed.
    pub fn spent_ns(&self) -> u64 {
        self.spent_ns.load(Ordering::Relaxed)
    }

    pub fn reset(&self) {
        self.count.store(0, Ordering::Relaxed);
        self.spent_ns.store(0, Ordering::Relaxed);
    }

    pub fn set_latency(&self, nanoseconds: u64) {
        self.latency_ns.store(nanoseconds, Ordering::Relaxed);
        self.mark(SLOW, nanoseconds > 0);
    }

    pub fn mark(&self, bit: u32, on: bool) {
        if on {
            self.special.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.special.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

/// The name without `_v2`, `_ptsz` and the like.
pub fn base_name(name: &str) -> &str {
    let name = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")).unwrap_or(name);
    match name.rsplit_once("_v") {
        Some((base, digits)) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => base,
        _ => name,
    }
}

/// The address of an exported function.
pub struct Address(pub *const ());

// SAFETY: it is the address of code, which never changes.
unsafe impl Sync for Address {}

/// A line of a module's table of exports.
pub struct Entry {
    pub call: &'static Call,
    pub address: Address,
}

/// Runs the body of one exported function.
#[inline]
pub fn enter(call: &'static Call, needs_init: bool, body: impl FnOnce() -> Res) -> i32 {
    call.count.fetch_add(1, Ordering::Relaxed);
    let special = call.special.load(Ordering::Relaxed);
    if special != 0 {
        return enter_special(call, special, needs_init, body);
    }
    guarded(call, needs_init, body)
}

#[cold]
fn enter_special(call: &'static Call, special: u32, needs_init: bool, body: impl FnOnce() -> Res) -> i32 {
    if special & CLOCKED != 0 {
        clock::enrol();
    }
    let start = clock::now();
    let timed = (special & TIMED != 0).then(thread_ns);
    let result = if special & TOO_NEW != 0 {
        code::NOT_SUPPORTED
    } else {
        match (special & FAILING != 0).then(|| knobs::injected_failure(call.name)) {
            Some(Some(injected)) => injected,
            _ => guarded(call, needs_init, body),
        }
    };
    if special & CLOCKED != 0 && result == code::NOT_READY {
        clock::pass_query();
    }
    if special & SLOW != 0 {
        let nanoseconds = call.latency_ns.load(Ordering::Relaxed);
        clock::sleep_until(start.saturating_add(nanoseconds));
    }
    if let Some(before) = timed {
        call.spent_ns.fetch_add(thread_ns().saturating_sub(before), Ordering::Relaxed);
    }
    result
}

/// The processor time of the calling thread: other programs on the machine do not count.
fn thread_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}

#[inline]
fn guarded(call: &'static Call, needs_init: bool, body: impl FnOnce() -> Res) -> i32 {
    if needs_init && let Err(code) = lifecycle::usable() {
        return code;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => code::SUCCESS,
        Ok(Err(code)) => code,
        Err(payload) => {
            // Dropping the payload could panic again.
            std::mem::forget(payload);
            report::note(&format!("internal error: a panic in {}", call.name));
            code::UNKNOWN
        }
    }
}

/// Defines exported functions, and `TABLE`, the module's list of them. Four forms:
///
/// - `fn name(args) => expression;` an initialised driver is needed, and checked before the arguments;
/// - `early fn name(args) => expression;` works before `cuInit`, or checks for itself;
/// - `stream fn name, name_ptsz(args; s; args) => expression;` two functions that take the stream `s` there;
/// - `implicit fn name, name_ptds(args; s) => expression;` two functions that use the default stream `s`.
macro_rules! exports {
    (@next [$($done:ident)*]) => {
        pub(crate) static TABLE: &[$crate::call::Entry] = &[$($crate::call::Entry {
            call: &$done::CALL,
            address: $crate::call::Address($done as *const ()),
        }),*];
    };
    (@next [$($done:ident)*]
        fn $name:ident ($($arg:ident : $type:ty),* $(,)?) => $body:expr; $($rest:tt)*) => {
        exports!(@one true, $name ($($arg: $type),*) $body);
        exports!(@next [$($done)* $name] $($rest)*);
    };
    (@next [$($done:ident)*]
        early fn $name:ident ($($arg:ident : $type:ty),* $(,)?) => $body:expr; $($rest:tt)*) => {
        exports!(@one false, $name ($($arg: $type),*) $body);
        exports!(@next [$($done)* $name] $($rest)*);
    };
    (@next [$($done:ident)*]
        stream fn $plain:ident, $per:ident
        ($($arg:ident : $type:ty),* ; $s:ident $(; $($more:ident : $mtype:ty),*)?)
        => $body:expr; $($rest:tt)*) => {
        exports!(@one true, $plain ($($arg: $type,)* $s: usize $($(, $more: $mtype)*)?) {
            let $s = $crate::stream::StreamArg::legacy($s);
            $body
        });
        exports!(@one true, $per ($($arg: $type,)* $s: usize $($(, $more: $mtype)*)?) {
            let $s = $crate::stream::StreamArg::per_thread($s);
            $body
        });
        exports!(@next [$($done)* $plain $per] $($rest)*);
    };
    (@next [$($done:ident)*] implicit fn $plain:ident, $per:ident ($($arg:ident : $type:ty),* ; $s:ident)
        => $body:expr; $($rest:tt)*) => {
        exports!(@one true, $plain ($($arg: $type),*) {
            let $s = $crate::stream::StreamArg::legacy(0);
            $body
        });
        exports!(@one true, $per ($($arg: $type),*) {
            let $s = $crate::stream::StreamArg::per_thread(0);
            $body
        });
        exports!(@next [$($done)* $plain $per] $($rest)*);
    };
    (@one $init:literal, $name:ident ($($arg:ident : $type:ty),*) $body:expr) => {
        /// The call's counters stand in a module of the function's name.
        #[allow(non_snake_case)]
        mod $name {
            pub(super) static CALL: $crate::call::Call = $crate::call::Call::new(stringify!($name));
        }

        /// # Safety
        /// The C contract of the driver function of this name.
        #[unsafe(no_mangle)]
        #[allow(clippy::too_many_arguments)] // The signatures are the driver's.
        pub unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
            $crate::call::enter(&$name::CALL, $init, || $body)
        }
    };
    ($($lines:tt)*) => {
        exports!(@next [] $($lines)*);
    };
}
