//! Everything a test can turn, by the environment and by call.

mod common;
use common::*;

fn log_path() -> String {
    let name = format!("cudasim-test-{}.log", std::process::id());
    std::env::temp_dir().join(name).to_str().unwrap().to_string()
}

tests! {
    memory_in_units ["CUDASIM_MEMORY" = "3GiB"] {
        let cu = Cuda::start();
        let mut total = 0;
        ok(cu.cuDeviceTotalMem_v2(&mut total, 0));
        assert_eq!((total, cu.free_bytes()), (3 << 30, 3 << 30));
    }

    memory_in_bytes ["CUDASIM_MEMORY" = "12345678"] {
        let cu = Cuda::start();
        assert_eq!(cu.free_bytes(), 12345678);
    }

    failures_from_the_environment ["CUDASIM_FAIL" = "cuMemAlloc:3=2, cuStreamCreate:2+=999"] {
        let cu = Cuda::start();
        let codes = |n| (0..n).map(|_| cu.cuMemAlloc_v2(&mut 0, 512)).collect::<Vec<i32>>();
        assert_eq!(codes(5), [0, 0, 2, 0, 0]);
        assert_eq!(cu.cudasim_live_allocations(), 4);
        let streams: Vec<i32> = (0..4).map(|_| cu.cuStreamCreate(&mut 0, 0)).collect();
        assert_eq!(streams, [0, 999, 999, 999]);
    }

    init_can_fail ["CUDASIM_FAIL" = "cuInit:1=46"] {
        let cu = Cuda::open();
        assert_eq!(cu.cuInit(0), 46);
        ok(cu.cuInit(0));
    }

    failures_by_call [] {
        let cu = Cuda::start();
        cu.alloc(512);
        cu.fail("cuMemAlloc_v2", 2, false, 2);
        let codes: Vec<i32> = (0..3).map(|_| cu.cuMemAlloc_v2(&mut 0, 512)).collect();
        assert_eq!(codes, [0, 2, 0]);
        cu.fail("cuMemFree", 1, true, 700);
        assert_eq!((cu.cuMemFree_v2(0), cu.cuMemFree_v2(0)), (700, 700));
        cu.fail("cuMemFree", 0, false, 0);
        ok(cu.cuMemFree_v2(0));
        cu.fail("*", 3, false, 999);
        let codes = [cu.cuMemFree_v2(0), cu.cuCtxSynchronize(), cu.cuCtxSynchronize(), cu.cuMemFree_v2(0)];
        assert_eq!(codes, [0, 0, 999, 0]);
        assert_eq!(cu.cudasim_fail(c"cuNoSuchCall".as_ptr(), 1, 0, 2), 1);
    }

    calls_are_counted [] {
        let cu = Cuda::start();
        cu.cudasim_reset_counts();
        let block = cu.alloc(512);
        cu.cuMemAlloc_v2(&mut 0, 0);
        ok(cu.cuMemFree_v2(block));
        ok(cu.cuMemsetD32Async_ptsz(cu.alloc(512), 0, 1, 0));
        ok(cu.cuMemsetD32Async(cu.alloc(512), 0, 1, 0));
        assert_eq!((cu.calls("cuMemAlloc"), cu.calls("cuMemAlloc_v2"), cu.calls("cuMemFree")), (4, 4, 1));
        assert_eq!((cu.calls("cuMemsetD32Async"), cu.calls("cuMemsetD32Async_ptsz")), (2, 1));
        assert_eq!((cu.calls("*"), cu.cudasim_call_count(std::ptr::null())), (7, 7));
        assert_eq!(cu.calls("cuNoSuchCall"), 0);
    }

    calls_are_timed_once_that_is_asked_for [] {
        let cu = Cuda::start();
        let time = |name: &std::ffi::CStr| cu.cudasim_call_time(name.as_ptr());
        ok(cu.cuMemFree_v2(cu.alloc(512)));
        assert_eq!(time(c"*"), 0);
        cu.cudasim_time_calls(1);
        let block = cu.alloc(512);
        let alloc = time(c"cuMemAlloc");
        ok(cu.cuMemFree_v2(block));
        assert!(alloc > 0 && time(c"cuMemFree") > 0);
        assert_eq!((time(c"cuMemAlloc"), time(c"*")), (alloc, alloc + time(c"cuMemFree")));
        cu.cudasim_time_calls(0);
        cu.cudasim_reset_counts();
        cu.alloc(512);
        assert_eq!((time(c"*"), cu.calls("cuMemAlloc")), (0, 1));
    }

    latency_from_the_environment ["CUDASIM_LATENCY" = "cuMemAlloc=3ms,cuMemFree=200us"] {
        let cu = Cuda::start();
        let start = cu.cudasim_now_ns();
        let block = cu.alloc(512);
        assert_eq!(cu.cudasim_now_ns() - start, 3_000_000);
        let start = cu.cudasim_now_ns();
        ok(cu.cuMemFree_v2(block));
        assert_eq!(cu.cudasim_now_ns() - start, 200_000);
    }

    latency_by_call [] {
        let cu = Cuda::start();
        ok(cu.cudasim_set_latency(c"cuCtxGetCurrent".as_ptr(), 20_000));
        let start = cu.cudasim_now_ns();
        for _ in 0..50 {
            ok(cu.cuCtxGetCurrent(&mut 0));
        }
        assert_eq!(cu.cudasim_now_ns() - start, 1_000_000);
        ok(cu.cudasim_set_latency(c"cuCtxGetCurrent".as_ptr(), 0));
        assert_eq!(cu.cudasim_set_latency(c"cuNoSuchCall".as_ptr(), 1), 1);
    }

    an_old_driver_lacks_what_came_later ["CUDASIM_DRIVER_VERSION" = "12040"] {
        let cu = Cuda::start();
        let (mut version, mut address, mut status) = (0, 1, 0);
        ok(cu.cuDriverGetVersion(&mut version));
        assert_eq!((version, cu.cuCtxRecordEvent(0, cu.event())), (12040, 801));
        ok(cu.cuGetProcAddress_v2(c"cuCtxRecordEvent".as_ptr(), &mut address, 12050, 0, &mut status));
        assert_eq!((address, status), (0, 1));
    }
}

#[test]
fn reports_go_to_the_log() {
    let path = log_path();
    let output = in_process("reports_go_to_the_log", &[("CUDASIM_LOG", &path)], || {
        let cu = Cuda::start();
        assert_eq!(cu.cuMemRelease(12345), 1);
    });
    if output.is_some() {
        expect_success(output);
        let log = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(log.starts_with("cudasim: misuse: cuMemRelease with handle 0x3039"), "{log}");
    }
}

#[test]
fn a_misspelt_knob_ends_the_process() {
    for (variable, value) in [
        ("CUDASIM_MEMORY", "8GB"),
        ("CUDASIM_FAIL", "cuMemMapp:1=2"),
        ("CUDASIM_FAIL", "cuMemMap:0=2"),
        ("CUDASIM_LATENCY", "cuMemMap=5"),
        ("CUDASIM_DEVICES", "99"),
        ("CUDASIM_NO_VMM", "yes"),
    ] {
        let output = in_process("a_misspelt_knob_ends_the_process", &[(variable, value)], || {
            Cuda::start();
        });
        if output.is_none() {
            return;
        }
        expect_death(output, libc::SIGABRT, variable);
    }
}
