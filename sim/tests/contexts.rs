//! Contexts: the current stack, primary contexts, their ends, and the process's own end.

mod common;
use common::*;

const INVALID_CONTEXT: i32 = 201;
const DESTROYED: i32 = 709;

fn current(cu: &Cuda) -> usize {
    let mut context = 9;
    ok(cu.cuCtxGetCurrent(&mut context));
    context
}

fn is_active(cu: &Cuda) -> bool {
    let (mut flags, mut active) = (0, 0);
    ok(cu.cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    active != 0
}

tests! {
    nothing_works_before_init [] {
        let cu = Cuda::open();
        let mut out = 77;
        assert_eq!(cu.cuMemAlloc_v2(&mut out, 512), 3);
        assert_eq!(cu.cuMemAlloc_v2(std::ptr::null_mut(), 0), 3, "before the arguments are looked at");
        assert_eq!((out, cu.cuCtxSynchronize(), cu.cuCtxGetCurrent(&mut 0)), (77, 3, 3));
        assert_eq!(cu.cuEventQuery(0), 400, "null handles come first");
        assert_eq!(cu.cuStreamDestroy_v2(0), 400);
        let (mut version, mut name) = (0, std::ptr::null());
        ok(cu.cuDriverGetVersion(&mut version));
        ok(cu.cuGetErrorName(2, &mut name));
        // SAFETY: the driver's names are terminated.
        assert_eq!(unsafe { std::ffi::CStr::from_ptr(name) }, c"CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(cu.cuGetErrorName(12345, &mut name), 1);
        assert!(name.is_null());
        assert_eq!(cu.cuInit(1), 1);
        ok(cu.cuInit(0));
        ok(cu.cuInit(0));
    }

    without_a_current_context [] {
        let cu = Cuda::open();
        ok(cu.cuInit(0));
        assert_eq!(current(&cu), 0);
        assert_eq!(cu.cuCtxGetDevice(&mut 0), INVALID_CONTEXT);
        assert_eq!(cu.cuCtxPopCurrent_v2(&mut 0), INVALID_CONTEXT);
        assert_eq!(cu.cuCtxSynchronize(), INVALID_CONTEXT);
        assert_eq!(cu.cuMemAlloc_v2(&mut 0, 512), INVALID_CONTEXT);
        assert_eq!(cu.cuStreamCreate(&mut 0, 0), INVALID_CONTEXT);
        assert_eq!(cu.cuStreamSynchronize(0), INVALID_CONTEXT);
        ok(cu.cuCtxSetCurrent(0));
    }

    the_stack [] {
        let cu = Cuda::open();
        ok(cu.cuInit(0));
        let (mut a, mut b, mut popped) = (0, 0, 0);
        ok(cu.cuCtxCreate_v2(&mut a, 0, 0));
        ok(cu.cuCtxCreate_v2(&mut b, 0, 0));
        assert_eq!(current(&cu), b);
        ok(cu.cuCtxPushCurrent_v2(a));
        ok(cu.cuCtxPopCurrent_v2(&mut popped));
        assert_eq!((popped, current(&cu)), (a, b));
        ok(cu.cuCtxSetCurrent(a));
        ok(cu.cuCtxSetCurrent(0));
        assert_eq!(current(&cu), a, "setting replaces the top, setting none pops it");
        ok(cu.cuCtxPopCurrent_v2(std::ptr::null_mut()));
        assert_eq!(current(&cu), 0);
        cu.on_threads(1, |cu, _| {
            assert_eq!(current(cu), 0, "each thread has its own");
            ok(cu.cuCtxSetCurrent(a));
            cu.alloc(512);
        });
    }

    a_destroyed_context_stays_on_other_stacks [] {
        let cu = Cuda::open();
        ok(cu.cuInit(0));
        let (mut a, mut b, mut popped, mut stream) = (0, 0, 0, 0);
        ok(cu.cuCtxCreate_v2(&mut a, 0, 0));
        cu.alloc(512);
        ok(cu.cuStreamCreate(&mut stream, 0));
        ok(cu.cuCtxCreate_v2(&mut b, 0, 0));
        ok(cu.cuCtxDestroy_v2(a));
        assert_eq!(cu.cudasim_used_bytes(0), 0, "its memory went with it");
        ok(cu.cuCtxDestroy_v2(b));
        assert_eq!(current(&cu), a);
        assert_eq!(cu.cuMemAlloc_v2(&mut 0, 512), DESTROYED);
        assert_eq!(cu.cuCtxDestroy_v2(a), DESTROYED);
        assert_eq!(cu.cuCtxGetApiVersion(a, &mut 0), INVALID_CONTEXT);
        assert_eq!((cu.cuStreamQuery(stream), cu.cuStreamDestroy_v2(stream)), (DESTROYED, 400));
        ok(cu.cuCtxPopCurrent_v2(&mut popped));
        assert_eq!((popped, cu.cudasim_live_streams(), cu.cudasim_misuse_count()), (a, 0, 0));
    }

    primary_contexts_are_counted [] {
        let cu = Cuda::open();
        ok(cu.cuInit(0));
        assert!(!is_active(&cu));
        assert_eq!(cu.cuDevicePrimaryCtxRelease_v2(0), INVALID_CONTEXT);
        let (mut first, mut second, mut version) = (0, 0, 0);
        ok(cu.cuDevicePrimaryCtxRetain(&mut first, 0));
        ok(cu.cuDevicePrimaryCtxRetain(&mut second, 0));
        assert_eq!((first, current(&cu), is_active(&cu)), (second, 0, true));
        ok(cu.cuCtxGetApiVersion(first, &mut version));
        assert_eq!((version, cu.cuCtxDestroy_v2(first)), (3020, INVALID_CONTEXT));
        ok(cu.cuCtxSetCurrent(first));
        cu.alloc(4096);
        ok(cu.cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!((is_active(&cu), cu.cudasim_used_bytes(0)), (true, 4096));
        ok(cu.cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!((is_active(&cu), cu.cudasim_used_bytes(0), current(&cu)), (false, 0, first));
        assert_eq!(cu.cuMemAlloc_v2(&mut 0, 512), DESTROYED);
    }

    a_reset_keeps_handle_and_owners [] {
        let cu = Cuda::start();
        let (context, block, mapped) = (current(&cu), cu.alloc(4096), cu.mapped(GRANULARITY));
        let (mut before, mut after) = (0, 0);
        ok(cu.cuCtxGetId(context, &mut before));
        ok(cu.cuDevicePrimaryCtxReset_v2(0));
        assert!(!is_active(&cu));
        assert_eq!(cu.cuMemFree_v2(block), 1, "its memory is gone");
        assert_eq!(cu.cuMemAlloc_v2(&mut 0, 512), DESTROYED);
        ok(cu.cuCtxSetCurrent(context));
        assert_eq!(cu.cudasim_used_bytes(0), GRANULARITY as u64, "mapped memory is not the context's");
        assert_eq!(peek(mapped), 0);
        assert_eq!(cu.use_primary(0), context);
        cu.alloc(512);
        ok(cu.cuCtxGetId(context, &mut after));
        assert_ne!(before, after);
        ok(cu.cuDevicePrimaryCtxRelease_v2(0));
        ok(cu.cuDevicePrimaryCtxRelease_v2(0));
        assert!(!is_active(&cu));
    }

    a_free_on_another_devices_context_works ["CUDASIM_DEVICES" = "2"] {
        let cu = Cuda::start();
        let block = cu.alloc(4096);
        cu.use_primary(1);
        ok(cu.cuMemFree_v2(block));
        assert_eq!(cu.cudasim_used_bytes(0), 0);
    }

    devices_are_listed ["CUDASIM_DEVICES" = "3"] {
        let cu = Cuda::open();
        ok(cu.cuInit(0));
        let (mut count, mut device, mut value) = (0, 9, 9);
        ok(cu.cuDeviceGetCount(&mut count));
        ok(cu.cuDeviceGet(&mut device, 2));
        assert_eq!((count, device), (3, 2));
        for bad in [-1, 3] {
            assert_eq!(cu.cuDeviceGet(&mut device, bad), 101);
            assert_eq!(cu.cuDeviceGetAttribute(&mut value, 16, bad), 101);
            assert_eq!(cu.cuDevicePrimaryCtxRetain(&mut 0, bad), 101);
        }
        assert_eq!(cu.cuDeviceGetAttribute(std::ptr::null_mut(), 16, -1), 1);
        assert_eq!(cu.cuDeviceGetAttribute(&mut value, 99999, 0), 1);
        for (which, expected) in [(102, 1), (115, 1), (75, 9), (41, 1)] {
            ok(cu.cuDeviceGetAttribute(&mut value, which, 0));
            assert_eq!(value, expected);
        }
        let mut name = [b'x' as std::ffi::c_char; 8];
        ok(cu.cuDeviceGetName(name.as_mut_ptr(), 8, 0));
        assert_eq!(name[7], 0, "cut, and terminated");
    }

    no_device_at_all ["CUDASIM_DEVICES" = "0"] {
        let cu = Cuda::open();
        assert_eq!(cu.cuInit(0), 100);
        assert_eq!(cu.cuDeviceGetCount(&mut 0), 3);
    }

    a_child_of_fork_cannot_use_it [] {
        let cu = Cuda::start();
        let s = cu.stream(0);
        ok(cu.cudasim_spin(s, 1000));
        // SAFETY: the child only calls the driver and leaves at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = cu.cuMemAlloc_v2(&mut 0, 512) == 3
                && cu.cuInit(0) == 3
                && cu.cuStreamSynchronize(s) == 3
                && cu.cuCtxGetCurrent(&mut 0) == 3;
            // SAFETY: ends this process only.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        let mut status = 1;
        // SAFETY: waits for the child just made.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0);
        ok(cu.cuStreamSynchronize(s));
    }

    after_exit_has_begun_it_is_gone [] {
        use std::sync::OnceLock;
        static CUDA: OnceLock<usize> = OnceLock::new();
        extern "C" fn late() {
            // SAFETY: it was leaked for this.
            let cuda = unsafe { &*(*CUDA.get().unwrap() as *const Cuda) };
            let codes = (cuda.cuCtxSynchronize(), cuda.cuMemAlloc_v2(&mut 0, 512), cuda.cuInit(0));
            if codes != (4, 4, 4) {
                // SAFETY: ends the process with a code that the test sees.
                unsafe { libc::_exit(9) };
            }
        }
        let cu: &'static Cuda = Box::leak(Box::new(Cuda::open()));
        CUDA.set(cu as *const Cuda as usize).unwrap();
        // Registered before the driver's own handler, so it runs after that.
        // SAFETY: a function of this program.
        unsafe { libc::atexit(late) };
        ok(cu.cuInit(0));
        cu.use_primary(0);
        let s = cu.stream(0);
        ok(cu.cudasim_spin(s, 5_000));
        ok(cu.cuMemsetD8Async(cu.alloc(MIB), 1, MIB, s));
    }
}
