// Stands in for PyTorch's header of this name where torch_extension.cpp is compiled: the two macros and the
// two error types that the extension uses, as PyTorch declares them.

#ifndef C10_UTIL_EXCEPTION_H
#define C10_UTIL_EXCEPTION_H

#include <stdexcept>
#include <string>

namespace c10 {

struct SourceLocation {
  const char *function;
  const char *file;
  unsigned line;
};

class Error : public std::exception {
 public:
  Error(SourceLocation, std::string message) : message_(std::move(message)) {}
  const char *what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

class OutOfMemoryError : public Error {
  using Error::Error;
};

inline std::string str(const char *first, const std::string &second) { return first + second; }

}  // namespace c10

#define TORCH_CHECK_WITH(error_t, condition, ...)                                              \
  if (!(condition)) {                                                                          \
    throw ::c10::error_t({__func__, __FILE__, static_cast<unsigned>(__LINE__)}, ::c10::str(__VA_ARGS__)); \
  }
#define TORCH_CHECK(condition, ...) TORCH_CHECK_WITH(Error, condition, __VA_ARGS__)

#endif
