//! Stream-ordered memory and its pools.

mod common;
use common::*;

const INVALID: i32 = 1;
const BUSY_US: u64 = 150_000;

const POOL: PoolProperties = PoolProperties {
    kind: 1,
    handle_types: 0,
    location: Location { kind: 1, id: 0 },
    windows: 0,
    max_size: 0,
    rest: [0; 56],
};

impl Cuda {
    #[track_caller]
    fn pool(&self) -> usize {
        let mut pool = 0;
        ok(self.cuMemPoolCreate(&mut pool, &POOL));
        pool
    }

    #[track_caller]
    fn value(&self, pool: usize, which: i32) -> u64 {
        let mut value = 0u64;
        ok(self.cuMemPoolGetAttribute(pool, which, (&raw mut value).cast()));
        value
    }

    #[track_caller]
    fn set(&self, pool: usize, which: i32, value: u64) -> i32 {
        self.cuMemPoolSetAttribute(pool, which, (&raw const value).cast())
    }

    #[track_caller]
    fn alloc_in(&self, pool: usize, size: usize, stream: usize) -> u64 {
        let mut address = 0;
        ok(self.cuMemAllocFromPoolAsync(&mut address, size, pool, stream));
        address
    }
}

const THRESHOLD: i32 = 4;
const RESERVED: i32 = 5;
const USED: i32 = 7;
const USED_PEAK: i32 = 8;

tests! {
    pools_count_what_they_hold [] {
        let cu = Cuda::start();
        let (pool, s) = (cu.pool(), cu.stream(1));
        ok(cu.set(pool, THRESHOLD, u64::MAX));
        let (a, b) = (cu.alloc_in(pool, 65536, s), cu.alloc_in(pool, 131072, s));
        assert_eq!((cu.value(pool, USED), b - a), (196608, 65536));
        assert_eq!(cu.value(pool, RESERVED), cu.cudasim_used_bytes(0));
        ok(cu.cuMemFreeAsync(a, s));
        ok(cu.cuMemFreeAsync(b, s));
        ok(cu.cuStreamSynchronize(s));
        assert_eq!((cu.value(pool, USED), cu.value(pool, USED_PEAK)), (0, 196608));
        assert!(cu.value(pool, RESERVED) > 0, "kept, below the threshold");
        assert_eq!(cu.set(pool, USED_PEAK, 5), INVALID);
        ok(cu.set(pool, USED_PEAK, 0));
        assert_eq!(cu.value(pool, USED_PEAK), 0);
        ok(cu.cuMemPoolTrimTo(pool, 0));
        assert_eq!((cu.value(pool, RESERVED), cu.cudasim_used_bytes(0)), (0, 0));
    }

    excess_goes_back_at_a_synchronisation [] {
        let cu = Cuda::start();
        let (pool, s) = (cu.pool(), cu.stream(1));
        let block = cu.alloc_in(pool, MIB, s);
        ok(cu.cuMemFreeAsync(block, s));
        assert!(cu.cudasim_used_bytes(0) > 0);
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(cu.cudasim_used_bytes(0), 0);
    }

    reuse_follows_the_streams [] {
        let cu = Cuda::start();
        let (pool, a, b) = (cu.pool(), cu.stream(1), cu.stream(1));
        ok(cu.set(pool, THRESHOLD, u64::MAX));
        let block = cu.alloc_in(pool, MIB, a);
        ok(cu.cudasim_poke(a, block, 3, 1, BUSY_US));
        ok(cu.cuMemFreeAsync(block, a));
        assert_ne!(cu.alloc_in(pool, MIB, b), block);
        let again = cu.alloc_in(pool, MIB, a);
        assert_eq!(again, block);
        ok(cu.cuMemFreeAsync(again, a));
        ok(cu.cuStreamSynchronize(a));
        assert_eq!(cu.alloc_in(pool, MIB, b), block, "seen complete, anyone may have it");
    }

    a_full_device_waits_for_frees ["CUDASIM_MEMORY" = "32MiB"] {
        let cu = Cuda::start();
        let (pool, a, b) = (cu.pool(), cu.stream(1), cu.stream(1));
        let block = cu.alloc_in(pool, 32 * MIB, a);
        ok(cu.cudasim_poke(a, block, 3, 1, BUSY_US));
        assert_eq!(cu.cuMemAllocFromPoolAsync(&mut 0, MIB, pool, b), 2);
        ok(cu.cuMemFreeAsync(block, a));
        assert_eq!(cu.alloc_in(pool, 32 * MIB, b), block);
        ok(cu.cuMemsetD32Async(block, 4, 1, b));
        ok(cu.cuStreamSynchronize(b));
        assert_eq!(peek(block), 4, "after the other stream's write");
    }

    wrong_frees_are_refused [] {
        let cu = Cuda::start();
        let (s, mut block) = (cu.stream(1), 0);
        ok(cu.cuMemAllocAsync(&mut block, MIB, s));
        assert_eq!(cu.cuMemAllocAsync(std::ptr::null_mut(), MIB, s), INVALID);
        assert_eq!(cu.cuMemAllocAsync(&mut 0, usize::MAX, s), 2);
        assert_eq!(cu.cuMemFreeAsync(0, s), INVALID);
        assert_eq!(cu.cuMemFreeAsync(block + 512, s), INVALID);
        ok(cu.cuMemFreeAsync(block, s));
        assert_eq!(cu.cuMemFreeAsync(block, s), INVALID);
        assert_eq!(cu.cuMemsetD32Async(block, 0, 1, s), INVALID);
        ok(cu.cuMemAllocAsync(&mut block, MIB, s));
        ok(cu.cuMemFree_v2(block));
        assert_eq!(cu.cuMemFree_v2(block), INVALID);
    }

    classic_blocks_can_be_freed_in_order [] {
        let cu = Cuda::start();
        let (s, block) = (cu.stream(1), cu.alloc(4 * MIB));
        ok(cu.cudasim_poke(s, block, 1, 1, BUSY_US));
        ok(cu.cuMemFreeAsync(block, s));
        assert_eq!((cu.cuMemFreeAsync(block, s), cu.cuMemFree_v2(block)), (INVALID, INVALID));
        assert_eq!(cu.cudasim_used_bytes(0) as usize, 4 * MIB, "not before the stream gets there");
        ok(cu.cuStreamSynchronize(s));
        assert_eq!((cu.cudasim_used_bytes(0), cu.cudasim_misuse_count()), (0, 0));
    }

    a_pool_dies_with_its_last_block [] {
        let cu = Cuda::start();
        let (pool, s) = (cu.pool(), cu.stream(1));
        let (mut default, mut current) = (0, 0);
        ok(cu.cuDeviceGetDefaultMemPool(&mut default, 0));
        ok(cu.cuDeviceSetMemPool(0, pool));
        ok(cu.cuDeviceGetMemPool(&mut current, 0));
        assert_eq!(current, pool);
        let mut block = 0;
        ok(cu.cuMemAllocAsync(&mut block, MIB, s));
        assert_eq!((cu.value(pool, USED) as usize, cu.cuMemPoolDestroy(default)), (MIB, INVALID));
        ok(cu.cuMemPoolDestroy(pool));
        ok(cu.cuDeviceGetMemPool(&mut current, 0));
        assert_eq!((current, cu.cuMemPoolDestroy(pool)), (default, INVALID));
        ok(cu.cuMemsetD32Async(block, 1, 1, s));
        ok(cu.cuMemFreeAsync(block, s));
        ok(cu.cuStreamSynchronize(s));
        assert_eq!(cu.cudasim_used_bytes(0), 0);
    }

    devices_of_pools_are_checked ["CUDASIM_DEVICES" = "2"] {
        let cu = Cuda::start();
        let pool = cu.pool();
        assert_eq!(cu.cuDeviceGetDefaultMemPool(&mut 0, 5), 101);
        assert_eq!(cu.cuDeviceGetMemPool(&mut 0, 5), INVALID);
        assert_eq!(cu.cuDeviceSetMemPool(1, pool), INVALID);
        assert_eq!(cu.cuMemPoolCreate(&mut 0, &PoolProperties { kind: 0, ..POOL }), INVALID);
        let limited = PoolProperties { max_size: 4 * MIB, ..POOL };
        let mut small = 0;
        ok(cu.cuMemPoolCreate(&mut small, &limited));
        assert_eq!(cu.cuMemAllocFromPoolAsync(&mut 0, 5 * MIB, small, cu.stream(1)), 2);
        cu.alloc_in(small, 4 * MIB, cu.stream(1));
        // The pool is the stream's device's, whatever is current.
        let s = cu.stream(1);
        cu.use_primary(1);
        let mut block = 0;
        ok(cu.cuMemAllocAsync(&mut block, MIB, s));
        assert_eq!(cu.cudasim_used_bytes(1), 0);
    }
}
