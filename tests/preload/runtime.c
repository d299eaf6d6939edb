/* runtime.c: a program on NVIDIA's runtime library, without a device: every result and message is printed,
 * and must be the same with the preload shim and without it. Linked with the library, or with its static
 * form, or (built with -DOPENED) opening it. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef struct CUstream_st *cudaStream_t;

#define FUNCTIONS(F)                                                                    \
  F(int, cudaGetDeviceCount, (int *count))                                              \
  F(int, cudaGetDevice, (int *device))                                                  \
  F(int, cudaSetDevice, (int device))                                                   \
  F(int, cudaDriverGetVersion, (int *version))                                          \
  F(int, cudaRuntimeGetVersion, (int *version))                                         \
  F(int, cudaMalloc, (void **ptr, size_t size))                                         \
  F(int, cudaMallocAsync, (void **ptr, size_t size, cudaStream_t stream))               \
  F(int, cudaMallocManaged, (void **ptr, size_t size, unsigned flags))                  \
  F(int, cudaMallocPitch, (void **ptr, size_t *pitch, size_t width, size_t height))     \
  F(int, cudaFree, (void *ptr))                                                         \
  F(int, cudaFreeAsync, (void *ptr, cudaStream_t stream))                               \
  F(int, cudaMemGetInfo, (size_t *available, size_t *total))                            \
  F(int, cudaStreamCreate, (cudaStream_t * stream))                                     \
  F(int, cudaDeviceSynchronize, (void))                                                 \
  F(int, cudaDeviceReset, (void))                                                       \
  F(int, cudaGetLastError, (void))                                                      \
  F(int, cudaGetDriverEntryPoint,                                                       \
    (const char *name, void **function, unsigned long long flags, int *status))         \
  F(const char *, cudaGetErrorName, (int error))                                        \
  F(const char *, cudaGetErrorString, (int error))

#ifdef OPENED
#define FIELD(type, name, parameters) static type(*name) parameters;
FUNCTIONS(FIELD)
#else
#define DECLARE(type, name, parameters) type name parameters;
FUNCTIONS(DECLARE)
#endif

#define SHOW(call) show(#call, call)

static void show(const char *call, int result) {
  printf("%s = %d, %s: %s\n", call, result, cudaGetErrorName(result), cudaGetErrorString(result));
}

static void all(void) {
  int number = -7, status = -7;
  void *ptr = (void *)0x77, *function = (void *)0x77;
  size_t size = 77, total = 77;
  cudaStream_t stream = NULL;
  SHOW(cudaRuntimeGetVersion(&number));
  printf("  %d\n", number);
  SHOW(cudaDriverGetVersion(&number));
  printf("  %d\n", number);
  SHOW(cudaGetDeviceCount(&number));
  printf("  %d\n", number);
  SHOW(cudaGetDevice(&number));
  SHOW(cudaSetDevice(0));
  SHOW(cudaMalloc(&ptr, 1 << 20));
  SHOW(cudaMalloc(NULL, 1 << 20));
  SHOW(cudaMalloc(&ptr, 0));
  SHOW(cudaMallocPitch(&ptr, &size, 100, 100));
  SHOW(cudaMallocManaged(&ptr, 1 << 20, 1));
  SHOW(cudaMallocAsync(&ptr, 1 << 20, NULL));
  printf("  %p %zu\n", ptr, size);
  SHOW(cudaFree(NULL));
  SHOW(cudaFree((void *)0x1234));
  SHOW(cudaFreeAsync((void *)0x1234, NULL));
  SHOW(cudaMemGetInfo(&size, &total));
  SHOW(cudaStreamCreate(&stream));
  SHOW(cudaDeviceSynchronize());
  SHOW(cudaDeviceReset());
  SHOW(cudaGetDriverEntryPoint("cuMemAlloc", &function, 0, &status));
  printf("  %s %d\n", function == NULL ? "none" : "some", status);
  SHOW(cudaGetLastError());
  SHOW(cudaGetLastError());
}

static void *in_thread(void *unused) {
  all();
  return unused;
}

int main(int count, char **arguments) {
  pthread_t thread;
#ifdef OPENED
  void *library = count > 1 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  void *found;
  if (library == NULL) {
    printf("%s\n", count > 1 ? dlerror() : "which library?");
    return 1;
  }
#define TAKE(type, name, parameters) \
  found = dlsym(library, #name);     \
  memcpy(&name, &found, sizeof found);
  FUNCTIONS(TAKE)
#else
  (void)count, (void)arguments;
#endif
  all();
  if (pthread_create(&thread, NULL, in_thread, NULL) != 0) {
    return 1;
  }
  pthread_join(thread, NULL);
  return 0;
}
