//! The driver's result codes, their names and their texts.

use crate::call::{Out, Res};
use std::ffi::{CStr, c_char};

pub const SUCCESS: i32 = 0;
pub const INVALID_VALUE: i32 = 1;
pub const OUT_OF_MEMORY: i32 = 2;
pub const NOT_INITIALIZED: i32 = 3;
pub const DEINITIALIZED: i32 = 4;
pub const NO_DEVICE: i32 = 100;
pub const INVALID_DEVICE: i32 = 101;
pub const INVALID_CONTEXT: i32 = 201;
pub const OPERATING_SYSTEM: i32 = 304;
pub const INVALID_HANDLE: i32 = 400;
pub const ILLEGAL_STATE: i32 = 401;
pub const NOT_FOUND: i32 = 500;
pub const NOT_READY: i32 = 600;
pub const ILLEGAL_ADDRESS: i32 = 700;
pub const CONTEXT_IS_DESTROYED: i32 = 709;
pub const HOST_MEMORY_ALREADY_REGISTERED: i32 = 712;
pub const HOST_MEMORY_NOT_REGISTERED: i32 = 713;
pub const NOT_PERMITTED: i32 = 800;
pub const NOT_SUPPORTED: i32 = 801;
pub const STREAM_CAPTURE_UNSUPPORTED: i32 = 900;
pub const STREAM_CAPTURE_INVALIDATED: i32 = 901;
pub const STREAM_CAPTURE_MERGE: i32 = 902;
pub const STREAM_CAPTURE_UNMATCHED: i32 = 903;
pub const STREAM_CAPTURE_UNJOINED: i32 = 904;
pub const STREAM_CAPTURE_ISOLATION: i32 = 905;
pub const STREAM_CAPTURE_IMPLICIT: i32 = 906;
pub const CAPTURED_EVENT: i32 = 907;
pub const STREAM_CAPTURE_WRONG_THREAD: i32 = 908;
pub const UNKNOWN: i32 = 999;

macro_rules! codes {
    ($($number:literal $name:literal $text:literal)*) => {
        /// Every code the driver knows: number, name, text (both ready for C).
        static CODES: &[(i32, &CStr, &CStr)] = &[$((
            $number,
            // Both literals end in the terminator that `concat!` adds.
            match CStr::from_bytes_with_nul(concat!("CUDA_", $name, "\0").as_bytes()) {
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
    0 "SUCCESS" "no error"
    1 "ERROR_INVALID_VALUE" "invalid argument"
    2 "ERROR_OUT_OF_MEMORY" "out of memory"
    3 "ERROR_NOT_INITIALIZED" "initialization error"
    4 "ERROR_DEINITIALIZED" "driver shutting down"
    5 "ERROR_PROFILER_DISABLED" "profiler disabled while using external profiling tool"
    34 "ERROR_STUB_LIBRARY" "stub library"
    46 "ERROR_DEVICE_UNAVAILABLE" "device(s) is/are busy or unavailable"
    100 "ERROR_NO_DEVICE" "no CUDA-capable device is detected"
    101 "ERROR_INVALID_DEVICE" "invalid device ordinal"
    200 "ERROR_INVALID_IMAGE" "device kernel image is invalid"
    201 "ERROR_INVALID_CONTEXT" "invalid device context"
    205 "ERROR_MAP_FAILED" "mapping of buffer object failed"
    206 "ERROR_UNMAP_FAILED" "unmapping of buffer object failed"
    209 "ERROR_NO_BINARY_FOR_GPU" "no kernel image is available for execution on the device"
    217 "ERROR_PEER_ACCESS_UNSUPPORTED" "peer access is not supported between these two devices"
    218 "ERROR_INVALID_PTX" "a PTX JIT compilation failed"
    301 "ERROR_FILE_NOT_FOUND" "file not found"
    304 "ERROR_OPERATING_SYSTEM" "OS call failed or operation not supported on this OS"
    400 "ERROR_INVALID_HANDLE" "invalid resource handle"
    401 "ERROR_ILLEGAL_STATE" "the operation cannot be performed in the present state"
    500 "ERROR_NOT_FOUND" "named symbol not found"
    600 "ERROR_NOT_READY" "device not ready"
    700 "ERROR_ILLEGAL_ADDRESS" "an illegal memory access was encountered"
    701 "ERROR_LAUNCH_OUT_OF_RESOURCES" "too many resources requested for launch"
    702 "ERROR_LAUNCH_TIMEOUT" "the launch timed out and was terminated"
    704 "ERROR_PEER_ACCESS_ALREADY_ENABLED" "peer access is already enabled"
    705 "ERROR_PEER_ACCESS_NOT_ENABLED" "peer access has not been enabled"
    708 "ERROR_PRIMARY_CONTEXT_ACTIVE" "cannot set while device is active in this process"
    709 "ERROR_CONTEXT_IS_DESTROYED" "context is destroyed"
    710 "ERROR_ASSERT" "device-side assert triggered"
    712 "ERROR_HOST_MEMORY_ALREADY_REGISTERED" "part or all of the requested memory range is already mapped"
    713 "ERROR_HOST_MEMORY_NOT_REGISTERED" "pointer does not correspond to a registered memory region"
    714 "ERROR_HARDWARE_STACK_ERROR" "hardware stack error"
    715 "ERROR_ILLEGAL_INSTRUCTION" "an illegal instruction was encountered"
    716 "ERROR_MISALIGNED_ADDRESS" "misaligned address"
    717 "ERROR_INVALID_ADDRESS_SPACE" "operation not supported on global/shared address space"
    718 "ERROR_INVALID_PC" "invalid program counter"
    719 "ERROR_LAUNCH_FAILED" "unspecified launch failure"
    800 "ERROR_NOT_PERMITTED" "operation not permitted"
    801 "ERROR_NOT_SUPPORTED" "operation not supported"
    802 "ERROR_SYSTEM_NOT_READY" "system not yet initialized"
    803 "ERROR_SYSTEM_DRIVER_MISMATCH" "system has unsupported display driver / cuda driver combination"
    900 "ERROR_STREAM_CAPTURE_UNSUPPORTED" "operation not permitted when stream is capturing"
    901 "ERROR_STREAM_CAPTURE_INVALIDATED" "operation failed due to a previous error during capture"
    902 "ERROR_STREAM_CAPTURE_MERGE" "operation would result in a merge of separate capture sequences"
    903 "ERROR_STREAM_CAPTURE_UNMATCHED" "capture was not ended in the same stream as it began"
    904 "ERROR_STREAM_CAPTURE_UNJOINED" "capturing stream has unjoined work"
    905 "ERROR_STREAM_CAPTURE_ISOLATION" "dependency created on uncaptured work in another stream"
    906 "ERROR_STREAM_CAPTURE_IMPLICIT"
        "operation would make the legacy stream depend on a capturing blocking stream"
    907 "ERROR_CAPTURED_EVENT" "operation not permitted on an event last recorded in a capturing stream"
    908 "ERROR_STREAM_CAPTURE_WRONG_THREAD"
        "attempt to terminate a thread-local capture sequence from another thread"
    909 "ERROR_TIMEOUT" "wait operation timed out"
    999 "ERROR_UNKNOWN" "unknown error"
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
