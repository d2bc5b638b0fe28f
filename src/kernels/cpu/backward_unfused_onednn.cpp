// The backward pass with its scores in memory: the honest baseline of recomputation. P and dS of
// the whole problem stand in the workspace in its dtype; every product is oneDNN's. Q, O, dO, dQ
// [batch, heads_q, seqlen_q, head_dim]   K, V, dK, dV [batch, heads_kv, seqlen_kv, …]
//   pack     Q, dO, K, V of each KV head to contiguous rows (where oneDNN lacks the dtype: to f32)
//   rows     by blocks of 256 query rows: P = exp(QKᵀ − lse) | dP = dO Vᵀ |
//            dS = P ∘ (dP − delta) in place | dQ = dS K
//   keys     by blocks of 256 keys, over the heads of the group: dV = Pᵀ dO | dK = dSᵀ Q
// A block's order of sums depends on its sequence alone. A KV head with an infinity or NaN in
// what its rows and keys see runs by plain loops instead: 0 · NaN is NaN. Limits: no softcap, whose
// derivative the stored probabilities do not give; the workspace holds P and dS.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/backward_plain.h"
#include "kernels/cpu/onednn_common.h"

namespace rafter {
namespace {

using base::checked_product;
using base::div_up;
using base::round_up;

constexpr std::int64_t kBlock = 256;  // query rows, or keys, of one product
constexpr std::int64_t kAlign = 64;
constexpr std::int64_t kFloat = sizeof(float);

std::int64_t size_of(DType dtype) { return bits_of(dtype) / 8; }
DType operand_of(DType dtype) { return cpu::onednn_multiplies(dtype) ? dtype : DType::f32; }

/// Byte offsets in the workspace, and sizes of one thread's scratch.
struct Places {
  std::int64_t q = 0, d_o = 0, k = 0, v = 0, delta = 0, plain = 0, p = 0, ds = 0, scratch = 0;
  std::int64_t thread_bytes = 0, total = 0;
};

/// Nothing when the sizes exceed 2^60.
std::optional<Places> places_of(const KernelProblem& problem) {
  const AttentionProblem& a = problem.attention;
  const bool packed = a.layout == Layout::packed;
  const std::int64_t element = size_of(operand_of(a.dtype)), stored = size_of(a.dtype);
  const std::int64_t batch = packed ? 1 : a.batch;
  const std::int64_t rows = packed ? a.total_q : a.seqlen_q;
  const std::int64_t keys = packed ? a.total_kv : a.seqlen_kv;
  Places out;
  std::int64_t at = 0;
  bool fits = a.seqlen_kv <= (std::int64_t{1} << 58);
  const auto take = [&](std::initializer_list<std::int64_t> factors) {
    constexpr std::int64_t kLimit = std::int64_t{1} << 60;
    const std::int64_t here = at;
    const auto bytes = checked_product(factors);
    fits = fits && bytes && *bytes <= kLimit && at <= kLimit;
    at += fits ? round_up(*bytes, kAlign) : 0;
    return here;
  };
  if (!fits) {
    return std::nullopt;
  }
  const std::int64_t stride = round_up(a.seqlen_kv, kAlign);
  out.q = take({batch, rows, a.heads_q, a.head_dim, element});
  out.d_o = take({batch, rows, a.heads_q, a.head_dim_v, element});
  out.k = take({batch, keys, a.heads_kv, a.head_dim, element});
  out.v = take({batch, keys, a.heads_kv, a.head_dim_v, element});
  out.delta = take({batch, rows, a.heads_q, kFloat});
  out.plain = take({a.batch, a.heads_kv});
  out.p = take({batch, rows, a.heads_q, stride, stored});
  out.ds = take({batch, rows, a.heads_q, stride, stored});
  out.scratch = at;
  const std::int64_t dim = std::max(a.head_dim, a.head_dim_v);
  // a block of scores in f32 and in the operand dtype, two sums and a product; or plain loops
  const std::int64_t block = kBlock * cpu::kKeyChunk;
  out.thread_bytes = block * (kFloat + element) + 3 * kBlock * dim * kFloat;
  out.thread_bytes =
      std::max(out.thread_bytes, fits ? cpu::plain::backward_doubles(a) * std::int64_t{8} : 0);
  out.thread_bytes = round_up(out.thread_bytes, kAlign);
  take({problem.threads, out.thread_bytes});
  out.total = at;
  return fits ? std::optional(out) : std::nullopt;
}

/// One sequence and KV head: a task of packing.
struct Head {
  cpu::Sequence s;
  std::int64_t batch = 0, head_kv = 0;
};

struct Scratch {
  float* scores = nullptr;   // [kBlock, kKeyChunk]
  void* left = nullptr;      // [kBlock, kKeyChunk] of the operand dtype
  float* sum[2] = {};        // [kBlock, dim]
  float* product = nullptr;  // [kBlock, dim]
  double* plain = nullptr;   // all of it, for plain loops
};

class Unfused {
 public:
  explicit Unfused(const BackwardCall& call)
      : call_(call),
        a_(call.problem.attention),
        ops_(cpu::row_ops(cpu::onednn_instruction_set())),
        operand_(operand_of(a_.dtype)),
        places_(places_of(call.problem).value_or(Places{})),
        stride_(round_up(a_.seqlen_kv, kAlign)) {}

  Status run() {
    Status first_error;
    std::mutex mutex;
    const auto note = [&](const Status& status) {
      if (!status) {
        const std::lock_guard<std::mutex> lock(mutex);
        first_error = first_error ? status : first_error;
      }
    };
#pragma omp parallel num_threads(call_.problem.threads)
    {
      const cpu::SerialScope serial;
      cpu::BlockProducts products(operand_);
      const Scratch scratch = scratch_of(omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t i = 0; i < a_.batch * a_.heads_kv; ++i) {
        pack(head_of(i));
      }
      for (std::int64_t b = 0; b < a_.batch; ++b) {
        const std::int64_t blocks = div_up(cpu::sequence_of(a_, call_.in, b).seqlen_q, kBlock);
#pragma omp for schedule(dynamic, 1) nowait
        for (std::int64_t i = 0; i < a_.heads_q * blocks; ++i) {
          const Head head = head_of(b * a_.heads_kv + i / blocks / group());
          note(rows_block(head, i / blocks, i % blocks * kBlock, scratch, products));
        }
      }
#pragma omp barrier
      for (std::int64_t b = 0; b < a_.batch; ++b) {
        const std::int64_t blocks = div_up(cpu::sequence_of(a_, call_.in, b).seqlen_kv, kBlock);
#pragma omp for schedule(dynamic, 1) nowait
        for (std::int64_t i = 0; i < a_.heads_kv * blocks; ++i) {
          const Head head = head_of(b * a_.heads_kv + i / blocks);
          note(keys_block(head, i % blocks * kBlock, scratch, products));
        }
      }
    }
    return first_error;
  }

 private:
  std::int64_t group() const { return a_.heads_q / a_.heads_kv; }
  std::byte* at(std::int64_t bytes) const {
    return static_cast<std::byte*>(call_.workspace.data) + bytes;
  }
  Head head_of(std::int64_t index) const {
    const std::int64_t batch = index / a_.heads_kv;
    return {cpu::sequence_of(a_, call_.in, batch), batch, index % a_.heads_kv};
  }
  std::uint8_t& is_plain(const Head& h) const {
    return reinterpret_cast<std::uint8_t*>(at(places_.plain))[h.batch * a_.heads_kv + h.head_kv];
  }
  Scratch scratch_of(int thread) const {
    std::byte* here = at(places_.scratch + thread * places_.thread_bytes);
    Scratch out;
    out.plain = reinterpret_cast<double*>(here);
    const auto take = [&here](std::int64_t bytes) {
      std::byte* const from = here;
      here += bytes;
      return from;
    };
    constexpr std::int64_t kScores = kBlock * cpu::kKeyChunk;
    const std::int64_t rows = kBlock * std::max(a_.head_dim, a_.head_dim_v) * kFloat;
    out.scores = reinterpret_cast<float*>(take(kScores * kFloat));
    out.left = take(kScores * size_of(operand_));
    out.sum[0] = reinterpret_cast<float*>(take(rows));
    out.sum[1] = reinterpret_cast<float*>(take(rows));
    out.product = reinterpret_cast<float*>(take(rows));
    return out;
  }

  /// Rows of a query head, or of a KV head, within a sequence: head after head.
  std::int64_t query(const Head& h, std::int64_t head_q, std::int64_t row) const {
    const std::int64_t before = a_.layout == Layout::packed ? h.s.q_row : h.batch * a_.seqlen_q;
    return before * a_.heads_q + head_q * h.s.seqlen_q + row;
  }
  std::int64_t key(const Head& h, std::int64_t j) const {
    const std::int64_t before = a_.layout == Layout::packed ? h.s.kv_row : h.batch * a_.seqlen_kv;
    return before * a_.heads_kv + h.head_kv * h.s.seqlen_kv + j;
  }
  std::byte* packed(std::int64_t place, std::int64_t row, std::int64_t dim) const {
    return at(place + row * dim * size_of(operand_));
  }
  std::byte* scores(std::int64_t place, std::int64_t row, std::int64_t key) const {
    return at(place + (row * stride_ + key) * size_of(a_.dtype));
  }

  bool load(const TensorView& view, std::int64_t offset, float* row) const {
    const auto* const from =
        static_cast<const std::byte*>(view.data) + offset * size_of(view.dtype);
    return view.stride_head_dim == 1 || view.head_dim == 1
               ? ops_.load(from, view.dtype, view.head_dim, row)
               : ops_.load_strided(from, view.dtype, view.stride_head_dim, view.head_dim, row);
  }
  bool pack_row(const TensorView& view, std::int64_t offset, std::byte* to) const {
    float row[256];  // head_dim is at most 256
    const bool finite = load(view, offset, row);
    ops_.store(row, 1.0f, operand_, view.head_dim, to);
    return finite;
  }

  void pack(const Head& h) const {
    const cpu::Sequence& s = h.s;
    const BackwardInputs& in = call_.in;
    const tiles::MaskWindow window = cpu::mask_window(a_.mask, s);
    const tiles::Range keys = window.hull(0, s.seqlen_q);
    const tiles::Range rows = window.transposed(s.seqlen_q).hull(0, s.seqlen_kv);
    bool finite = true;
    for (std::int64_t j = keys.first; j < keys.last; ++j) {
      const auto row_in = [&](const TensorView& view) {
        return cpu::offset_of(view, s.kv_batch, s.kv_row + j, h.head_kv);
      };
      finite = pack_row(in.k, row_in(in.k), packed(places_.k, key(h, j), a_.head_dim)) && finite;
      finite = pack_row(in.v, row_in(in.v), packed(places_.v, key(h, j), a_.head_dim_v)) && finite;
    }
    for (std::int64_t head = h.head_kv * group(); head < (h.head_kv + 1) * group(); ++head) {
      for (std::int64_t i = rows.first; i < rows.last; ++i) {
        const auto row_in = [&](const TensorView& view) {
          return cpu::offset_of(view, s.q_batch, s.q_row + i, head);
        };
        const std::int64_t row = query(h, head, i);
        finite = pack_row(in.q, row_in(in.q), packed(places_.q, row, a_.head_dim)) && finite;
        finite =
            pack_row(in.d_o, row_in(in.d_o), packed(places_.d_o, row, a_.head_dim_v)) && finite;
        float o[256], d_o[256];
        finite = load(in.o, row_in(in.o), o) && finite;
        load(in.d_o, row_in(in.d_o), d_o);
        float delta = 0;
        for (std::int64_t d = 0; d < a_.head_dim_v; ++d) {
          delta += d_o[d] * o[d];
        }
        if (in.dlse.data != nullptr) {
          delta -= *cpu::lse_of(in.dlse, s.q_batch, head, s.q_row + i);
        }
        finite = finite && std::isfinite(delta);
        reinterpret_cast<float*>(at(places_.delta))[row] = delta;
      }
    }
    is_plain(h) = finite ? 0 : 1;
  }

  /// matrix[rows, keys of the hull] = alpha · left rightᵀ in the problem's dtype.
  Status product_of_rows(std::int64_t matrix, const std::byte* left, const Head& h,
                         std::int64_t right_place, std::int64_t dim, float alpha,
                         std::int64_t first_row, std::int64_t rows, tiles::Range hull,
                         const Scratch& scratch, cpu::BlockProducts& products) const {
    const bool in_place = operand_ == a_.dtype;
    for (std::int64_t j = hull.first; j < hull.last;) {
      const std::int64_t end = std::min(hull.last, (j / cpu::kKeyChunk + 1) * cpu::kKeyChunk);
      const std::int64_t ldc = in_place ? stride_ : cpu::kKeyChunk;
      void* const c = in_place ? static_cast<void*>(scores(matrix, first_row, j)) : scratch.scores;
      if (Status status = products.times_transposed({rows, end - j, dim, dim, dim, ldc}, alpha,
                                                    left, packed(right_place, key(h, j), dim), c);
          !status) {
        return status;
      }
      for (std::int64_t r = 0; !in_place && r < rows; ++r) {
        ops_.store(scratch.scores + r * ldc, 1.0f, a_.dtype, end - j,
                   scores(matrix, first_row + r, j));
      }
      j = end;
    }
    return Status::ok();
  }

  /// P of a block of rows from scores in f32, zeros wherever a row sees nothing.
  Status weights_of_rows(const Head& h, std::int64_t head, std::int64_t first, std::int64_t rows,
                         tiles::Range hull, const Scratch& scratch,
                         cpu::BlockProducts& products) const {
    const std::int64_t row0 = query(h, head, first), dim = a_.head_dim;
    const tiles::MaskWindow window = cpu::mask_window(a_.mask, h.s);
    for (std::int64_t j = 0; j < h.s.seqlen_kv; j += cpu::kKeyChunk) {
      const std::int64_t end = std::min(h.s.seqlen_kv, j + cpu::kKeyChunk);
      const tiles::Range seen = cpu::intersect({j, end}, hull);
      if (seen.size() > 0) {
        if (Status status = products.times_transposed_f32(
                {rows, seen.size(), dim, dim, dim, cpu::kKeyChunk}, *a_.softmax_scale,
                packed(places_.q, row0, dim), packed(places_.k, key(h, seen.first), dim),
                scratch.scores + seen.first - j);
            !status) {
          return status;
        }
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        float* const row = scratch.scores + r * cpu::kKeyChunk;
        const tiles::Range keys = cpu::intersect({j, end}, window.row(first + r));
        if (keys.size() == 0) {
          std::fill_n(row, end - j, 0.0f);
        } else {
          std::fill_n(row, keys.first - j, 0.0f);
          std::fill(row + keys.last - j, row + end - j, 0.0f);
          ops_.exponentials(row + keys.first - j,
                            *cpu::lse_of(call_.in.lse, h.s.q_batch, head, h.s.q_row + first + r),
                            keys.size());
        }
        ops_.store(row, 1.0f, a_.dtype, end - j, scores(places_.p, row0 + r, j));
      }
    }
    return Status::ok();
  }

  /// A row of dP becomes dS; zeros wherever the row sees nothing.
  template <typename Change>
  void change_row(std::int64_t matrix, std::int64_t row, std::int64_t seqlen_kv, tiles::Range keys,
                  const Change& change) const {
    float values[cpu::kKeyChunk];
    for (std::int64_t j = 0; j < seqlen_kv; j += cpu::kKeyChunk) {
      const std::int64_t end = std::min(j + cpu::kKeyChunk, seqlen_kv);
      const tiles::Range seen = cpu::intersect({j, end}, keys);
      std::fill_n(values, end - j, 0.0f);
      if (seen.size() > 0) {
        ops_.load(scores(matrix, row, seen.first), a_.dtype, seen.size(), values + seen.first - j);
        change(seen, values + seen.first - j);
      }
      ops_.store(values, 1.0f, a_.dtype, end - j, scores(matrix, row, j));
    }
  }

  /// A block of P or dS as a product takes it: in place, or widened to f32.
  const void* operand_block(std::int64_t matrix, std::int64_t row, std::int64_t rows,
                            std::int64_t key, std::int64_t keys, void* into,
                            std::int64_t& stride) const {
    if (operand_ == a_.dtype) {
      stride = stride_;
      return scores(matrix, row, key);
    }
    stride = keys;
    for (std::int64_t r = 0; r < rows; ++r) {
      ops_.load(scores(matrix, row + r, key), a_.dtype, keys, static_cast<float*>(into) + r * keys);
    }
    return into;
  }

  void store(const float* from, float factor, const TensorView& view, std::int64_t offset) const {
    auto* const to = static_cast<std::byte*>(view.data) + offset * size_of(view.dtype);
    if (view.stride_head_dim == 1) {
      ops_.store(from, factor, view.dtype, view.head_dim, to);
      return;
    }
    for (std::int64_t d = 0; d < view.head_dim; ++d) {
      ops_.store(from + d, factor, view.dtype, 1,
                 to + d * view.stride_head_dim * size_of(view.dtype));
    }
  }

  Status rows_block(const Head& h, std::int64_t head, std::int64_t first, const Scratch& scratch,
                    cpu::BlockProducts& products) const {
    if (is_plain(h) != 0) {
      return Status::ok();
    }
    const cpu::Sequence& s = h.s;
    const std::int64_t rows = std::min(kBlock, s.seqlen_q - first);
    const tiles::MaskWindow window = cpu::mask_window(a_.mask, s);
    const tiles::Range hull = window.hull(first, first + rows);
    const std::int64_t row0 = query(h, head, first);
    if (Status status = weights_of_rows(h, head, first, rows, hull, scratch, products); !status) {
      return status;
    }
    if (Status status =
            product_of_rows(places_.ds, packed(places_.d_o, row0, a_.head_dim_v), h, places_.v,
                            a_.head_dim_v, 1.0f, row0, rows, hull, scratch, products);
        !status) {
      return status;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      const float delta = reinterpret_cast<const float*>(at(places_.delta))[row0 + r];
      float p[cpu::kKeyChunk];
      change_row(places_.ds, row0 + r, s.seqlen_kv, window.row(first + r),
                 [&](tiles::Range keys, float* values) {
                   ops_.load(scores(places_.p, row0 + r, keys.first), a_.dtype, keys.size(), p);
                   for (std::int64_t j = 0; j < keys.size(); ++j) {
                     values[j] = p[j] * (values[j] - delta);
                   }
                 });
    }
    std::fill_n(scratch.sum[0], rows * a_.head_dim, 0.0f);
    for (std::int64_t j = hull.first; j < hull.last;) {
      const std::int64_t end = std::min(hull.last, (j / cpu::kKeyChunk + 1) * cpu::kKeyChunk);
      std::int64_t stride = 0;
      const void* const ds =
          operand_block(places_.ds, row0, rows, j, end - j, scratch.left, stride);
      if (Status status =
              products.times({rows, a_.head_dim, end - j, stride, a_.head_dim, a_.head_dim}, ds,
                             packed(places_.k, key(h, j), a_.head_dim), scratch.product);
          !status) {
        return status;
      }
      ops_.add(scratch.sum[0], scratch.product, rows * a_.head_dim);
      j = end;
    }
    const TensorView& dq = call_.out.dq;
    for (std::int64_t r = 0; r < rows; ++r) {
      store(scratch.sum[0] + r * a_.head_dim, *a_.softmax_scale, dq,
            cpu::offset_of(dq, s.q_batch, s.q_row + first + r, head));
    }
    return Status::ok();
  }

  /// sum += matrix[rows, keys]ᵀ · right[rows, dim].
  Status add_transposed(std::int64_t matrix, std::int64_t row, std::int64_t rows, std::int64_t key,
                        std::int64_t keys, const std::byte* right, std::int64_t dim, float* sum,
                        const Scratch& scratch, cpu::BlockProducts& products) const {
    std::int64_t stride = 0;
    const void* const left = operand_block(matrix, row, rows, key, keys, scratch.left, stride);
    const Status status = products.transposed_times({keys, dim, rows, stride, dim, dim}, left,
                                                    right, scratch.product);
    ops_.add(sum, scratch.product, keys * dim);
    return status;
  }

  Status keys_block(const Head& h, std::int64_t first, const Scratch& scratch,
                    cpu::BlockProducts& products) const {
    if (is_plain(h) != 0) {
      if (first == 0) {
        cpu::plain::backward_head(call_, h.s, h.head_kv, scratch.plain);
      }
      return Status::ok();
    }
    const cpu::Sequence& s = h.s;
    const std::int64_t keys = std::min(kBlock, s.seqlen_kv - first);
    const tiles::Range seen =
        cpu::mask_window(a_.mask, s).transposed(s.seqlen_q).hull(first, first + keys);
    std::fill_n(scratch.sum[0], keys * a_.head_dim, 0.0f);
    std::fill_n(scratch.sum[1], keys * a_.head_dim_v, 0.0f);
    for (std::int64_t head = h.head_kv * group(); head < (h.head_kv + 1) * group(); ++head) {
      for (std::int64_t i = seen.first; i < seen.last;) {
        const std::int64_t end = std::min(seen.last, (i / cpu::kKeyChunk + 1) * cpu::kKeyChunk);
        const std::int64_t row = query(h, head, i);
        if (Status status = add_transposed(places_.p, row, end - i, first, keys,
                                           packed(places_.d_o, row, a_.head_dim_v), a_.head_dim_v,
                                           scratch.sum[1], scratch, products);
            !status) {
          return status;
        }
        if (Status status = add_transposed(places_.ds, row, end - i, first, keys,
                                           packed(places_.q, row, a_.head_dim), a_.head_dim,
                                           scratch.sum[0], scratch, products);
            !status) {
          return status;
        }
        i = end;
      }
    }
    const auto& [dq, dk, dv] = call_.out;
    for (std::int64_t j = 0; j < keys; ++j) {
      const auto row_in = [&](const TensorView& view) {
        return cpu::offset_of(view, s.kv_batch, s.kv_row + first + j, h.head_kv);
      };
      store(scratch.sum[0] + j * a_.head_dim, *a_.softmax_scale, dk, row_in(dk));
      store(scratch.sum[1] + j * a_.head_dim_v, 1.0f, dv, row_in(dv));
    }
    return Status::ok();
  }

  const BackwardCall& call_;
  const AttentionProblem& a_;
  const cpu::RowOps& ops_;
  const DType operand_;
  const Places places_;
  const std::int64_t stride_;
};

Acceptance accepts(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (p.dtype != DType::f32 && p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return Acceptance::refuse(std::string(to_string(p.dtype)) + " is not among f32, f16, bf16");
  }
  if (p.softcap > 0) {
    return Acceptance::refuse("softcap: stored probabilities do not give its derivative");
  }
  if (!places_of(problem)) {
    return Acceptance::refuse("the scores would need 2^60 bytes or more");
  }
  return Acceptance::accept();
}

}  // namespace

std::span<const KernelEntry> entries_backward_unfused_onednn() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "backward_unfused_onednn",
      .device = Device::Kind::cpu,
      .pipeline = Pipeline::unfused,
      .instruction_set = cpu::onednn_instruction_set(),
      .dtypes = {DType::f32, DType::f16, DType::bf16},
      .accepts_text =
          "dense and packed, every mask, group and stride, no softcap; the workspace holds the "
          "scores twice",
      .machine_has = [] { return Acceptance::accept(); },
      .accepts = accepts,
      .reach = cpu::materialised_reach,
      .workspace =
          [](const KernelProblem& p) {
            const auto places = places_of(p);
            return places ? places->total : std::int64_t{0};
          },
      .backward = [](const BackwardCall& call) { return Unfused(call).run(); },
      .any_head_dim_stride = true,
      .note = cpu::onednn_note}};
  return kEntries;
}

}  // namespace rafter
