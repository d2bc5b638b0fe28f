#include "kernels/cuda/forward_sm90_case.h"

#include <cmath>
#include <limits>
#include <numeric>

namespace rafter {
std::span<const KernelEntry> entries_forward_reference();
}

namespace rafter::testing::forward_sm90 {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<std::int64_t> offsets(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

/// Rows of a packed o that belong to a sequence; all rows of a dense one.
bool owned(const Trial& trial, const Case& c, std::int64_t row) {
  return trial.problem().attention.layout != Layout::packed ||
         row < std::accumulate(c.lengths_q.begin(), c.lengths_q.end(), std::int64_t{0});
}

}  // namespace

AttentionProblem completed(AttentionProblem p) {
  p.heads_kv = p.heads_kv == 0 ? p.heads_q : p.heads_kv;
  p.head_dim_v = p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
  if (!p.softmax_scale) {
    p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  }
  return p;
}

Trial::Trial(const Case& c) : case_(c), problem_{completed(c.problem), 1, 0} {
  AttentionProblem& p = problem_.attention;
  problem_.threads = 8;
  const bool packed = p.layout == Layout::packed;
  if (packed) {
    cu_q_ = offsets(c.lengths_q);
    cu_kv_ = offsets(c.lengths_kv);
    p.batch = static_cast<std::int64_t>(c.lengths_q.size());
    p.total_q = cu_q_.back() + 5;  // rows behind the last sequence belong to nobody
    p.total_kv = cu_kv_.back() + 7;
  }
  p.seqused_kv = !c.used.empty();
  const std::int64_t batch = packed ? 1 : p.batch;
  const std::int64_t rows_q = packed ? p.total_q : p.seqlen_q;
  const std::int64_t rows_kv = packed ? p.total_kv : p.seqlen_kv;
  q_ = std::make_unique<HostTensor>(p.dtype, batch, rows_q, p.heads_q, p.head_dim, c.order);
  k_ = std::make_unique<HostTensor>(p.dtype, batch, rows_kv, p.heads_kv, p.head_dim, c.order);
  v_ = std::make_unique<HostTensor>(p.dtype, batch, rows_kv, p.heads_kv, p.head_dim_v, c.order);
  std::mt19937 random(7);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t kv_first = packed ? cu_kv_[b] : 0;
    const std::int64_t kv_last =
        !c.used.empty() ? kv_first + c.used[b] : (packed ? cu_kv_[b + 1] : p.seqlen_kv);
    q_->fill_rows(packed ? 0 : b, packed ? cu_q_[b] : 0, packed ? cu_q_[b + 1] : p.seqlen_q, random,
                  c.spread);
    k_->fill_rows(packed ? 0 : b, kv_first, kv_last, random, 1);
    v_->fill_rows(packed ? 0 : b, kv_first, kv_last, random, 1);
  }
}

Answer Trial::reference() const {
  const AttentionProblem& p = problem_.attention;
  const auto [batch, rows] = outer();
  Answer answer{std::vector<float>(batch * rows * p.heads_q * p.head_dim_v, NAN),
                std::vector<float>(batch * rows * p.heads_q, NAN)};
  const KernelEntry& entry = entries_forward_reference()[0];
  std::vector<double> scratch(entry.workspace(problem_) / 8 + 8);
  const ForwardInputs in = inputs(q_->bits.data(), k_->bits.data(), v_->bits.data(), false);
  const ForwardOutputs out{
      TensorView::contiguous(answer.o.data(), DType::f32, batch, rows, p.heads_q, p.head_dim_v),
      LseView::contiguous(answer.lse.data(), batch, p.heads_q, rows)};
  EXPECT_TRUE(entry
                  .forward({problem_,
                            in,
                            out,
                            {scratch.data(), static_cast<std::int64_t>(scratch.size() * 8)},
                            {}})
                  .is_ok());
  return answer;
}

std::vector<float> Trial::naive() const {
  const AttentionProblem& p = problem_.attention;
  const auto [batch, rows] = outer();
  std::vector<float> o(static_cast<std::size_t>(batch * rows * p.heads_q * p.head_dim_v), 0.0f);
  const ForwardInputs in = inputs(q_->bits.data(), k_->bits.data(), v_->bits.data(), false);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const cpu::Sequence sequence = cpu::sequence_of(p, in, b);
    const tiles::MaskWindow mask = cpu::mask_window(p.mask, sequence);
    const std::int64_t first = sequence.q_batch * rows + sequence.q_row;
#pragma omp parallel for
    for (std::int64_t hi = 0; hi < p.heads_q * sequence.seqlen_q; ++hi) {
      const std::int64_t h = hi / sequence.seqlen_q, i = hi % sequence.seqlen_q;
      naive_row(in, sequence, mask.row(i), h, i,
                o.data() + ((first + i) * p.heads_q + h) * p.head_dim_v);
    }
  }
  return o;
}

ForwardInputs Trial::inputs(const void* q, const void* k, const void* v, bool device) const {
  ForwardInputs in{q_->view, k_->view, v_->view};
  in.q.data = const_cast<void*>(q);
  in.k.data = const_cast<void*>(k);
  in.v.data = const_cast<void*>(v);
  const auto index = [&](const std::vector<std::int64_t>& values) -> IndexView {
    if (values.empty()) {
      return {};
    }
    const DType dtype = device && !case_.wide_indices ? DType::i32 : DType::i64;
    return {values.data(), dtype, static_cast<std::int64_t>(values.size()), 0};
  };
  in.cu_seqlens_q = index(cu_q_);
  in.cu_seqlens_kv = index(cu_kv_);
  in.seqused_kv = index(case_.used);
  return in;
}

void Trial::naive_row(const ForwardInputs& in, const cpu::Sequence& sequence,
                      const tiles::Range& keys, std::int64_t h, std::int64_t i, float* o) const {
  const AttentionProblem& p = problem_.attention;
  const std::int64_t head_kv = h / (p.heads_q / p.heads_kv);
  const std::int64_t q = cpu::offset_of(in.q, sequence.q_batch, sequence.q_row + i, h);
  const auto key_at = [&](const TensorView& view, std::int64_t j) {
    return cpu::offset_of(view, sequence.kv_batch, sequence.kv_row + j, head_kv);
  };
  std::vector<float> s;
  float max = -kInfinity, sum = 0;
  for (std::int64_t j = keys.first; j < keys.last; ++j) {
    double dot = 0;
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      dot += base::load_element(in.q, q + d) * base::load_element(in.k, key_at(in.k, j) + d);
    }
    const auto score = static_cast<float>(dot * *p.softmax_scale);
    s.push_back(p.softcap > 0 ? p.softcap * std::tanh(score / p.softcap) : score);
    max = std::max(max, s.back());
  }
  for (float& score : s) {
    score = std::exp(score - max);
    sum += score;
  }
  std::vector<double> outputs(static_cast<std::size_t>(p.head_dim_v), 0.0);
  for (std::int64_t j = keys.first; j < keys.last; ++j) {
    const double weight = rounded(s[static_cast<std::size_t>(j - keys.first)] / sum);
    for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
      outputs[static_cast<std::size_t>(d)] +=
          weight * base::load_element(in.v, key_at(in.v, j) + d);
    }
  }
  for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
    o[d] = rounded(outputs[static_cast<std::size_t>(d)]);
  }
}

Loaded::Loaded(const Trial& trial)
    : problem_(trial.problem()),
      wide_(trial.input().wide_indices),
      q_(trial.q().bits),
      k_(trial.k().bits),
      v_(trial.v().bits),
      cu_q_(index_buffer(trial.cu_q())),
      cu_kv_(index_buffer(trial.cu_kv())),
      used_(index_buffer(trial.input().used)),
      rows_(trial.outer()),
      shape_(DType::bf16, rows_.first, rows_.second, problem_.attention.heads_q,
             problem_.attention.head_dim_v, trial.input().o_order.value_or(trial.input().order)),
      o_(shape_.bits.size() * static_cast<std::size_t>(bits_of(trial.input().o_dtype) / 8)),
      lse_(static_cast<std::size_t>(rows_.first * rows_.second * problem_.attention.heads_q) * 4),
      workspace_(static_cast<std::size_t>(entry().workspace(problem_)) + 64) {
  in_ = trial.inputs(q_.data(), k_.data(), v_.data(), true);
  in_.cu_seqlens_q.data = trial.cu_q().empty() ? nullptr : cu_q_.data();
  in_.cu_seqlens_kv.data = trial.cu_kv().empty() ? nullptr : cu_kv_.data();
  in_.seqused_kv.data = trial.input().used.empty() ? nullptr : used_.data();
  out_.o = shape_.view;
  out_.o.dtype = trial.input().o_dtype;
  out_.o.data = o_.data();
  out_.lse = LseView::contiguous(static_cast<float*>(lse_.data()), rows_.first,
                                 problem_.attention.heads_q, rows_.second);
}

void Loaded::run(cudaStream_t stream) {
  const Status status =
      entry().forward({problem_,
                       in_,
                       out_,
                       {workspace_.data(), static_cast<std::int64_t>(workspace_.bytes())},
                       {stream}});
  EXPECT_TRUE(status.is_ok()) << status.message();
}

Answer Loaded::read() const {
  EXPECT_TRUE(o_.guards_intact());
  EXPECT_TRUE(lse_.guards_intact());
  std::vector<std::uint8_t> bytes = bits();
  TensorView o = out_.o;
  o.data = bytes.data();
  std::vector<bool> owned(bytes.size(), false);
  const std::int64_t size = bits_of(o.dtype) / 8;
  Answer answer{{}, lse_.download<float>()};
  for (std::int64_t b = 0; b < o.batch; ++b) {
    for (std::int64_t s = 0; s < o.seqlen; ++s) {
      for (std::int64_t h = 0; h < o.heads; ++h) {
        const std::int64_t at = cpu::offset_of(o, b, s, h);
        std::fill_n(owned.begin() + at * size, o.head_dim * size, true);
        for (std::int64_t d = 0; d < o.head_dim; ++d) {
          answer.o.push_back(static_cast<float>(base::load_element(o, at + d)));
        }
      }
    }
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (!owned[i] && bytes[i] != 0xff) {
      ADD_FAILURE() << "byte " << i << " between rows of o was written";
      break;
    }
  }
  return answer;
}

Answer Trial::kernel(int repeats) const {
  const Acceptance accepted = Loaded::entry().accepts(problem_);
  EXPECT_TRUE(accepted.yes) << accepted.reason;
  Loaded loaded(*this);
  std::vector<std::uint8_t> first;
  for (int i = 0; i < repeats; ++i) {
    loaded.poison();
    loaded.run();
    const cudaError_t ran = cudaDeviceSynchronize();
    EXPECT_EQ(ran, cudaSuccess) << cudaGetErrorString(ran);
    if (i == 0) {
      first = loaded.bits();
    }
    EXPECT_EQ(loaded.bits(), first) << "run " << i << " differs";
  }
  return loaded.read();
}

void expect_close(const Trial& trial, const Case& c, const Answer& got, const Answer& want) {
  const AttentionProblem& p = trial.problem().attention;
  const std::vector<float> naive = trial.naive();
  double naive_worst = 0, largest = 0;
  for (std::size_t i = 0; i < naive.size(); ++i) {
    if (std::isfinite(want.o[i])) {
      naive_worst = std::max(naive_worst, std::abs(double{naive[i]} - want.o[i]));
      largest = std::max(largest, std::abs(double{want.o[i]}));
    }
  }
  const double unit = p.dtype == DType::bf16 ? 1.0 / 256 : 1.0 / 2048;
  const double bound = 1.5 * naive_worst + unit / 2 * largest;
  const auto [batch, rows] = trial.outer();
  ASSERT_EQ(got.o.size(), want.o.size());
  double worst = 0, squares = 0, reference = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < got.o.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / (p.heads_q * p.head_dim_v) % rows;
    if (!owned(trial, c, row)) {
      ASSERT_TRUE(std::isnan(got.o[i])) << "row " << row << " of nobody was written";
      continue;
    }
    ASSERT_EQ(std::isfinite(got.o[i]), std::isfinite(want.o[i]))
        << "o[" << i << "] = " << got.o[i] << ", want " << want.o[i];
    const double error = std::abs(double{got.o[i]} - want.o[i]);
    if (error > worst) {
      worst = error;
      at = i;
    }
    squares += error * error;
    reference += double{want.o[i]} * want.o[i];
  }
  EXPECT_LE(worst, bound) << "o[" << at << "] = " << got.o[at] << ", want " << want.o[at]
                          << "; the naive computation is off by " << naive_worst;
  EXPECT_LE(std::sqrt(squares), unit * std::sqrt(reference) + 1e-30);
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) % rows;
    if (!owned(trial, c, row)) {
      continue;
    }
    if (std::isinf(want.lse[i])) {
      ASSERT_EQ(got.lse[i], want.lse[i]) << "lse[" << i << "]";
    } else {
      ASSERT_NEAR(got.lse[i], want.lse[i], 2e-5 + 1e-6 * std::abs(want.lse[i]))
          << "lse[" << i << "]";
    }
  }
}

AttentionProblem shape(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                       std::int64_t seqlen_q, std::int64_t seqlen_kv, std::int64_t head_dim,
                       Mask mask, DType dtype) {
  AttentionProblem p;
  p.batch = batch;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.seqlen_q = seqlen_q;
  p.seqlen_kv = seqlen_kv;
  p.head_dim = head_dim;
  p.mask = mask;
  p.dtype = dtype;
  return p;
}

Case make_case(const AttentionProblem& problem, std::vector<std::int64_t> used) {
  return {.name = "case",
          .problem = problem,
          .lengths_q = {},
          .lengths_kv = {},
          .used = std::move(used),
          .o_order = {}};
}

}  // namespace rafter::testing::forward_sm90
