// exit_static.cpp: C++ objects with static and thread storage whose destructors free blocks, some constructed
// before the library was used and so destroyed after its exit handler. Prints nothing when all is well.

#include "check.h"
#include "driver.h"

#include <memory>
#include <vector>

namespace {

// As a runtime's buffers are: frees in its destructor, and must not fail there.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size) { CHECK_STATUS(POOL_OK, pool_alloc(&ptr_, size)); }
  Buffer(Buffer &&other) noexcept : ptr_(other.ptr_) { other.ptr_ = nullptr; }
  Buffer &operator=(Buffer &&other) noexcept {
    std::swap(ptr_, other.ptr_);
    return *this;
  }
  ~Buffer() {
    if (pool_free(ptr_) != POOL_OK) _exit(3);
  }

 private:
  void *ptr_ = nullptr;
};

std::vector<Buffer> before_first_use;
Buffer global;
thread_local Buffer of_this_thread;

Buffer &local_static() {
  static Buffer buffer(3 * MIB);
  return buffer;
}

// Allocates when it is destroyed, which is too late, and must learn that from the status.
struct LateUser {
  ~LateUser() {
    void *out = this;
    int status = pool_alloc(&out, 100);
    if (status != POOL_ERROR_SHUTTING_DOWN || out != nullptr) _exit(4);
  }
} late_user;

void *thread_with_buffer(void *) {
  of_this_thread = Buffer(5000);
  return nullptr;
}

}  // namespace

int main() {
  driver_open();
  for (int i = 0; i < 20; i++) before_first_use.emplace_back(size_t(1) << i);
  global = Buffer(MIB);
  of_this_thread = Buffer(MIB);
  local_static();
  struct check_thread thread;
  start_thread(&thread, thread_with_buffer, nullptr);
  join_thread(&thread);
  return check_result();
}
