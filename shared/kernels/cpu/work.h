// Sharing work among the threads of torch's pool, and scratch memory that a thread keeps from call to call.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <new>

namespace twostroke {

// Runs body(i) for each i in [0, num_items): each thread takes the next item as it gets free, so that uneven items even out.
template <typename Body>
void for_each_item(int64_t num_items, const Body& body) {
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_items);
  if (num_threads <= 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < num_items; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) body(i);
  });
}

// Uninitialized floats that grow to the largest size asked for. Declare as `static thread_local`.
class Scratch {
 public:
  float* at_least(int64_t size) {
    if (size > size_) {
      floats_.reset(static_cast<float*>(::operator new[](size * sizeof(float), kCacheLine)));
      size_ = size;
    }
    return floats_.get();
  }

 private:
  static constexpr std::align_val_t kCacheLine{64};
  struct Free {
    void operator()(float* p) const { ::operator delete[](p, kCacheLine); }
  };
  std::unique_ptr<float[], Free> floats_;
  int64_t size_ = 0;
};

}  // namespace twostroke
