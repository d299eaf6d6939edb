//! Classic device memory, pinned memory, pointer attributes, copies.

mod common;
use common::*;
use std::ffi::c_void;

const INVALID: i32 = 1;
const NO_MEMORY: i32 = 2;

fn attribute<T: Default>(cu: &Cuda, which: i32, address: u64) -> Result<T, i32> {
    let mut value = T::default();
    match cu.cuPointerGetAttribute((&mut value as *mut T).cast(), which, address) {
        0 => Ok(value),
        code => Err(code),
    }
}

tests! {
    the_account_is_exact ["CUDASIM_MEMORY" = "64MiB"] {
        let cu = Cuda::start();
        let small: Vec<u64> = [1, 512, 513, 4096].map(|size| cu.alloc(size)).into();
        assert_eq!(cu.cudasim_used_bytes(0), 512 + 512 + 1024 + 4096);
        let large = cu.alloc(3 * MIB + 1);
        assert_eq!(cu.cudasim_used_bytes(0) as usize, 6144 + 3 * MIB + 512);
        assert_eq!(cu.free_bytes(), 64 * MIB - 6144 - 3 * MIB - 512);
        let handle = cu.create(GRANULARITY);
        assert_eq!(cu.cudasim_used_bytes(0) as usize, 6144 + 5 * MIB + 512);
        ok(cu.cuMemRelease(handle));
        ok(cu.cuMemFree_v2(large));
        small.into_iter().for_each(|address| ok(cu.cuMemFree_v2(address)));
        assert_eq!(cu.cudasim_used_bytes(0), 0);
        assert_eq!(cu.cudasim_peak_bytes(0) as usize, 6144 + 5 * MIB + 512);
        assert_eq!(cu.cudasim_live_allocations(), 0);
    }

    the_device_can_be_full ["CUDASIM_MEMORY" = "16MiB"] {
        let cu = Cuda::start();
        let mut address = 99;
        assert_eq!(cu.cuMemAlloc_v2(&mut address, 16 * MIB + 1), NO_MEMORY);
        assert_eq!(cu.cuMemAlloc_v2(&mut address, usize::MAX), NO_MEMORY);
        assert_eq!(address, 99, "a failure leaves the output alone");
        let all = cu.alloc(16 * MIB);
        assert_eq!(cu.cuMemAlloc_v2(&mut address, 1), NO_MEMORY);
        assert_eq!(cu.cuMemCreate(&mut address, GRANULARITY, &ON_DEVICE, 0), NO_MEMORY);
        ok(cu.cuMemFree_v2(all));
        ok(cu.cudasim_set_memory(0, 4 * MIB as u64));
        assert_eq!(cu.cuMemAlloc_v2(&mut address, 5 * MIB), NO_MEMORY);
        cu.alloc(4 * MIB);
    }

    a_large_device_costs_nothing ["CUDASIM_MEMORY" = "141GiB", "CUDASIM_DEVICES" = "8"] {
        let cu = Cuda::start();
        let mut total = 0;
        ok(cu.cuDeviceTotalMem_v2(&mut total, 7));
        assert_eq!(total, 141 << 30);
        let all = cu.alloc(141 << 30);
        ok(cu.cuMemsetD32Async(all + (140 << 30), 3, 1024, 0));
        ok(cu.cuCtxSynchronize());
        assert_eq!(peek(all + (140 << 30)), 3);
        cu.reserve(8 << 40);
        ok(cu.cuMemFree_v2(all));
        assert_eq!(cu.cudasim_used_bytes(0), 0);
    }

    host_memory_comes_back [] {
        fn resident() -> usize {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        }
        let cu = Cuda::start();
        let before = resident();
        for _ in 0..16 {
            let block = cu.alloc(64 * MIB);
            ok(cu.cuMemsetD8_v2(block, 1, 64 * MIB));
            ok(cu.cuCtxSynchronize());
            ok(cu.cuMemFree_v2(block));
        }
        assert!(resident() < before + 32 * MIB);
    }

    addresses_are_aligned_and_packed [] {
        let cu = Cuda::start();
        let small: Vec<u64> = (0..64).map(|_| cu.alloc(600)).collect();
        assert!(small.iter().all(|address| address % 512 == 0));
        assert!(small.windows(2).all(|pair| pair[1] - pair[0] == 1024));
        for size in [MIB, MIB + 1, 5 * MIB] {
            assert_eq!(cu.alloc(size) as usize % GRANULARITY, 0);
        }
    }

    wrong_frees_are_refused [] {
        let cu = Cuda::start();
        let block = cu.alloc(4096);
        assert_eq!(cu.cuMemAlloc_v2(&mut 0, 0), INVALID);
        assert_eq!(cu.cuMemAlloc_v2(std::ptr::null_mut(), 1), INVALID);
        ok(cu.cuMemFree_v2(0));
        assert_eq!(cu.cuMemFree_v2(block + 512), INVALID);
        ok(cu.cuMemFree_v2(block));
        assert_eq!(cu.cuMemFree_v2(block), INVALID);
        assert_eq!(cu.cuMemFree_v2(&block as *const u64 as u64), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 0, "the driver defines these");
        let mapped = cu.mapped(GRANULARITY);
        assert_eq!(cu.cuMemFree_v2(mapped), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 1);
    }

    copies_go_where_they_should [] {
        let cu = Cuda::start();
        let (a, b) = (cu.alloc(8 * MIB), cu.alloc(8 * MIB));
        let source: Vec<u32> = (0..2 * MIB as u32).collect();
        let mut target = vec![0u32; 2 * MIB];
        ok(cu.cuMemcpyHtoD_v2(a, source.as_ptr().cast(), 8 * MIB));
        ok(cu.cuMemcpyDtoD_v2(b, a, 8 * MIB));
        ok(cu.cuMemcpyDtoH_v2(target.as_mut_ptr().cast(), b, 8 * MIB));
        assert!(source == target);
        // A pageable source may be changed as soon as the call returns.
        let s = cu.stream(1);
        let mut word = 5u32;
        ok(cu.cudasim_spin(s, 150_000));
        ok(cu.cuMemcpyHtoDAsync_v2(a, (&raw const word).cast(), 4, s));
        word = 6;
        ok(cu.cuMemcpyDtoHAsync_v2((&raw mut word).cast(), a, 4, s));
        assert_eq!(word, 5, "a copy to pageable memory is complete when the call returns");
        ok(cu.cuMemcpyAsync(b, a, 4, s));
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(peek(b), 5);
    }

    bad_ranges_are_refused_at_once [] {
        let cu = Cuda::start();
        let block = cu.alloc(MIB);
        let mut host = [0u8; 64];
        let pointer: *mut c_void = host.as_mut_ptr().cast();
        assert_eq!(cu.cuMemcpyHtoD_v2(block + MIB as u64 - 32, pointer, 64), INVALID);
        assert_eq!(cu.cuMemcpyDtoH_v2(pointer, block + 2 * MIB as u64, 64), INVALID);
        assert_eq!(cu.cuMemsetD8_v2(pointer as u64, 0, 64), INVALID);
        assert_eq!(cu.cuMemsetD32Async(block + 2, 0, 1, 0), INVALID);
        assert_eq!(cu.cuMemsetD16Async(block + 1, 0, 1, 0), INVALID);
        assert_eq!(cu.cuMemsetD2D8Async(block, 16, 0, 32, 2, 0), INVALID);
        ok(cu.cuMemcpyHtoD_v2(0, std::ptr::null(), 0));
        assert_eq!(cu.cuMemcpyHtoD_v2(block, std::ptr::null(), 1), INVALID);
        ok(cu.cuMemsetD2D8Async(block, 64, 1, 32, 2, 0));
        ok(cu.cuCtxSynchronize());
        assert_eq!([peek(block), peek(block + 32), peek(block + 64)], [0x01010101, 0, 0x01010101]);
    }

    address_ranges [] {
        let cu = Cuda::start();
        let (mut base, mut size) = (0, 0);
        let block = cu.alloc(1000);
        ok(cu.cuMemGetAddressRange_v2(&mut base, &mut size, block + 999));
        assert_eq!((base, size), (block, 1000));
        assert_eq!(cu.cuMemGetAddressRange_v2(&mut base, &mut size, block + 1000), 500);
        ok(cu.cuMemGetAddressRange_v2(std::ptr::null_mut(), &mut size, block));
        let range = cu.reserve(4 * GRANULARITY);
        cu.map(range + GRANULARITY as u64, GRANULARITY, cu.create(GRANULARITY));
        ok(cu.cuMemGetAddressRange_v2(&mut base, &mut size, range + GRANULARITY as u64 + 5));
        assert_eq!((base, size), (range + GRANULARITY as u64, GRANULARITY));
        assert_eq!(cu.cuMemGetAddressRange_v2(&mut base, &mut size, range), 500);
    }

    pointer_attributes [] {
        let cu = Cuda::start();
        let mut context = 0usize;
        ok(cu.cuCtxGetCurrent(&mut context));
        let block = cu.alloc(MIB);
        assert_eq!(attribute::<usize>(&cu, 1, block), Ok(context));
        assert_eq!(attribute::<u32>(&cu, 2, block + 7), Ok(2));
        assert_eq!(attribute::<u64>(&cu, 3, block + 7), Ok(block + 7));
        assert_eq!(attribute::<u64>(&cu, 4, block), Err(INVALID));
        assert_eq!(attribute::<i32>(&cu, 9, block), Ok(0));
        assert_eq!((attribute(&cu, 11, block + 7), attribute(&cu, 12, block)), (Ok(block), Ok(MIB)));
        let id = attribute::<u64>(&cu, 7, block).unwrap();
        ok(cu.cuMemFree_v2(block));
        assert_eq!(attribute::<u32>(&cu, 2, block), Err(INVALID));
        let again = cu.alloc(MIB);
        assert_eq!(again, block, "addresses are used again");
        assert_ne!(attribute::<u64>(&cu, 7, again), Ok(id), "buffer numbers are not");

        let range = cu.mapped(GRANULARITY);
        assert_eq!(attribute::<usize>(&cu, 1, range), Ok(0), "mapped memory has no context");
        assert_eq!(attribute::<u32>(&cu, 13, range), Ok(1));
        assert_eq!(attribute::<u32>(&cu, 10, range), Ok(0));

        let unknown = &cu as *const Cuda as u64;
        let (mut kind, mut ordinal, mut host) = (7u32, 7i32, 7u64);
        let outputs: [*mut c_void; 3] =
            [(&raw mut kind).cast(), (&raw mut ordinal).cast(), (&raw mut host).cast()];
        ok(cu.cuPointerGetAttributes(3, [2, 9, 4].as_ptr(), outputs.as_ptr(), unknown));
        assert_eq!((kind, ordinal, host), (0, -2, unknown));
        assert_eq!(cu.cuPointerGetAttributes(0, [2].as_ptr(), outputs.as_ptr(), block), INVALID);
        assert_eq!(cu.cuPointerGetAttributes(1, [99].as_ptr(), outputs.as_ptr(), block), INVALID);
    }

    pinned_memory [] {
        let cu = Cuda::start();
        let (mut pinned, mut device, mut flags) = (0, 0, 0);
        ok(cu.cuMemHostAlloc(&mut pinned, 4096, 1));
        ok(cu.cuMemHostGetDevicePointer_v2(&mut device, pinned + 8, 0));
        ok(cu.cuMemHostGetFlags(&mut flags, pinned));
        assert_eq!((device, flags), (pinned + 8, 3));
        assert_eq!(attribute::<u32>(&cu, 2, pinned), Ok(1));
        assert_eq!(cu.cudasim_used_bytes(0), 0, "it is not device memory");
        // Copies from pinned memory read it when they run.
        let (s, block) = (cu.stream(1), cu.alloc(4096));
        ok(cu.cudasim_spin(s, 150_000));
        ok(cu.cuMemcpyHtoDAsync_v2(block, pinned as *const c_void, 4, s));
        // SAFETY: the driver just gave it out.
        unsafe { (pinned as *mut u32).write_volatile(77) };
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(peek(block), 77);
        assert_eq!(cu.cuMemFreeHost(block), INVALID);
        ok(cu.cuMemFreeHost(0));
        ok(cu.cuMemFreeHost(pinned));
        assert_eq!(cu.cuMemFreeHost(pinned), INVALID);
        assert_eq!(cu.cuMemHostAlloc(&mut pinned, usize::MAX, 0), NO_MEMORY);
        assert_eq!(cu.cuMemHostAlloc(&mut pinned, 1, 8), INVALID);
    }

    registered_memory [] {
        let cu = Cuda::start();
        let buffer = vec![0u8; 8192];
        let address = buffer.as_ptr() as u64;
        ok(cu.cuMemHostRegister_v2(address, 4096, 0));
        assert_eq!(cu.cuMemHostRegister_v2(address + 100, 100, 0), 712);
        ok(cu.cuMemHostRegister_v2(address + 4096, 4096, 0));
        assert_eq!(cu.cuMemHostUnregister(address + 1), 713);
        ok(cu.cuMemHostUnregister(address));
        assert_eq!(cu.cuMemHostUnregister(address), 713);
        assert_eq!(cu.cuMemHostRegister_v2(cu.alloc(4096), 4096, 0), INVALID);
        assert_eq!(cu.cuMemHostRegister_v2(address, 0, 0), INVALID);
        assert_eq!(cu.cuMemFreeHost(address + 4096), INVALID);
    }

    pitched_and_managed_memory [] {
        let cu = Cuda::start();
        let (mut block, mut pitch) = (0, 0);
        ok(cu.cuMemAllocPitch_v2(&mut block, &mut pitch, 1000, 3, 4));
        assert_eq!((pitch, cu.cudasim_used_bytes(0)), (1024, 3072));
        assert_eq!(cu.cuMemAllocPitch_v2(&mut block, &mut pitch, 1000, 3, 5), INVALID);
        assert_eq!(cu.cuMemAllocPitch_v2(&mut block, &mut pitch, 0, 3, 4), INVALID);
        ok(cu.cuMemAllocManaged(&mut block, 4096, 1));
        assert_eq!(attribute::<u32>(&cu, 8, block), Ok(1));
        assert_eq!(cu.cuMemAllocManaged(&mut block, 4096, 3), INVALID);
        ok(cu.cuMemFree_v2(block));
    }

    legacy_handles_are_for_whole_classic_blocks [] {
        let cu = Cuda::start();
        let mut handle = IpcHandle([0; 64]);
        ok(cu.cuIpcGetMemHandle(&mut handle, cu.alloc(4096) + 100));
        assert_eq!(cu.cuIpcOpenMemHandle_v2(&mut 0, handle, 1), 201, "not in its own process");
        assert_eq!(cu.cuIpcGetMemHandle(&mut handle, cu.mapped(GRANULARITY)), INVALID);
        let mut pooled = 0;
        ok(cu.cuMemAllocAsync(&mut pooled, 4096, 0));
        assert_eq!(cu.cuIpcGetMemHandle(&mut handle, pooled), INVALID);
    }

    a_freed_block_is_free_for_its_next_owner_only_when_freed [] {
        // Two contexts of a device do not share small blocks' pages, and each context's end frees its own.
        let cu = Cuda::start();
        let first = cu.alloc(512);
        let mut context = 0;
        ok(cu.cuCtxCreate_v2(&mut context, 0, 0));
        let second = cu.alloc(512);
        assert!(first.abs_diff(second) >= GRANULARITY as u64);
        assert_eq!(cu.cudasim_used_bytes(0), 1024);
        ok(cu.cuCtxDestroy_v2(context));
        assert_eq!(cu.cudasim_used_bytes(0), 512);
    }
}

#[test]
fn reading_freed_memory_faults() {
    let output = in_process("reading_freed_memory_faults", &[], || {
        let cu = Cuda::start();
        let block = cu.alloc(4 * MIB);
        ok(cu.cuMemFree_v2(block));
        peek(block);
    });
    expect_death(output, libc::SIGSEGV, "");
}
