//! The table of what is wrapped: names, wrappers, and the driver's own functions.
//!
//! `hooks!` turns lines such as `fn cuMemFree_v2(ptr: u64) |call| expression;` into exported functions and
//! collects them in the module's `TABLE`. In the expression, `call` calls the driver's function with the same
//! arguments.
//!
//! A wrapper knows one original: the first that was met. If a program has several libraries with a function
//! of the name, the others' stay theirs. Nothing here locks: threads that fill the table at once do the same
//! work, and find the same.

use crate::elf::{self, Object};
use crate::{alloc, capture, contexts, guard, info, lookup, stub};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};

/// A result of the driver; 0 is success.
pub type CuResult = c_int;

/// Results that are answered here or acted upon.
pub mod code {
    use cudarc::driver::sys::CUresult as R;

    pub const SUCCESS: i32 = R::CUDA_SUCCESS as i32;
    pub const INVALID_VALUE: i32 = R::CUDA_ERROR_INVALID_VALUE as i32;
    pub const OUT_OF_MEMORY: i32 = R::CUDA_ERROR_OUT_OF_MEMORY as i32;
    pub const NOT_INITIALIZED: i32 = R::CUDA_ERROR_NOT_INITIALIZED as i32;
    pub const INVALID_CONTEXT: i32 = R::CUDA_ERROR_INVALID_CONTEXT as i32;
    /// A link to a shared object failed to resolve.
    pub const SYMBOL_NOT_FOUND: i32 = R::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND as i32;
    pub const NOT_FOUND: i32 = R::CUDA_ERROR_NOT_FOUND as i32;
    pub const NOT_SUPPORTED: i32 = R::CUDA_ERROR_NOT_SUPPORTED as i32;
    pub const CAPTURE_INVALIDATED: i32 = R::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED as i32;
    pub const UNKNOWN: i32 = R::CUDA_ERROR_UNKNOWN as i32;
}

/// One wrapped function.
pub struct Hook {
    pub name: &'static CStr,
    wrapper: Wrapper,
    original: AtomicPtr<c_void>,
}

/// The address of a wrapper.
pub struct Wrapper(pub *const ());

// SAFETY: it is the address of code, which never changes.
unsafe impl Sync for Wrapper {}

impl Hook {
    pub const fn new(name: &'static CStr, wrapper: *const ()) -> Hook {
        Hook { name, wrapper: Wrapper(wrapper), original: AtomicPtr::new(ptr::null_mut()) }
    }

    pub fn wrapper(&self) -> *mut c_void {
        self.wrapper.0.cast_mut().cast()
    }

    /// The driver's function; null if there is none.
    #[inline]
    pub fn original(&self) -> *mut c_void {
        match self.original.load(Relaxed) {
            known if !known.is_null() => known,
            _ => self.resolve(),
        }
    }

    /// For a program that is linked with the driver, or a part of it that is: the next function of the name
    /// in the order of the search, else that of a driver which only a part of the program sees.
    #[cold]
    fn resolve(&self) -> *mut c_void {
        let next = stub::ask(libc::RTLD_NEXT, self.name.as_ptr(), ptr::null());
        let found = if next.is_null() {
            elf::find_object(|object| is_driver(object).then(|| object.find(self.name)))
                .flatten()
                .unwrap_or(ptr::null_mut())
        } else {
            next
        };
        if found.is_null() { found } else { self.adopt(found) }
    }

    /// Takes a function that the program was to get for the original, unless there is one, and with it all
    /// others of the same library. Returns the original.
    pub fn adopt(&self, found: *mut c_void) -> *mut c_void {
        match self.original.compare_exchange(ptr::null_mut(), found, Relaxed, Relaxed) {
            Ok(_) => fill(found),
            Err(known) if known != found => return known,
            Err(_) => complete(found),
        }
        found
    }

    /// Whether this is the original of this hook, without looking for one.
    pub fn is_original(&self, address: *mut c_void) -> bool {
        !address.is_null() && self.original.load(Relaxed) == address
    }
}

/// The table has all originals of the first library.
static FILLED: AtomicBool = AtomicBool::new(false);

/// Takes all originals that are still missing from the library of this function. Another thread may be at the
/// same.
#[cold]
fn fill(function: *const c_void) {
    elf::keep_loaded(function);
    if let Some(library) = Object::around(function) {
        for hook in all() {
            if hook.original.load(Relaxed).is_null()
                && let Some(address) = library.find(hook.name)
            {
                let _ = hook.original.compare_exchange(ptr::null_mut(), address, Relaxed, Relaxed);
            }
        }
    }
    FILLED.store(true, Release);
}

/// Makes sure that the table is filled: the thread that was first may still be at it.
#[inline]
pub fn complete(function: *const c_void) {
    if !FILLED.load(Acquire) {
        fill(function);
    }
}

/// A library that is a driver, and not the shim itself.
pub fn is_driver(object: &Object) -> bool {
    object.find(c"cuInit").is_some() && object.find(c"cuDriverGetVersion").is_some() && !elf::is_own(object)
}

static TABLES: [&[&Hook]; 6] =
    [guard::TABLE, alloc::TABLE, info::TABLE, contexts::TABLE, capture::TABLE, lookup::TABLE];

pub fn all() -> impl Iterator<Item = &'static Hook> {
    TABLES.iter().flat_map(|table| table.iter().copied())
}

/// The hook of exactly this name.
///
/// # Safety
/// `name` is a terminated string.
pub unsafe fn find(name: *const c_char) -> Option<&'static Hook> {
    // SAFETY: by the contract of this function.
    let name = unsafe { CStr::from_ptr(name) };
    all().find(|hook| hook.name == name)
}

/// See the module.
macro_rules! hooks {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) |$call:ident| $body:expr;)*) => {
        pub static TABLE: &[&$crate::hooks::Hook] = &[$(&$name::HOOK),*];
        $(
            /// The hook stands in a module of the function's name.
            pub mod $name {
                use core::ffi::CStr;
                const TEXT: &str = concat!(stringify!($name), "\0");
                const NAME: &CStr = match CStr::from_bytes_with_nul(TEXT.as_bytes()) {
                    Ok(name) => name,
                    Err(_) => c"",
                };
                pub static HOOK: $crate::hooks::Hook =
                    $crate::hooks::Hook::new(NAME, super::$name as *const ());
            }

            /// # Safety
            /// The contract of the driver's function of this name.
            #[unsafe(no_mangle)]
            #[allow(clippy::too_many_arguments)] // The signatures are the driver's.
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::hooks::CuResult {
                let original = $name::HOOK.original();
                if original.is_null() {
                    return $crate::hooks::code::SYMBOL_NOT_FOUND;
                }
                // SAFETY: the driver's function of this name has this type.
                let original = unsafe {
                    core::mem::transmute::<
                        *mut core::ffi::c_void,
                        unsafe extern "C" fn($($type),*) -> $crate::hooks::CuResult,
                    >(original)
                };
                // SAFETY: the arguments are the caller's own.
                let $call = || unsafe { original($($arg),*) };
                $body
            }
        )*
    };
}
