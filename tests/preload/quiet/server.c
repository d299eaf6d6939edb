/* server.c: a forking server without CUDA: each child looks names up, loads a library, and answers; some exec
 * another program. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int serve(int request) {
  void *library = dlopen("libm.so.6", RTLD_NOW);
  int good = library != NULL && dlsym(library, "cos") != NULL &&
             dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL && dlsym(RTLD_NEXT, "malloc") != NULL;
  if (request % 10 == 9) {
    execl("/bin/true", "true", (char *)NULL);
    return 100;
  }
  return good ? request % 50 : 101;
}

/* Looks names up all the time, so that forks happen in the middle of it. */
static void *look_up(void *stop) {
  while (!__atomic_load_n((int *)stop, __ATOMIC_SEQ_CST)) {
    dlsym(RTLD_DEFAULT, "cuMemFree_v2");
    dlsym(RTLD_DEFAULT, "malloc");
    usleep(50);
  }
  return NULL;
}

int main(void) {
  pthread_t thread;
  int request, answer, sum = 0, stop = 0;
  if (pthread_create(&thread, NULL, look_up, &stop) != 0) {
    return 1;
  }
  for (request = 0; request < 200; request++) {
    pid_t child = fork();
    if (child == 0) {
      alarm(60);
      _exit(serve(request));
    }
    if (waitpid(child, &answer, 0) != child || !WIFEXITED(answer)) {
      printf("request %d was not answered\n", request);
      return 1;
    }
    sum += WEXITSTATUS(answer);
  }
  __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
  pthread_join(thread, NULL);
  printf("200 requests, sum of answers %d\n", sum);
  return 0;
}
