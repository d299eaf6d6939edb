//! The driver: found, loaded and asked once, then a table of functions; contexts; the life of the process.
//!
//! This is the crate's whole boundary to CUDA. Real and simulated drivers are found the same way, by the
//! loader of cudarc, which looks along the library path.

pub mod context;
pub mod lifecycle;
pub mod table;

use crate::error::{Result, Status, bail, fail};
use crate::host_alloc::without_failing;
use crate::sync::{clock, lock};
use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering::*};
use once_cell::sync::OnceCell;
pub use table::{Api, Ctx, CuResult, Event, Stream};

/// Results of the driver that are acted upon; all others are reported by number and name.
pub mod code {
    pub const SUCCESS: i32 = 0;
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const NOT_INITIALIZED: i32 = 3;
    pub const DEINITIALIZED: i32 = 4;
    pub const STUB_LIBRARY: i32 = 34;
    pub const NO_DEVICE: i32 = 100;
    pub const INVALID_CONTEXT: i32 = 201;
    pub const NOT_READY: i32 = 600;
    pub const CONTEXT_IS_DESTROYED: i32 = 709;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const SYSTEM_DRIVER_MISMATCH: i32 = 803;
    pub const CAPTURE_IMPLICIT: i32 = 906;
}

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const CAPTURE_RELAXED: u32 = 2;

static API: OnceCell<Api> = OnceCell::new();
static DEVICES: AtomicI32 = AtomicI32::new(0);
/// A result of `cuInit` that another try would not change: drivers leave file descriptors open at each.
static REFUSED: AtomicI32 = AtomicI32::new(code::SUCCESS);
static LARGEST_DEVICE: AtomicU64 = AtomicU64::new(u64::MAX);

/// The driver, if it has been initialised.
#[inline]
pub fn loaded() -> Option<&'static Api> {
    API.get()
}

/// Number of devices; 0 before the driver is initialised.
pub fn device_count() -> i32 {
    DEVICES.load(Relaxed)
}

/// Bytes of the largest device: what no request can exceed.
pub fn largest_device() -> u64 {
    LARGEST_DEVICE.load(Relaxed)
}

/// The driver, initialised at first use. After a failure that can pass the next call tries again.
pub fn api() -> Result<&'static Api> {
    lifecycle::check_running()?;
    if let Some(api) = API.get() {
        return Ok(api);
    }
    lifecycle::watch_for_fork();
    let load_once = || {
        let loaded = load();
        if matches!(loaded, Err(Status::POOL_ERROR_NO_DRIVER | Status::POOL_ERROR_NO_DEVICE)) {
            lifecycle::not_started();
        }
        loaded
    };
    // A thread that waits for another one in here needs host memory for it.
    without_failing(|| API.get_or_try_init(load_once))
}

fn load() -> Result<Api> {
    let mut api = without_failing(find)?;
    without_failing(find_clock);
    // SAFETY: the function of this name, with its documented arguments; the pointer is to a local.
    let version = unsafe {
        let mut version: c_int = 0;
        match (api.driver_version)(&mut version) {
            code::SUCCESS => version,
            result => return Err(refused(&api, result, "cuDriverGetVersion")),
        }
    };
    let result = match REFUSED.load(Relaxed) {
        // SAFETY: flags must be 0.
        code::SUCCESS => unsafe { (api.init)(0) },
        refused_before => refused_before,
    };
    if result != code::SUCCESS {
        if matches!(result, code::NO_DEVICE | code::STUB_LIBRARY | code::SYSTEM_DRIVER_MISMATCH) {
            REFUSED.store(result, Relaxed);
        }
        return Err(refused(&api, result, "cuInit"));
    }
    let mut devices: c_int = 0;
    // SAFETY: the pointer is to a local.
    match unsafe { (api.device_count)(&mut devices) } {
        code::SUCCESS if devices > 0 => {}
        code::SUCCESS => bail!(POOL_ERROR_NO_DEVICE, "the CUDA driver {version} sees no device"),
        result => return Err(refused(&api, result, "cuDeviceGetCount")),
    }
    api.cut_to_version(version);
    DEVICES.store(devices, Relaxed);
    let mut largest = 0;
    for device in 0..devices {
        largest = total_memory(&api, device)?.max(largest);
    }
    LARGEST_DEVICE.store(largest, Relaxed);
    lifecycle::watch();
    lock::ask_for_threads();
    Ok(api)
}

/// Bytes of a device.
pub fn total_memory(api: &Api, device: i32) -> Result<u64> {
    let mut total = 0usize;
    // SAFETY: the pointer is to a local.
    check(api, unsafe { (api.device_total_mem)(&mut total, device) }, "cuDeviceTotalMem")?;
    Ok(total as u64)
}

/// Opens the library and looks its functions up.
fn find() -> Result<Api> {
    // SAFETY: opens libraries by name along the loader's path and closes them again.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        bail!(
            POOL_ERROR_NO_DRIVER,
            "no CUDA driver library (libcuda.so, libcuda.so.1) is on the loader's path"
        );
    }
    let found = std::panic::catch_unwind(|| {
        Api::load(|name| {
            // SAFETY: an address taken as data; the table gives it the type that belongs to the name.
            unsafe { cudarc::driver::sys::culib().get::<*const core::ffi::c_void>(name) }
                .ok()
                .map(|symbol| *symbol)
        })
    });
    match found {
        Ok(Ok(api)) => Ok(api),
        Ok(Err(missing)) => {
            bail!(POOL_ERROR_DRIVER_VERSION, "the CUDA driver is too old: it has no {missing}")
        }
        Err(payload) => {
            // Dropping a payload may panic again.
            core::mem::forget(payload);
            bail!(POOL_ERROR_NO_DRIVER, "the CUDA driver library went away while it was being loaded")
        }
    }
}

/// A driver with a clock of its own, as the simulated one can have, is what time goes by.
fn find_clock() {
    // SAFETY: the library is loaded, and stays so. The simulated driver alone has the function; it answers
    // null, or with a clock that lasts.
    unsafe {
        let find = cudarc::driver::sys::culib()
            .get::<unsafe extern "C" fn() -> *const clock::DriverClock>(b"cudasim_clock\0");
        if let Ok(find) = find {
            clock::install(find());
        }
    }
}

/// The status for a failure before the driver is up.
fn refused(api: &Api, result: CuResult, call: &str) -> Status {
    match result {
        code::NO_DEVICE => {
            fail(Status::POOL_ERROR_NO_DEVICE, format_args!("{call}: the CUDA driver sees no device"))
        }
        code::NOT_INITIALIZED if call == "cuInit" => fail(
            Status::POOL_ERROR_FORKED,
            format_args!(
                "{call}: the driver was initialised before this process was forked; exec a program to use it"
            ),
        ),
        code::STUB_LIBRARY => fail(
            Status::POOL_ERROR_NO_DRIVER,
            format_args!("{call}: libcuda.so is a toolkit's stub, not a driver"),
        ),
        code::SYSTEM_DRIVER_MISMATCH => fail(
            Status::POOL_ERROR_DRIVER_VERSION,
            format_args!("{call}: the CUDA driver library and the kernel's driver are of different versions"),
        ),
        _ => status_of(api, result, call),
    }
}

/// The status for a result of the driver that is not success; the sentence goes to the last error.
pub fn status_of(api: &Api, result: CuResult, call: &str) -> Status {
    let status = match result {
        code::OUT_OF_MEMORY => Status::POOL_ERROR_OUT_OF_MEMORY,
        code::NOT_INITIALIZED if lifecycle::process_state() == lifecycle::ProcessState::Forked => {
            Status::POOL_ERROR_FORKED
        }
        code::DEINITIALIZED => Status::POOL_ERROR_SHUTTING_DOWN,
        code::INVALID_CONTEXT | code::CONTEXT_IS_DESTROYED => Status::POOL_ERROR_CONTEXT_LOST,
        code::NOT_SUPPORTED => Status::POOL_ERROR_NOT_SUPPORTED,
        _ => Status::POOL_ERROR_DRIVER,
    };
    fail(status, format_args!("{call} answered {result} ({})", name_of(api, result)))
}

/// The driver's own name for a result.
pub fn name_of(api: &Api, result: CuResult) -> &'static str {
    let Some(error_name) = api.error_name else { return "unnamed" };
    let mut name: *const c_char = core::ptr::null();
    // SAFETY: any integer is answered; the pointer is to a local.
    if unsafe { error_name(result, &mut name) } != code::SUCCESS || name.is_null() {
        return "unknown to this driver";
    }
    // SAFETY: the driver's names are static and terminated.
    unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("unnamed")
}

/// Turns a result into `Ok` or a status with its sentence.
pub fn check(api: &Api, result: CuResult, call: &str) -> Result<()> {
    if result == code::SUCCESS { Ok(()) } else { Err(status_of(api, result, call)) }
}

/// Runs driver calls under the relaxed capture mode, so that a capture of this thread is not broken by a call
/// that only *could* be unsafe in one, and puts the caller's mode back.
pub fn relaxed<R>(api: &Api, f: impl FnOnce() -> R) -> R {
    let mut mode = CAPTURE_RELAXED;
    // SAFETY: swaps the calling thread's mode with the local.
    let swapped = unsafe { (api.exchange_capture_mode)(&mut mode) } == code::SUCCESS;
    let result = f();
    if swapped {
        // SAFETY: as above.
        unsafe { (api.exchange_capture_mode)(&mut mode) };
    }
    result
}

/// Whether the stream is being captured; `None` if the driver cannot tell.
pub fn is_capturing(api: &Api, stream: Stream) -> Option<bool> {
    let mut status = 0;
    // SAFETY: the stream is the caller's own, in a call that carries it, or a default stream's handle.
    match unsafe { (api.stream_capturing)(stream, &mut status) } {
        code::SUCCESS => Some(status != 0),
        // The legacy stream says so of the streams that it waits for.
        code::CAPTURE_IMPLICIT => Some(true),
        _ => None,
    }
}

/// Whether the stream does not synchronise with the legacy stream. One that cannot be told counts as such.
pub fn is_non_blocking(api: &Api, stream: Stream) -> bool {
    /// `CU_STREAM_NON_BLOCKING`.
    const NON_BLOCKING: u32 = 1;
    let mut flags = 0;
    // SAFETY: as for `is_capturing`.
    let result = unsafe { (api.stream_flags)(stream, &mut flags) };
    result != code::SUCCESS || flags & NON_BLOCKING != 0
}
