/* What libcudapool answers on a machine without a driver or without a device: the same code every time,
 * from any number of threads, with the failure value in every out-parameter, without a word on stdout or
 * stderr and without descriptors that pile up. The library is opened as runtimes open it; nothing here links
 * to it.
 *
 * usage: no_device LIBCUDAPOOL STATUS     (STATUS is 300, no driver, or 301, no device)
 *
 * The caller arranges that such a driver is what the loader finds. */

#define _XOPEN_SOURCE 700

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cudapool.h"

enum { THREADS = 4, ROUNDS = 100, TEXT = 512 };

static struct {
    enum pool_status (*alloc)(void **, size_t);
    enum pool_status (*free)(void *);
    enum pool_status (*alloc_async)(void **, size_t, struct CUstream_st *);
    enum pool_status (*free_async)(void *, struct CUstream_st *);
    enum pool_status (*alloc_with)(void **, const struct pool_request *);
    enum pool_status (*use_on_stream)(void *, struct CUstream_st *);
    enum pool_status (*query)(const void *, struct pool_block_info *);
    enum pool_status (*trim)(struct pool_t *, int, size_t, size_t *);
    enum pool_status (*get_stats)(struct pool_t *, int, struct pool_stats *);
    enum pool_status (*options_init)(struct pool_options *);
    size_t (*last_error)(char *, size_t);
    const char *(*status_name)(int);
    const char *(*status_message)(int);
    uint32_t (*version)(void);
} pool;

/* ISO C has no conversion from an object pointer to a function pointer; POSIX gives dlsym this form. */
#define LOAD(library, member) load((library), "pool_" #member, (void **)&pool.member)

static int failures; /* under the lock below */
static pthread_mutex_t failures_lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *report;
static int expected;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&failures_lock);
    if (failures++ < 20) {
        fputs("no_device: ", report);
        vfprintf(report, format, arguments);
        fputc('\n', report);
    }
    pthread_mutex_unlock(&failures_lock);
    va_end(arguments);
}

static void load(void *library, const char *name, void **function) {
    *function = dlsym(library, name);
    if (*function == NULL) {
        fprintf(report, "no_device: the library has no %s\n", name);
        exit(1);
    }
}

/* The text that goes with a failure is there, whole and cut. */
static void check_last_error(const char *call) {
    char text[TEXT], cut[4] = "...";
    size_t length = pool.last_error(text, sizeof text);
    if (length == 0 || (length < sizeof text && strlen(text) != length)) {
        fail("%s: the last error has length %zu and text \"%.60s\"", call, length, text);
    }
    if (pool.last_error(cut, sizeof cut) != length || strlen(cut) != 3 || strncmp(cut, text, 3) != 0) {
        fail("%s: the cut last error is \"%.4s\"", call, cut);
    }
    if (pool.last_error(NULL, 0) != length) {
        fail("%s: the length of the last error depends on the buffer", call);
    }
}

static void check(const char *call, enum pool_status got) {
    if ((int)got != expected) {
        fail("%s answers %d (%s), not %d", call, (int)got, pool.status_name((int)got), expected);
    } else {
        check_last_error(call);
    }
}

static void check_status(const char *call, enum pool_status got, enum pool_status wanted) {
    if (got != wanted) {
        fail("%s answers %d (%s), not %d", call, (int)got, pool.status_name((int)got), (int)wanted);
    }
}

/* A pointer that the pool cannot have given out: it says that, or why it has given out none. */
static void check_stranger(const char *call, enum pool_status got) {
    if (got != POOL_ERROR_INVALID_POINTER && (int)got != expected) {
        fail("%s of a stranger answers %d (%s)", call, (int)got, pool.status_name((int)got));
    }
}

/* A struct that crosses the boundary keeps its size and is zero otherwise. */
static void check_zeroed(const char *call, const void *bytes, size_t size) {
    const unsigned char *byte = bytes;
    size_t i, size_told;
    memcpy(&size_told, bytes, sizeof size_told);
    for (i = sizeof size_told; i < size && byte[i] == 0; i++) {
    }
    if (size_told != size || i != size) {
        fail("%s leaves something in its out-parameter", call);
    }
}

static void check_allocations(void) {
    int here = 0;
    struct pool_request request;
    void *out = &here;
    check("pool_alloc", pool.alloc(&out, 4096));
    if (out != NULL) {
        fail("pool_alloc leaves %p in its out-parameter", out);
    }
    out = &here;
    check("pool_alloc_async", pool.alloc_async(&out, 1, NULL));
    if (out != NULL) {
        fail("pool_alloc_async leaves %p in its out-parameter", out);
    }
    memset(&request, 0, sizeof request);
    request.struct_size = sizeof request;
    request.size = (size_t)1 << 24;
    for (request.device = POOL_DEVICE_CURRENT; request.device <= 1; request.device++) {
        out = &here;
        check("pool_alloc_with", pool.alloc_with(&out, &request));
        if (out != NULL) {
            fail("pool_alloc_with leaves %p in its out-parameter", out);
        }
    }
    check_status("pool_alloc to NULL", pool.alloc(NULL, 1), POOL_ERROR_INVALID_ARGUMENT);
    check_status("pool_alloc_async to NULL", pool.alloc_async(NULL, 1, NULL), POOL_ERROR_INVALID_ARGUMENT);
    check_status("pool_alloc_with to NULL", pool.alloc_with(NULL, &request), POOL_ERROR_INVALID_ARGUMENT);
}

static void check_pointers(void) {
    int here = 0;
    struct pool_block_info info;
    check_status("pool_free(NULL)", pool.free(NULL), POOL_OK);
    check_status("pool_free_async(NULL)", pool.free_async(NULL, NULL), POOL_OK);
    check_stranger("pool_free", pool.free(&here));
    check_stranger("pool_free_async", pool.free_async(&here, NULL));
    check_stranger("pool_use_on_stream", pool.use_on_stream(&here, NULL));
    memset(&info, 0x5a, sizeof info);
    info.struct_size = sizeof info;
    check_stranger("pool_query", pool.query(&here, &info));
    check_zeroed("pool_query", &info, sizeof info);
}

static void check_device_calls(void) {
    int device;
    for (device = POOL_DEVICE_CURRENT; device <= 1; device++) {
        struct pool_stats stats;
        size_t released = 77;
        check("pool_trim", pool.trim(NULL, device, 0, &released));
        if (released != 0) {
            fail("pool_trim leaves %zu in its out-parameter", released);
        }
        check("pool_trim without out-parameter", pool.trim(NULL, device, 0, NULL));
        memset(&stats, 0x5a, sizeof stats);
        stats.struct_size = sizeof stats;
        check("pool_get_stats", pool.get_stats(NULL, device, &stats));
        check_zeroed("pool_get_stats", &stats, sizeof stats);
    }
}

/* Nothing about these needs a driver. */
static void check_driverless_calls(void) {
    struct pool_options options;
    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    check_status("pool_options_init", pool.options_init(&options), POOL_OK);
    if (pool.version() == 0) {
        fail("pool_version answers 0");
    }
    if (strlen(pool.status_message(expected)) == 0) {
        fail("pool_status_message has nothing to say about %d", expected);
    }
}

static void *work(void *unused) {
    int round;
    for (round = 0; round < ROUNDS; round++) {
        check_allocations();
        check_pointers();
        check_device_calls();
        check_driverless_calls();
    }
    return unused;
}

static void run_threads(void) {
    pthread_t threads[THREADS];
    int i, started = 0;
    for (i = 0; i < THREADS; i++) {
        if (pthread_create(&threads[i], NULL, work, NULL) != 0) {
            fail("a thread cannot be started");
            break;
        }
        started++;
    }
    for (i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* Sends stdout and stderr to a nameless file and answers its descriptor; `report` keeps the old stderr. */
static int silence(void) {
    FILE *file = tmpfile();
    int old_stderr = dup(STDERR_FILENO);
    report = old_stderr < 0 ? NULL : fdopen(old_stderr, "w");
    if (file == NULL || report == NULL || dup2(fileno(file), STDOUT_FILENO) < 0 ||
        dup2(fileno(file), STDERR_FILENO) < 0) {
        perror("no_device: cannot redirect the output");
        exit(1);
    }
    setvbuf(report, NULL, _IONBF, 0);
    return fileno(file);
}

static void check_silent(int output) {
    struct stat status;
    fflush(stdout);
    fflush(stderr);
    if (fstat(output, &status) != 0) {
        fail("cannot look at the output");
    } else if (status.st_size != 0) {
        char text[TEXT];
        ssize_t length = pread(output, text, sizeof text - 1, 0);
        text[length < 0 ? 0 : length] = '\0';
        fail("%ld bytes were printed: %s", (long)status.st_size, text);
    }
}

static int count_descriptors(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    if (directory == NULL) {
        return -1;
    }
    while (readdir(directory) != NULL) {
        count++;
    }
    closedir(directory);
    return count;
}

int main(int argc, char **argv) {
    void *library;
    int output, descriptors;
    if (argc != 3) {
        fprintf(stderr, "usage: no_device LIBCUDAPOOL STATUS\n");
        return 2;
    }
    expected = atoi(argv[2]);
    output = silence();

    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(report, "no_device: %s\n", dlerror());
        return 1;
    }
    LOAD(library, alloc);
    LOAD(library, free);
    LOAD(library, alloc_async);
    LOAD(library, free_async);
    LOAD(library, alloc_with);
    LOAD(library, use_on_stream);
    LOAD(library, query);
    LOAD(library, trim);
    LOAD(library, get_stats);
    LOAD(library, options_init);
    LOAD(library, last_error);
    LOAD(library, status_name);
    LOAD(library, status_message);
    LOAD(library, version);

    run_threads(); /* first use is already a race between threads */
    /* NVIDIA's driver leaves four descriptors open with every cuInit that fails (550, 555), and answers
     * something else once they run out: asking it again and again ruins the program around us. */
    descriptors = count_descriptors();
    work(NULL);
    if (count_descriptors() != descriptors) {
        fail("%d descriptors are open after the calls, %d before", count_descriptors(), descriptors);
    }
    check_silent(output);
    if (dlclose(library) != 0) {
        fail("dlclose: %s", dlerror());
    }
    return failures == 0 ? 0 : 1;
}
