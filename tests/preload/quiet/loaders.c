/* loaders.c: 64 threads that load and unload libraries and look names up, CUDA's among them. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 64, ROUNDS = 60 };

static const char *const libraries[] = {"libm.so.6",   "libutil.so.1",         "libresolv.so.2",
                                        "libanl.so.1", "libBrokenLocale.so.1", "libnsl.so.1"};
static const char *const names[] = {"cos",           "openpty", "ns_initparse", "getaddrinfo_a",
                                    "cuMemAlloc_v2", "cuInit",  "cu",           "malloc"};

static void *run(void *seed) {
  uintptr_t state = (uintptr_t)seed, found = 0;
  int round;
  size_t i;
  for (round = 0; round < ROUNDS; round++) {
    void *library;
    state = state * 6364136223846793005u + 1442695040888963407u;
    library = dlopen(libraries[(state >> 33) % 6], round % 2 ? RTLD_NOW : RTLD_LAZY | RTLD_GLOBAL);
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
      void *in_library = library != NULL ? dlsym(library, names[i]) : NULL;
      void *anywhere = dlsym(RTLD_DEFAULT, names[i]);
      /* No driver is loaded, whatever else comes and goes. */
      if (strncmp(names[i], "cu", 2) == 0 && (in_library != NULL || anywhere != NULL)) {
        found++;
      }
      if (strcmp(names[i], "malloc") == 0 && anywhere == NULL) {
        found++;
      }
    }
    if (library != NULL) {
      dlclose(library);
    }
  }
  return (void *)found;
}

int main(void) {
  pthread_t thread[THREADS];
  uintptr_t wrong = 0, i;
  for (i = 0; i < THREADS; i++) {
    if (pthread_create(&thread[i], NULL, run, (void *)(i + 1)) != 0) {
      return 1;
    }
  }
  for (i = 0; i < THREADS; i++) {
    void *result = NULL;
    pthread_join(thread[i], &result);
    wrong += (uintptr_t)result;
  }
  printf("%d threads, wrong answers: %lu\n", THREADS, (unsigned long)wrong);
  return wrong != 0;
}
