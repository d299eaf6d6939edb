/* probe_memory.c: device memory, by cuMemAlloc and by the virtual memory calls. */

#include "probe.h"

static void granularity(void) {
  CUmemAllocationProp prop = device_memory();
  size_t recommended = 0;
  driver_start(0);
  SAME(page_size(), 2 << 20);
  SAME(cu.MemGetAllocationGranularity(&recommended, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), 0);
  SAME(recommended, 2 << 20);
}

/* An arena reserves eight times the device. */
static void large_ranges(void) {
  size_t total = 0, range;
  CUdeviceptr base = 0, second = 0;
  driver_start(0);
  NEEDS(cu.MemAddressReserve);
  MUST(cu.DeviceTotalMem(&total, 0));
  range = (total * 8 + (2u << 20) - 1) & ~(size_t)((2u << 20) - 1);
  SAME(cu.MemAddressReserve(&base, range, 0, 0, 0), 0);
  SAME(cu.MemAddressReserve(&second, range, 0, 0, 0), 0);
  SAME(base % (2u << 20), 0);
  TRUE(base + range <= second || second + range <= base);
  SAME(cu.MemAddressFree(base, range / 2), 1);
  SAME(cu.MemAddressFree(second, range), 0);
  SAME(cu.MemAddressFree(base, range), 0);
}

static void zero_sizes(void) {
  CUdeviceptr ptr = 77;
  CUmemGenericAllocationHandle handle = 77;
  driver_start(0);
  SAME(cu.MemAlloc(&ptr, 0), 1);
  TRUE(ptr == 77);
  SAME(cu.MemFree(0), 0);
  NEEDS(cu.MemCreate);
  SAME(create(&handle, 0), 1);
  SAME(cu.MemAddressReserve(&ptr, 0, 0, 0, 0), 1);
  SAME(cu.MemAddressFree(0, 0), 1);
  SAME(cu.MemRelease(0), 1);
  SAME(cu.MemsetD32(0, 1, 0), 0);
}

/* The library takes cuMemAlloc memory in multiples of 512 bytes. */
static void classic_alignment(void) {
  static const size_t sizes[] = {1, 100, 512, 513, 100000, 1 << 20, 2 << 20, 5 << 20, (16 << 20) + 1};
  size_t i;
  driver_start(0);
  for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    CUdeviceptr ptr = 0, base = 0;
    size_t bytes = 0;
    MUST(cu.MemAlloc(&ptr, sizes[i]));
    same("alignment of cuMemAlloc to 512", ptr % 512, 0);
    if (sizes[i] >= 2 << 20) {
      same("alignment of a large cuMemAlloc to 2 MiB", ptr % (2 << 20), 0);
    }
    SAME(cu.MemGetAddressRange(&base, &bytes, ptr + sizes[i] / 2), 0);
    TRUE(base == ptr && bytes == sizes[i]);
  }
}

static void wrong_frees(void) {
  CUdeviceptr ptr = 0;
  int local = 0;
  driver_start(0);
  MUST(cu.MemAlloc(&ptr, 1 << 20));
  SAME(cu.MemFree(ptr + 512), 1);
  SAME(cu.MemFree((CUdeviceptr)(uintptr_t)&local), 1);
  SAME(cu.MemFree(ptr), 0);
  SAME(cu.MemFree(ptr), 1);
}

/* The answer is 2, nothing is taken, and the next call works. */
static void out_of_memory(void) {
  size_t total = 0, before = 0, after = 0, unused = 0;
  CUdeviceptr ptr = 77;
  CUmemGenericAllocationHandle handle = 0;
  driver_start(0);
  NEEDS(cu.MemCreate);
  MUST(cu.DeviceTotalMem(&total, 0));
  MUST(cu.MemGetInfo(&before, &unused));
  SAME(cu.MemAlloc(&ptr, total + (1 << 20)), 2);
  TRUE(ptr == 77);
  SAME(create(&handle, ((total >> 21) + 1) << 21), 2);
  SAME(cu.MemGetInfo(&after, &unused), 0);
  TRUE(before - after < 64u << 20 || before < after);
  SAME(cu.MemAlloc(&ptr, 1 << 20), 0);
  SAME(cu.MemFree(ptr), 0);
}

static void mapping_rules(void) {
  size_t page;
  CUdeviceptr base = 0;
  CUmemGenericAllocationHandle one = 0, two = 0;
  unsigned word = 0;
  driver_start(0);
  page = page_size();
  MUST(cu.MemAddressReserve(&base, 8 * page, 0, 0, 0));
  MUST(create(&one, page));
  MUST(create(&two, 2 * page));
  SAME(cu.MemMap(base, page, page, two, 0), 1); /* an offset */
  SAME(cu.MemMap(base + 4096, page, 0, one, 0), 1);
  SAME(cu.MemMap(base, page, 0, one, 0), 0);
  SAME(cu.MemMap(base, page, 0, one, 0), 1); /* taken */
  SAME(cu.MemMap(base + page, 2 * page, 0, two, 0), 0);
  SAME(cu.MemcpyDtoH(&word, base, 4), 1); /* no access yet */
  SAME(give_access(base, 4 * page), 1); /* the last page is not mapped */
  SAME(give_access(base, 3 * page), 0); /* two mappings by one call */
  /* One piece of work across both. */
  SAME(cu.MemsetD32(base + page - 4096, 0x77, 2048), 0);
  SAME(cu.MemcpyDtoH(&word, base + page + 4092, 4), 0);
  SAME(word, 0x77);
  SAME(cu.MemUnmap(base + page, page), 1); /* a part of a mapping */
  SAME(cu.MemUnmap(base, 3 * page), 0);    /* both by one call */
  SAME(cu.MemcpyDtoH(&word, base, 4), 1);
  /* The contents move along, and access does not. */
  SAME(cu.MemMap(base + 4 * page, 2 * page, 0, two, 0), 0);
  SAME(cu.MemcpyDtoH(&word, base + 4 * page, 4), 1);
  SAME(give_access(base + 4 * page, 2 * page), 0);
  SAME(cu.MemcpyDtoH(&word, base + 4 * page, 4), 0);
  SAME(word, 0x77);
  /* A released handle lives on in its mapping. */
  SAME(cu.MemRelease(two), 0);
  SAME(cu.MemcpyDtoH(&word, base + 4 * page, 4), 0);
  SAME(cu.MemAddressFree(base, 8 * page), 1);
  SAME(cu.MemUnmap(base + 4 * page, 2 * page), 0);
  SAME(cu.MemRelease(one), 0);
  SAME(cu.MemAddressFree(base, 8 * page), 0);
}

/* No virtual memory call needs a current context; memory by cuMemAlloc does. */
static void without_a_context(void) {
  CUdeviceptr base = 0;
  CUmemGenericAllocationHandle handle = 0;
  size_t page, unused = 0;
  MUST(cu.Init(0));
  page = page_size();
  SAME(cu.MemAlloc(&base, 100), 201);
  SAME(cu.MemGetInfo(&unused, &unused), 201);
  SAME(cu.MemAddressReserve(&base, page, 0, 0, 0), 0);
  SAME(create(&handle, page), 0);
  SAME(cu.MemMap(base, page, 0, handle, 0), 0);
  SAME(give_access(base, page), 0);
  SAME(cu.MemUnmap(base, page), 0);
  SAME(cu.MemRelease(handle), 0);
  SAME(cu.MemAddressFree(base, page), 0);
}

/* A mapped page, and a stream that writes it in 400 ms. */
static CUstream write_late(CUdeviceptr *base, size_t *page) {
  CUmemGenericAllocationHandle handle = 0;
  CUstream stream;
  driver_start(0);
  *page = page_size();
  *base = mapped_page(4 * *page, &handle);
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  busy(stream, 400);
  MUST(cu.MemsetD32Async(*base, 1, *page / 4, stream));
  return stream;
}

/* The library waits before it unmaps, because the driver does not. */
static void unmap_with_work_pending(void) {
  CUdeviceptr base;
  size_t page;
  CUstream stream = write_late(&base, &page);
  double start = now_ms();
  SAME(cu.MemUnmap(base, page), 0);
  TRUE(now_ms() - start < 200);
  SAME(cu.StreamSynchronize(stream), 700);
  SAME(cu.MemAlloc(&base, 100), 700); /* and from then on */
}

static void map_and_access_with_work_pending(void) {
  CUmemGenericAllocationHandle other = 0;
  CUdeviceptr base;
  size_t page;
  CUstream stream = write_late(&base, &page);
  double start = now_ms();
  SAME(create(&other, page), 0);
  SAME(cu.MemMap(base + 2 * page, page, 0, other, 0), 0);
  SAME(give_access(base + 2 * page, page), 0);
  TRUE(now_ms() - start < 200);
  SAME(cu.StreamSynchronize(stream), 0);
}

static void free_with_work_pending(void) {
  CUdeviceptr block = 0, other = 0;
  CUstream stream;
  double start;
  driver_start(0);
  MUST(cu.MemAlloc(&block, 4 << 20));
  MUST(cu.MemAlloc(&other, 4 << 20));
  stream = new_stream(CU_STREAM_NON_BLOCKING);
  busy(stream, 400);
  MUST(cu.MemsetD32Async(block, 1, 1 << 20, stream));
  start = now_ms();
  SAME(cu.MemFree(other), 0);
  TRUE(now_ms() - start > 200); /* it waits for the context */
  SAME(cu.StreamSynchronize(stream), 0);
}

static void what_can_be_shared(void) {
  CUipcMemHandle ipc;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr classic = 0, base;
  driver_start(0);
  NEEDS(cu.IpcGetMemHandle);
  MUST(cu.MemAlloc(&classic, 4 << 20));
  SAME(cu.IpcGetMemHandle(&ipc, classic), 0);
  base = mapped_page(4 * page_size(), &handle);
  SAME(cu.IpcGetMemHandle(&ipc, base), 1);
}

static void pointer_attributes(void) {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr base, start = 0, classic = 0;
  size_t page, bytes = 0;
  int number = -1, local = 0;
  driver_start(0);
  page = page_size();
  base = mapped_page(4 * page, &handle);
  MUST(cu.MemAlloc(&classic, 12345));
  SAME(cu.PointerGetAttribute(&number, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, base), 0);
  SAME(number, 2);
  SAME(cu.PointerGetAttribute(&number, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, base), 0);
  SAME(number, 0);
  SAME(cu.PointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, base + 100), 0);
  TRUE(start == base);
  SAME(cu.PointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, base + 100), 0);
  SAME(bytes / page, 4); /* the whole reservation */
  SAME(cu.PointerGetAttribute(&number, CU_POINTER_ATTRIBUTE_MAPPED, base + page), 0);
  SAME(number, 0);
  SAME(cu.MemGetAddressRange(&start, &bytes, base + 100), 0);
  TRUE(start == base && bytes == page); /* the mapping */
  SAME(cu.PointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, classic), 0);
  SAME(bytes, 12345);
  SAME(cu.MemGetAddressRange(&start, &bytes, (CUdeviceptr)(uintptr_t)&local), 500);
}

int main(int argc, char **argv) {
  static const struct probe probes[] = {
      {"granularity", "chunks are multiples of 2 MiB", granularity},
      {"large_ranges", "ranges of eight times the device can be reserved; no partial frees of them",
       large_ranges},
      {"zero_sizes", "size 0 everywhere", zero_sizes},
      {"classic_alignment", "cuMemAlloc aligns to 512 bytes, large blocks to 2 MiB", classic_alignment},
      {"wrong_frees", "cuMemFree refuses what is no block", wrong_frees},
      {"out_of_memory", "out of memory is answered 2, takes nothing and does not stick", out_of_memory},
      {"mapping_rules", "map, access and unmap: what is refused, and contents that move along",
       mapping_rules},
      {"without_a_context", "virtual memory calls need no current context", without_a_context},
      {"unmap_with_work_pending", "cuMemUnmap does not wait, and the work then fails for good",
       unmap_with_work_pending},
      {"map_with_work_pending", "create, map and access do not wait for work",
       map_and_access_with_work_pending},
      {"free_with_work_pending", "cuMemFree waits for the context's work", free_with_work_pending},
      {"what_can_be_shared", "legacy IPC handles: of cuMemAlloc memory, not of mapped memory",
       what_can_be_shared},
      {"pointer_attributes", "what is told of mapped and of cuMemAlloc memory", pointer_attributes},
      {NULL, NULL, NULL},
  };
  return probe_main(probes, argc, argv);
}
