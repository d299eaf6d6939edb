//! The table of driver functions, with integer results.
//!
//! The driver's result enum grows with every release; a Rust enum that does not know a value would be
//! undefined behaviour, so results stay integers. Symbols are taken one by one: old drivers lack some.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use cudarc::driver::sys::{CUdevice, CUmemAccessDesc, CUmemAllocationProp};

/// A result of the driver; 0 is success.
pub type CuResult = c_int;

macro_rules! table {
    (required { $($req:ident = $req_sym:literal ( $($req_arg:ty),* );)* }
     optional { $($opt:ident = $opt_sym:literal since $since:literal ( $($opt_arg:ty),* );)* }) => {
        /// The driver's functions. Optional ones are `None` where the driver is older than they are.
        #[derive(Clone, Copy)]
        pub struct Api {
            /// `cuDriverGetVersion`: 1000 * major + 10 * minor.
            pub version: c_int,
            $(pub $req: unsafe extern "C" fn($($req_arg),*) -> CuResult,)*
            $(pub $opt: Option<unsafe extern "C" fn($($opt_arg),*) -> CuResult>,)*
        }

        impl Api {
            /// Looks all functions up, by names that end in a zero. `Err` names the first required one that
            /// is missing.
            pub(super) fn load(find: impl Fn(&[u8]) -> Option<*const c_void>) -> Result<Api, &'static str> {
                Ok(Api {
                    version: 0,
                    $($req: {
                        let found = find(concat!($req_sym, "\0").as_bytes()).ok_or($req_sym)?;
                        // SAFETY: the type is that of cuda.h for this name.
                        unsafe {
                            transmute::<*const c_void, unsafe extern "C" fn($($req_arg),*) -> CuResult>(found)
                        }
                    },)*
                    $($opt: find(concat!($opt_sym, "\0").as_bytes()).map(|found| {
                        // SAFETY: the type is that of cuda.h for this name.
                        unsafe {
                            transmute::<*const c_void, unsafe extern "C" fn($($opt_arg),*) -> CuResult>(found)
                        }
                    }),)*
                })
            }

            /// Forgets what is newer than the driver says it is: a library may export a name for others.
            pub(super) fn cut_to_version(&mut self, version: c_int) {
                self.version = version;
                $(if version < $since { self.$opt = None; })*
            }
        }
    };
}

table! {
    required {
        init = "cuInit"(c_uint);
        driver_version = "cuDriverGetVersion"(*mut c_int);
        device_count = "cuDeviceGetCount"(*mut c_int);
        device_total_mem = "cuDeviceTotalMem_v2"(*mut usize, CUdevice);
        device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_uint, CUdevice);
        primary_retain = "cuDevicePrimaryCtxRetain"(*mut Ctx, CUdevice);
        primary_release = "cuDevicePrimaryCtxRelease_v2"(CUdevice);
        primary_state = "cuDevicePrimaryCtxGetState"(CUdevice, *mut c_uint, *mut c_int);
        ctx_current = "cuCtxGetCurrent"(*mut Ctx);
        ctx_push = "cuCtxPushCurrent_v2"(Ctx);
        ctx_pop = "cuCtxPopCurrent_v2"(*mut Ctx);
        ctx_device = "cuCtxGetDevice"(*mut CUdevice);
        ctx_api_version = "cuCtxGetApiVersion"(Ctx, *mut c_uint);
        ctx_synchronize = "cuCtxSynchronize"();
        mem_alloc = "cuMemAlloc_v2"(*mut u64, usize);
        mem_free = "cuMemFree_v2"(u64);
        mem_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
        event_create = "cuEventCreate"(*mut Event, c_uint);
        event_record = "cuEventRecord"(Event, Stream);
        event_query = "cuEventQuery"(Event);
        stream_flags = "cuStreamGetFlags"(Stream, *mut c_uint);
        stream_capturing = "cuStreamIsCapturing"(Stream, *mut c_uint);
        exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut c_uint);
    }
    optional {
        address_reserve = "cuMemAddressReserve" since 10020 (*mut u64, usize, usize, u64, u64);
        address_free = "cuMemAddressFree" since 10020 (u64, usize);
        mem_create = "cuMemCreate" since 10020 (*mut u64, usize, *const CUmemAllocationProp, u64);
        mem_release = "cuMemRelease" since 10020 (u64);
        mem_map = "cuMemMap" since 10020 (u64, usize, usize, u64, u64);
        mem_unmap = "cuMemUnmap" since 10020 (u64, usize);
        mem_set_access = "cuMemSetAccess" since 10020 (u64, usize, *const CUmemAccessDesc, usize);
        mem_granularity = "cuMemGetAllocationGranularity" since 10020
            (*mut usize, *const CUmemAllocationProp, c_uint);
        stream_synchronize = "cuStreamSynchronize" since 2000 (Stream);
        stream_ctx = "cuStreamGetCtx" since 9020 (Stream, *mut Ctx);
        ctx_id = "cuCtxGetId" since 12000 (Ctx, *mut u64);
        ctx_record_event = "cuCtxRecordEvent" since 12050 (Ctx, Event);
        error_name = "cuGetErrorName" since 6000 (c_int, *mut *const c_char);
    }
}

/// A context as the driver names it; 0 is none.
pub type Ctx = u64;
/// An event as the driver names it.
pub type Event = u64;
/// A stream as the driver names it.
pub type Stream = u64;
const _: () = assert!(size_of::<*mut c_void>() == size_of::<u64>(), "handles are passed as 64-bit integers");
