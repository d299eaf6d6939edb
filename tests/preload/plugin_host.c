/* plugin_host.c: a program without CUDA that opens a client as a plugin, for itself alone: the plugin is
 * linked with the driver, and the rest of the process does not see it.
 *
 *   plugin_host PLUGIN ARGUMENTS... */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(int count, char **arguments) {
  void *plugin, *found;
  int (*run)(int, char **);
  if (count < 2) {
    return 2;
  }
  if (dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") != NULL) {
    printf("a driver before there is one\n");
    return 1;
  }
  plugin = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin == NULL) {
    printf("%s\n", dlerror());
    return 1;
  }
  if (dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") != NULL) {
    printf("a driver that only the plugin sees\n");
    return 1;
  }
  found = dlsym(plugin, "client_main");
  if (found == NULL) {
    return 1;
  }
  memcpy(&run, &found, sizeof run);
  return run(count - 1, arguments + 1);
}
