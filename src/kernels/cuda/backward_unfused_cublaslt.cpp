// The backward pass with its scores in memory on CUDA devices: the honest baseline of
// recomputation. P and dS of the whole problem stand in the workspace in its dtype, bf16 or f16;
// products are cuBLASLt's, accumulators f32.
// Q, O, dO, dQ [batch, seqlen_q, heads_q, head_dim]   K, V, dK, dV [batch, seqlen_kv, heads_kv, …]
//   rows     delta = rowsum(dO ∘ O) − dlse
//   P        S = softmax_scale · QKᵀ | P = exp(S − lse) in place
//   dV       Pᵀ dO
//   dS       dP = dO Vᵀ | dS = P ∘ (dP − delta) in place
//   dQ, dK   softmax_scale · dS K | softmax_scale · dSᵀ Q
// Pairs of a sequence and a head that lie a constant stride apart are one batched product; under a
// mask, blocks of 1024 query rows (or keys) over what they see. Where heads share K and V, or
// lengths are on the device, rows are first copied to [pairs, capacity, head_dim], zeros beyond a
// sequence, and gradients come back from f32 sums of each pair. Limits: no softcap, whose
// derivative stored probabilities do not give; the workspace holds P and dS.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/checked.h"
#include "kernels/cuda/accepts_sm90.h"
#include "kernels/cuda/backward_unfused.h"
#include "kernels/cuda/score_problem.h"
#include "kernels/cuda/scores_common.h"

namespace rafter {
namespace {

using tiles::Range;

/// Byte offsets in the workspace.
struct Places {
  std::int64_t p = 0, ds = 0, blas = 0, delta = 0, d_o = 0, q = 0, k = 0, v = 0, sums = 0;
  std::int64_t row_stride = 0, total = 0;
};

/// Tensors are copied: heads share keys, or lengths are data.
bool copies(const AttentionProblem& p) {
  return p.heads_q != p.heads_kv || cuda::lengths_are_data(p);
}

/// Nothing when the sizes exceed 2^60.
std::optional<Places> places_of(const AttentionProblem& p) {
  constexpr std::int64_t kLimit = std::int64_t{1} << 60;
  Places out;
  bool fits = true;
  std::int64_t at = 0;
  const auto take = [&](std::initializer_list<std::int64_t> factors) {
    const std::int64_t here = at;
    const auto bytes = base::checked_product(factors);
    fits = fits && bytes && *bytes <= kLimit && at <= kLimit;
    at += fits ? base::round_up(*bytes, cuda::kScoreAlign) : 0;
    return here;
  };
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  out.row_stride = base::round_up(std::max<std::int64_t>(p.seqlen_kv, 1), tiles::kScoreRowStep);
  out.p = take({p.batch, p.heads_q, p.seqlen_q, out.row_stride, 2});
  out.ds = take({p.batch, p.heads_q, p.seqlen_q, out.row_stride, 2});
  out.blas = take({cuda::kMatmulWorkspaceBytes});
  out.delta = take({p.batch, p.heads_q, p.seqlen_q, 4});
  out.d_o = take({p.batch, p.heads_q, p.seqlen_q, p.head_dim_v, 2});
  if (copies(p)) {
    out.q = take({p.batch, p.heads_q, p.seqlen_q, p.head_dim, 2});
    out.k = take({p.batch, p.heads_q, p.seqlen_kv, p.head_dim, 2});
    out.v = take({p.batch, p.heads_q, p.seqlen_kv, p.head_dim_v, 2});
    out.sums = take({p.batch, p.heads_q, std::max(p.seqlen_q, p.seqlen_kv), dim, 4});
  }
  out.total = at + cuda::kScoreAlign - cuda::kLentAlign;
  return fits ? std::optional(out) : std::nullopt;
}

Acceptance accepts(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (Acceptance common = cuda::accepts_sm90(problem); !common.yes) {
    return common;
  }
  if (p.softcap > 0) {
    return Acceptance::refuse("softcap: stored probabilities do not give its derivative");
  }
  const std::int64_t longest =
      std::max({p.seqlen_q, p.seqlen_kv, p.total_q, p.total_kv, p.heads_q, p.batch});
  const std::optional<Places> places = places_of(p);
  if (longest >= cuda::kMaxLength || !places) {
    return Acceptance::refuse("more than 2^29 rows, or scores beyond 2^60 bytes");
  }
  if (Acceptance here = cuda::accepts_sm90_device(problem); !here.yes) {
    return here;
  }
  const Result<std::int64_t> memory = cuda::memory_bytes(problem.device_index);
  if (memory && places->total > *memory) {
    return Acceptance::refuse(fmt::format(
        "needs a workspace of {:.1f} GB for its scores, more than the {:.1f} GB of the device",
        static_cast<double>(places->total) / 1e9, static_cast<double>(*memory) / 1e9));
  }
  return Acceptance::accept();
}

/// The model has P stored by a forward pass: 7 passes over scores and 4 products. Here P is made
/// as well, by 3 passes and a product, and 0.7 of the bandwidth is reached by the model's count.
/// Half of that stands here: memory that grows with S² is for who asks for this pipeline, and where
/// the fused kernel is slow (head_dim 256) the true figure would take it unasked.
constexpr Reach kReach{.compute = 0.4, .bandwidth = 0.35, .fixed_seconds = 3e-5};

/// Products and passes over one tensor's rows, by pair.
struct Operand {
  std::byte* data = nullptr;
  std::int64_t row_stride = 0, pair_stride = 0, run_stride = 0;  // elements
  std::int64_t element_bytes = 2;

  std::byte* at(std::int64_t run, std::int64_t pair, std::int64_t row, std::int64_t column) const {
    return data +
           (run * run_stride + pair * pair_stride + row * row_stride + column) * element_bytes;
  }
};

/// Rows (or keys) that are one product, and the keys (or rows) that they meet.
struct Block {
  Range own, other;
};

class Call {
 public:
  explicit Call(const BackwardCall& call)
      : call_(call),
        p_(call.problem.attention),
        places_(places_of(p_).value_or(Places{})),  // accepts() has seen that there are some
        copies_(copies(p_)),
        workspace_(cuda::aligned_scores(call.workspace.data)),
        stream_(call.stream.handle) {
    order_ = copies_ ? tiles::PairOrder{p_.batch, p_.heads_q, false}
                     : tiles::pair_order(p_.batch, p_.heads_q, 1);
    runs_ = copies_ ? 1 : order_.batch_fastest ? p_.heads_q : p_.batch;
    run_length_ = copies_ ? p_.batch * p_.heads_q : order_.batch_fastest ? p_.batch : p_.heads_q;
    problem_ = cuda::score_problem(p_, call.in);
    problem_.batch_fastest = order_.batch_fastest;
    tiled_ = !cuda::lengths_are_data(p_) && !p_.mask.is_none();
  }

  Status run() {
    if (Status status = set_tensors(); !status) {
      return status;
    }
    if (Status status = probabilities(); !status) {
      return status;
    }
    if (Status status = of_keys(call_.out.dv, p_matrix(), d_o_, p_.head_dim_v, 1.0f); !status) {
      return status;
    }
    if (Status status = score_gradients(); !status) {
      return status;
    }
    if (Status status = of_queries(); !status) {
      return status;
    }
    return of_keys(call_.out.dk, ds_matrix(), q_, p_.head_dim, *p_.softmax_scale);
  }

 private:
  std::byte* place(std::int64_t bytes) const { return workspace_ + bytes; }
  bool f16() const { return p_.dtype == DType::f16; }

  // ---- tensors

  Operand copied(std::int64_t where, std::int64_t capacity, std::int64_t dim) const {
    return {place(where), dim, capacity * dim, run_length_ * capacity * dim, 2};
  }
  Operand direct(const TensorView& view) const {
    const std::int64_t row = cuda::stride_or(view.seqlen, view.stride_seqlen, view.head_dim);
    const std::int64_t apart = view.seqlen * row;  // where there is one alone
    const std::int64_t batch = cuda::stride_or(view.batch, view.stride_batch, apart);
    const std::int64_t heads = cuda::stride_or(view.heads, view.stride_heads, apart);
    return {static_cast<std::byte*>(view.data), row, order_.batch_fastest ? batch : heads,
            order_.batch_fastest ? heads : batch, bits_of(view.dtype) / 8};
  }
  Operand matrix(std::int64_t where) const {
    const std::int64_t pair = p_.seqlen_q * places_.row_stride;
    return {place(where), places_.row_stride, pair, run_length_ * pair, 2};
  }
  Operand p_matrix() const { return matrix(places_.p); }
  Operand ds_matrix() const { return matrix(places_.ds); }

  Status set_tensors() {
    const std::pair<const char*, const TensorView*> read[] = {
        {"q", &call_.in.q}, {"k", &call_.in.k}, {"v", &call_.in.v}};
    for (const auto& [name, view] : read) {
      if (Status status = cuda::check_score_rows(name, *view); !status) {
        return status;
      }
    }
    const std::pair<const char*, const TensorView*> written[] = {
        {"dq", &call_.out.dq}, {"dk", &call_.out.dk}, {"dv", &call_.out.dv}};
    for (const auto& [name, view] : written) {
      if (Status status = copies_ ? Status::ok() : cuda::check_score_rows(name, *view); !status) {
        return status;
      }
    }
    if (Status status = set_d_o(); !status) {
      return status;
    }
    q_ = copies_ ? copied(places_.q, p_.seqlen_q, p_.head_dim) : direct(call_.in.q);
    k_ = copies_ ? copied(places_.k, p_.seqlen_kv, p_.head_dim) : direct(call_.in.k);
    v_ = copies_ ? copied(places_.v, p_.seqlen_kv, p_.head_dim_v) : direct(call_.in.v);
    return copies_ ? gather() : Status::ok();
  }

  /// delta, and dO as the products take it: itself, or its copy.
  Status set_d_o() {
    const TensorView& d_o = call_.in.d_o;
    const bool copy = copies_ || d_o.dtype != p_.dtype || !cuda::check_score_rows("d_o", d_o);
    d_o_ = copy ? copied(places_.d_o, p_.seqlen_q, p_.head_dim_v) : direct(d_o);
    delta_ = reinterpret_cast<float*>(place(places_.delta));
    const LseView& dlse = call_.in.dlse;
    const cuda::DeltaRows rows{
        .o = cuda::rows_of(call_.in.o),
        .d_o = cuda::rows_of(d_o),
        .dlse = {dlse.data, dlse.stride_batch, dlse.stride_heads, dlse.stride_seqlen},
        .delta = delta_,
        .d_o_copy = copy ? d_o_.data : nullptr,
        .head_dim_v = static_cast<int>(p_.head_dim_v)};
    const auto launch = f16() ? cuda::launch_delta<DType::f16> : cuda::launch_delta<DType::bf16>;
    return launch(problem_, rows, stream_);
  }

  Status gather() const {
    return cuda::gather_views(problem_,
                              {{call_.in.q, q_.data, cuda::RowsOf::queries},
                               {call_.in.k, k_.data, cuda::RowsOf::keys},
                               {call_.in.v, v_.data, cuda::RowsOf::keys}},
                              0, runs_ * run_length_, stream_);
  }

  // ---- blocks

  tiles::MaskWindow window() const {
    const std::int64_t offset = problem_.top_left ? 0 : p_.seqlen_kv - p_.seqlen_q;
    return {problem_.window_left, problem_.window_right, offset, p_.seqlen_kv};
  }

  /// Query rows and the keys that they see, from a multiple of 8 on.
  template <typename Body>
  Status for_each_row_block(Body body) const {
    const std::int64_t step = tiled_ ? cuda::kMaskedBlock : std::max<std::int64_t>(p_.seqlen_q, 1);
    for (std::int64_t row = 0; row < p_.seqlen_q; row += step) {
      Block block{{row, std::min(row + step, p_.seqlen_q)}, {0, p_.seqlen_kv}};
      if (tiled_) {
        const Range hull = window().hull(block.own.first, block.own.last);
        block.other = {hull.first / 8 * 8, hull.last};
      }
      if (Status status = body(block); !status) {
        return status;
      }
    }
    return Status::ok();
  }

  /// Keys and the whole blocks of rows of which any sees them: the rows that have zeros, if not
  /// values, over them all.
  template <typename Body>
  Status for_each_key_block(Body body) const {
    const std::int64_t tile = cuda::kMaskedBlock;
    const std::int64_t step = tiled_ ? tile : std::max<std::int64_t>(p_.seqlen_kv, 1);
    for (std::int64_t key = 0; key < p_.seqlen_kv; key += step) {
      Block block{{key, std::min(key + step, p_.seqlen_kv)}, {0, p_.seqlen_q}};
      if (tiled_) {
        const Range hull = window().transposed(p_.seqlen_q).hull(block.own.first, block.own.last);
        block.other = {hull.first / tile * tile,
                       std::min(base::round_up(hull.last, tile), p_.seqlen_q)};
      }
      if (Status status = body(block); !status) {
        return status;
      }
    }
    return Status::ok();
  }

  // ---- products

  /// C[c_row…] = A[a_row…, a_column…] B[b_row…] of every pair; strides and sizes of one in `shape`.
  struct Corner {
    const Operand& operand;
    std::int64_t row = 0, column = 0;
  };
  Status multiply(cuda::Matmul shape, const Corner& a, const Corner& b, const Corner& c) const {
    shape.dtype = p_.dtype;
    shape.c_is_f32 = c.operand.element_bytes == 4;
    shape.lda = a.operand.row_stride;
    shape.ldb = b.operand.row_stride;
    shape.ldc = c.operand.row_stride;
    shape.stride_a = a.operand.pair_stride;
    shape.stride_b = b.operand.pair_stride;
    shape.stride_c = c.operand.pair_stride;
    for (std::int64_t run = 0; run < runs_; ++run) {
      for (std::int64_t pair = 0; pair < run_length_; pair += cuda::kMostScoreMatrices) {
        shape.batch = std::min(run_length_ - pair, cuda::kMostScoreMatrices);
        const auto at = [&](const Corner& corner) {
          return corner.operand.at(run, pair, corner.row, corner.column);
        };
        if (Status status = cuda::matmul(shape, at(a), at(b), at(c), place(places_.blas), stream_);
            !status) {
          return status;
        }
      }
    }
    return Status::ok();
  }

  /// into = alpha · left rightᵀ over what rows see.
  Status scores(const Operand& left, const Operand& right, std::int64_t dim, float alpha,
                const Operand& into) const {
    return for_each_row_block([&](const Block& block) {
      if (block.other.size() == 0) {
        return Status::ok();
      }
      return multiply({.b_transposed = true,
                       .alpha = alpha,
                       .m = block.own.size(),
                       .n = block.other.size(),
                       .k = dim},
                      {left, block.own.first}, {right, block.other.first},
                      {into, block.own.first, block.other.first});
    });
  }

  cuda::ScoreGradients matrices() const {
    const LseView& lse = call_.in.lse;
    return {.p = place(places_.p),
            .ds = place(places_.ds),
            .row_stride = places_.row_stride,
            .tile = tiled_ ? static_cast<int>(cuda::kMaskedBlock) : 0,
            .lse = {lse.data, lse.stride_batch, lse.stride_heads, lse.stride_seqlen},
            .delta = delta_};
  }

  Status probabilities() const {
    if (Status status = scores(q_, k_, p_.head_dim, *p_.softmax_scale, p_matrix()); !status) {
      return status;
    }
    const auto launch =
        f16() ? cuda::launch_weights<DType::f16> : cuda::launch_weights<DType::bf16>;
    return launch(problem_, matrices(), stream_);
  }

  Status score_gradients() const {
    if (Status status = scores(d_o_, v_, p_.head_dim_v, 1.0f, ds_matrix()); !status) {
      return status;
    }
    const auto launch = f16() ? cuda::launch_score_gradients<DType::f16>
                              : cuda::launch_score_gradients<DType::bf16>;
    return launch(problem_, matrices(), stream_);
  }

  // ---- gradients

  /// Where products leave a gradient: in its tensor, or in sums of each pair.
  Operand target(const TensorView& view, std::int64_t capacity) const {
    if (!copies_) {
      return direct(view);
    }
    const std::int64_t pair = capacity * view.head_dim;
    return {place(places_.sums), view.head_dim, pair, run_length_ * pair, 4};
  }

  Status store(const TensorView& view, cuda::RowsOf rows_of, bool zeros, Range rows) const {
    const float* const sums = reinterpret_cast<const float*>(place(places_.sums));
    return cuda::launch_store_gradient(problem_,
                                       {.sums = zeros ? nullptr : sums,
                                        .target = cuda::rows_of(view),
                                        .head_dim = static_cast<int>(view.head_dim),
                                        .rows_of = rows_of,
                                        .first_row = static_cast<int>(rows.first),
                                        .rows = static_cast<int>(rows.size())},
                                       stream_);
  }

  /// dq = softmax_scale · dS K.
  Status of_queries() const {
    const TensorView& dq = call_.out.dq;
    const Operand into = target(dq, p_.seqlen_q), ds = ds_matrix();
    return for_each_row_block([&](const Block& block) {
      const bool zeros = block.other.size() == 0;
      Status status = zeros ? Status::ok()
                            : multiply({.alpha = *p_.softmax_scale,
                                        .m = block.own.size(),
                                        .n = p_.head_dim,
                                        .k = block.other.size()},
                                       {ds, block.own.first, block.other.first},
                                       {k_, block.other.first}, {into, block.own.first});
      return status && (zeros || copies_) ? store(dq, cuda::RowsOf::queries, zeros, block.own)
                                          : status;
    });
  }

  /// gradient = alpha · matrixᵀ right: dV and dK.
  Status of_keys(const TensorView& gradient, const Operand& matrix, const Operand& right,
                 std::int64_t dim, float alpha) const {
    const Operand into = target(gradient, p_.seqlen_kv);
    return for_each_key_block([&](const Block& block) {
      const bool zeros = block.other.size() == 0;
      Status status = zeros ? Status::ok()
                            : multiply({.a_transposed = true,
                                        .alpha = alpha,
                                        .m = block.own.size(),
                                        .n = dim,
                                        .k = block.other.size()},
                                       {matrix, block.other.first, block.own.first},
                                       {right, block.other.first}, {into, block.own.first});
      return status && (zeros || copies_) ? store(gradient, cuda::RowsOf::keys, zeros, block.own)
                                          : status;
    });
  }

  const BackwardCall& call_;
  const AttentionProblem& p_;
  Places places_;
  bool copies_ = false, tiled_ = false;
  std::byte* workspace_ = nullptr;
  void* stream_ = nullptr;
  cuda::ScoreProblem problem_;
  tiles::PairOrder order_;
  std::int64_t runs_ = 1, run_length_ = 1;
  Operand q_, k_, v_, d_o_;
  float* delta_ = nullptr;
};

Status backward(const BackwardCall& call) {
  const cuda::DeviceScope device(call.problem.device_index);
  return device.status() ? Call(call).run() : device.status();
}

}  // namespace

std::span<const KernelEntry> entries_backward_unfused_cublaslt() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "backward_unfused_cublaslt",
      .device = Device::Kind::cuda,
      .pipeline = Pipeline::unfused,
      .instruction_set = "sm_90a",
      .dtypes = {DType::bf16, DType::f16},
      .accepts_text = "dense and packed layouts, head_dim and head_dim_v multiples of 8 up to 256, "
                      "every mask, seqused_kv, no softcap; strides multiples of 16 bytes; the "
                      "workspace holds the scores twice",
      .machine_has = cuda::machine_has_scores,
      .accepts = accepts,
      .reach =
          [](const KernelProblem& p, const DeviceSpec&) {
            return cuda::scores_reach(p, Pipeline::unfused, Pass::backward, kReach);
          },
      .workspace =
          [](const KernelProblem& p) {
            const std::optional<Places> places = places_of(p.attention);
            return places ? places->total : std::int64_t{0};
          },
      .backward = backward,
      .note =
          [](const KernelProblem& p) {
            return std::string(cuda::lengths_are_data(p.attention) ? cuda::kPaddedNote : "");
          }}};
  return kEntries;
}

}  // namespace rafter
