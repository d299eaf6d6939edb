//! What the shim itself asks the driver: the functions that it does not wrap, and small questions made of
//! them.

use crate::hooks::{self, CuResult, code};
use crate::text::Shown;
use crate::{elf, guard, stub};
use core::ffi::{CStr, c_int, c_uint, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering::*};
use cudarc::driver::sys::CUstreamCaptureStatus;

/// A function of the driver, found at first use. Where the driver lacks it, every use asks again.
struct Function {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Function {
    const fn new(name: &'static CStr) -> Function {
        Function { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    fn get(&self) -> *mut c_void {
        match self.address.load(Relaxed) {
            known if !known.is_null() => known,
            _ => self.find(),
        }
    }

    /// In the library that the wrapped functions come from; else as a program that is linked with it would.
    #[cold]
    fn find(&self) -> *mut c_void {
        let of_originals =
            elf::Object::around(guard::any_original()).and_then(|object| object.find(self.name));
        let found = of_originals.unwrap_or_else(|| {
            elf::find_object(|object| hooks::is_driver(object).then(|| object.find(self.name)))
                .flatten()
                .unwrap_or_else(|| stub::ask(libc::RTLD_NEXT, self.name.as_ptr(), ptr::null()))
        });
        self.address.store(found, Relaxed);
        found
    }
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal fn($($arg:ident: $type:ty),*);)*) => {
        $($(#[$doc])*
        fn $name($($arg: $type),*) -> CuResult {
            static FUNCTION: Function = Function::new($symbol);
            let address = FUNCTION.get();
            if address.is_null() {
                return code::NOT_FOUND;
            }
            // SAFETY: the type is that of cuda.h for this name; pointers are to locals of the callers below.
            unsafe {
                transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> CuResult>(address)($($arg),*)
            }
        })*
    };
}

functions! {
    ctx_current = c"cuCtxGetCurrent" fn(context: *mut usize);
    ctx_api_version = c"cuCtxGetApiVersion" fn(context: usize, version: *mut c_uint);
    ctx_device = c"cuCtxGetDevice" fn(device: *mut c_int);
    ctx_push = c"cuCtxPushCurrent_v2" fn(context: usize);
    ctx_pop = c"cuCtxPopCurrent_v2" fn(context: *mut usize);
    device_count = c"cuDeviceGetCount" fn(count: *mut c_int);
    device_total = c"cuDeviceTotalMem_v2" fn(bytes: *mut usize, device: c_int);
    can_access_peer = c"cuDeviceCanAccessPeer" fn(can: *mut c_int, device: c_int, peer: c_int);
    primary_state = c"cuDevicePrimaryCtxGetState" fn(device: c_int, flags: *mut c_uint, active: *mut c_int);
    stream_context = c"cuStreamGetCtx" fn(stream: usize, context: *mut usize);
    stream_capturing = c"cuStreamIsCapturing" fn(stream: usize, status: *mut c_int);
    primary_reset = c"cuDevicePrimaryCtxReset_v2" fn(device: c_int);
    driver_alloc = c"cuMemAlloc_v2" fn(address: *mut usize, size: usize);
    driver_free = c"cuMemFree_v2" fn(address: usize);
    driver_info = c"cuMemGetInfo_v2" fn(free: *mut usize, total: *mut usize);
    address_range = c"cuMemGetAddressRange_v2" fn(base: *mut usize, size: *mut usize, address: usize);
    retain_handle = c"cuMemRetainAllocationHandle" fn(handle: *mut usize, address: usize);
    release_handle = c"cuMemRelease" fn(handle: usize);
    driver_attributes = c"cuPointerGetAttributes" fn(
        count: c_uint, which: *mut c_int, data: *mut *mut c_void, address: usize
    );
}

/// More than any request.
const NO_LIMIT: usize = usize::MAX;

/// The default streams: NULL and 1 are the legacy one, 2 the per-thread one (`CU_STREAM_PER_THREAD`, which
/// cudarc does not have).
pub const PER_THREAD: usize = 2;

/// The calling thread's current context; 0 for none, or before the driver is initialised.
pub fn current_context() -> usize {
    let mut context = 0;
    if ctx_current(&mut context) == code::SUCCESS { context } else { 0 }
}

/// Whether the context is neither destroyed nor inactive.
pub fn is_alive(context: usize) -> bool {
    let mut version = 0;
    context != 0 && ctx_api_version(context, &mut version) == code::SUCCESS
}

/// The calling thread's current context, if it can be allocated in.
pub fn living_context() -> Option<usize> {
    Some(current_context()).filter(|&context| is_alive(context))
}

/// The device of the current context; -1 for none.
pub fn current_device() -> c_int {
    let mut device = -1;
    if ctx_device(&mut device) == code::SUCCESS { device } else { -1 }
}

pub fn devices() -> c_int {
    let mut count = 0;
    if device_count(&mut count) == code::SUCCESS { count } else { 0 }
}

/// Whether kernels of any device may be able to reach memory of another one.
pub fn has_peers() -> bool {
    let count = devices();
    let reaches = |device, peer| {
        let mut can = 0;
        device != peer && can_access_peer(&mut can, device, peer) == code::SUCCESS && can != 0
    };
    (0..count).any(|device| (0..count).any(|peer| reaches(device, peer)))
}

/// Bytes of a device, -1 meaning the current context's; more than any request where it cannot be told.
pub fn total_memory(device: c_int) -> usize {
    let device = if device < 0 { current_device() } else { device };
    let mut bytes = 0;
    if device >= 0 && device_total(&mut bytes, device) == code::SUCCESS { bytes } else { NO_LIMIT }
}

/// The device that memory for this stream comes from; -1, the current context's, where that is the only one
/// or the stream does not tell.
pub fn device_of_stream(stream: usize) -> c_int {
    if stream <= PER_THREAD || devices() < 2 { -1 } else { device_of_context(context_of_stream(stream)) }
}

/// The context that a stream belongs to; 0 if the driver does not say.
pub fn context_of_stream(stream: usize) -> usize {
    let mut context = 0;
    if stream_context(stream, &mut context) == code::SUCCESS { context } else { 0 }
}

/// The device of a context, which need not be the current one; -1 for none, or if it has ended.
pub fn device_of_context(context: usize) -> c_int {
    if context == 0 {
        return -1;
    }
    if current_context() == context {
        return current_device();
    }
    if ctx_push(context) != code::SUCCESS {
        return -1;
    }
    let (device, mut popped) = (current_device(), 0);
    ctx_pop(&mut popped);
    device
}

/// Whether a device's primary context is active.
pub fn is_primary_active(device: c_int) -> bool {
    let (mut flags, mut active) = (0, 0);
    primary_state(device, &mut flags, &mut active) == code::SUCCESS && active != 0
}

/// Ends all that is in a device's primary context; references to it stay.
pub fn reset_primary(device: c_int) {
    primary_reset(device);
}

/// A block of the driver's own, and its end.
pub fn alloc(address: &mut usize, size: usize) -> CuResult {
    driver_alloc(address, size)
}

pub fn free(address: usize) {
    driver_free(address);
}

/// All memory of the current device, as the driver tells it together with what is free.
pub fn memory_in_sight() -> usize {
    let (mut free, mut total) = (0, 0);
    if driver_info(&mut free, &mut total) == code::SUCCESS { total } else { NO_LIMIT }
}

/// What the driver says of an address, in the list form, which answers for any.
pub fn pointer_attributes(
    count: c_uint,
    which: *mut c_int,
    data: *mut *mut c_void,
    address: usize,
) -> CuResult {
    driver_attributes(count, which, data, address)
}

/// Whether these bytes are all of one `cuMemAlloc`.
pub fn is_one_allocation(base: usize, size: usize) -> bool {
    let (mut found, mut length, mut handle) = (0, 0, 0);
    if address_range(&mut found, &mut length, base) != code::SUCCESS || (found, length) != (base, size) {
        return false;
    }
    // Mapped memory has a handle, which may cover the same range by chance.
    let mapped = retain_handle(&mut handle, base) == code::SUCCESS;
    if mapped {
        release_handle(handle);
    }
    !mapped
}

/// Whether the stream is being captured, or captures keep the legacy stream from being used.
pub fn is_capturing(stream: usize) -> bool {
    let mut status = 0;
    match stream_capturing(stream, &mut status) {
        code::SUCCESS => status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as c_int,
        code::NOT_FOUND => false,
        _ => true,
    }
}

/// What the driver says to a free, on a captured stream, of memory that is not the graph's.
pub fn refusal_of_free(stream: usize) -> CuResult {
    const INVALIDATED: c_int = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as c_int;
    let mut status = 0;
    match stream_capturing(stream, &mut status) {
        code::SUCCESS if status == INVALIDATED => code::CAPTURE_INVALIDATED,
        code::SUCCESS => code::INVALID_VALUE,
        refused => refused,
    }
}

/// Where the driver was loaded from.
pub fn driver_path() -> Shown<'static> {
    let object = elf::mapped_at(guard::any_original());
    // SAFETY: the loader's string; a driver is not unloaded in use.
    unsafe { Shown::of_c(object.map_or(c"no driver".as_ptr(), |object| object.dli_fname)) }
}
