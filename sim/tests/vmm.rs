//! Virtual memory management: what is allowed, what is refused, and what is reported.

mod common;
use common::*;

const INVALID: i32 = 1;
const CHUNK: usize = GRANULARITY;
const STEP: u64 = GRANULARITY as u64;

tests! {
    two_mappings_of_a_chunk_are_the_same_memory [] {
        let cu = Cuda::start();
        let base = cu.reserve(8 * CHUNK);
        let handle = cu.create(2 * CHUNK);
        cu.map(base, 2 * CHUNK, handle);
        cu.map(base + 4 * STEP, 2 * CHUNK, handle);
        ok(cu.cuMemsetD32Async(base + 4096, 42, 1, 0));
        ok(cu.cuCtxSynchronize());
        assert_eq!(peek(base + 4 * STEP + 4096), 42);
        ok(cu.cuMemUnmap(base, 2 * CHUNK));
        assert_eq!(peek(base + 4 * STEP + 4096), 42);
    }

    memory_goes_with_the_last_owner_or_mapping [] {
        let cu = Cuda::start();
        let base = cu.reserve(CHUNK);
        let handle = cu.create(CHUNK);
        cu.map(base, CHUNK, handle);
        ok(cu.cuMemRelease(handle));
        assert_eq!((cu.cudasim_live_handles(), cu.cudasim_used_bytes(0)), (0, STEP));
        let mut again = 0;
        ok(cu.cuMemRetainAllocationHandle(&mut again, base + 100));
        assert_eq!(again, handle);
        ok(cu.cuMemUnmap(base, CHUNK));
        assert_eq!(cu.cudasim_used_bytes(0), STEP);
        ok(cu.cuMemRelease(handle));
        assert_eq!((cu.cudasim_live_handles(), cu.cudasim_used_bytes(0)), (0, 0));
        ok(cu.cuMemAddressFree(base, CHUNK));
        assert_eq!((cu.cudasim_live_mappings(), cu.cudasim_live_reservations()), (0, 0));
        assert_eq!(cu.cudasim_misuse_count(), 0);
    }

    no_context_is_needed_and_memory_outlives_them [] {
        let cu = Cuda::open();
        ok(cu.cuInit(0));
        let base = cu.mapped(CHUNK);
        let mut context = 0;
        ok(cu.cuCtxCreate_v2(&mut context, 0, 0));
        ok(cu.cuMemsetD32Async(base, 9, 1, 0));
        ok(cu.cuCtxDestroy_v2(context));
        assert_eq!((peek(base), cu.cudasim_used_bytes(0)), (9, STEP));
    }

    one_call_unmaps_neighbours [] {
        let cu = Cuda::start();
        let base = cu.reserve(4 * CHUNK);
        for i in 0..3 {
            cu.map(base + i * STEP, CHUNK, cu.create(CHUNK));
        }
        ok(cu.cuMemsetD8_v2(base + 100, 1, 3 * CHUNK - 200));
        ok(cu.cuCtxSynchronize());
        assert_eq!(cu.cuMemUnmap(base, 4 * CHUNK), INVALID, "there is a hole");
        ok(cu.cuMemUnmap(base, 3 * CHUNK));
        assert_eq!(cu.cuMemUnmap(base, 3 * CHUNK), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 0);
    }

    a_partial_unmap_is_reported [] {
        let cu = Cuda::start();
        let base = cu.mapped(4 * CHUNK);
        assert_eq!(cu.cuMemUnmap(base, CHUNK), INVALID);
        assert_eq!(cu.cuMemUnmap(base + STEP, 3 * CHUNK), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 2);
        assert_eq!(peek(base), 0, "nothing changed");
    }

    an_unmap_under_pending_work_is_reported [] {
        let cu = Cuda::start();
        let s = cu.stream(1);
        let base = cu.mapped(2 * CHUNK);
        ok(cu.cudasim_spin(s, 150_000));
        ok(cu.cuMemsetD32Async(base + STEP, 1, 1, s));
        ok(cu.cuMemUnmap(base, 2 * CHUNK));
        assert_eq!(cu.cudasim_misuse_count(), 1);
        assert_eq!(cu.cuStreamSynchronize(s), 700);
        assert_eq!(cu.cuCtxSynchronize(), 700);
    }

    unmapping_other_memory_disturbs_nothing [] {
        let cu = Cuda::start();
        let s = cu.stream(1);
        let (base, other) = (cu.mapped(CHUNK), cu.mapped(CHUNK));
        ok(cu.cudasim_poke(s, base, 3, 16, 150_000));
        ok(cu.cuMemUnmap(other, CHUNK));
        ok(cu.cuStreamSynchronize(s));
        assert_eq!((peek(base + 60), cu.cudasim_misuse_count()), (3, 0));
    }

    a_kernel_that_finds_no_access_loses_the_context [] {
        let cu = Cuda::start();
        let s = cu.stream(1);
        let base = cu.reserve(2 * CHUNK);
        ok(cu.cuMemMap(base, CHUNK, 0, cu.create(CHUNK), 0));
        assert_eq!(cu.cuMemsetD32Async(base, 1, 1, s), INVALID, "copies are checked at once");
        ok(cu.cudasim_poke(s, base, 1, 1, 0));
        assert_eq!(cu.cuStreamSynchronize(s), 700);
        assert_eq!(cu.cudasim_misuse_count(), 1);
    }

    access_can_differ_inside_a_mapping [] {
        let cu = Cuda::start();
        let base = cu.mapped(4 * CHUNK);
        let read_only = AccessRights { flags: 1, ..READ_WRITE };
        ok(cu.cuMemSetAccess(base + STEP, CHUNK, &read_only, 1));
        let rights = |address| {
            let mut rights = 9;
            ok(cu.cuMemGetAccess(&mut rights, &READ_WRITE.location, address));
            rights
        };
        assert_eq!([rights(base), rights(base + STEP), rights(base + 2 * STEP)], [3, 1, 3]);
        assert_eq!(cu.cuMemsetD8_v2(base, 0, 4 * CHUNK), INVALID);
        ok(cu.cuMemsetD8_v2(base, 0, CHUNK));
        ok(cu.cuMemSetAccess(base, 4 * CHUNK, &READ_WRITE, 1));
        ok(cu.cuMemsetD8_v2(base, 0, 4 * CHUNK));
    }

    access_needs_mappings [] {
        let cu = Cuda::start();
        let base = cu.reserve(2 * CHUNK);
        ok(cu.cuMemMap(base, CHUNK, 0, cu.create(CHUNK), 0));
        assert_eq!(cu.cuMemSetAccess(base, 2 * CHUNK, &READ_WRITE, 1), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 1);
        assert_eq!(cu.cuMemSetAccess(base, CHUNK, &READ_WRITE, 0), INVALID);
        assert_eq!(cu.cuMemSetAccess(base, CHUNK, &AccessRights { flags: 2, ..READ_WRITE }, 1), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 1);
        ok(cu.cuMemSetAccess(base, CHUNK, &READ_WRITE, 1));
        ok(cu.cuMemUnmap(base, CHUNK));
        ok(cu.cuMemMap(base, CHUNK, 0, cu.create(CHUNK), 0));
        let mut rights = 9;
        ok(cu.cuMemGetAccess(&mut rights, &READ_WRITE.location, base));
        assert_eq!(rights, 0, "rights do not survive an unmap");
    }

    a_mapping_needs_free_reserved_addresses [] {
        let cu = Cuda::start();
        let base = cu.reserve(4 * CHUNK);
        let handle = cu.create(2 * CHUNK);
        assert_eq!(cu.cuMemMap(base, 2 * CHUNK, 0, 0, 0), INVALID);
        assert_eq!(cu.cuMemMap(base, 2 * CHUNK, CHUNK, handle, 0), INVALID);
        assert_eq!(cu.cuMemMap(base, 2 * CHUNK, 0, handle, 1), INVALID);
        assert_eq!(cu.cuMemMap(base, 4 * CHUNK, 0, handle, 0), INVALID, "larger than the chunk");
        assert_eq!(cu.cuMemMap(base + 3 * STEP, 2 * CHUNK, 0, handle, 0), INVALID, "over the end");
        assert_eq!(cu.cuMemMap(base + 4096, 2 * CHUNK, 0, handle, 0), INVALID);
        ok(cu.cuMemMap(base + STEP, 2 * CHUNK, 0, handle, 0));
        assert_eq!(cu.cuMemMap(base, 2 * CHUNK, 0, handle, 0), INVALID, "overlaps");
        assert_eq!(cu.cuMemMap(base + 2 * STEP, 2 * CHUNK, 0, handle, 0), INVALID, "overlaps");
        ok(cu.cuMemMap(base, CHUNK, 0, handle, 0));
    }

    reservations_are_freed_whole_and_empty [] {
        let cu = Cuda::start();
        assert_eq!(cu.cuMemAddressReserve(&mut 0, 0, 0, 0, 0), INVALID);
        assert_eq!(cu.cuMemAddressReserve(&mut 0, CHUNK + 4096, 0, 0, 0), INVALID);
        assert_eq!(cu.cuMemAddressReserve(&mut 0, CHUNK, 3, 0, 0), INVALID);
        assert_eq!(cu.cuMemAddressReserve(&mut 0, CHUNK, 0, 0, 1), INVALID);
        let mut aligned = 0;
        ok(cu.cuMemAddressReserve(&mut aligned, CHUNK, 1 << 30, 0, 0));
        assert_eq!(aligned % (1 << 30), 0);
        let base = cu.reserve(4 * CHUNK);
        assert_eq!(cu.cuMemAddressFree(base, CHUNK), INVALID);
        assert_eq!(cu.cuMemAddressFree(base + STEP, 3 * CHUNK), INVALID);
        cu.map(base, CHUNK, cu.create(CHUNK));
        assert_eq!(cu.cudasim_misuse_count(), 0);
        assert_eq!(cu.cuMemAddressFree(base, 4 * CHUNK), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 1);
        ok(cu.cuMemUnmap(base, CHUNK));
        ok(cu.cuMemAddressFree(base, 4 * CHUNK));
    }

    stale_handles_are_reported [] {
        let cu = Cuda::start();
        let handle = cu.create(CHUNK);
        ok(cu.cuMemRelease(handle));
        assert_eq!(cu.cuMemRelease(handle), INVALID);
        assert_eq!(cu.cuMemMap(cu.reserve(CHUNK), CHUNK, 0, handle, 0), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 2);
        assert_eq!(cu.cuMemRelease(0), INVALID);
        assert_eq!(cu.cudasim_misuse_count(), 2);
        assert_ne!(cu.create(CHUNK), handle, "handles are not used again");
    }

    creation_is_checked [] {
        let cu = Cuda::start();
        let mut handle = 7;
        let create = |size, properties: Properties| cu.cuMemCreate(&mut 0, size, &properties, 0);
        assert_eq!(create(0, ON_DEVICE), INVALID);
        assert_eq!(create(CHUNK + 4096, ON_DEVICE), INVALID);
        assert_eq!(create(CHUNK, Properties { kind: 0, ..ON_DEVICE }), INVALID);
        assert_eq!(create(CHUNK, Properties { location: Location { kind: 1, id: 5 }, ..ON_DEVICE }), INVALID);
        assert_eq!(cu.cuMemCreate(&mut handle, CHUNK, std::ptr::null(), 0), INVALID);
        assert_eq!(cu.cuMemCreate(std::ptr::null_mut(), CHUNK, &ON_DEVICE, 0), INVALID);
        let mut granularity = 0;
        ok(cu.cuMemGetAllocationGranularity(&mut granularity, &ON_DEVICE, 1));
        assert_eq!((handle, granularity), (7, CHUNK));
        let mut properties = Properties::default();
        ok(cu.cuMemGetAllocationPropertiesFromHandle(&mut properties, cu.create(CHUNK)));
        assert_eq!(properties, ON_DEVICE);
        let on_host = Properties { location: Location { kind: 3, id: 0 }, ..ON_DEVICE };
        let used = cu.cudasim_used_bytes(0);
        assert_eq!(create(CHUNK, on_host), 0);
        assert_eq!(cu.cudasim_used_bytes(0), used, "host memory is not the device's");
    }

    chunks_travel_as_descriptors_in_the_process [] {
        let cu = Cuda::start();
        let (mut descriptor, mut imported) = (0, 0);
        assert_eq!(cu.cuMemExportToShareableHandle(&mut descriptor, cu.create(CHUNK), 1, 0), INVALID);
        let shareable = Properties { handle_types: 1, ..ON_DEVICE };
        let mut handle = 0;
        ok(cu.cuMemCreate(&mut handle, CHUNK, &shareable, 0));
        ok(cu.cuMemExportToShareableHandle(&mut descriptor, handle, 1, 0));
        ok(cu.cuMemImportFromShareableHandle(&mut imported, descriptor as usize, 1));
        let base = cu.reserve(2 * CHUNK);
        cu.map(base, CHUNK, handle);
        cu.map(base + STEP, CHUNK, imported);
        ok(cu.cuMemsetD32Async(base, 6, 1, 0));
        ok(cu.cuCtxSynchronize());
        assert_eq!(peek(base + STEP), 6);
    }

    rights_are_per_device ["CUDASIM_DEVICES" = "2"] {
        let cu = Cuda::start();
        let base = cu.mapped(CHUNK);
        cu.use_primary(1);
        assert_eq!(cu.cuMemsetD8_v2(base, 0, 16), INVALID);
        let second = AccessRights { location: Location { kind: 1, id: 1 }, flags: 3 };
        ok(cu.cuMemSetAccess(base, CHUNK, &second, 1));
        ok(cu.cuMemsetD8_v2(base, 0, 16));
        assert_eq!((cu.cudasim_used_bytes(0), cu.cudasim_used_bytes(1)), (STEP, 0));
    }

    it_can_be_missing ["CUDASIM_NO_VMM" = "1"] {
        let cu = Cuda::start();
        let mut value = 7;
        ok(cu.cuDeviceGetAttribute(&mut value, 102, 0));
        assert_eq!(value, 0);
        assert_eq!(cu.cuMemCreate(&mut 0, CHUNK, &ON_DEVICE, 0), 801);
        assert_eq!(cu.cuMemAddressReserve(&mut 0, CHUNK, 0, 0, 0), 801);
        cu.alloc(CHUNK);
    }

    many_small_mappings_in_order_are_few_for_the_host [] {
        let cu = Cuda::start();
        let base = cu.reserve(1024 * CHUNK);
        let lines = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let before = lines();
        for i in 0..1024 {
            let handle = cu.create(CHUNK);
            cu.map(base + i * STEP, CHUNK, handle);
        }
        assert!(lines() < before + 16, "{} mappings more", lines() - before);
        ok(cu.cuMemUnmap(base, 1024 * CHUNK));
    }
}

#[test]
fn reading_unmapped_memory_faults() {
    let output = in_process("reading_unmapped_memory_faults", &[], || {
        let cu = Cuda::start();
        let base = cu.mapped(CHUNK);
        assert_eq!(peek(base), 0);
        ok(cu.cuMemUnmap(base, CHUNK));
        peek(base);
    });
    expect_death(output, libc::SIGSEGV, "");
}
