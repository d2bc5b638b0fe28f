// Device memory for tests: owned, guarded on both sides, poisoned before use.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace rafter::testing {

/// `bytes` of device memory between two guard bands of 4 KiB; every byte starts as 0xff, which is a
/// NaN in bf16, f16 and f32. What is written is there when a call returns, for streams too that do
/// not wait for the default one.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&base_, bytes + 2 * kGuard), cudaSuccess);
    EXPECT_EQ(cudaMemset(base_, 0xff, bytes + 2 * kGuard), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  }
  template <typename T>
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size() * sizeof(T)) {
    upload(host.data(), bytes_);
  }
  ~DeviceBuffer() { (void)cudaFree(base_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return static_cast<std::uint8_t*>(base_) + kGuard; }
  std::size_t bytes() const { return bytes_; }
  void upload(const void* host, std::size_t bytes) {
    EXPECT_EQ(cudaMemcpy(data(), host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  }
  void poison() {
    EXPECT_EQ(cudaMemset(data(), 0xff, bytes_), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  }
  template <typename T>
  std::vector<T> download() const {
    std::vector<T> host(bytes_ / sizeof(T));
    EXPECT_EQ(cudaMemcpy(host.data(), data(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }
  /// Nothing was written outside.
  bool guards_intact() const {
    std::vector<std::uint8_t> guard(kGuard);
    for (const std::size_t at : {std::size_t{0}, kGuard + bytes_}) {
      EXPECT_EQ(cudaMemcpy(guard.data(), static_cast<std::uint8_t*>(base_) + at, kGuard,
                           cudaMemcpyDeviceToHost),
                cudaSuccess);
      for (const std::uint8_t byte : guard) {
        if (byte != 0xff) {
          return false;
        }
      }
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 4096;
  void* base_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace rafter::testing
