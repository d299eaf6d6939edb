/* info.c: what the machine is, a line each: name, tab, value. Changes nothing. */

#include "probe.h"

static const struct {
  int number;
  const char *name;
} attributes[] = {
    {75, "compute capability, major"},
    {76, "compute capability, minor"},
    {16, "multiprocessors"},
    {102, "virtual memory management"},
    {103, "handles as file descriptors"},
    {110, "RDMA with virtual memory management"},
    {115, "memory pools"},
    {119, "handle types of memory pools"},
    {128, "fabric handles"},
    {41, "unified addressing"},
    {83, "managed memory"},
    {88, "pageable memory access"},
    {141, "virtual memory on host NUMA nodes"},
    {145, "virtual memory on the host"},
    {20, "compute mode"},
};

static void largest_range(size_t total) {
  size_t range = 64 * total;
  CUdeviceptr base = 0;
  for (range &= ~(size_t)((2u << 20) - 1); range >= total; range /= 2) {
    range &= ~(size_t)((2u << 20) - 1);
    if (more.Reserve(&base, range, 0, 0, 0) == 0) {
      printf("reservable at once\t%.1f times the device\n", (double)range / (double)total);
      MUST(more.AddressFree(base, range));
      return;
    }
  }
  printf("reservable at once\tless than the device\n");
}

int main(void) {
  struct allocation_prop prop = device_memory();
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
  MUST(more.GetName(name, (int)sizeof name - 1, 0));
  printf("device 0\t%s\n", name);
  MUST(cu.DeviceTotalMem(&total, 0));
  MUST(cu.MemGetInfo(&available, &bytes));
  printf("memory\t%.2f GiB, %.2f GiB of it free\n", (double)total / (double)GIB, (double)available / (double)GIB);
  for (i = 0; i < sizeof attributes / sizeof attributes[0]; i++) {
    if (more.GetAttribute(&value, attributes[i].number, 0) == 0) {
      printf("%s\t%d\n", attributes[i].name, value);
    }
  }
  if (more.Granularity != NULL && more.Granularity(&bytes, &prop, 0) == 0) {
    printf("granularity\t%llu bytes", (unsigned long long)bytes);
    MUST(more.Granularity(&bytes, &prop, 1));
    printf(", recommended %llu\n", (unsigned long long)bytes);
    largest_range(total);
  }
  printf("events of the context\t%s\n", more.CtxRecordEvent != NULL ? "yes" : "no");
  return EXIT_SUCCESS;
}
