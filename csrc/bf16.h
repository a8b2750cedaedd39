// A number of bfloat16.
#pragma once

#include <cstdint>
#include <cstring>

namespace disagg {

using bf16 = uint16_t;  // the upper half of a float32

inline float wide_of(bf16 narrow) {
  const uint32_t wide = uint32_t(narrow) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

// Converts a number that bfloat16 represents exactly.
inline bf16 bf16_of(float exact) {
  uint32_t bits;
  memcpy(&bits, &exact, sizeof bits);
  return static_cast<bf16>(bits >> 16);
}

}  // namespace disagg
