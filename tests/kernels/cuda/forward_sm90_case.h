// forward_sm90 in tests: a problem with its inputs on both sides, the float64 answer and the
// kernel's.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/element.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/sequence.h"
#include "kernels/cuda/device_buffer.h"

namespace rafter {
std::span<const KernelEntry> entries_forward_sm90();
}

namespace rafter::testing::forward_sm90 {

enum class Order { seqlen_first, heads_first, spread, odd };  // of a tensor's strides

struct Case {
  std::string name;
  AttentionProblem problem;
  std::vector<std::int64_t> lengths_q, lengths_kv;  // packed
  std::vector<std::int64_t> used;                   // seqused_kv
  Order order = Order::seqlen_first;
  std::optional<Order> o_order;  // not given: as the others
  DType o_dtype = DType::bf16;
  bool wide_indices = false;
  float spread = 1;  // standard deviation of q
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

/// The problem with the defaults that plan() would fill in.
AttentionProblem completed(AttentionProblem p);

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
    if (order == Order::odd) {  // rows that only single elements can be written to
      view.stride_heads = head_dim + 1;
      view.stride_seqlen = heads * view.stride_heads + 2;
      view.stride_batch = seqlen * view.stride_seqlen;
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

struct Answer {
  std::vector<float> o;  // contiguous
  std::vector<float> lse;
};

/// One problem with its inputs on both sides and the float64 answer.
class Trial {
 public:
  explicit Trial(const Case& c);

  const KernelProblem& problem() const { return problem_; }
  const Case& input() const { return case_; }
  HostTensor& q() const { return *q_; }
  HostTensor& k() const { return *k_; }
  HostTensor& v() const { return *v_; }
  const std::vector<std::int64_t>& cu_q() const { return cu_q_; }
  const std::vector<std::int64_t>& cu_kv() const { return cu_kv_; }

  /// float64 reference, o in f32.
  Answer reference() const;

  /// Scores and softmax in f32, P rounded to the dtype before P V, O rounded: what the unfused
  /// pipeline does. Contiguous; rows of nobody and rows without keys stay 0.
  std::vector<float> naive() const;

  /// The kernel, run `repeats` times on poisoned outputs; all runs must give the same bits.
  Answer kernel(int repeats = 1) const;

  /// [batch, seqlen] of q, o and lse.
  std::pair<std::int64_t, std::int64_t> outer() const {
    const AttentionProblem& p = problem_.attention;
    return p.layout == Layout::packed ? std::pair{std::int64_t{1}, p.total_q}
                                      : std::pair{p.batch, p.seqlen_q};
  }

  ForwardInputs inputs(const void* q, const void* k, const void* v, bool device) const;

 private:
  float rounded(double value) const {
    const auto single = static_cast<float>(value);
    return problem_.attention.dtype == DType::bf16 ? bf16_to_f32(f32_to_bf16(single))
                                                   : f16_to_f32(f32_to_f16(single));
  }

  void naive_row(const ForwardInputs& in, const cpu::Sequence& sequence, const tiles::Range& keys,
                 std::int64_t h, std::int64_t i, float* o) const;

  Case case_;
  KernelProblem problem_;
  std::vector<std::int64_t> cu_q_, cu_kv_;
  std::unique_ptr<HostTensor> q_, k_, v_;
};

/// A trial on the device: its buffers, poisoned where the kernel writes.
class Loaded {
 public:
  explicit Loaded(const Trial& trial);

  static const KernelEntry& entry() { return entries_forward_sm90()[0]; }

  void poison() {
    o_.poison();
    lse_.poison();
    workspace_.poison();
  }
  void set_used(const std::vector<std::int32_t>& used) {
    used_.upload(used.data(), used.size() * 4);
  }

  void run(cudaStream_t stream = nullptr);
  std::vector<std::uint8_t> bits() const { return o_.download<std::uint8_t>(); }

  Answer read() const;

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

/// Same places of non-finite values, then the largest error. The bound: 1.5 times the largest error
/// of the naive computation in the same dtype, and half an ulp of the largest output.
void expect_close(const Trial& trial, const Case& c, const Answer& got, const Answer& want);

inline bool no_sm90() { return !entries_forward_sm90()[0].machine_has().yes; }
#define RAFTER_NEEDS_SM90()            \
  if (no_sm90()) {                     \
    GTEST_SKIP() << "no sm_90 device"; \
  }

AttentionProblem shape(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                       std::int64_t seqlen_q, std::int64_t seqlen_kv, std::int64_t head_dim,
                       Mask mask = {}, DType dtype = DType::bf16);

Case make_case(const AttentionProblem& problem, std::vector<std::int64_t> used = {});

}  // namespace rafter::testing::forward_sm90
