// Where the tensors of an attention case lie, on the host and on a device, and how what comes back
// compares.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "cli/cases.h"
#include "cli/quantise.h"
#include "rafter/measure.h"

namespace rafter::cli {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

inline std::int64_t total(const std::vector<std::int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

inline float rounded(float value, DType dtype) {
  switch (dtype) {
    case DType::f16:
      return f16_to_f32(f32_to_f16(value));
    case DType::bf16:
      return bf16_to_f32(f32_to_bf16(value));
    default:
      return value;
  }
}

// ---- layouts: where row r of sequence b lies

/// A tensor with memory of its own, every byte of it poison until rows are written.
struct Placed {
  std::vector<std::byte> memory;
  TensorView view;

  std::byte* element(std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t dim) {
    const std::int64_t offset = batch * view.stride_batch + row * view.stride_seqlen +
                                head * view.stride_heads + dim * view.stride_head_dim;
    return static_cast<std::byte*>(view.data) + offset * (bits_of(view.dtype) / 8);
  }
};

inline Placed place(Strides strides, DType dtype, std::array<std::int64_t, 4> shape,
                    unsigned char poison) {
  const auto [batch, seqlen, heads, head_dim] = shape;
  Placed placed;
  TensorView& t = placed.view;
  t = strides == Strides::heads_first
          ? TensorView::heads_first(nullptr, dtype, batch, heads, seqlen, head_dim)
          : TensorView::contiguous(nullptr, dtype, batch, seqlen, heads, head_dim);
  std::int64_t skew = 0;  // elements off the alignment
  if (strides == Strides::padded) {
    t.stride_heads = head_dim + 3;
    t.stride_seqlen = heads * t.stride_heads + 5;
    t.stride_batch = seqlen * t.stride_seqlen + 7;
    skew = 1;
  }
  constexpr std::int64_t kGuard = 64;  // elements behind and in front
  const std::int64_t elements = std::max(
      {batch * t.stride_batch, heads * t.stride_heads, seqlen * t.stride_seqlen, std::int64_t{1}});
  const std::int64_t bytes = bits_of(dtype) / 8;
  placed.memory.assign(at((elements + skew + 2 * kGuard) * bytes), std::byte{poison});
  t.data = placed.memory.data() + (kGuard + skew) * bytes;
  return placed;
}

inline void store(std::byte* to, DType dtype, float value, float scale = 1) {
  if (dtype == DType::int8) {
    const std::int8_t whole = to_int8(value, scale);
    std::memcpy(to, &whole, sizeof whole);
    return;
  }
  if (dtype == DType::e4m3) {
    const std::uint8_t bits = f32_to_e4m3(value / scale);
    std::memcpy(to, &bits, sizeof bits);
    return;
  }
  if (dtype == DType::f32) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == DType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
  std::memcpy(to, &bits, sizeof bits);
}

/// Where the rows of each sequence lie in the tensors of the problem.
struct Map {
  const AttentionProblem& problem;
  std::vector<std::int64_t> start_q, start_kv;  // packed
  std::vector<std::int64_t> pages;              // paged: [batch, columns]
  std::int64_t columns = 0;

  std::pair<std::int64_t, std::int64_t> query(std::int64_t b, std::int64_t row) const {
    return problem.layout == Layout::packed ? std::pair(std::int64_t{0}, start_q[at(b)] + row)
                                            : std::pair(b, row);
  }
  std::pair<std::int64_t, std::int64_t> key(std::int64_t b, std::int64_t row) const {
    switch (problem.layout) {
      case Layout::packed:
        return {0, start_kv[at(b)] + row};
      case Layout::paged:
        return {pages[at(b * columns + row / problem.page_size)], row % problem.page_size};
      default:
        return {b, row};
    }
  }
};

inline Map map_of(const AttentionCase& c, const AttentionProblem& problem) {
  Map map{.problem = problem, .start_q = {0}, .start_kv = {0}, .pages = {}};
  for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
    map.start_q.push_back(map.start_q.back() + c.lengths_q[b]);
    map.start_kv.push_back(map.start_kv.back() + c.lengths_kv[b] +
                           (problem.seqused_kv ? kSpareRows : 0));
  }
  if (problem.layout == Layout::paged) {
    map.columns = (problem.seqlen_kv + problem.page_size - 1) / problem.page_size;
    // Descending, so that neighbouring keys are not neighbouring pages; page 0 stays unused.
    for (std::int64_t page = problem.batch * map.columns; page > 0; --page) {
      map.pages.push_back(page);
    }
  }
  return map;
}

/// One sequence of a problem in the plainest layout, in f32, which holds the values of every dtype
/// exactly.
inline AttentionProblem alone(AttentionProblem p, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  p.dtype = DType::f32;
  p.kv_dtype = {};
  p.layout = Layout::dense;
  p.batch = 1;
  p.seqlen_q = seqlen_q;
  p.seqlen_kv = seqlen_kv;
  p.total_q = p.total_kv = p.page_size = p.num_pages = 0;
  p.seqused_kv = false;
  return p;
}

/// Visits every element of the valid region in the order of CaseValues.
template <typename Where, typename Visit>
void each_element(const std::vector<std::int64_t>& lengths, std::int64_t heads,
                  std::int64_t head_dim, Where where, Visit visit) {
  std::size_t i = 0;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    for (std::int64_t row = 0; row < lengths[b]; ++row) {
      const auto [batch, seqlen] = where(static_cast<std::int64_t>(b), row);
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t dim = 0; dim < head_dim; ++dim) {
          visit(i++, batch, seqlen, head, dim);
        }
      }
    }
  }
}

inline bool all_poison(const std::vector<std::byte>& memory, unsigned char poison) {
  return std::all_of(memory.begin(), memory.end(),
                     [poison](std::byte b) { return b == std::byte{poison}; });
}

/// Takes the valid elements out of a float tensor; false when any other byte has changed.
template <typename Where>
bool take(Placed& placed, const std::vector<std::int64_t>& lengths, std::int64_t heads,
          std::int64_t head_dim, Where where, unsigned char poison, std::vector<float>& into) {
  into.resize(at(total(lengths) * heads * head_dim));
  each_element(lengths, heads, head_dim, where,
               [&](std::size_t i, std::int64_t batch, std::int64_t row, std::int64_t head,
                   std::int64_t dim) {
                 std::byte* from = placed.element(batch, row, head, dim);
                 std::memcpy(&into[i], from, sizeof(float));
                 std::memset(from, poison, sizeof(float));
               });
  return all_poison(placed.memory, poison);
}

// ---- the device's copy

/// What a run reads and writes, where its device reaches it: on the CPU the memory itself.
class Stage {
 public:
  explicit Stage(const Device& device) : device_(device) {}

  /// Memory that holds a copy of those bytes, or the bytes themselves; null after an error.
  void* lend(const void* from, std::size_t bytes) {
    if (device_.kind == Device::Kind::cpu) {
      return const_cast<void*>(from);
    }
    const auto size = static_cast<std::int64_t>(bytes);
    Result<DeviceMemory> memory = DeviceMemory::allocate(device_, size);
    Status status = memory ? memory->upload(from, size) : memory.status();
    if (!status) {
      status_ = status;
      return nullptr;
    }
    copies_.push_back({from, *std::move(memory)});
    return copies_.back().memory.data();
  }
  TensorView view(const Placed& placed) {
    TensorView view = placed.view;
    const auto offset = static_cast<std::byte*>(view.data) - placed.memory.data();
    auto* const base = static_cast<std::byte*>(lend(placed.memory.data(), placed.memory.size()));
    view.data = base == nullptr ? nullptr : base + offset;
    return view;
  }
  /// What the run has written comes back.
  Status fetch(Placed& placed) const {
    for (const Copy& copy : copies_) {
      if (copy.from == placed.memory.data()) {
        return copy.memory.download(placed.memory.data(), copy.memory.bytes());
      }
    }
    return Status::ok();
  }
  const Status& status() const { return status_; }

 private:
  struct Copy {
    const void* from;
    DeviceMemory memory;
  };
  Device device_;
  Status status_;
  std::vector<Copy> copies_;
};

// ---- what comes back

inline double largest_error(const std::vector<float>& got, const std::vector<float>& want) {
  double most = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::isfinite(got[i]) && std::isfinite(want[i])) {
      most = std::max(most, std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
    }
  }
  return most;
}

inline double largest(const std::vector<float>& values) {
  double most = 0;
  for (const float value : values) {
    most = std::isfinite(value) ? std::max(most, std::fabs(static_cast<double>(value))) : most;
  }
  return most;
}

/// Of what a case compares: [Σ lengths, heads, head_dim].
struct Compared {
  const char* name;
  const std::vector<std::int64_t>& lengths;
  std::int64_t heads, head_dim;
};

/// "o[sequence 1, row 3, head 0, 5]".
inline std::string place_of(const Compared& of, std::size_t index) {
  std::int64_t element = static_cast<std::int64_t>(index);
  const std::int64_t dim = element % of.head_dim;
  element /= of.head_dim;
  const std::int64_t head = element % of.heads;
  std::int64_t row = element / of.heads;
  std::size_t b = 0;
  for (; row >= of.lengths[b]; ++b) {
    row -= of.lengths[b];
  }
  return of.head_dim == 1
             ? fmt::format("{}[sequence {}, row {}, head {}]", of.name, b, row, head)
             : fmt::format("{}[sequence {}, row {}, head {}, {}]", of.name, b, row, head, dim);
}

/// Shape; NaN and infinities in the same places; then the largest error.
inline std::string compare(const Compared& of, const std::vector<float>& got,
                           const std::vector<float>& want, double bound) {
  if (got.size() != want.size()) {
    return fmt::format("{} has {} elements, {} expected", of.name, got.size(), want.size());
  }
  double most = 0;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const bool special = !std::isfinite(want[i]) || !std::isfinite(got[i]);
    const bool same = std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i];
    if (special && !same) {
      return fmt::format("{} is {}, {} expected", place_of(of, i), got[i], want[i]);
    }
    const double error = std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i]));
    if (!special && error > most) {
      most = error;
      worst = i;
    }
  }
  return most <= bound
             ? std::string()
             : fmt::format("{} is {:.9g}, {:.9g} expected: error {:.3g}, at most {:.3g} allowed",
                           place_of(of, worst), got[worst], want[worst], most, bound);
}

/// Empty when equal to the bit; else the first element that is not.
inline std::string first_difference(const Compared& of, const std::vector<float>& x,
                                    const std::vector<float>& y) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(x[i]) != std::bit_cast<std::uint32_t>(y[i])) {
      return fmt::format("{} is {:.9g} and {:.9g}", place_of(of, i), x[i], y[i]);
    }
  }
  return {};
}

}  // namespace rafter::cli
