#include "hw/cuda/tensor_map.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace rafter::cuda {
namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver is not linked: a build with CUDA must load on a machine without one.
EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSince = 12000;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                       cudaEnableDefault, &found) != cudaSuccess ||
      found != cudaDriverEntryPointSuccess) {
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(function);
}

std::int64_t element_bytes(const TensorView& tensor) { return bits_of(tensor.dtype) / 8; }

Status check_readable(const char* name, const TensorView& tensor) {
  const std::int64_t chunk = 16 / element_bytes(tensor);  // elements of 16 bytes
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % 16 != 0) {
    return Status::invalid_argument(fmt::format("{}.data", name), fmt::format("{}", tensor.data),
                                    "addresses aligned to 16 bytes");
  }
  const std::pair<const char*, std::pair<std::int64_t, std::int64_t>> strides[] = {
      {"stride_batch", {tensor.stride_batch, tensor.batch}},
      {"stride_seqlen", {tensor.stride_seqlen, tensor.seqlen}},
      {"stride_heads", {tensor.stride_heads, tensor.heads}}};
  for (const auto& [field, stride_size] : strides) {
    const auto [stride, size] = stride_size;
    if (size > 1 && (stride < 0 || stride % chunk != 0)) {
      return Status::invalid_argument(fmt::format("{}.{}", name, field), fmt::format("{}", stride),
                                      fmt::format("multiples of {} elements from 0", chunk));
    }
  }
  if (tensor.seqlen > 1 && tensor.stride_seqlen == 0) {
    return Status::invalid_argument(fmt::format("{}.stride_seqlen", name), "0",
                                    fmt::format("multiples of {0} elements from {0}", chunk));
  }
  return Status::ok();
}

}  // namespace

Status make_tensor_map(const char* name, const TensorView& tensor, int box_rows,
                       TensorMap& result) {
  static const EncodeTiled encode = find_encode_tiled();
  if (encode == nullptr) {
    return Status::device_error("driver", "no cuTensorMapEncodeTiled", "CUDA 12.0 or newer");
  }
  if (Status readable = check_readable(name, tensor); !readable) {
    return readable;
  }
  result.heads_step = tensor.heads > 1 && tensor.stride_heads != 0;
  result.batch_step = tensor.batch > 1 && tensor.stride_batch != 0;
  // A dimension of one element needs a legal stride all the same.
  const std::int64_t bytes = element_bytes(tensor);
  const auto stride_bytes = [bytes](std::int64_t stride, std::int64_t size) {
    return static_cast<cuuint64_t>(size > 1 && stride > 0 ? stride * bytes : 16);
  };
  const auto extent = [](std::int64_t size) {
    return static_cast<cuuint64_t>(std::max<std::int64_t>(size, 1));
  };
  const cuuint64_t dims[4] = {extent(tensor.head_dim), extent(tensor.seqlen),
                              result.heads_step != 0 ? extent(tensor.heads) : 1,
                              result.batch_step != 0 ? extent(tensor.batch) : 1};
  const cuuint64_t strides[3] = {stride_bytes(tensor.stride_seqlen, tensor.seqlen),
                                 stride_bytes(tensor.stride_heads, tensor.heads),
                                 stride_bytes(tensor.stride_batch, tensor.batch)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / bytes),
                             static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  // The copy moves bits: types of one width share one element type here.
  // The map of a tensor without elements must have an address and sizes of 1: read it outside them.
  void* const data = tensor.data != nullptr ? tensor.data : reinterpret_cast<void*>(4096);
  const CUresult code = encode(
      &result.map, bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 4,
      data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    return Status::invalid_argument(
        name,
        fmt::format("[{}, {}, {}, {}] with strides {}, {}, {}", tensor.batch, tensor.seqlen,
                    tensor.heads, tensor.head_dim, tensor.stride_batch, tensor.stride_seqlen,
                    tensor.stride_heads),
        "sizes below 2^32 and strides below 2^40 bytes (the copy engine's limits)");
  }
  return Status::ok();
}

}  // namespace rafter::cuda
