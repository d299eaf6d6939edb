// torch_extension.cpp: examples/torch/extension.cpp, called as PyTorch calls it: what fails for memory throws
// PyTorch's error for that, what fails otherwise throws its general one, and no tensor is without memory.

#include "../examples/torch/extension.cpp"

#include "check.h"
#include "driver.h"

#include <functional>
#include <vector>

namespace {

const std::function<void *(size_t, int, CUstream_st *)> alloc = cudapool_torch_alloc;
const std::function<void(void *, size_t, int, CUstream_st *)> release = cudapool_torch_free;

enum class Outcome { block, null, out_of_memory, error };

Outcome outcome_of(size_t size, int device, std::string *message, void **block) {
  try {
    *block = alloc(size, device, nullptr);
    return *block != nullptr ? Outcome::block : Outcome::null;
  } catch (const c10::OutOfMemoryError &error) {
    *message = error.what();
    return Outcome::out_of_memory;
  } catch (const c10::Error &error) {
    *message = error.what();
    return Outcome::error;
  }
}

void serves_and_frees() {
  std::string message;
  void *block = nullptr;
  CHECK(outcome_of(MIB, 0, &message, &block) == Outcome::block);
  CHECK(strcmp(info_of(block).owner, "torch") == 0);
  release(block, MIB, 0, nullptr);
  CHECK(outcome_of(0, 0, &message, &block) == Outcome::null);
  release(nullptr, 0, 0, nullptr);
  CHECK_EQ(stats_of(0).live_blocks, 0);
}

void throws_what_pytorch_throws() {
  std::string message;
  void *block = nullptr;
  CHECK(outcome_of(SIZE_MAX / 2, 0, &message, &block) == Outcome::out_of_memory);
  CHECK(message.find("CUDA out of memory: ") == 0 &&
        message.find(std::to_string(SIZE_MAX / 2)) != std::string::npos);
  CHECK(outcome_of(MIB, 64, &message, &block) == Outcome::error);
  CHECK(message.find("cudapool: ") == 0 && message.find("64") != std::string::npos);
}

void throws_until_there_is_memory() {
  if (!needs_sim()) return;
  std::vector<void *> blocks;
  std::string message;
  void *block = nullptr;
  sim.set_memory(0, 64 * MIB);
  while (outcome_of(7 * MIB, 0, &message, &block) == Outcome::block) blocks.push_back(block);
  CHECK(outcome_of(7 * MIB, 0, &message, &block) == Outcome::out_of_memory);
  CHECK(blocks.size() >= 7);
  release(blocks.back(), 0, 0, nullptr);
  CHECK(outcome_of(7 * MIB, 0, &message, &blocks.back()) == Outcome::block);
  for (void *each : blocks) release(each, 0, 0, nullptr);
  CHECK_TRIMS_TO_ZERO(0);
}

}  // namespace

int main() {
  driver_start(0);
  RUN(serves_and_frees);
  RUN(throws_what_pytorch_throws);
  RUN(throws_until_there_is_memory);
  return driver_result();
}
