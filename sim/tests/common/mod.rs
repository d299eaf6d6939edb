//! What all tests of the simulated driver share: the library, opened as a program would, and processes.
//!
//! Knobs are read once in a process, and counts and accounts are the process's, so every test runs its body
//! in a process of its own: the test binary, started again for that one test.
#![allow(dead_code, non_snake_case)]

use std::ffi::{CString, c_char, c_void};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

pub type Callback = unsafe extern "C" fn(*mut c_void);

macro_rules! api {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        /// The functions used here, found by name.
        pub struct Cuda {
            library: *mut c_void,
            $($name: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl Cuda {
            fn bind(library: *mut c_void) -> Cuda {
                Cuda {
                    library,
                    $(
                        // SAFETY: the symbol is a function of this type, as the driver's header says.
                        $name: unsafe { std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($type),*) -> $result,
                        >(symbol(library, stringify!($name))) },
                    )*
                }
            }

            $(
                #[allow(clippy::too_many_arguments, clippy::not_unsafe_ptr_arg_deref)]
                pub fn $name(&self, $($arg: $type),*) -> $result {
                    // SAFETY: tests pass what the function's contract asks for, or what it must refuse.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }
    };
}

fn symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let found = find_symbol(library, name);
    assert!(!found.is_null(), "the library lacks {name}");
    found
}

fn find_symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    // SAFETY: the library stays open and the name is terminated.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Location {
    pub kind: i32,
    pub id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Properties {
    pub kind: i32,
    pub handle_types: i32,
    pub location: Location,
    pub windows: usize,
    pub flags: [u8; 8],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AccessRights {
    pub location: Location,
    pub flags: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct PoolProperties {
    pub kind: i32,
    pub handle_types: i32,
    pub location: Location,
    pub windows: usize,
    pub max_size: usize,
    pub rest: [u8; 56],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle(pub [u8; 64]);

/// `struct cudasim_clock`.
#[repr(C)]
pub struct Clock {
    pub now: extern "C" fn() -> u64,
    pub wait: unsafe extern "C" fn(word: *const u32, seen: u32, until: u64),
    pub wake: unsafe extern "C" fn(word: *const u32),
}

impl Clock {
    /// Sleeps until the word is not 0 any more, however late.
    pub fn wait_for(&self, word: &AtomicU32) {
        while word.load(Ordering::SeqCst) == 0 {
            // SAFETY: the word outlives the call.
            unsafe { (self.wait)(word.as_ptr(), 0, u64::MAX) };
        }
    }

    pub fn set(&self, word: &AtomicU32) {
        word.store(1, Ordering::SeqCst);
        // SAFETY: the word is only an address here.
        unsafe { (self.wake)(word.as_ptr()) };
    }
}

api! {
    cuInit(flags: u32) -> i32;
    cuDriverGetVersion(out: *mut i32) -> i32;
    cuGetErrorName(code: i32, out: *mut *const c_char) -> i32;
    cuGetProcAddress(name: *const c_char, out: *mut usize, version: i32, flags: u64) -> i32;
    cuGetProcAddress_v2(name: *const c_char, out: *mut usize, version: i32, flags: u64, status: *mut i32)
        -> i32;
    cuDeviceGet(out: *mut i32, ordinal: i32) -> i32;
    cuDeviceGetCount(out: *mut i32) -> i32;
    cuDeviceGetName(out: *mut c_char, length: i32, device: i32) -> i32;
    cuDeviceGetAttribute(out: *mut i32, which: i32, device: i32) -> i32;
    cuDeviceTotalMem_v2(out: *mut usize, device: i32) -> i32;
    cuDevicePrimaryCtxRetain(out: *mut usize, device: i32) -> i32;
    cuDevicePrimaryCtxRelease_v2(device: i32) -> i32;
    cuDevicePrimaryCtxReset_v2(device: i32) -> i32;
    cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32) -> i32;
    cuCtxCreate_v2(out: *mut usize, flags: u32, device: i32) -> i32;
    cuCtxDestroy_v2(context: usize) -> i32;
    cuCtxPushCurrent_v2(context: usize) -> i32;
    cuCtxPopCurrent_v2(out: *mut usize) -> i32;
    cuCtxSetCurrent(context: usize) -> i32;
    cuCtxGetCurrent(out: *mut usize) -> i32;
    cuCtxGetDevice(out: *mut i32) -> i32;
    cuCtxGetApiVersion(context: usize, out: *mut u32) -> i32;
    cuCtxGetId(context: usize, out: *mut u64) -> i32;
    cuCtxSynchronize() -> i32;
    cuCtxRecordEvent(context: usize, event: usize) -> i32;
    cuCtxWaitEvent(context: usize, event: usize) -> i32;
    cuMemAlloc_v2(out: *mut u64, size: usize) -> i32;
    cuMemAllocPitch_v2(out: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) -> i32;
    cuMemAllocManaged(out: *mut u64, size: usize, flags: u32) -> i32;
    cuMemFree_v2(address: u64) -> i32;
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> i32;
    cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64) -> i32;
    cuMemGetAllocationGranularity(out: *mut usize, properties: *const Properties, option: u32) -> i32;
    cuMemAddressReserve(out: *mut u64, size: usize, alignment: usize, hint: u64, flags: u64) -> i32;
    cuMemAddressFree(base: u64, size: usize) -> i32;
    cuMemCreate(out: *mut u64, size: usize, properties: *const Properties, flags: u64) -> i32;
    cuMemRelease(handle: u64) -> i32;
    cuMemMap(base: u64, size: usize, offset: usize, handle: u64, flags: u64) -> i32;
    cuMemUnmap(base: u64, size: usize) -> i32;
    cuMemSetAccess(base: u64, size: usize, rights: *const AccessRights, count: usize) -> i32;
    cuMemGetAccess(out: *mut u64, location: *const Location, address: u64) -> i32;
    cuMemRetainAllocationHandle(out: *mut u64, address: u64) -> i32;
    cuMemGetAllocationPropertiesFromHandle(out: *mut Properties, handle: u64) -> i32;
    cuMemExportToShareableHandle(out: *mut i32, handle: u64, kind: i32, flags: u64) -> i32;
    cuMemImportFromShareableHandle(out: *mut u64, descriptor: usize, kind: i32) -> i32;
    cuMemHostAlloc(out: *mut u64, size: usize, flags: u32) -> i32;
    cuMemFreeHost(address: u64) -> i32;
    cuMemHostGetFlags(out: *mut u32, address: u64) -> i32;
    cuMemHostGetDevicePointer_v2(out: *mut u64, address: u64, flags: u32) -> i32;
    cuMemHostRegister_v2(address: u64, size: usize, flags: u32) -> i32;
    cuMemHostUnregister(address: u64) -> i32;
    cuPointerGetAttribute(out: *mut c_void, which: i32, address: u64) -> i32;
    cuPointerGetAttributes(count: u32, which: *const i32, outputs: *const *mut c_void, address: u64) -> i32;
    cuIpcGetMemHandle(out: *mut IpcHandle, address: u64) -> i32;
    cuIpcOpenMemHandle_v2(out: *mut u64, handle: IpcHandle, flags: u32) -> i32;
    cuMemsetD8_v2(to: u64, value: u8, count: usize) -> i32;
    cuMemsetD8Async(to: u64, value: u8, count: usize, stream: usize) -> i32;
    cuMemsetD16Async(to: u64, value: u16, count: usize, stream: usize) -> i32;
    cuMemsetD32Async(to: u64, value: u32, count: usize, stream: usize) -> i32;
    cuMemsetD32Async_ptsz(to: u64, value: u32, count: usize, stream: usize) -> i32;
    cuMemsetD2D8Async(to: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize) -> i32;
    cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize) -> i32;
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize) -> i32;
    cuMemcpyDtoD_v2(to: u64, from: u64, size: usize) -> i32;
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, size: usize, stream: usize) -> i32;
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, size: usize, stream: usize) -> i32;
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: usize) -> i32;
    cuMemcpyAsync(to: u64, from: u64, size: usize, stream: usize) -> i32;
    cuStreamCreate(out: *mut usize, flags: u32) -> i32;
    cuStreamCreateWithPriority(out: *mut usize, flags: u32, priority: i32) -> i32;
    cuStreamDestroy_v2(stream: usize) -> i32;
    cuStreamQuery(stream: usize) -> i32;
    cuStreamSynchronize(stream: usize) -> i32;
    cuStreamWaitEvent(stream: usize, event: usize, flags: u32) -> i32;
    cuStreamGetCtx(stream: usize, out: *mut usize) -> i32;
    cuStreamGetId(stream: usize, out: *mut u64) -> i32;
    cuStreamGetPriority(stream: usize, out: *mut i32) -> i32;
    cuStreamIsCapturing(stream: usize, out: *mut i32) -> i32;
    cuStreamBeginCapture_v2(stream: usize, mode: u32) -> i32;
    cuStreamEndCapture(stream: usize, out: *mut usize) -> i32;
    cuStreamGetCaptureInfo_v2(stream: usize, status: *mut i32, id: *mut u64, graph: *mut usize,
        nodes: *mut *const usize, count: *mut usize) -> i32;
    cuThreadExchangeStreamCaptureMode(mode: *mut u32) -> i32;
    cuStreamWriteValue32_v2(stream: usize, address: u64, value: u32, flags: u32) -> i32;
    cuStreamWaitValue32_v2(stream: usize, address: u64, value: u32, flags: u32) -> i32;
    cuLaunchHostFunc(stream: usize, function: Option<Callback>, data: *mut c_void) -> i32;
    cuEventCreate(out: *mut usize, flags: u32) -> i32;
    cuEventDestroy_v2(event: usize) -> i32;
    cuEventRecord(event: usize, stream: usize) -> i32;
    cuEventQuery(event: usize) -> i32;
    cuEventSynchronize(event: usize) -> i32;
    cuEventElapsedTime(out: *mut f32, start: usize, end: usize) -> i32;
    cuGraphDestroy(graph: usize) -> i32;
    cuGraphGetNodes(graph: usize, out: *mut usize, count: *mut usize) -> i32;
    cuGraphInstantiateWithFlags(out: *mut usize, graph: usize, flags: u64) -> i32;
    cuGraphExecDestroy(instance: usize) -> i32;
    cuGraphLaunch(instance: usize, stream: usize) -> i32;
    cuMemPoolCreate(out: *mut usize, properties: *const PoolProperties) -> i32;
    cuMemPoolDestroy(pool: usize) -> i32;
    cuMemPoolGetAttribute(pool: usize, which: i32, out: *mut c_void) -> i32;
    cuMemPoolSetAttribute(pool: usize, which: i32, value: *const c_void) -> i32;
    cuMemPoolTrimTo(pool: usize, keep: usize) -> i32;
    cuDeviceGetDefaultMemPool(out: *mut usize, device: i32) -> i32;
    cuDeviceGetMemPool(out: *mut usize, device: i32) -> i32;
    cuDeviceSetMemPool(device: i32, pool: usize) -> i32;
    cuMemAllocAsync(out: *mut u64, size: usize, stream: usize) -> i32;
    cuMemAllocFromPoolAsync(out: *mut u64, size: usize, pool: usize, stream: usize) -> i32;
    cuMemFreeAsync(address: u64, stream: usize) -> i32;
    cudasim_used_bytes(device: i32) -> u64;
    cudasim_peak_bytes(device: i32) -> u64;
    cudasim_set_memory(device: i32, bytes: u64) -> i32;
    cudasim_call_count(name: *const c_char) -> u64;
    cudasim_time_calls(on: i32) -> ();
    cudasim_call_time(name: *const c_char) -> u64;
    cudasim_reset_counts() -> ();
    cudasim_fail(name: *const c_char, nth: u64, sticky: i32, code: i32) -> i32;
    cudasim_set_latency(name: *const c_char, nanoseconds: u64) -> i32;
    cudasim_misuse_count() -> u64;
    cudasim_set_free_waits(waits: i32) -> ();
    cudasim_use_virtual_clock() -> i32;
    cudasim_clock() -> *const Clock;
    cudasim_now_ns() -> u64;
    cudasim_sleep_ns(ns: u64) -> ();
    cudasim_thread_expect() -> ();
    cudasim_thread_enter() -> ();
    cudasim_thread_leave() -> ();
    cudasim_live_handles() -> u64;
    cudasim_live_mappings() -> u64;
    cudasim_live_reservations() -> u64;
    cudasim_live_allocations() -> u64;
    cudasim_live_streams() -> u64;
    cudasim_live_events() -> u64;
    cudasim_spin(stream: usize, microseconds: u64) -> i32;
    cudasim_poke(stream: usize, address: u64, value: u32, count: u64, delay_us: u64) -> i32;
}

pub const MIB: usize = 1 << 20;
pub const GRANULARITY: usize = 2 * MIB;

/// Device memory of the first device.
pub const ON_DEVICE: Properties =
    Properties { kind: 1, handle_types: 0, location: Location { kind: 1, id: 0 }, windows: 0, flags: [0; 8] };

pub const READ_WRITE: AccessRights = AccessRights { location: Location { kind: 1, id: 0 }, flags: 3 };

/// Fails with the line of the test that called.
#[track_caller]
pub fn ok(code: i32) {
    assert_eq!(code, 0, "a call that had to work did not");
}

fn library_path() -> PathBuf {
    match std::env::var_os("CUDASIM_LIB") {
        Some(path) => path.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/sim/libcuda.so.1"),
    }
}

impl Cuda {
    /// The library, not initialised.
    pub fn open() -> Cuda {
        let path = library_path();
        assert!(path.exists(), "{} is missing: `make sim` builds it", path.display());
        let name = CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: opening it runs no code that the process could not bear.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{} cannot be opened", path.display());
        Cuda::bind(library)
    }

    /// The library with the first device's primary context current.
    pub fn start() -> Cuda {
        let cuda = Cuda::open();
        ok(cuda.cuInit(0));
        cuda.use_primary(0);
        cuda
    }

    pub fn use_primary(&self, device: i32) -> usize {
        let mut context = 0;
        ok(self.cuDevicePrimaryCtxRetain(&mut context, device));
        ok(self.cuCtxSetCurrent(context));
        context
    }

    /// The virtual clock.
    pub fn clock(&self) -> &'static Clock {
        // SAFETY: null, or a clock that lasts as long as the process.
        unsafe { self.cudasim_clock().as_ref() }.expect("time is virtual in these tests")
    }

    /// Runs `body` on threads of their own, with their numbers from 0 on, and waits for them in virtual time.
    pub fn on_threads(&self, count: usize, body: impl Fn(&Cuda, usize) + Sync) {
        /// Says so also when the thread panics.
        struct Done<'a>(&'a Clock, &'a AtomicU32);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.set(self.1);
            }
        }
        let done: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
        let (clock, body) = (self.clock(), &body);
        std::thread::scope(|scope| {
            for (number, done) in done.iter().enumerate() {
                self.cudasim_thread_expect();
                scope.spawn(move || {
                    let _done = Done(clock, done);
                    let cu = Cuda::open();
                    cu.cudasim_thread_enter();
                    body(&cu, number);
                });
            }
            done.iter().for_each(|done| clock.wait_for(done));
        });
    }

    pub fn has(&self, name: &str) -> Option<usize> {
        let found = find_symbol(self.library, name) as usize;
        (found != 0).then_some(found)
    }

    #[track_caller]
    pub fn alloc(&self, size: usize) -> u64 {
        let mut address = 0;
        ok(self.cuMemAlloc_v2(&mut address, size));
        address
    }

    #[track_caller]
    pub fn stream(&self, flags: u32) -> usize {
        let mut stream = 0;
        ok(self.cuStreamCreate(&mut stream, flags));
        stream
    }

    #[track_caller]
    pub fn event(&self) -> usize {
        let mut event = 0;
        ok(self.cuEventCreate(&mut event, 2));
        event
    }

    #[track_caller]
    pub fn reserve(&self, size: usize) -> u64 {
        let mut base = 0;
        ok(self.cuMemAddressReserve(&mut base, size, 0, 0, 0));
        base
    }

    #[track_caller]
    pub fn create(&self, size: usize) -> u64 {
        let mut handle = 0;
        ok(self.cuMemCreate(&mut handle, size, &ON_DEVICE, 0));
        handle
    }

    /// Mapped, with access.
    #[track_caller]
    pub fn map(&self, base: u64, size: usize, handle: u64) {
        ok(self.cuMemMap(base, size, 0, handle, 0));
        ok(self.cuMemSetAccess(base, size, &READ_WRITE, 1));
    }

    /// A reservation of this size, all of it one mapped chunk that is not owned any more.
    #[track_caller]
    pub fn mapped(&self, size: usize) -> u64 {
        let base = self.reserve(size);
        let handle = self.create(size);
        self.map(base, size, handle);
        ok(self.cuMemRelease(handle));
        base
    }

    pub fn calls(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        self.cudasim_call_count(name.as_ptr())
    }

    #[track_caller]
    pub fn fail(&self, name: &str, nth: u64, sticky: bool, code: i32) {
        let name = CString::new(name).unwrap();
        ok(self.cudasim_fail(name.as_ptr(), nth, sticky as i32, code));
    }

    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        ok(self.cuMemGetInfo_v2(&mut free, &mut total));
        free
    }
}

/// Device memory is readable by the host here, without any driver call that would synchronise.
pub fn peek(address: u64) -> u32 {
    // SAFETY: the tests pass mapped addresses.
    unsafe { (address as *const u32).read_volatile() }
}

const CHILD: &str = "CUDASIM_TEST_CHILD";

/// In the process started for this test: runs the body and answers `None`. Otherwise starts that process.
pub fn in_process(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) -> Option<Output> {
    if std::env::var(CHILD).is_ok_and(|child| child == test) {
        body();
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]);
    for (name, _) in std::env::vars() {
        if name.starts_with("CUDASIM_") && name != "CUDASIM_LIB" {
            command.env_remove(name);
        }
    }
    // Nothing in these tests depends on how fast the machine is.
    command.env("CUDASIM_CLOCK", "virtual");
    command.env(CHILD, test);
    command.envs(environment.iter().copied());
    Some(command.output().unwrap())
}

/// Fails with what the process wrote, unless it ended well.
pub fn expect_success(output: Option<Output>) {
    if let Some(output) = output {
        assert!(
            output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed"),
            "{}\n{}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// The process has to die of this signal, having said this.
pub fn expect_death(output: Option<Output>, signal: i32, text: &str) {
    if let Some(output) = output {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.signal(), Some(signal), "{said}");
        assert!(said.contains(text), "{said}");
    }
}

/// Defines tests, each with knobs of its own: `name ["VARIABLE" = "value"] { body }`.
#[macro_export]
macro_rules! tests {
    ($($(#[$meta:meta])* $name:ident [$($variable:literal = $value:expr),*] $body:block)*) => {
        $(
            $(#[$meta])*
            #[test]
            fn $name() {
                let environment: &[(&str, &str)] = &[$(($variable, $value)),*];
                common::expect_success(common::in_process(stringify!($name), environment, || $body));
            }
        )*
    };
}
