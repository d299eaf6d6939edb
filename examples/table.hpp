// Numbers as people read them, for the tables of the demo and the benchmarks.
//
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace table {

inline std::string number(double value, int decimals) {
  char text[64];
  snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

// 1234567 as "1,234,567".
inline std::string count(double value) {
  std::string text = number(value, 0);
  for (int at = static_cast<int>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), ",");
  }
  return text;
}

inline std::string bytes(double value) {
  const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  const bool whole = value == static_cast<double>(static_cast<uint64_t>(value));
  return number(value, whole ? 0 : value < 10 ? 2 : value < 100 ? 1 : 0) + " " + units[unit];
}

inline std::string duration(double seconds) {
  const char *const units[] = {"s", "ms", "us", "ns"};
  size_t unit = 0;
  for (; seconds < 1 && unit < 3; ++unit) seconds *= 1000;
  return number(seconds, seconds < 10 ? 2 : seconds < 100 ? 1 : 0) + " " + units[unit];
}

}  // namespace table
