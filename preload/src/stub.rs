//! The hooks of the loader: `dlsym` and `dlvsym`.
//!
//! They *jump* to the real functions instead of calling them, because `RTLD_NEXT` and `RTLD_DEFAULT` are
//! resolved from the return address: a call from here would be answered for the shim. Names that cannot be
//! CUDA's are told by their first two letters, before anything else happens.

use crate::elf;
use crate::lookup::decide;
use core::arch::naked_asm;
use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicUsize, Ordering::*};

/// The real functions; 0 until first used.
static REAL_DLSYM: AtomicUsize = AtomicUsize::new(0);
static REAL_DLVSYM: AtomicUsize = AtomicUsize::new(0);

/// What a stub is to do.
#[repr(C)]
pub struct Answer {
    /// 0: jump to the real function.
    decided: usize,
    value: *mut c_void,
}

impl Answer {
    pub const JUMP: Answer = Answer { decided: 0, value: core::ptr::null_mut() };

    pub fn of(value: *mut c_void) -> Answer {
        Answer { decided: 1, value }
    }
}

/// Both are found in the objects behind the shim. `dlvsym(RTLD_NEXT, ..)` would be the usual way, but that
/// function is hooked here too, and where it does not find a version it allocates, perhaps by a `malloc` that
/// is just asking for `dlsym`.
fn real(cell: &AtomicUsize, name: &CStr) -> usize {
    match cell.load(Relaxed) {
        0 => {
            let found = elf::find_next(name).map_or(0, |address| address as usize);
            cell.store(found, Relaxed);
            found
        }
        known => known,
    }
}

extern "C" fn find_dlsym() -> usize {
    real(&REAL_DLSYM, c"dlsym")
}

extern "C" fn find_dlvsym() -> usize {
    real(&REAL_DLVSYM, c"dlvsym")
}

/// The real `dlsym`, or `dlvsym` where a version is given, asked by the shim.
pub fn ask(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
    let function = if version.is_null() { find_dlsym() } else { find_dlvsym() };
    if function == 0 {
        return core::ptr::null_mut();
    }
    // SAFETY: the C library's functions of these types, with a handle and strings as a caller gave them.
    unsafe {
        if version.is_null() {
            core::mem::transmute::<usize, Dlsym>(function)(handle, name)
        } else {
            core::mem::transmute::<usize, Dlvsym>(function)(handle, name, version)
        }
    }
}

/// `dlsym(handle, name)`: arguments in rdi and rsi, the return address on the stack.
///
/// # Safety
/// The contract of the C library's function.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "xor edx, edx", // no version
        "lea rax, [rip + {find}]",
        "mov r11, [rip + {real}]",
        "jmp {common}",
        find = sym find_dlsym,
        real = sym REAL_DLSYM,
        common = sym common,
    )
}

/// `dlvsym(handle, name, version)`: the version in rdx.
///
/// # Safety
/// The contract of the C library's function.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    naked_asm!(
        "lea rax, [rip + {find}]",
        "mov r11, [rip + {real}]",
        "jmp {common}",
        find = sym find_dlvsym,
        real = sym REAL_DLVSYM,
        common = sym common,
    )
}

/// What both do. r11: the real function or 0; rax: the function that finds it; the other registers as the
/// caller left them.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn common() {
    naked_asm!(
        // Not "cu..."? The byte after a terminating zero is not read.
        "test rsi, rsi",
        "je 2f",
        "cmp byte ptr [rsi], 99",
        "jne 2f",
        "cmp byte ptr [rsi + 1], 117",
        "je 3f",
        "2:",
        "test r11, r11",
        "je 4f",
        "jmp r11",
        // decide(handle, name, version, caller)
        "3:",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rax",
        "push r11",
        "mov rcx, [rsp + 40]",
        "call {decide}",
        "mov r8, rdx",
        "mov rcx, rax",
        "pop r11",
        "pop rax",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rcx, rcx",
        "je 2b",
        "mov rax, r8",
        "ret",
        // The first use.
        "4:",
        "push rdi",
        "push rsi",
        "push rdx",
        "call rax",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "mov r11, rax",
        "test rax, rax",
        "je 5f",
        "jmp r11",
        "5:",
        "ret",
        decide = sym decide,
    )
}

/// `dlsym(handle, name)`: arguments in x0 and x1, the return address in x30.
///
/// # Safety
/// The contract of the C library's function.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "mov x2, xzr",
        "adrp x10, {find}",
        "add x10, x10, :lo12:{find}",
        "adrp x16, {real}",
        "ldr x16, [x16, :lo12:{real}]",
        "b {common}",
        find = sym find_dlsym,
        real = sym REAL_DLSYM,
        common = sym common,
    )
}

/// `dlvsym(handle, name, version)`: the version in x2.
///
/// # Safety
/// The contract of the C library's function.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *mut c_void {
    naked_asm!(
        "adrp x10, {find}",
        "add x10, x10, :lo12:{find}",
        "adrp x16, {real}",
        "ldr x16, [x16, :lo12:{real}]",
        "b {common}",
        find = sym find_dlvsym,
        real = sym REAL_DLVSYM,
        common = sym common,
    )
}

/// What both do. x16: the real function or 0; x10: the function that finds it; the other registers as the
/// caller left them.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn common() {
    naked_asm!(
        "cbz x1, 2f",
        "ldrb w9, [x1]",
        "cmp w9, #99",
        "b.ne 2f",
        "ldrb w9, [x1, #1]",
        "cmp w9, #117",
        "b.eq 3f",
        "2:",
        "cbz x16, 4f",
        "br x16",
        // decide(handle, name, version, caller)
        "3:",
        "stp x29, x30, [sp, #-64]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x10, [sp, #32]",
        "str x16, [sp, #48]",
        "mov x3, x30",
        "bl {decide}",
        "mov x11, x0",
        "mov x12, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x10, [sp, #32]",
        "ldr x16, [sp, #48]",
        "ldp x29, x30, [sp], #64",
        "cbz x11, 2b",
        "mov x0, x12",
        "ret",
        // The first use.
        "4:",
        "stp x29, x30, [sp, #-48]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "str x2, [sp, #32]",
        "blr x10",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldr x2, [sp, #32]",
        "ldp x29, x30, [sp], #48",
        "cbz x16, 5f",
        "br x16",
        "5:",
        "mov x0, xzr",
        "ret",
        decide = sym decide,
    )
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("the loader's hooks are written for x86_64 and aarch64");
