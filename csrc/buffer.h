#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace disagg {

// Memory that can grow, which loses its contents. Only for types without constructors.
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

// One `T` for each thread of a step, kept from step to step.
template <class T>
class PerThread {
 public:
  PerThread() = default;
  ~PerThread() { delete[] all_; }
  PerThread(const PerThread&) = delete;
  PerThread& operator=(const PerThread&) = delete;

  // Returns false if there is not enough memory. The contents for fewer threads are lost.
  bool hold(int num_threads) {
    if (num_threads <= num_threads_) return true;
    auto* grown = new (std::nothrow) T[num_threads];
    if (grown == nullptr) return false;
    delete[] all_;
    all_ = grown;
    num_threads_ = num_threads;
    return true;
  }
  T& operator[](int thread) { return all_[thread]; }

 private:
  T* all_ = nullptr;
  int num_threads_ = 0;
};

}  // namespace disagg
