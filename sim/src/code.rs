//! The driver's result codes, their names and their texts.

use crate::call::{Out, Res};
use cudarc::driver::sys::CUresult as R;
use std::ffi::{CStr, c_char};

pub const SUCCESS: i32 = R::CUDA_SUCCESS as i32;
pub const INVALID_VALUE: i32 = R::CUDA_ERROR_INVALID_VALUE as i32;
pub const OUT_OF_MEMORY: i32 = R::CUDA_ERROR_OUT_OF_MEMORY as i32;
pub const NOT_INITIALIZED: i32 = R::CUDA_ERROR_NOT_INITIALIZED as i32;
pub const DEINITIALIZED: i32 = R::CUDA_ERROR_DEINITIALIZED as i32;
pub const NO_DEVICE: i32 = R::CUDA_ERROR_NO_DEVICE as i32;
pub const INVALID_DEVICE: i32 = R::CUDA_ERROR_INVALID_DEVICE as i32;
pub const INVALID_CONTEXT: i32 = R::CUDA_ERROR_INVALID_CONTEXT as i32;
pub const OPERATING_SYSTEM: i32 = R::CUDA_ERROR_OPERATING_SYSTEM as i32;
pub const INVALID_HANDLE: i32 = R::CUDA_ERROR_INVALID_HANDLE as i32;
pub const ILLEGAL_STATE: i32 = R::CUDA_ERROR_ILLEGAL_STATE as i32;
pub const NOT_FOUND: i32 = R::CUDA_ERROR_NOT_FOUND as i32;
pub const NOT_READY: i32 = R::CUDA_ERROR_NOT_READY as i32;
pub const ILLEGAL_ADDRESS: i32 = R::CUDA_ERROR_ILLEGAL_ADDRESS as i32;
pub const PEER_ACCESS_ALREADY_ENABLED: i32 = R::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as i32;
pub const PEER_ACCESS_NOT_ENABLED: i32 = R::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED as i32;
pub const CONTEXT_IS_DESTROYED: i32 = R::CUDA_ERROR_CONTEXT_IS_DESTROYED as i32;
pub const HOST_MEMORY_ALREADY_REGISTERED: i32 = R::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as i32;
pub const HOST_MEMORY_NOT_REGISTERED: i32 = R::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED as i32;
pub const NOT_PERMITTED: i32 = R::CUDA_ERROR_NOT_PERMITTED as i32;
pub const NOT_SUPPORTED: i32 = R::CUDA_ERROR_NOT_SUPPORTED as i32;
pub const STREAM_CAPTURE_UNSUPPORTED: i32 = R::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as i32;
pub const STREAM_CAPTURE_INVALIDATED: i32 = R::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED as i32;
pub const STREAM_CAPTURE_MERGE: i32 = R::CUDA_ERROR_STREAM_CAPTURE_MERGE as i32;
pub const STREAM_CAPTURE_UNMATCHED: i32 = R::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED as i32;
pub const STREAM_CAPTURE_UNJOINED: i32 = R::CUDA_ERROR_STREAM_CAPTURE_UNJOINED as i32;
pub const STREAM_CAPTURE_ISOLATION: i32 = R::CUDA_ERROR_STREAM_CAPTURE_ISOLATION as i32;
pub const STREAM_CAPTURE_IMPLICIT: i32 = R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as i32;
pub const CAPTURED_EVENT: i32 = R::CUDA_ERROR_CAPTURED_EVENT as i32;
pub const STREAM_CAPTURE_WRONG_THREAD: i32 = R::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as i32;
pub const UNKNOWN: i32 = R::CUDA_ERROR_UNKNOWN as i32;

macro_rules! codes {
    ($($name:ident $text:literal)*) => {
        /// Every code the driver knows: number, name, text (both ready for C).
        static CODES: &[(i32, &CStr, &CStr)] = &[$((
            R::$name as i32,
            // Both end in the terminator that `concat!` adds.
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(text) => text,
                Err(_) => panic!("a name holds a zero"),
            },
            match CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()) {
                Ok(text) => text,
                Err(_) => panic!("a text holds a zero"),
            },
        )),*];
    };
}

codes! {
    CUDA_SUCCESS "no error"
    CUDA_ERROR_INVALID_VALUE "invalid argument"
    CUDA_ERROR_OUT_OF_MEMORY "out of memory"
    CUDA_ERROR_NOT_INITIALIZED "initialization error"
    CUDA_ERROR_DEINITIALIZED "driver shutting down"
    CUDA_ERROR_PROFILER_DISABLED "profiler disabled while using external profiling tool"
    CUDA_ERROR_STUB_LIBRARY "stub library"
    CUDA_ERROR_DEVICE_UNAVAILABLE "device(s) is/are busy or unavailable"
    CUDA_ERROR_NO_DEVICE "no CUDA-capable device is detected"
    CUDA_ERROR_INVALID_DEVICE "invalid device ordinal"
    CUDA_ERROR_INVALID_IMAGE "device kernel image is invalid"
    CUDA_ERROR_INVALID_CONTEXT "invalid device context"
    CUDA_ERROR_MAP_FAILED "mapping of buffer object failed"
    CUDA_ERROR_UNMAP_FAILED "unmapping of buffer object failed"
    CUDA_ERROR_NO_BINARY_FOR_GPU "no kernel image is available for execution on the device"
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED "peer access is not supported between these two devices"
    CUDA_ERROR_INVALID_PTX "a PTX JIT compilation failed"
    CUDA_ERROR_FILE_NOT_FOUND "file not found"
    CUDA_ERROR_OPERATING_SYSTEM "OS call failed or operation not supported on this OS"
    CUDA_ERROR_INVALID_HANDLE "invalid resource handle"
    CUDA_ERROR_ILLEGAL_STATE "the operation cannot be performed in the present state"
    CUDA_ERROR_NOT_FOUND "named symbol not found"
    CUDA_ERROR_NOT_READY "device not ready"
    CUDA_ERROR_ILLEGAL_ADDRESS "an illegal memory access was encountered"
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES "too many resources requested for launch"
    CUDA_ERROR_LAUNCH_TIMEOUT "the launch timed out and was terminated"
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED "peer access is already enabled"
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED "peer access has not been enabled"
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE "cannot set while device is active in this process"
    CUDA_ERROR_CONTEXT_IS_DESTROYED "context is destroyed"
    CUDA_ERROR_ASSERT "device-side assert triggered"
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED "part or all of the requested memory range is already mapped"
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED "pointer does not correspond to a registered memory region"
    CUDA_ERROR_HARDWARE_STACK_ERROR "hardware stack error"
    CUDA_ERROR_ILLEGAL_INSTRUCTION "an illegal instruction was encountered"
    CUDA_ERROR_MISALIGNED_ADDRESS "misaligned address"
    CUDA_ERROR_INVALID_ADDRESS_SPACE "operation not supported on global/shared address space"
    CUDA_ERROR_INVALID_PC "invalid program counter"
    CUDA_ERROR_LAUNCH_FAILED "unspecified launch failure"
    CUDA_ERROR_NOT_PERMITTED "operation not permitted"
    CUDA_ERROR_NOT_SUPPORTED "operation not supported"
    CUDA_ERROR_SYSTEM_NOT_READY "system not yet initialized"
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH "system has unsupported display driver / cuda driver combination"
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED "operation not permitted when stream is capturing"
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED "operation failed due to a previous error during capture"
    CUDA_ERROR_STREAM_CAPTURE_MERGE "operation would result in a merge of separate capture sequences"
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED "capture was not ended in the same stream as it began"
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED "capturing stream has unjoined work"
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION "dependency created on uncaptured work in another stream"
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        "operation would make the legacy stream depend on a capturing blocking stream"
    CUDA_ERROR_CAPTURED_EVENT "operation not permitted on an event last recorded in a capturing stream"
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
        "attempt to terminate a thread-local capture sequence from another thread"
    CUDA_ERROR_TIMEOUT "wait operation timed out"
    CUDA_ERROR_UNKNOWN "unknown error"
}

fn describe(
    code: i32,
    out: Out<*const c_char>,
    pick: fn(&(i32, &'static CStr, &'static CStr)) -> &'static CStr,
) -> Res {
    match CODES.iter().find(|entry| entry.0 == code) {
        Some(entry) => out.put(pick(entry).as_ptr()),
        None => {
            out.put(std::ptr::null())?;
            Err(INVALID_VALUE)
        }
    }
}

exports! {
    early fn cuGetErrorName(code: i32, name: Out<*const c_char>) => describe(code, name, |entry| entry.1);
    early fn cuGetErrorString(code: i32, text: Out<*const c_char>) => describe(code, text, |entry| entry.2);
}
