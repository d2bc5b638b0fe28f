// The operations of layers.h on the CPU: rows widened to f32, computed, rounded back; products by
// oneDNN with all threads.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "base/element.h"
#include "base/packed_weight.h"
#include "dispatch/operation_entry.h"
#include "kernels/cpu/onednn_common.h"
#include "kernels/cpu/rows_common.h"
#include "tiles/append_rows.h"
#include "tiles/uniform.h"

namespace rafter {
namespace {

constexpr std::int64_t kSmall = 1 << 15;  // elements that are not worth waking threads for

const cpu::RowOps& ops() { return cpu::row_ops(cpu::onednn_instruction_set()); }

/// Element 0 of row `i` of a tensor, its rows numbered batch by batch, token by token, head by
/// head.
void* row_of(const TensorView& t, std::int64_t i) {
  const std::int64_t head = i % t.heads, token = i / t.heads % t.seqlen,
                     batch = i / t.heads / t.seqlen;
  const std::int64_t at = batch * t.stride_batch + token * t.stride_seqlen + head * t.stride_heads;
  return static_cast<std::byte*>(t.data) + at * (bits_of(t.dtype) / 8);
}

std::int64_t rows_in(const TensorView& t) { return t.batch * t.seqlen * t.heads; }

/// body(row, scratch) for every row of a tensor, in parallel; scratch holds `rows` rows in f32.
template <typename Body>
void for_each_row(const TensorView& t, int rows, Body body) {
  const std::int64_t count = t.head_dim > 0 ? rows_in(t) : 0;
#pragma omp parallel if (count * t.head_dim > kSmall)
  {
    std::vector<float> scratch(static_cast<std::size_t>(rows * t.head_dim));
#pragma omp for schedule(static)
    for (std::int64_t i = 0; i < count; ++i) {
      body(i, scratch.data());
    }
  }
}

Status rmsnorm(const RmsNormCall& call) {
  const RmsNormInputs& in = call.in;
  const RmsNormOutputs& out = call.out;
  const std::int64_t n = in.x.head_dim;
  const DType dtype = in.x.dtype;
  std::vector<float> weight(static_cast<std::size_t>(n));
  ops().load(in.weight.data, dtype, n, weight.data());
  for_each_row(in.x, 2, [&](std::int64_t i, float* row) {
    float* const other = row + n;
    ops().load(row_of(in.x, i), dtype, n, row);
    if (in.residual.data != nullptr) {
      ops().load(row_of(in.residual, i), dtype, n, other);
      ops().add(row, other, n);
      ops().store(row, 1.0f, dtype, n, row_of(out.sum, i));
      ops().load(row_of(out.sum, i), dtype, n, row);  // as rounded
    }
    double squares = 0;
    for (std::int64_t d = 0; d < n; ++d) {
      squares += static_cast<double>(row[d]) * row[d];
    }
    const auto inverse =
        static_cast<float>(1 / std::sqrt(squares / static_cast<double>(n) + in.eps));
    for (std::int64_t d = 0; d < n; ++d) {
      row[d] = row[d] * inverse * weight[static_cast<std::size_t>(d)];
    }
    ops().store(row, 1.0f, dtype, n, row_of(out.y, i));
  });
  return Status::ok();
}

void apply(Pointwise function, const float* other, std::int64_t n, float* row) {
  const auto silu = [](float x) { return x / (1 + std::exp(-x)); };
  switch (function) {
    case Pointwise::add:
      for (std::int64_t d = 0; d < n; ++d) {
        row[d] += other[d];
      }
      break;
    case Pointwise::multiply:
      for (std::int64_t d = 0; d < n; ++d) {
        row[d] *= other[d];
      }
      break;
    case Pointwise::silu:
      for (std::int64_t d = 0; d < n; ++d) {
        row[d] = silu(row[d]);
      }
      break;
    case Pointwise::swiglu:
      for (std::int64_t d = 0; d < n; ++d) {
        row[d] = silu(row[d]) * other[d];
      }
      break;
  }
}

Status pointwise(const PointwiseCall& call) {
  const std::int64_t n = call.a.head_dim;
  for_each_row(call.a, 2, [&](std::int64_t i, float* row) {
    ops().load(row_of(call.a, i), call.a.dtype, n, row);
    if (call.function != Pointwise::silu) {
      ops().load(row_of(call.b, i), call.a.dtype, n, row + n);
    }
    apply(call.function, row + n, n, row);
    ops().store(row, 1.0f, call.a.dtype, n, row_of(call.out, i));
  });
  return Status::ok();
}

Status rope(const RopeCall& call) {
  const std::int64_t n = call.x.head_dim;
  const int rotary_dim = static_cast<int>(call.rope.rotary_dim);
  const bool interleaved = call.rope.pairs == Rope::Pairs::interleaved;
  for_each_row(call.x, 2, [&](std::int64_t i, float* row) {
    float* const before = row + n;
    ops().load(row_of(call.x, i), call.x.dtype, n, before);
    std::memcpy(row, before, static_cast<std::size_t>(n) * sizeof(float));
    const std::int64_t at = call.positions[i / call.x.heads] * (rotary_dim / 2);
    for (int d = 0; d < rotary_dim; ++d) {
      const tiles::RopePair pair = tiles::rope_pair(d, rotary_dim, interleaved);
      const float along = before[d] * call.rope.cos[at + pair.angle];
      const float across = before[pair.partner] * call.rope.sin[at + pair.angle];
      row[d] = pair.second ? along + across : along - across;
    }
    ops().store(row, 1.0f, call.x.dtype, n, row_of(call.out, i));
  });
  return Status::ok();
}

Status gather(const GatherCall& call) {
  const std::int64_t bytes = call.table.head_dim * bits_of(call.table.dtype) / 8;
  for (std::int64_t i = 0; bytes > 0 && i < call.rows.size; ++i) {
    std::memcpy(row_of(call.out, i), row_of(call.table, call.rows[i]),
                static_cast<std::size_t>(bytes));
  }
  return Status::ok();
}

/// out = rounded(product + bias): the product in f32 first.
Status linear_with_bias(const LinearCall& call, const cpu::BlockProducts::Shape& shape) {
  const DType dtype = call.in.x.dtype;
  std::vector<float> product(static_cast<std::size_t>(shape.m * shape.n));
  std::vector<float> bias(static_cast<std::size_t>(shape.n));
  cpu::BlockProducts::Shape dense = shape;
  dense.ldc = shape.n;
  cpu::BlockProducts products(dtype);
  Status done = products.times_transposed_f32(dense, 1.0f, call.in.x.data, call.in.weight.data,
                                              product.data());
  if (!done) {
    return done;
  }
  ops().load(call.in.bias.data, dtype, shape.n, bias.data());
#pragma omp parallel for schedule(static) if (shape.m * shape.n > kSmall)
  for (std::int64_t i = 0; i < shape.m; ++i) {
    float* const row = product.data() + i * shape.n;
    ops().add(row, bias.data(), shape.n);
    ops().store(row, 1.0f, dtype, shape.n, row_of(call.out, i));
  }
  return done;
}

Status multiply(const LinearCall& call) {
  const TensorView& x = call.in.x;
  const cpu::BlockProducts::Shape shape = {x.seqlen,   call.in.weight.seqlen,
                                           x.head_dim, x.stride_seqlen,
                                           x.head_dim, call.out.stride_seqlen};
  if (shape.m == 0 || shape.n == 0 || shape.k == 0) {
    return Status::ok();
  }
  if (call.in.bias.data != nullptr) {
    return linear_with_bias(call, shape);
  }
  cpu::BlockProducts products(x.dtype);  // oneDNN remembers the primitives that it has built
  if (call.out.dtype == DType::f32) {
    return products.times_transposed_f32(shape, 1.0f, x.data, call.in.weight.data,
                                         static_cast<float*>(call.out.data));
  }
  return products.times_transposed(shape, 1.0f, x.data, call.in.weight.data, call.out.data);
}

base::PackedShape shape_of(const PackedWeight& w) { return {w.dtype, w.n, w.k, w.group_size}; }

/// Element `at` of a matrix without gaps, widened.
float element(const TensorView& t, std::int64_t at) {
  return static_cast<float>(base::load_element(t, at));
}

Status quantize(const PackCall& call) {
  const base::PackedShape shape = shape_of(call.packed);
  auto* const packed = static_cast<std::byte*>(call.packed.data);
  const std::int64_t cols = shape.scale_cols(), groups = shape.k / cols;
#pragma omp parallel for schedule(static) if (shape.n * shape.k > kSmall)
  for (std::int64_t index = 0; index < shape.n * groups; ++index) {
    const std::int64_t row = index / groups, first = index % groups * cols;
    std::uint32_t largest = 0;
    for (std::int64_t i = 0; i < cols; ++i) {
      largest =
          std::max(largest, base::magnitude_bits(element(call.view, row * shape.k + first + i)));
    }
    const float scale = base::scale_of(shape.dtype, largest);
    const std::uint16_t half = f32_to_bf16(scale);
    std::byte* const at = packed + base::scale_offset(shape, row, first);
    std::memcpy(at, shape.is_int4() ? static_cast<const void*>(&half) : &scale,
                shape.is_int4() ? sizeof half : sizeof scale);
  }
#pragma omp parallel for schedule(static) if (shape.n * shape.k > kSmall)
  for (std::int64_t chunk = 0; chunk < shape.chunks(); ++chunk) {
    const base::ChunkPlace place = base::place_of_chunk(shape, chunk);
    std::uint32_t words[4] = {};
    base::visit_chunk(shape, place, [&](int upper, int i, std::int64_t row, std::int64_t col) {
      const float scale = base::load_scale(shape, packed, row, col);
      const float value = element(call.view, row * shape.k + col);
      base::put_code(shape.dtype, upper, i,
                     base::encode(shape.dtype, base::quotient_of(value, scale)), words);
    });
    std::memcpy(packed + place.offset, words, sizeof words);
  }
  return Status::ok();
}

Status dequantize(const PackCall& call) {
  const base::PackedShape shape = shape_of(call.packed);
  const auto* const packed = static_cast<const std::byte*>(call.packed.data);
#pragma omp parallel for schedule(static) if (shape.n * shape.k > kSmall)
  for (std::int64_t chunk = 0; chunk < shape.chunks(); ++chunk) {
    const base::ChunkPlace place = base::place_of_chunk(shape, chunk);
    std::uint32_t words[4];
    std::memcpy(words, packed + place.offset, sizeof words);
    base::visit_chunk(shape, place, [&](int upper, int i, std::int64_t row, std::int64_t col) {
      const float scale = base::load_scale(shape, packed, row, col);
      base::store_element(call.view, row * shape.k + col,
                          base::code_value(shape.dtype, upper, i, words) * scale);
    });
  }
  return Status::ok();
}

/// A packed weight is multiplied with as what dequantize() makes of it, in the workspace.
Status linear(const LinearCall& call) {
  if (call.in.packed.data == nullptr) {
    return multiply(call);
  }
  const PackedWeight& packed = call.in.packed;
  LinearInputs in = call.in;
  in.weight = matrix(call.workspace.data, in.x.dtype, packed.n, packed.k);
  in.packed = {};
  Status done = dequantize({in.weight, packed, call.place});
  return done ? multiply({in, call.out, call.workspace, call.place}) : done;
}

Status fill_uniform(const FillUniformCall& call) {
  constexpr std::int64_t kBlock = 1024;
  const std::int64_t count = call.out.elements(), blocks = base::div_up(count, kBlock);
#pragma omp parallel for schedule(static) if (count > kSmall)
  for (std::int64_t block = 0; block < blocks; ++block) {
    std::array<float, kBlock> values;
    const std::int64_t first = block * kBlock, here = std::min(kBlock, count - first);
    for (std::int64_t i = 0; i < here; ++i) {
      values[static_cast<std::size_t>(i)] =
          call.bound * tiles::uniform_of(call.seed, static_cast<std::uint64_t>(first + i));
    }
    ops().store(values.data(), 1.0f, call.out.dtype, here,
                static_cast<std::byte*>(call.out.data) + first * (bits_of(call.out.dtype) / 8));
  }
  return Status::ok();
}

Status advance(const AdvanceCall& call) {
  for (std::int64_t i = 0; i < call.counts.size; ++i) {
    call.counts.data[i] += call.by;
  }
  return Status::ok();
}

const char* linear_kernel(std::int64_t, DType, const PackedWeight& packed) {
  return packed.k > 0 ? "dequantize+onednn" : "onednn";
}
bool linear_dequantizes(std::int64_t, DType, const PackedWeight&) { return true; }

std::string why_no_linear(DType dtype) {
  return cpu::onednn_multiplies(dtype)
             ? std::string()
             : std::string("oneDNN has no matrix product in it on this CPU; f32 it has");
}

constexpr LayerOperations kLayers = {.rmsnorm = rmsnorm,
                                     .pointwise = pointwise,
                                     .rope = rope,
                                     .gather = gather,
                                     .linear = linear,
                                     .quantize = quantize,
                                     .dequantize = dequantize,
                                     .fill_uniform = fill_uniform,
                                     .advance = advance,
                                     .linear_workspace_bytes = 0,
                                     .linear_kernel = linear_kernel,
                                     .linear_dequantizes = linear_dequantizes,
                                     .why_no_linear = why_no_linear};

}  // namespace

std::span<const OperationEntry> operations_layers_cpu() {
  static const std::array<OperationEntry, 1> kEntries = {
      OperationEntry{.device = Device::Kind::cpu,
                     .why_not = [](int) { return std::string(); },
                     .layers = &kLayers}};
  return kEntries;
}

}  // namespace rafter
