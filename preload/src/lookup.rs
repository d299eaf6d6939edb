//! Where programs look functions up: what `dlsym` and `dlvsym` answer for CUDA's names, and
//! `cuGetProcAddress`.
//!
//! The driver, or the loader, is always asked first, and its answer stands: results, statuses, failures. Only
//! a pointer that is the original of a wrapper is replaced by the wrapper.

use crate::elf::Object;
use crate::hooks::{self, CuResult, Hook, code};
use crate::mode::{self, Mode};
use crate::stub::{Answer, ask};
use crate::{elf, pool};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

hooks! {
    fn cuGetProcAddress(symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64)
        |call| substitute(&cuGetProcAddress::HOOK, symbol, function, call());
    fn cuGetProcAddress_v2(
        symbol: *const c_char, function: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) |call| substitute(&cuGetProcAddress_v2::HOOK, symbol, function, call());
}

/// Called by the stubs for names that begin with "cu", before anything may be allocated or locked for other
/// names.
pub extern "C" fn decide(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
    caller: *const c_void,
) -> Answer {
    // SAFETY: a terminated string, as the caller of `dlsym` promises.
    let Some(hook) = (unsafe { hooks::find(name) }) else { return Answer::JUMP };
    let pool_asks = pool::is_pool(caller);
    if handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT {
        let found = is_behind_the_shim(hook, name, version, caller);
        if found && !pool_asks && handle == libc::RTLD_NEXT && meets_the_driver(hook, name, version, caller) {
            return Answer::of(hook.wrapper());
        }
        return match (found && !hook.original().is_null(), pool_asks) {
            (true, false) => Answer::JUMP,
            (true, true) => Answer::of(hook.original()),
            (false, _) => not_found(name, version),
        };
    }
    let found = ask(handle, name, version);
    if found == hook.wrapper() {
        // By a handle of the whole program.
        let good = is_behind_the_shim(hook, name, version, ptr::null()) && !hook.original().is_null();
        return if good { Answer::of(found) } else { not_found(name, version) };
    }
    // A driver's function is CUDA's first use; before that not even the mode is read.
    if found.is_null() || pool_asks || mode::get() == Mode::Off || hook.adopt(found) != found {
        return Answer::of(found);
    }
    Answer::of(hook.wrapper())
}

/// Whether a search of the whole program, or of what the caller's part of it has opened for itself, would
/// find the name without the shim: its own exports would be found even where there is no driver, or where
/// only others see it.
fn is_behind_the_shim(
    hook: &Hook,
    name: *const c_char,
    version: *const c_char,
    caller: *const c_void,
) -> bool {
    if !ask(libc::RTLD_NEXT, name, version).is_null() {
        return true;
    }
    // Only where some part has a driver is the question worth the loader's trouble.
    if hook.original().is_null() {
        return false;
    }
    let found = found_by(caller, name, version);
    !found.is_null() && found != hook.wrapper()
}

/// Whether `RTLD_NEXT` means the driver's own function to the caller, which comes behind the shim, as
/// libraries do. One that has a function of the name is an interposer: its wish is to get past the shim.
fn meets_the_driver(hook: &Hook, name: *const c_char, version: *const c_char, caller: *const c_void) -> bool {
    let Some(own) = Object::around(caller).filter(|own| own.find(hook.name).is_none()) else { return false };
    let mut behind = false;
    let next = elf::find_object(|object| {
        let found = if behind { object.find(hook.name) } else { None };
        behind |= object.is(&own);
        found
    });
    let original = hook.original();
    let in_the_order = match next {
        Some(next) => next == original,
        // The driver was loaded before the caller: the next one only in the caller's own part of the program.
        None => ask(libc::RTLD_NEXT, name, version).is_null(),
    };
    in_the_order && mode::get() != Mode::Off && found_by(caller, name, version) == original
}

/// What the part of the program that was opened with the caller's library finds.
fn found_by(caller: *const c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    let path = elf::mapped_at(caller).map_or(ptr::null(), |object| object.dli_fname);
    if path.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: the loader's name of the object, which is loaded: this only counts one more user, for a moment.
    unsafe {
        let part = libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if part.is_null() {
            return ptr::null_mut();
        }
        let found = ask(part, name, version);
        libc::dlclose(part);
        found
    }
}

/// What the loader answers behind the shim: NULL, and a message.
fn not_found(name: *const c_char, version: *const c_char) -> Answer {
    Answer::of(ask(libc::RTLD_NEXT, name, version))
}

/// `asked` is the lookup function itself.
fn substitute(asked: &Hook, symbol: *const c_char, function: *mut *mut c_void, result: CuResult) -> CuResult {
    if result == code::SUCCESS && !function.is_null() && !symbol.is_null() && mode::get() != Mode::Off {
        // SAFETY: the driver has just read the one and written the other.
        unsafe {
            let base = CStr::from_ptr(symbol);
            hooks::complete(asked.original());
            if let Some(hook) = hooks::all().find(|hook| hook.is_original(*function) && is_form(hook, base)) {
                *function = hook.wrapper();
            }
        }
    }
    result
}

/// Whether the hook's name is the base name with suffixes. The pointer alone says so too, unless the library
/// of the originals was unloaded and another one lies in its place.
fn is_form(hook: &Hook, base: &CStr) -> bool {
    hook.name.to_bytes().starts_with(base.to_bytes())
}
