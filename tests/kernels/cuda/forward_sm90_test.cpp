// forward_sm90 against the float64 reference and against itself.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/element.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/sequence.h"
#include "kernels/cuda/device_buffer.h"

namespace rafter {
std::span<const KernelEntry> entries_forward_sm90();
std::span<const KernelEntry> entries_forward_reference();

namespace {

using testing::DeviceBuffer;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

enum class Order { seqlen_first, heads_first, spread };  // of a tensor's strides

struct Case {
  std::string name;
  AttentionProblem problem;
  std::vector<std::int64_t> lengths_q, lengths_kv;  // packed
  std::vector<std::int64_t> used;                   // seqused_kv
  Order order = Order::seqlen_first;
  DType o_dtype = DType::bf16;
  bool wide_indices = false;
  float spread = 1;  // standard deviation of q
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

/// The problem with the defaults that plan() would fill in.
AttentionProblem completed(AttentionProblem p) {
  p.heads_kv = p.heads_kv == 0 ? p.heads_q : p.heads_kv;
  p.head_dim_v = p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
  if (!p.softmax_scale) {
    p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  }
  return p;
}

/// A tensor on the host with its strides; rows nobody owns are NaN.
struct HostTensor {
  TensorView view;
  std::vector<std::uint16_t> bits;  // 16-bit elements

  HostTensor(DType dtype, std::int64_t batch, std::int64_t seqlen, std::int64_t heads,
             std::int64_t head_dim, Order order) {
    view = order == Order::heads_first
               ? TensorView::heads_first(nullptr, dtype, batch, heads, seqlen, head_dim)
               : TensorView::contiguous(nullptr, dtype, batch, seqlen, heads, head_dim);
    if (order == Order::spread) {  // a slice of something wider in every dimension
      view.stride_heads = (head_dim + 15) / 8 * 8;
      view.stride_seqlen = heads * view.stride_heads + 24;
      view.stride_batch = seqlen * view.stride_seqlen + 8;
    }
    bits.assign(static_cast<std::size_t>(batch * view.stride_batch + seqlen * view.stride_seqlen +
                                         heads * view.stride_heads + head_dim),
                0xffff);
    view.data = bits.data();
  }
  void set(std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d, float value) {
    base::store_element(
        view, b * view.stride_batch + s * view.stride_seqlen + h * view.stride_heads + d, value);
  }
  /// Rows [first, first + count) of another packed tensor become rows [0, count) of this one.
  void copy_rows(const HostTensor& from, std::int64_t first, std::int64_t count) {
    std::copy_n(from.bits.begin() + first * from.view.stride_seqlen, count * view.stride_seqlen,
                bits.begin());
  }
  void fill_rows(std::int64_t b, std::int64_t first, std::int64_t last, std::mt19937& random,
                 float deviation) {
    std::normal_distribution<float> normal(0, deviation);
    for (std::int64_t s = first; s < last; ++s) {
      for (std::int64_t h = 0; h < view.heads; ++h) {
        for (std::int64_t d = 0; d < view.head_dim; ++d) {
          set(b, s, h, d, normal(random));
        }
      }
    }
  }
};

std::vector<std::int64_t> offsets(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> sums(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
  return sums;
}

struct Answer {
  std::vector<float> o;  // contiguous
  std::vector<float> lse;
};

/// One problem with its inputs on both sides and the float64 answer.
class Trial {
 public:
  explicit Trial(const Case& c) : case_(c), problem_{completed(c.problem), 1, 0} {
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
      q_->fill_rows(packed ? 0 : b, packed ? cu_q_[b] : 0, packed ? cu_q_[b + 1] : p.seqlen_q,
                    random, c.spread);
      k_->fill_rows(packed ? 0 : b, kv_first, kv_last, random, 1);
      v_->fill_rows(packed ? 0 : b, kv_first, kv_last, random, 1);
    }
  }

  const KernelProblem& problem() const { return problem_; }
  const Case& input() const { return case_; }
  HostTensor& q() const { return *q_; }
  HostTensor& k() const { return *k_; }
  HostTensor& v() const { return *v_; }
  const std::vector<std::int64_t>& cu_q() const { return cu_q_; }
  const std::vector<std::int64_t>& cu_kv() const { return cu_kv_; }

  /// float64 reference, o in f32.
  Answer reference() const {
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

  /// Scores and softmax in f32, P rounded to the dtype before P V, O rounded: what the unfused
  /// pipeline does. Contiguous; rows of nobody and rows without keys stay 0.
  std::vector<float> naive() const {
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

  /// The kernel, run `repeats` times on poisoned outputs; all runs must give the same bits.
  Answer kernel(int repeats = 1) const;

  /// [batch, seqlen] of q, o and lse.
  std::pair<std::int64_t, std::int64_t> outer() const {
    const AttentionProblem& p = problem_.attention;
    return p.layout == Layout::packed ? std::pair{std::int64_t{1}, p.total_q}
                                      : std::pair{p.batch, p.seqlen_q};
  }

  ForwardInputs inputs(const void* q, const void* k, const void* v, bool device) const {
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

 private:
  float rounded(double value) const {
    const auto single = static_cast<float>(value);
    return problem_.attention.dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(single))
                                                   : f16_to_f32(f32_to_f16(single));
  }

  void naive_row(const ForwardInputs& in, const cpu::Sequence& sequence, const tiles::Range& keys,
                 std::int64_t h, std::int64_t i, float* o) const {
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

  Case case_;
  KernelProblem problem_;
  std::vector<std::int64_t> cu_q_, cu_kv_;
  std::unique_ptr<HostTensor> q_, k_, v_;
};

/// A trial on the device: its buffers, poisoned where the kernel writes.
class Loaded {
 public:
  explicit Loaded(const Trial& trial)
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
               problem_.attention.head_dim_v, trial.input().order),
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

  static const KernelEntry& entry() { return entries_forward_sm90()[0]; }

  void poison() {
    o_.poison();
    lse_.poison();
    workspace_.poison();
  }
  void set_used(const std::vector<std::int32_t>& used) {
    used_.upload(used.data(), used.size() * 4);
  }

  void run(cudaStream_t stream = nullptr) {
    const Status status =
        entry().forward({problem_,
                         in_,
                         out_,
                         {workspace_.data(), static_cast<std::int64_t>(workspace_.bytes())},
                         {stream}});
    EXPECT_TRUE(status.is_ok()) << status.message();
  }
  std::vector<std::uint8_t> bits() const { return o_.download<std::uint8_t>(); }

  Answer read() const {
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

 private:
  DeviceBuffer index_buffer(const std::vector<std::int64_t>& values) const {
    if (wide_) {
      return DeviceBuffer(values);
    }
    return DeviceBuffer(std::vector<std::int32_t>(values.begin(), values.end()));
  }

  KernelProblem problem_;
  bool wide_ = false;
  DeviceBuffer q_, k_, v_, cu_q_, cu_kv_, used_;
  std::pair<std::int64_t, std::int64_t> rows_;
  HostTensor shape_;
  DeviceBuffer o_, lse_, workspace_;
  ForwardInputs in_;
  ForwardOutputs out_;
};

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

/// Rows of a packed o that belong to a sequence; all rows of a dense one.
bool owned(const Trial& trial, const Case& c, std::int64_t row) {
  return trial.problem().attention.layout != Layout::packed ||
         row < std::accumulate(c.lengths_q.begin(), c.lengths_q.end(), std::int64_t{0});
}

/// Same places of non-finite values, then the largest error. The bound: 1.5 times the largest error
/// of the naive computation in the same dtype, and half an ulp of the largest output.
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

bool no_sm90() { return !entries_forward_sm90()[0].machine_has().yes; }
#define RAFTER_NEEDS_SM90()            \
  if (no_sm90()) {                     \
    GTEST_SKIP() << "no sm_90 device"; \
  }

AttentionProblem shape(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                       std::int64_t seqlen_q, std::int64_t seqlen_kv, std::int64_t head_dim,
                       Mask mask = {}, DType dtype = DType::bf16) {
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

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](std::string name, AttentionProblem p) -> Case& {
    all.push_back({.name = std::move(name),
                   .problem = p,
                   .lengths_q = {},
                   .lengths_kv = {},
                   .used = {},
                   .o_dtype = p.dtype});
    return all.back();
  };
  const Mask causal = Mask::causal();
  const Mask top_left = Mask::causal(MaskAlign::top_left);
  for (const std::int64_t d : {64, 128, 256}) {
    const std::string suffix = "_d" + std::to_string(d);
    add("one" + suffix, shape(1, 1, 1, 1, 1, d));
    for (const std::int64_t s : {63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 193, 257}) {
      add("s" + std::to_string(s) + suffix, shape(1, 2, 2, s, s, d));
      add("causal_s" + std::to_string(s) + suffix, shape(1, 2, 2, s, s, d, causal));
    }
    add("long" + suffix, shape(2, 3, 3, 700, 1030, d));
    add("long_causal" + suffix, shape(2, 3, 3, 700, 1030, d, causal));
    add("many_heads" + suffix, shape(5, 20, 4, 150, 150, d, causal));
    add("more_queries_causal" + suffix, shape(1, 2, 1, 500, 130, d, causal));
    add("more_queries_top_left" + suffix, shape(1, 2, 1, 500, 130, d, top_left));
    add("top_left" + suffix, shape(1, 2, 1, 300, 700, d, top_left));
    add("window" + suffix, shape(1, 2, 2, 600, 640, d, Mask::window(100, 37)));
    add("window_left" + suffix, shape(1, 2, 2, 600, 600, d, Mask::window(50, 0)));
    add("window_right" + suffix, shape(1, 2, 2, 500, 600, d, Mask::window(-1, 17)));
    add("window_narrow" + suffix, shape(1, 1, 1, 300, 300, d, Mask::window(0, 0)));
    add("window_top_left" + suffix,
        shape(1, 2, 2, 300, 900, d, Mask::window(70, 5, MaskAlign::top_left)));
    add("window_empty_rows" + suffix, shape(1, 1, 1, 129, 17, d, Mask::window(32, 64)));
    add("f16" + suffix, shape(2, 2, 1, 333, 444, d, causal, DType::f16));
    add("no_keys" + suffix, shape(2, 2, 1, 70, 0, d));
    add("heads_first" + suffix, shape(2, 4, 2, 200, 300, d, causal)).order = Order::heads_first;
    add("spread_strides" + suffix, shape(2, 4, 2, 200, 300, d)).order = Order::spread;
    add("o_f32" + suffix, shape(1, 2, 2, 200, 300, d)).o_dtype = DType::f32;
    Case& used = add("seqused" + suffix, shape(5, 4, 2, 150, 400, d));
    used.used = {0, 1, 130, 400, 257};
    Case& used_causal = add("seqused_causal" + suffix, shape(5, 4, 2, 150, 400, d, causal));
    used_causal.used = {0, 1, 130, 400, 257};
    used_causal.wide_indices = true;
    Case& packed = add("packed" + suffix, shape(1, 3, 1, 300, 520, d));
    packed.problem.layout = Layout::packed;
    packed.lengths_q = {5, 0, 300, 129, 1, 64};
    packed.lengths_kv = {7, 20, 300, 0, 520, 65};
    Case& packed_causal = add("packed_causal" + suffix, shape(1, 4, 2, 300, 520, d, causal));
    packed_causal.problem.layout = Layout::packed;
    packed_causal.lengths_q = {5, 0, 300, 129, 1, 64};
    packed_causal.lengths_kv = {7, 20, 310, 100, 520, 65};
    packed_causal.wide_indices = true;
    Case& many = add("packed_many" + suffix, shape(1, 2, 2, 150, 150, d, causal));
    many.problem.layout = Layout::packed;
    for (std::int64_t i = 0; i < 100; ++i) {
      many.lengths_q.push_back(i * 37 % 151);
      many.lengths_kv.push_back(i * 37 % 151);
    }
    Case& softcap = add("softcap" + suffix, shape(1, 2, 2, 200, 300, d, causal));
    softcap.problem.softcap = 5;
    softcap.spread = 10;
    add("scale_negative" + suffix, shape(1, 1, 1, 100, 300, d)).problem.softmax_scale = -0.1f;
    add("scale_zero" + suffix, shape(1, 1, 1, 100, 300, d, causal)).problem.softmax_scale = 0.0f;
    add("sharp" + suffix, shape(1, 2, 2, 200, 500, d, causal)).spread = 30;
  }
  // Several query tiles a CTA, in some of which a warpgroup of three has no query or no key.
  add("many_tiles", shape(5, 40, 8, 200, 140, 64));
  add("many_tiles_causal", shape(5, 28, 4, 400, 330, 64, causal));
  add("many_tiles_window", shape(5, 28, 4, 400, 400, 64, Mask::window(70, 150)));
  // More keys.
  add("many_tiles_causal_1100", shape(2, 40, 4, 400, 1100, 64, causal));
  add("many_tiles_window_1100", shape(2, 40, 4, 400, 1100, 64, Mask::window(70, 150)));
  add("many_tiles_causal_1024", shape(1, 40, 4, 1024, 1024, 64, causal));
  add("many_tiles_narrow_1024", shape(1, 40, 4, 1024, 1024, 64, Mask::window(3, 0)));
  for (const std::int64_t d : {8, 24, 40, 56, 72, 80, 96, 104, 120, 136, 160, 192, 224}) {
    add("head_dim_" + std::to_string(d), shape(1, 2, 1, 150, 200, d, causal));
  }
  const std::pair<std::int64_t, std::int64_t> dims[] = {
      {192, 128}, {64, 128}, {128, 64}, {40, 256}, {256, 8}};
  for (const auto& [d, dv] : dims) {
    add("head_dim_" + std::to_string(d) + "_v_" + std::to_string(dv),
        shape(1, 2, 1, 150, 200, d, causal))
        .problem.head_dim_v = dv;
  }
  for (const std::int64_t group : {5, 7, 16, 71}) {
    add("group_" + std::to_string(group), shape(1, group, 1, 65, 130, 128, causal));
  }
  return all;
}

class EveryCase : public ::testing::TestWithParam<Case> {};

TEST_P(EveryCase, AgreesWithFloat64AndWritesNothingElse) {
  RAFTER_NEEDS_SM90();
  const Trial trial(GetParam());
  expect_close(trial, GetParam(), trial.kernel(2), trial.reference());
}

Case make_case(const AttentionProblem& problem, std::vector<std::int64_t> used = {}) {
  return {.name = "case",
          .problem = problem,
          .lengths_q = {},
          .lengths_kv = {},
          .used = std::move(used)};
}

Case packed_case(const std::vector<std::int64_t>& lengths, const Mask& mask) {
  Case c = make_case(shape(1, 4, 2, 700, 700, 128, mask));
  c.problem.layout = Layout::packed;
  c.lengths_q = c.lengths_kv = lengths;
  return c;
}

// Its bits depend on the sequence alone: packed alone, or between others of other lengths.
TEST(ForwardSm90, ASequenceHasTheSameBitsAloneAndAmongOthers) {
  RAFTER_NEEDS_SM90();
  for (const Mask& mask : {Mask::none(), Mask::causal(), Mask::window(90, 10)}) {
    const Trial among(packed_case({40, 1, 333, 700, 0, 129}, mask));
    const Trial alone(packed_case({333}, mask));
    const std::int64_t begin = 41;  // of the sequence of 333 rows
    alone.q().copy_rows(among.q(), begin, 333);
    alone.k().copy_rows(among.k(), begin, 333);
    alone.v().copy_rows(among.v(), begin, 333);
    const std::vector<float> all = among.kernel().o, one = alone.kernel().o;
    const std::int64_t row = 4 * 128;
    EXPECT_TRUE(std::equal(one.begin(), one.begin() + 333 * row, all.begin() + begin * row));
  }
}

// The same of a dense batch: a CTA takes its query tiles among others, from whichever tile before.
TEST(ForwardSm90, ADenseSequenceHasTheSameBitsAloneAndInABatch) {
  RAFTER_NEEDS_SM90();
  for (const Mask& mask : {Mask::none(), Mask::causal(), Mask::window(90, 10)}) {
    const Trial among(make_case(shape(20, 16, 4, 520, 520, 64, mask)));
    const Trial alone(make_case(shape(1, 16, 4, 520, 520, 64, mask)));
    const std::int64_t begin = 13 * 520;  // of the sequence in the batch
    alone.q().copy_rows(among.q(), begin, 520);
    alone.k().copy_rows(among.k(), begin, 520);
    alone.v().copy_rows(among.v(), begin, 520);
    const std::vector<float> all = among.kernel().o, one = alone.kernel().o;
    EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + begin * 16 * 64));
  }
}

// Shared memory holds whatever the kernel before left: here NaN in every tile.
TEST(ForwardSm90, NothingOfTheKernelBeforeEnters) {
  RAFTER_NEEDS_SM90();
  const Trial trial(packed_case({33, 11, 12, 12, 5}, Mask::none()));
  const std::vector<float> clean = trial.kernel().o;
  Case nan_case = make_case(shape(8, 16, 16, 600, 600, 128), std::vector<std::int64_t>(8, 0));
  nan_case.used.assign(8, 0);  // no key is owned: k and v hold NaN only
  const Trial poison(nan_case);
  Loaded loaded(poison);
  for (int i = 0; i < 3; ++i) {
    loaded.set_used(std::vector<std::int32_t>(8, 600));
    loaded.run();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(std::isnan(loaded.read().o[0]));
    const std::vector<float> again = trial.kernel().o;
    EXPECT_EQ(std::memcmp(again.data(), clean.data(), clean.size() * 4), 0);
  }
}

// A NaN in a query stays in that query's row.
TEST(ForwardSm90, ANanQueryRowIsNanAndTheOthersAreNot) {
  RAFTER_NEEDS_SM90();
  const Trial trial(make_case(shape(1, 1, 1, 100, 200, 128)));
  trial.q().set(0, 17, 0, 3, NAN);
  const Answer answer = trial.kernel();
  for (std::size_t i = 0; i < 100; ++i) {
    EXPECT_EQ(std::isnan(answer.o[i * 128]), i == 17) << "row " << i;
    EXPECT_EQ(std::isnan(answer.lse[i]), i == 17) << "row " << i;
  }
}

// Captured once, replayed after the lengths changed on the device.
TEST(ForwardSm90, AGraphReadsLengthsWhenItIsReplayed) {
  RAFTER_NEEDS_SM90();
  const Trial trial(make_case(shape(3, 2, 1, 64, 500, 128, Mask::causal()), {500, 500, 500}));
  Loaded loaded(trial);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t runnable = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  loaded.run(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&runnable, graph, 0), cudaSuccess);
  for (const std::vector<std::int32_t>& used :
       {std::vector<std::int32_t>{0, 77, 500}, std::vector<std::int32_t>{500, 1, 128}}) {
    loaded.set_used(used);
    loaded.poison();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(runnable, stream), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<std::uint8_t> replayed = loaded.bits();
    loaded.poison();
    loaded.run();
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(loaded.bits(), replayed);
  }
  (void)cudaGraphExecDestroy(runnable);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

// 200 runs give the same bits while another stream keeps the device busy.
TEST(ForwardSm90, RepeatsAreBitwiseEqualBesideAnotherStream) {
  RAFTER_NEEDS_SM90();
  const Trial trial(packed_case({700, 40, 333, 129}, Mask::causal()));
  const Trial other(make_case(shape(2, 8, 8, 512, 512, 64)));
  Loaded loaded(trial), busy(other);
  cudaStream_t stream = nullptr, beside = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), cudaSuccess);
  std::vector<std::uint8_t> first;
  for (int i = 0; i < 200; ++i) {
    busy.run(beside);
    loaded.run(stream);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    if (i == 0) {
      first = loaded.bits();
    } else {
      ASSERT_EQ(loaded.bits(), first) << "run " << i;
    }
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  (void)cudaStreamDestroy(stream);
  (void)cudaStreamDestroy(beside);
}

// Offsets beyond 2^31 elements in q, k, v and o.
TEST(ForwardSm90, FarBatchesHaveTheBitsOfNearOnes) {
  RAFTER_NEEDS_SM90();
  const KernelProblem problem{completed(shape(2, 2, 2, 70, 70, 64)), 1, 0};
  const Trial near(make_case(shape(2, 2, 2, 70, 70, 64)));
  const std::vector<float> want = near.kernel().o;
  const std::int64_t far_stride = (std::int64_t{1} << 31) + 64;
  const std::size_t sequence = 70 * 2 * 64;
  std::vector<void*> memory(4, nullptr);
  std::vector<TensorView> views;
  const std::vector<std::uint16_t>* contents[] = {&near.q().bits, &near.k().bits, &near.v().bits};
  for (std::size_t i = 0; i < 4; ++i) {
    const std::size_t bytes = (static_cast<std::size_t>(far_stride) + sequence) * 2;
    if (cudaMalloc(&memory[i], bytes) != cudaSuccess) {
      (void)cudaGetLastError();
      GTEST_SKIP() << "less than 17 GiB of device memory";
    }
    views.push_back(TensorView::contiguous(memory[i], DType::bf16, 2, 70, 2, 64));
    views.back().stride_batch = far_stride;
    for (std::size_t b = 0; b < 2 && i < 3; ++b) {
      ASSERT_EQ(
          cudaMemcpy(static_cast<std::uint16_t*>(memory[i]) + b * far_stride,
                     contents[i]->data() + b * sequence, sequence * 2, cudaMemcpyHostToDevice),
          cudaSuccess);
    }
  }
  const Status status =
      Loaded::entry().forward({problem, {views[0], views[1], views[2]}, {views[3], {}}, {}, {}});
  EXPECT_TRUE(status.is_ok()) << status.message();
  std::vector<std::uint16_t> got(2 * sequence);
  for (std::size_t b = 0; b < 2; ++b) {
    ASSERT_EQ(cudaMemcpy(got.data() + b * sequence,
                         static_cast<std::uint16_t*>(memory[3]) + b * far_stride, sequence * 2,
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(bf16_to_f32(got[i]), want[i]) << "element " << i;
  }
  for (void* pointer : memory) {
    (void)cudaFree(pointer);
  }
}

TEST(ForwardSm90, DrawsTilesFromAWorkspaceOnlyWhereACtaTakesMoreThanOne) {
  RAFTER_NEEDS_SM90();
  const KernelEntry& entry = entries_forward_sm90()[0];
  const auto bytes = [&](std::int64_t heads, Mask mask) {
    return entry.workspace({.attention = shape(1, heads, heads, 64, 64, 128, mask)});
  };
  EXPECT_EQ(bytes(8, Mask::causal()), 0);
  EXPECT_GT(bytes(4096, Mask::causal()), 0);
  EXPECT_EQ(bytes(4096, Mask::none()), 0);
}

TEST(ForwardSm90, RefusesByNameWhatItDoesNotDo) {
  const auto reason = [](AttentionProblem p) {
    return Loaded::entry().accepts({completed(p), 1, 0}).reason;
  };
  AttentionProblem p = shape(1, 1, 1, 8, 8, 100);
  EXPECT_EQ(reason(p), "head_dim 100 is not a multiple of 8");
  p.head_dim = 128;
  p.head_dim_v = 4;
  EXPECT_EQ(reason(p), "head_dim_v 4 is not a multiple of 8");
  p.head_dim_v = 128;
  p.dtype = DType::f32;
  EXPECT_EQ(reason(p), "f32 is not among bf16, f16");
  p.dtype = DType::bf16;
  p.layout = Layout::paged;
  EXPECT_EQ(reason(p), "layout paged is not among dense, packed");
  p.layout = Layout::dense;
  EXPECT_EQ(reason(p), "");
  EXPECT_EQ(Loaded::entry().accepts({completed(p), 1, 3}).reason,
            "splits 3: it does not split the keys");
}

TEST(ForwardSm90, NamesTheStrideThatTheCopyEngineCannotRead) {
  RAFTER_NEEDS_SM90();
  const KernelProblem problem{completed(shape(1, 2, 2, 8, 8, 64)), 1, 0};
  const DeviceBuffer memory(std::size_t{1} << 16);
  TensorView q = TensorView::contiguous(memory.data(), DType::bf16, 1, 8, 2, 64);
  const TensorView k = q;
  q.stride_seqlen = 132;
  const Status status =
      Loaded::entry().forward({problem, {q, k, k}, {k, {}}, {memory.data(), 64}, {}});
  EXPECT_EQ(status.message(), "q.stride_seqlen: 132 given; multiples of 8 elements from 0 allowed");
}

INSTANTIATE_TEST_SUITE_P(ForwardSm90, EveryCase, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace rafter
