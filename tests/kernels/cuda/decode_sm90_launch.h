// Which of its kernels decode_sm90 queues for a problem, and what it tells it.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "kernels/cuda/decode_sm90.h"
#include "kernels/cuda/decode_sm90_case.h"
#include "kernels/cuda/device_buffer.h"

namespace rafter::testing {

struct DecodeLaunch {
  /// "units", "columns" (units too), "clusters", "columns in clusters", "heads"; "unknown" has
  /// failed the test.
  std::string way = "unknown";
  unsigned cluster = 0;  // CTAs that are launched as one, in clusters
  cuda::DecodeParams params = {};
};

/// By the name of the kernel.
inline std::string decode_way_of(std::string_view name) {
  constexpr std::pair<std::string_view, const char*> kWays[] = {
      {"decode_sm90_columns_cluster_kernel", "columns in clusters"},
      {"decode_sm90_cluster_kernel", "clusters"},
      {"decode_sm90_heads_kernel", "heads"},
      {"decode_sm90_columns_kernel", "columns"},
      {"decode_sm90_kernel", "units"}};
  for (const auto& [kernel, way] : kWays) {
    if (name.find(kernel) != name.npos) {
      return way;
    }
  }
  ADD_FAILURE() << "\"" << name << "\" is none of the kernels";
  return "unknown";
}

/// The launch that a plan queues for contiguous tensors. Nothing runs.
inline DecodeLaunch launch_of(const AttentionProblem& problem, std::int64_t splits = 0) {
  const Result<Plan> made =
      plan(problem, Device::cuda(), {.kernel = "decode_sm90", .splits = splits});
  EXPECT_TRUE(made) << made.status().message();
  if (!made) {
    return {};
  }
  const AttentionProblem& p = made->problem();
  const DeviceBuffer memory(std::size_t{4096});
  auto* const place = static_cast<std::byte*>(memory.data());  // of o
  std::byte* const inputs = place + (std::int64_t{1} << 32);
  const auto view = [&](DType dtype, std::int64_t batch, std::int64_t rows, std::int64_t heads,
                        std::int64_t dim) {
    return TensorView::contiguous(inputs, dtype, batch, rows, heads, dim);
  };
  const bool packed = p.layout == Layout::packed, pages = p.layout == Layout::paged;
  const DType kv = p.kv_dtype.value_or(p.dtype);
  const auto cache = [&](std::int64_t dim) {
    return pages    ? view(kv, p.num_pages, p.page_size, p.heads_kv, dim)
           : packed ? view(kv, 1, p.total_kv, p.heads_kv, dim)
                    : view(kv, p.batch, p.seqlen_kv, p.heads_kv, dim);
  };
  const auto queries = [&](std::int64_t dim) {
    return packed ? view(p.dtype, 1, p.total_q, p.heads_q, dim)
                  : view(p.dtype, p.batch, p.seqlen_q, p.heads_q, dim);
  };
  ForwardInputs in{.q = queries(p.head_dim), .k = cache(p.head_dim), .v = cache(p.head_dim_v)};
  if (packed) {
    in.cu_seqlens_q = in.cu_seqlens_kv = {memory.data(), DType::i32, p.batch + 1, 0};
  }
  if (p.seqused_kv) {
    in.seqused_kv = {memory.data(), DType::i32, p.batch, 0};
  }
  if (pages) {
    const std::int64_t cols = (p.seqlen_kv + p.page_size - 1) / p.page_size;
    in.page_table = {memory.data(), DType::i32, p.batch * cols, cols};
  }
  if (p.tree_mask) {
    in.tree_mask =
        BitsView::contiguous(static_cast<const std::uint64_t*>(memory.data()), p.batch, p.seqlen_q);
  }
  if (kv == DType::int8) {
    in.k_scale = in.v_scale =
        TensorView::contiguous(inputs, DType::f32, in.k.batch, in.k.seqlen, in.k.heads, 1);
  }
  TensorView out = queries(p.head_dim_v);
  out.data = place;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status status = made->forward(
      in, {out}, {place + (std::int64_t{1} << 30), made->workspace_bytes()}, {stream});
  EXPECT_TRUE(status) << status.message();
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphNode_t node = nullptr;
  std::size_t count = 1;
  EXPECT_EQ(cudaGraphGetNodes(graph, &node, &count), cudaSuccess);
  cudaKernelNodeParams launch = {};
  const char* name = nullptr;
  cudaLaunchAttributeValue value = {};
  EXPECT_EQ(cudaGraphKernelNodeGetParams(node, &launch), cudaSuccess);
  EXPECT_EQ(cudaFuncGetName(&name, launch.func), cudaSuccess);
  EXPECT_EQ(cudaGraphKernelNodeGetAttribute(node, cudaLaunchAttributeClusterDimension, &value),
            cudaSuccess);
  DecodeLaunch found{.way = decode_way_of(name != nullptr ? name : ""),
                     .cluster = value.clusterDim.x};
  if (found.way != "unknown" && launch.kernelParams != nullptr) {  // the first of every kernel
    found.params = *static_cast<const cuda::DecodeParams*>(launch.kernelParams[0]);
  }
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
  return found;
}

inline DecodeLaunch launch_of(const Case& c, std::int64_t splits = 0) {
  return launch_of(sized_problem(c), splits);
}

}  // namespace rafter::testing
