// backward_sm90 beyond 2^31 elements: in the strides of its tensors, in its sums of dQ.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/backward_sm90_case.h"

namespace rafter::testing {
namespace {

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// Poisoned; none where the device has not so much.
void* device_memory(std::int64_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, at(bytes)) != cudaSuccess) {
    (void)cudaGetLastError();
    return nullptr;
  }
  EXPECT_EQ(cudaMemset(memory, 0xff, at(bytes)), cudaSuccess);
  return memory;
}

// I1: offsets beyond 2^31 elements in every tensor.
TEST(BackwardSm90, FarBatchesHaveTheBitsOfNearOnes) {
  RAFTER_NEEDS_SM90();
  AttentionProblem p = shape(2, 70, 64, Mask::causal());
  p.batch = 2;
  Loaded near(p, 1);
  near.run(nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::int64_t far_stride = (std::int64_t{1} << 31) + 64;
  constexpr std::size_t kSequence = 70 * 2 * 64;
  const DeviceBuffer* const buffers[] = {&near.q,   &near.k,  &near.v,  &near.o,
                                         &near.d_o, &near.dq, &near.dk, &near.dv};
  std::vector<TensorView> views;
  const auto release = [&views] {
    for (const TensorView& view : views) {
      (void)cudaFree(view.data);
    }
  };
  for (const DeviceBuffer* one : buffers) {
    void* memory = nullptr;
    if (cudaMalloc(&memory, (static_cast<std::size_t>(far_stride) + kSequence) * 2) !=
        cudaSuccess) {
      (void)cudaGetLastError();
      release();
      GTEST_SKIP() << "less than 34 GiB of device memory";
    }
    views.push_back(TensorView::contiguous(memory, DType::bf16, 2, 70, 2, 64));
    views.back().stride_batch = far_stride;
    for (std::size_t b = 0; b < 2; ++b) {
      ASSERT_EQ(
          cudaMemcpy(static_cast<std::uint16_t*>(memory) + b * static_cast<std::size_t>(far_stride),
                     static_cast<const std::uint16_t*>(one->data()) + b * kSequence, kSequence * 2,
                     cudaMemcpyDeviceToDevice),
          cudaSuccess);
    }
  }
  const std::vector<std::uint16_t> want = near.bits();
  const BackwardInputs in{
      .q = views[0],
      .k = views[1],
      .v = views[2],
      .o = views[3],
      .lse = LseView::contiguous(static_cast<float*>(near.lse.data()), 2, 2, 70),
      .d_o = views[4]};
  for (std::size_t t = 5; t < 8; ++t) {
    for (std::size_t b = 0; b < 2; ++b) {
      ASSERT_EQ(cudaMemset(static_cast<std::uint16_t*>(views[t].data) +
                               b * static_cast<std::size_t>(far_stride),
                           0xff, kSequence * 2),
                cudaSuccess);
    }
  }
  const Status status =
      entry().backward({near.problem,
                        in,
                        {views[5], views[6], views[7]},
                        {near.workspace.data(), static_cast<std::int64_t>(near.workspace.bytes())},
                        {}});
  EXPECT_TRUE(status.is_ok()) << status.message();
  std::vector<std::uint16_t> got(6 * kSequence);
  for (std::size_t i = 0; i < 6; ++i) {
    ASSERT_EQ(cudaMemcpy(got.data() + i * kSequence,
                         static_cast<std::uint16_t*>(views[5 + i / 2].data) +
                             i % 2 * static_cast<std::size_t>(far_stride),
                         kSequence * 2, cudaMemcpyDeviceToHost),
              cudaSuccess);
  }
  EXPECT_EQ(got, want);
  release();
}

// I1: dO a slice of the columns of a wide tensor; with a stride for the copy engine, and without.
TEST(BackwardSm90, ASliceOfAWideTensorGivesTheBitsOfAWholeOne) {
  RAFTER_NEEDS_SM90();
  constexpr std::int64_t kRows = 70000, kRow = 2 * 64;
  AttentionProblem p = shape(2, kRows, 64, Mask::causal());
  p.seqlen_kv = 200;
  Loaded loaded(p, 1);
  loaded.run(nullptr);
  const std::vector<std::uint16_t> whole = loaded.bits();
  for (const std::int64_t stride : {32768, 32769}) {
    const std::unique_ptr<void, cudaError_t (*)(void*)> memory(device_memory(kRows * stride * 2),
                                                               cudaFree);
    if (memory == nullptr) {
      GTEST_SKIP() << "less than 4.6 GB of device memory";
    }
    ASSERT_EQ(cudaMemcpy2D(memory.get(), at(stride * 2), loaded.d_o.data(), kRow * 2, kRow * 2,
                           at(kRows), cudaMemcpyDeviceToDevice),
              cudaSuccess);
    TensorView d_o = TensorView::contiguous(memory.get(), DType::bf16, 1, kRows, 2, 64);
    d_o.stride_seqlen = stride;
    loaded.poison();
    loaded.run(nullptr, d_o);
    EXPECT_TRUE(loaded.bits() == whole) << stride;
  }
}

// I2: more than 2^31 sums of dQ. The batch is one sequence over and over, by strides of 0.
TEST(BackwardSm90, SumsBeyond32BitsAreThoseOfASequenceAlone) {
  RAFTER_NEEDS_SM90();
  constexpr std::int64_t kBatch = 15000, kHeads = 3, kRows = 512, kKeys = 64, kDim = 128;
  constexpr std::int64_t kQueries = kRows * kHeads * kDim, kValues = kKeys * kHeads * kDim;
  AttentionProblem p = shape(kHeads, kRows, kDim);
  p.seqlen_kv = kKeys;
  Loaded alone(p, 1);
  alone.run(nullptr);
  p.batch = kBatch;
  const KernelProblem problem{p, 1, 0};
  const std::int64_t room = entry().workspace(problem);
  constexpr std::int64_t kGradients = kBatch * (kQueries + 2 * kValues) * 2;
  const std::unique_ptr<void, cudaError_t (*)(void*)> memory(device_memory(room + kGradients),
                                                             cudaFree);
  if (memory == nullptr) {
    GTEST_SKIP() << "less than " << (room + kGradients) / 1000000000 << " GB of device memory";
  }
  auto* const dq = static_cast<std::uint16_t*>(memory.get()) + (room + 15) / 16 * 8;
  std::uint16_t* const dk = dq + kBatch * kQueries;
  std::uint16_t* const dv = dk + kBatch * kValues;
  const auto repeated = [](const DeviceBuffer& one, std::int64_t length) {
    TensorView view = TensorView::contiguous(one.data(), DType::bf16, kBatch, length, kHeads, kDim);
    view.stride_batch = 0;
    return view;
  };
  LseView lse = LseView::contiguous(static_cast<float*>(alone.lse.data()), kBatch, kHeads, kRows);
  lse.stride_batch = 0;
  const Status status =
      entry().backward({problem,
                        {.q = repeated(alone.q, kRows),
                         .k = repeated(alone.k, kKeys),
                         .v = repeated(alone.v, kKeys),
                         .o = repeated(alone.o, kRows),
                         .lse = lse,
                         .d_o = repeated(alone.d_o, kRows)},
                        {TensorView::contiguous(dq, DType::bf16, kBatch, kRows, kHeads, kDim),
                         TensorView::contiguous(dk, DType::bf16, kBatch, kKeys, kHeads, kDim),
                         TensorView::contiguous(dv, DType::bf16, kBatch, kKeys, kHeads, kDim)},
                        {memory.get(), room},
                        {}});
  ASSERT_TRUE(status.is_ok()) << status.message();
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<std::uint16_t> want = alone.bits();
  // the first, those around 2^31 sums, the last
  constexpr std::int64_t kMiddle = (std::int64_t{1} << 31) / kQueries;
  for (const std::int64_t b : {std::int64_t{0}, kMiddle, kMiddle + 1, kBatch - 1}) {
    std::vector<std::uint16_t> got(want.size());
    std::uint16_t* to = got.data();
    for (const auto& [from, count] :
         {std::pair(dq + b * kQueries, kQueries), std::pair(dk + b * kValues, kValues),
          std::pair(dv + b * kValues, kValues)}) {
      ASSERT_EQ(cudaMemcpy(to, from, at(count * 2), cudaMemcpyDeviceToHost), cudaSuccess);
      to += count;
    }
    EXPECT_TRUE(got == want) << "sequence " << b;
  }
}

}  // namespace
}  // namespace rafter::testing
