// Memory between guard bands, filled with a chosen byte before use: what a kernel reads or writes
// outside its tensor shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace rafter::testing {

/// The byte that memory outside the valid region holds. 0xff is NaN in f32, f16 and bf16.
enum class Fill : unsigned char { nan = 0xff, zero = 0x00 };

/// Some memory of the host.
struct Region {
  void* data = nullptr;
  std::size_t bytes = 0;
};

class GuardedBuffer {
 public:
  static constexpr std::size_t kGuard = 4096;
  static constexpr unsigned char kGuardByte = 0xff;  // NaN as well: a read past the end poisons

  GuardedBuffer() = default;
  /// `skew` shifts the data off its 64-byte alignment.
  GuardedBuffer(std::size_t bytes, Fill fill, std::size_t skew = 0)
      : memory_(bytes + 2 * kGuard + 64 + skew, kGuardByte), bytes_(bytes) {
    const auto start = reinterpret_cast<std::uintptr_t>(memory_.data()) + kGuard;
    offset_ = kGuard + (64 - start % 64) % 64 + skew;
    std::memset(data(), static_cast<int>(fill), bytes);
  }

  void* data() { return memory_.data() + offset_; }
  std::size_t bytes() const { return bytes_; }
  /// The guard bands as well.
  Region region() { return {memory_.data(), memory_.size()}; }

  /// True while nothing outside [data, data + bytes) has changed.
  bool intact() const {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if ((i < offset_ || i >= offset_ + bytes_) && memory_[i] != kGuardByte) {
        return false;
      }
    }
    return true;
  }

 private:
  std::vector<unsigned char> memory_;
  std::size_t bytes_ = 0;
  std::size_t offset_ = 0;
};

}  // namespace rafter::testing
