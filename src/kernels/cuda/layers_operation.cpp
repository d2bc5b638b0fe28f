// The operations of layers.h on CUDA: the host side of inst/layers.cu, inst/vector_rows.cu,
// inst/packed_*.cu and inst/chain_rows.cu, and products by cuBLASLt.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "dispatch/operation_entry.h"
#include "hw/cuda/blas.h"
#include "hw/cuda/launch.h"
#include "kernels/cuda/chain_rows.h"
#include "kernels/cuda/layers.h"
#include "kernels/cuda/packed_rows.h"

namespace rafter {
namespace {

/// run(stream) on the call's device; nothing where there is nothing to do (`size` is 0).
template <typename Run>
Status on_device(const LayerPlace& place, std::int64_t size, Run run) {
  if (size == 0) {
    return Status::ok();
  }
  const cuda::DeviceScope device(place.device_index);
  return device.status() ? run(place.stream.handle) : device.status();
}

/// Rows that are counted in 31 bits, elements of a row and heads too.
Result<cuda::RowCount> count_of(const TensorView& t) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  const std::int64_t rows = t.batch * t.seqlen * t.heads;
  if (rows > kMost || t.head_dim > kMost) {
    return Status::unsupported("rows", fmt::format("{} of {}", rows, t.head_dim),
                               "fewer than 2^31 of fewer than 2^31");
  }
  return cuda::RowCount{rows, static_cast<int>(t.seqlen), static_cast<int>(t.heads),
                        static_cast<int>(t.head_dim)};
}

Status rmsnorm(const RmsNormCall& call) {
  const Result<cuda::RowCount> count = count_of(call.in.x);
  if (!count) {
    return count.status();
  }
  if (call.in.x.head_dim > cuda::kMostNormElements) {
    return Status::unsupported("x.head_dim", fmt::format("{}", call.in.x.head_dim),
                               fmt::format("up to {} are held", cuda::kMostNormElements));
  }
  return on_device(call.place, call.in.x.elements(), [&](void* stream) {
    return cuda::launch_rmsnorm(
        {.count = *count,
         .x = cuda::rows_of(call.in.x),
         .residual = cuda::rows_of(call.in.residual),
         .y = cuda::rows_of(call.out.y),
         .sum = cuda::rows_of(call.out.sum),
         .weight = call.in.weight.data,
         .weight_in_vectors = reinterpret_cast<std::uintptr_t>(call.in.weight.data) % 16 == 0,
         .eps = call.in.eps},
        stream);
  });
}

Status pointwise(const PointwiseCall& call) {
  const Result<cuda::RowCount> count = count_of(call.a);
  return !count ? count.status() : on_device(call.place, call.a.elements(), [&](void* stream) {
    cuda::PointwiseParams params;
    params.count = *count;
    params.a = cuda::rows_of(call.a);
    params.b = cuda::rows_of(call.b);
    params.out = cuda::rows_of(call.out);
    params.function = static_cast<int>(call.function);
    return cuda::launch_pointwise(params, stream);
  });
}

Status rope(const RopeCall& call) {
  const Result<cuda::RowCount> count = count_of(call.x);
  return !count ? count.status() : on_device(call.place, call.x.elements(), [&](void* stream) {
    cuda::RopeParams params;
    params.count = *count;
    params.x = cuda::rows_of(call.x);
    params.out = cuda::rows_of(call.out);
    params.positions = cuda::device_indices(call.positions);
    params.rope = cuda::rope_tables(call.rope);
    return cuda::launch_rope(params, stream);
  });
}

Status gather(const GatherCall& call) {
  const Result<cuda::RowCount> count = count_of(call.out);
  return !count ? count.status() : on_device(call.place, call.out.elements(), [&](void* stream) {
    cuda::GatherParams params;
    params.table = cuda::rows_of(call.table);
    params.out = cuda::rows_of(call.out);
    params.rows = cuda::device_indices(call.rows);
    params.table_rows = call.table.seqlen;
    params.count = call.rows.size;
    params.size = count->size;
    return cuda::launch_gather(params, stream);
  });
}

/// Products of so few rows leave SMs idle unless k is cut as well.
constexpr std::int64_t kFewRows = 256;

bool takes_vector_rows(std::int64_t rows, DType dtype) {
  return rows <= cuda::kMostVectorRows && dtype != DType::f32;
}

base::PackedShape shape_of(const PackedWeight& w) { return {w.dtype, w.n, w.k, w.group_size}; }

bool linear_dequantizes(std::int64_t rows, DType dtype, const PackedWeight& packed) {
  return dtype == DType::f32 || !cuda::packed_rows_takes(rows, shape_of(packed));
}

const char* linear_kernel(std::int64_t rows, DType dtype, const PackedWeight& packed) {
  if (packed.k > 0) {
    return linear_dequantizes(rows, dtype, packed) ? "dequantize+cublaslt" : "packed_rows";
  }
  return takes_vector_rows(rows, dtype) ? "vector_rows" : "cublaslt";
}

/// Loads of 16 bytes; sizes and strides are multiples of eight elements.
Status check_addresses(const LinearCall& call) {
  const std::pair<const char*, const void*> addresses[] = {{"x", call.in.x.data},
                                                           {"weight", call.in.weight.data},
                                                           {"bias", call.in.bias.data},
                                                           {"out", call.out.data},
                                                           {"workspace", call.workspace.data}};
  for (const auto& [name, address] : addresses) {
    if (reinterpret_cast<std::uintptr_t>(address) % 16 != 0) {
      return Status::invalid_argument(name, "an address that is not a multiple of 16",
                                      "addresses aligned to 16 bytes");
    }
  }
  return Status::ok();
}

/// The packed weight and a matrix, as the kernels that go between them take them.
cuda::PackParams pack_params(const TensorView& view, const PackedWeight& packed) {
  return {.matrix = cuda::rows_of(view), .packed = packed.data, .shape = shape_of(packed)};
}
Status quantize(const PackCall& call) {
  return on_device(call.place, call.packed.n, [&](void* stream) {
    return cuda::launch_quantize(pack_params(call.view, call.packed), stream);
  });
}
Status dequantize(const PackCall& call) {
  return on_device(call.place, call.packed.n, [&](void* stream) {
    return cuda::launch_dequantize(pack_params(call.view, call.packed), stream);
  });
}

Status multiply(const LinearCall& call, const void* weight, std::int64_t n, void* stream) {
  const TensorView& x = call.in.x;
  return cuda::matmul({.dtype = x.dtype,
                       .c_is_f32 = call.out.dtype == DType::f32,
                       .b_transposed = true,
                       .bias = call.in.bias.data,
                       .split = x.seqlen <= kFewRows,
                       .m = x.seqlen,
                       .n = n,
                       .k = x.head_dim,
                       .lda = x.stride_seqlen,
                       .ldb = x.head_dim,
                       .ldc = call.out.stride_seqlen},
                      x.data, weight, call.out.data, call.workspace.data, stream);
}

Status linear_packed(const LinearCall& call, void* stream) {
  const TensorView& x = call.in.x;
  const PackedWeight& packed = call.in.packed;
  if (linear_dequantizes(x.seqlen, x.dtype, packed)) {  // behind what cuBLASLt may use
    auto* const whole = static_cast<std::byte*>(call.workspace.data) + cuda::kMatmulWorkspaceBytes;
    const TensorView weight = matrix(whole, x.dtype, packed.n, packed.k);
    Status done = cuda::launch_dequantize(pack_params(weight, packed), stream);
    return done ? multiply(call, whole, packed.n, stream) : done;
  }
  return cuda::launch_packed_rows({.x = x.data,
                                   .weight = packed.data,
                                   .bias = call.in.bias.data,
                                   .y = call.out.data,
                                   .x_stride = x.stride_seqlen,
                                   .y_stride = call.out.stride_seqlen,
                                   .shape = shape_of(packed),
                                   .m = static_cast<int>(x.seqlen),
                                   .dtype = x.dtype,
                                   .y_is_f32 = call.out.dtype == DType::f32,
                                   .weight_is_settled = call.in.weight_is_settled},
                                  stream);
}

Status linear(const LinearCall& call) {
  const TensorView& x = call.in.x;
  if (Status s = check_addresses(call); !s) {
    return s;
  }
  const bool packed = call.in.packed.data != nullptr;
  const std::int64_t n = packed ? call.in.packed.n : call.in.weight.seqlen;
  return on_device(call.place, std::min(x.seqlen, n), [&](void* stream) {
    if (packed) {
      return linear_packed(call, stream);
    }
    if (takes_vector_rows(x.seqlen, x.dtype)) {
      return cuda::launch_vector_rows({.x = x.data,
                                       .weight = call.in.weight.data,
                                       .bias = call.in.bias.data,
                                       .y = call.out.data,
                                       .x_stride = x.stride_seqlen,
                                       .y_stride = call.out.stride_seqlen,
                                       .n = n,
                                       .m = static_cast<int>(x.seqlen),
                                       .k = static_cast<int>(x.head_dim),
                                       .dtype = x.dtype,
                                       .y_is_f32 = call.out.dtype == DType::f32,
                                       .weight_is_settled = call.in.weight_is_settled},
                                      stream);
    }
    return multiply(call, call.in.weight.data, n, stream);
  });
}

cuda::ChainParams chain_params(std::span<const Link> links, float eps) {
  cuda::ChainParams params;
  params.eps = eps;
  params.count = static_cast<int>(links.size());
  params.m = static_cast<int>(links[0].x.seqlen);
  params.dtype = links[0].x.dtype;
  for (std::size_t i = 0; i < links.size(); ++i) {
    const Link& link = links[i];
    const bool packed = link.packed.k > 0;
    params.phases[i] = {.x = link.x.data,
                        .norm = link.norm.data,
                        .weight = packed ? link.packed.data : link.weight.data,
                        .bias = link.bias.data,
                        .y = link.out.data,
                        .x_stride = link.x.stride_seqlen,
                        .y_stride = link.out.stride_seqlen,
                        .packed = packed ? std::optional(link.packed.dtype) : std::nullopt,
                        .group_size = static_cast<int>(link.packed.group_size),
                        .n = packed ? link.packed.n : link.weight.seqlen,
                        .k = static_cast<int>(link.x.head_dim),
                        .end = link.end};
  }
  return params;
}

std::string why_no_linear_chain(std::span<const Link> links) {
  if (links.empty() || links.size() > cuda::kMostPhases) {
    return fmt::format("a chain has 1 to {} products", cuda::kMostPhases);
  }
  const std::int64_t m = links[0].x.seqlen;
  if (m < 1 || m > cuda::kMostChainRows) {
    return fmt::format("chain_rows takes 1 to {} rows", cuda::kMostChainRows);
  }
  const PackedWeight& first = links[0].packed;
  for (const Link& link : links) {
    const PackedWeight& w = link.packed;
    if (link.x.dtype == DType::f32 || link.x.dtype != links[0].x.dtype) {
      return "chain_rows multiplies bf16 or f16";
    }
    if ((w.k == 0) != (first.k == 0) || (w.k != 0 && w.dtype != first.dtype) ||
        w.group_size != first.group_size) {
      return "the weights of a chain have one format";
    }
    if (link.norm.head_dim > 0 && link.x.head_dim > cuda::kMostChainNorm) {
      return fmt::format("chain_rows normalises up to {} elements", cuda::kMostChainNorm);
    }
    if (link.x.head_dim % 8 != 0) {
      return "rows are in multiples of 8";
    }
  }
  return cuda::why_no_chain(chain_params(links, 0));
}

std::int64_t linear_chain_workspace_bytes(std::span<const Link> links) {
  std::int64_t elements = 0;
  for (std::size_t i = 0; i + 1 < links.size(); ++i) {
    elements += links[i].out.seqlen * links[i].out.head_dim;
  }
  return cuda::chain_bytes(elements);
}

Status linear_chain(const LinearChainCall& call) {
  for (const Link& link : call.links) {
    const LinearInputs in{.x = link.x, .weight = link.weight, .bias = link.bias};
    if (Status s = check_addresses({in, link.out, call.workspace, call.place}); !s) {
      return s;
    }
    if (reinterpret_cast<std::uintptr_t>(link.norm.data) % 16 != 0) {
      return Status::invalid_argument("norm", "an address that is not a multiple of 16",
                                      "addresses aligned to 16 bytes");
    }
  }
  return on_device(call.place, 1, [&](void* stream) {
    cuda::ChainParams params = chain_params(call.links, call.eps);
    params.words = static_cast<cuda::ChainWords*>(call.workspace.data);
    return cuda::launch_chain_rows(params, stream);
  });
}

Status fill_uniform(const FillUniformCall& call) {
  return on_device(call.place, call.out.elements(), [&](void* stream) {
    return cuda::launch_fill_uniform(call.out.data, call.out.dtype, call.out.elements(), call.seed,
                                     call.bound, stream);
  });
}

Status advance(const AdvanceCall& call) {
  return on_device(call.place, call.counts.size, [&](void* stream) {
    return cuda::launch_advance(call.counts.data, call.counts.size, call.by, stream);
  });
}

std::string why_no_linear(DType) { return cuda::why_no_cublaslt(); }

constexpr LayerOperations kLayers = {.rmsnorm = rmsnorm,
                                     .pointwise = pointwise,
                                     .rope = rope,
                                     .gather = gather,
                                     .linear = linear,
                                     .quantize = quantize,
                                     .dequantize = dequantize,
                                     .fill_uniform = fill_uniform,
                                     .advance = advance,
                                     .linear_workspace_bytes = cuda::kMatmulWorkspaceBytes,
                                     .linear_kernel = linear_kernel,
                                     .linear_dequantizes = linear_dequantizes,
                                     .why_no_linear = why_no_linear,
                                     .linear_chain = linear_chain,
                                     .why_no_linear_chain = why_no_linear_chain,
                                     .linear_chain_workspace_bytes = linear_chain_workspace_bytes};

}  // namespace

std::span<const OperationEntry> operations_layers_cuda() {
  static const std::array<OperationEntry, 1> kEntries = {OperationEntry{
      .device = Device::Kind::cuda, .why_not = cuda::why_not_sm90, .layers = &kLayers}};
  return kEntries;
}

}  // namespace rafter
