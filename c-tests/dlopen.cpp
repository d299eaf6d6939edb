// dlopen.cpp: a program that opens the library at run time, uses it, closes it and opens it again, from
// several threads too. What the library knows survives, and nothing runs after a close that is not there any
// more. This program alone is not linked with the library.

#define CHECK_WITHOUT_LIBRARY
#include "check.h"

#include <dlfcn.h>

namespace {

class Library {
 public:
  Library() : handle_(dlopen("libcudapool.so", RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      fprintf(stderr, "%s\n", dlerror());
      exit(EXIT_FAILURE);
    }
    find("pool_alloc", &alloc);
    find("pool_free", &free);
    find("pool_alloc_async", &alloc_async);
    find("pool_free_async", &free_async);
    find("pool_get_stats", &get_stats);
    find("pool_trim", &trim);
    find("pool_last_error", &last_error);
    find("pool_version", &version);
  }
  ~Library() { CHECK_EQ(dlclose(handle_), 0); }
  Library(const Library &) = delete;
  Library &operator=(const Library &) = delete;

  decltype(&pool_alloc) alloc;
  decltype(&pool_free) free;
  decltype(&pool_alloc_async) alloc_async;
  decltype(&pool_free_async) free_async;
  decltype(&pool_get_stats) get_stats;
  decltype(&pool_trim) trim;
  decltype(&pool_last_error) last_error;
  decltype(&pool_version) version;

 private:
  template <typename Function>
  void find(const char *name, Function *place) {
    void *found = dlsym(handle_, name);
    CHECK(found != nullptr);
    memcpy(place, &found, sizeof found);
  }

  void *handle_;
};

CUstream_st *const per_thread = reinterpret_cast<CUstream_st *>(2);

void use(const Library &pool) {
  void *one = nullptr, *two = nullptr;
  CHECK_EQ(pool.version(), POOL_VERSION_MAJOR * 1000000 + POOL_VERSION_MINOR * 1000 + POOL_VERSION_PATCH);
  CHECK_EQ(pool.alloc(&one, 100000), POOL_OK);
  CHECK_EQ(pool.alloc_async(&two, 3 * MIB, per_thread), POOL_OK);
  CHECK(one != two);
  CHECK_EQ(pool.free_async(two, per_thread), POOL_OK);
  CHECK_EQ(pool.free(one), POOL_OK);
}

void opened_a_hundred_times() {
  for (int i = 0; i < 100; i++) {
    Library pool;
    use(pool);
  }
}

void blocks_and_errors_outlive_a_close() {
  void *block = nullptr;
  char before[500] = "", after[500] = "";
  {
    Library pool;
    CHECK_EQ(pool.alloc(&block, 3000), POOL_OK);
    CHECK_EQ(pool.free(&block), POOL_ERROR_INVALID_POINTER);
    CHECK(pool.last_error(before, sizeof before) > 0);
  }
  Library pool;
  pool_stats stats;
  stats.struct_size = sizeof stats;
  CHECK(pool.last_error(after, sizeof after) > 0);
  CHECK(strcmp(before, after) == 0);
  CHECK_EQ(pool.get_stats(nullptr, 0, &stats), POOL_OK);
  CHECK_EQ(stats.live_blocks, 1);
  CHECK_EQ(pool.free(block), POOL_OK);
}

// Ends right after the close: whatever the library keeps per thread goes then.
void *open_use_close(void *) {
  for (int i = 0; i < 20; i++) {
    Library pool;
    use(pool);
    void *out = nullptr;
    CHECK_EQ(pool.alloc(nullptr, 1), POOL_ERROR_INVALID_ARGUMENT);
    CHECK_EQ(pool.alloc(&out, SIZE_MAX), POOL_ERROR_OUT_OF_MEMORY);
  }
  return nullptr;
}

void opened_by_threads() {
  for (int round = 0; round < 5; round++) {
    pthread_t threads[4];
    for (pthread_t &thread : threads) CHECK_EQ(pthread_create(&thread, nullptr, open_use_close, nullptr), 0);
    for (pthread_t &thread : threads) pthread_join(thread, nullptr);
  }
}

void all_memory_goes_back() {
  Library pool;
  pool_stats stats;
  stats.struct_size = sizeof stats;
  CHECK_EQ(pool.trim(nullptr, 0, 0, nullptr), POOL_OK);
  CHECK_EQ(pool.get_stats(nullptr, 0, &stats), POOL_OK);
  CHECK_EQ(stats.live_blocks, 0);
  CHECK_EQ(stats.reserved_bytes, 0);
}

}  // namespace

int main() {
  if (dlopen("libcuda.so.1", RTLD_NOW) == nullptr) {
    printf("skipped: %s\n", dlerror());
    return EXIT_SKIPPED;
  }
  RUN(opened_a_hundred_times);
  RUN(blocks_and_errors_outlive_a_close);
  RUN(opened_by_threads);
  RUN(all_memory_goes_back);
  return check_result();
}
