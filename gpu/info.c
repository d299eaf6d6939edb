/* info.c: what the machine is, a line each: name, tab, value. Changes nothing. */

#include "probe.h"

static const struct {
  CUdevice_attribute number;
  const char *name;
} attributes[] = {
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, "compute capability, major"},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, "compute capability, minor"},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, "multiprocessors"},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "handles as file descriptors"},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, "RDMA with virtual memory management"},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, "memory pools"},
    {CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, "handle types of memory pools"},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, "fabric handles"},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, "unified addressing"},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, "managed memory"},
    {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, "pageable memory access"},
    {CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory on host NUMA nodes"},
    {CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory on the host"},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, "compute mode"},
};

static void largest_range(size_t total) {
  size_t range = 64 * total;
  CUdeviceptr base = 0;
  for (range &= ~(size_t)((2u << 20) - 1); range >= total; range /= 2) {
    range &= ~(size_t)((2u << 20) - 1);
    if (cu.MemAddressReserve(&base, range, 0, 0, 0) == 0) {
      printf("reservable at once\t%.1f times the device\n", (double)range / (double)total);
      MUST(cu.MemAddressFree(base, range));
      return;
    }
  }
  printf("reservable at once\tless than the device\n");
}

int main(void) {
  CUmemAllocationProp prop = device_memory();
  char name[256] = "";
  size_t total = 0, available = 0, bytes = 0, i;
  int version = 0, count = 0, value;
  probe_open();
  MUST(cu.DriverGetVersion(&version));
  printf("driver\t%d.%d%s\n", version / 1000, version % 1000 / 10, on_sim() ? " (simulated)" : "");
  if (cu.Init(0) != 0) {
    printf("skipped: the driver cannot be initialised\n");
    return EXIT_SKIPPED;
  }
  MUST(cu.DeviceGetCount(&count));
  printf("devices\t%d\n", count);
  driver_start(0);
  MUST(cu.DeviceGetName(name, (int)sizeof name - 1, 0));
  printf("device 0\t%s\n", name);
  MUST(cu.DeviceTotalMem(&total, 0));
  MUST(cu.MemGetInfo(&available, &bytes));
  printf("memory\t%.2f GiB, %.2f GiB of it free\n", (double)total / (double)GIB,
         (double)available / (double)GIB);
  for (i = 0; i < sizeof attributes / sizeof attributes[0]; i++) {
    if (cu.DeviceGetAttribute(&value, attributes[i].number, 0) == 0) {
      printf("%s\t%d\n", attributes[i].name, value);
    }
  }
  if (cu.MemGetAllocationGranularity != NULL &&
      cu.MemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == 0) {
    printf("granularity\t%llu bytes", (unsigned long long)bytes);
    MUST(cu.MemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    printf(", recommended %llu\n", (unsigned long long)bytes);
    largest_range(total);
  }
  printf("events of the context\t%s\n", cu.CtxRecordEvent != NULL ? "yes" : "no");
  return EXIT_SUCCESS;
}
