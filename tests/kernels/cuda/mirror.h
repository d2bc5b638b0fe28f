// Copies of host memory on the device: a case that is laid out on the host runs there with its
// strides, its poison and its guard bands, and what was written comes back.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "rafter/attention.h"
#include "rafter/cache.h"
#include "support/attention_case.h"

namespace rafter::testing {

class Mirror {
 public:
  explicit Mirror(std::span<const Region> regions) {
    for (const Region& region : regions) {
      if (region.bytes == 0) {
        continue;
      }
      Copy copy{.host = static_cast<std::byte*>(region.data), .bytes = region.bytes};
      EXPECT_EQ(cudaMalloc(&copy.memory, region.bytes + kAlign), cudaSuccess);
      // The same remainder of the address: alignment is a part of the case.
      const auto past = reinterpret_cast<std::uintptr_t>(region.data) % kAlign;
      copy.device = static_cast<std::byte*>(copy.memory) + past;
      EXPECT_EQ(cudaMemcpy(copy.device, copy.host, copy.bytes, cudaMemcpyHostToDevice),
                cudaSuccess);
      copies_.push_back(copy);
    }
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);  // the last may still be on its way
  }
  ~Mirror() {
    for (const Copy& copy : copies_) {
      (void)cudaFree(copy.memory);
    }
  }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  /// Where a place of the host's memory is on the device. Null stays.
  template <typename T>
  T* at(T* host) const {
    const auto* const place = reinterpret_cast<const std::byte*>(host);
    for (const Copy& copy : copies_) {
      if (place >= copy.host && place < copy.host + copy.bytes) {
        return reinterpret_cast<T*>(copy.device + (place - copy.host));
      }
    }
    EXPECT_EQ(host, nullptr) << "no region has this memory";
    return nullptr;
  }
  TensorView at(TensorView view) const {
    view.data = at(static_cast<std::byte*>(view.data));
    return view;
  }
  LseView at(LseView view) const {
    view.data = at(view.data);
    return view;
  }
  IndexView at(IndexView view) const {
    view.data = at(static_cast<const std::byte*>(view.data));
    return view;
  }
  ForwardInputs at(const ForwardInputs& in) const {
    ForwardInputs out = in;
    for (TensorView* view : {&out.q, &out.k, &out.v, &out.k_scale, &out.v_scale}) {
      *view = at(*view);
    }
    for (IndexView* view :
         {&out.cu_seqlens_q, &out.cu_seqlens_kv, &out.seqused_kv, &out.page_table}) {
      *view = at(*view);
    }
    out.tree_mask.data = at(out.tree_mask.data);
    return out;
  }
  ForwardOutputs at(const ForwardOutputs& out) const {
    return {.o = at(out.o),
            .lse = at(out.lse),
            .bad_pages = {at(out.bad_pages.data), out.bad_pages.size}};
  }
  AppendInputs at(const AppendInputs& in) const {
    AppendInputs out = in;
    for (TensorView* view : {&out.k, &out.v, &out.q, &out.k_scale, &out.v_scale}) {
      *view = at(*view);
    }
    for (IndexView* view : {&out.seqused_kv, &out.seqused_new, &out.page_table}) {
      *view = at(*view);
    }
    out.rope.cos = at(out.rope.cos);
    out.rope.sin = at(out.rope.sin);
    return out;
  }
  AppendOutputs at(const AppendOutputs& out) const {
    return {.k_cache = at(out.k_cache),
            .v_cache = at(out.v_cache),
            .k_scale = at(out.k_scale),
            .v_scale = at(out.v_scale),
            .q = at(out.q),
            .dropped = {at(out.dropped.data), out.dropped.size}};
  }

  /// What the device has, into the host's memory.
  void fetch() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (const Copy& copy : copies_) {
      EXPECT_EQ(cudaMemcpy(copy.host, copy.device, copy.bytes, cudaMemcpyDeviceToHost),
                cudaSuccess);
    }
  }

 private:
  static constexpr std::size_t kAlign = 256;
  struct Copy {
    std::byte* host = nullptr;
    std::size_t bytes = 0;
    void* memory = nullptr;
    std::byte* device = nullptr;
  };
  std::vector<Copy> copies_;
};

/// RunOptions::forward of a CUDA device.
inline Status mirrored_forward(const Plan& plan, const ForwardInputs& in, const ForwardOutputs& out,
                               Workspace workspace, std::span<const Region> regions) {
  const Mirror mirror(regions);
  const Workspace lent{mirror.at(static_cast<std::byte*>(workspace.data)), workspace.bytes};
  const Status status = plan.forward(mirror.at(in), mirror.at(out), lent);
  mirror.fetch();
  return status;
}

}  // namespace rafter::testing
