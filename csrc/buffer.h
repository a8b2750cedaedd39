#pragma once

#include <cstdint>
#include <cstdlib>

namespace disagg {

// Memory that grows; what was in it is lost then. Of types that need no constructor.
template <class T>
class Buffer {
 public:
  ~Buffer() { free(memory_); }
  bool hold(int64_t size) {
    if (size <= size_) return true;
    free(memory_);
    const int64_t nbytes = (size * int64_t(sizeof(T)) + 63) / 64 * 64;
    memory_ = static_cast<T*>(aligned_alloc(64, nbytes));
    size_ = memory_ == nullptr ? 0 : size;
    return memory_ != nullptr;
  }
  T* get() const { return memory_; }

 private:
  T* memory_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace disagg
