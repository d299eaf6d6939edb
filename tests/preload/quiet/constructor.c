/* constructor.c: a program that calls dlsym and dlvsym before main, as early as a program can, and looks at
 * what it gets. What it prints is the same with and without the shim, and no CUDA library is opened on its
 * behalf. */

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[] = {
    "malloc", "free",   "printf",  "cuInit_", "c",        "",        "cu",     "cudaMalloc",
    "curl_",  "cuInit", "cuMemGe", "dlsym_",  "cuMemMap", "environ", "getenv", "pthread_create"};

/* Where it was found: the object and the offset in it, which address randomisation does not change. */
static void show(const char *how, const char *name, void *found) {
  Dl_info info;
  const char *why = dlerror();
  if (found != NULL && dladdr(found, &info) != 0) {
    printf("%s(%s): %s+%lx, %s\n", how, name, info.dli_fname,
           (unsigned long)((char *)found - (char *)info.dli_fbase),
           info.dli_sname != NULL ? info.dli_sname : "-");
  } else {
    printf("%s(%s): %s, %s\n", how, name, found != NULL ? "elsewhere" : "NULL",
           why != NULL ? why : "no error");
  }
}

__attribute__((constructor)) static void early(void) {
  size_t i;
  void *library = dlopen("libm.so.6", RTLD_NOW);
  for (i = 0; i < sizeof names / sizeof names[0]; i++) {
    show("default", names[i], dlsym(RTLD_DEFAULT, names[i]));
    show("next", names[i], dlsym(RTLD_NEXT, names[i]));
    show("versioned", names[i], dlvsym(RTLD_DEFAULT, names[i], "GLIBC_2.2.5"));
    show("versioned next", names[i], dlvsym(RTLD_NEXT, names[i], "GLIBC_2.17"));
    show("wrong version", names[i], dlvsym(RTLD_DEFAULT, names[i], "NO_SUCH_VERSION"));
    show("library", names[i], dlsym(library, names[i]));
  }
  show("library", "cos", dlsym(library, "cos"));
  show("library", "cosinus", dlsym(library, "cosinus"));
  dlclose(library);
  /* An error is told once, and a later success ends it. */
  dlsym(RTLD_DEFAULT, "there is no such name");
  dlsym(RTLD_DEFAULT, "printf");
  printf("error left: %s\n", dlerror() != NULL ? "yes" : "no");
}

int main(void) {
  char line[4096];
  int opened = 0;
  FILE *maps = fopen("/proc/self/maps", "r");
  if (maps == NULL) {
    return 1;
  }
  while (fgets(line, sizeof line, maps) != NULL) {
    opened |= strstr(line, "libcudapool.so") != NULL || strstr(line, "libcuda.so") != NULL ||
              strstr(line, "libnvidia") != NULL;
  }
  fclose(maps);
  printf("CUDA libraries: %s\n", opened ? "opened" : "none");
  return opened;
}
