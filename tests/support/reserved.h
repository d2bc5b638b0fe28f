// Address space without memory, and tensors whose strides need it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "rafter/attention.h"

namespace rafter::testing {

/// Address space without memory behind it until touched.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes) : bytes_(bytes) {
    void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = p == MAP_FAILED ? nullptr : p;
  }
  ~Reserved() {
    if (data_ != nullptr) {
      munmap(data_, bytes_);
    }
  }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

/// A tensor whose given stride exceeds 2^31 elements.
enum class Far : std::uint8_t { batch, seqlen, heads };

inline TensorView far_view(void* data, Far far, std::int64_t batch, std::int64_t seqlen,
                           std::int64_t heads, std::int64_t dim) {
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;
  TensorView t = TensorView::contiguous(data, DType::f32, batch, seqlen, heads, dim);
  (far == Far::batch    ? t.stride_batch
   : far == Far::seqlen ? t.stride_seqlen
                        : t.stride_heads) = kFar;
  return t;
}

inline float& at(const TensorView& t, std::int64_t b, std::int64_t i, std::int64_t h,
                 std::int64_t d) {
  return static_cast<float*>(
      t.data)[b * t.stride_batch + i * t.stride_seqlen + h * t.stride_heads + d];
}

}  // namespace rafter::testing
