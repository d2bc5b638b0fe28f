// A decode problem in device memory whose lengths and pages change between runs of one plan.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "base/element.h"
#include "kernels/cuda/decode_sm90_case.h"
#include "kernels/cuda/device_buffer.h"

namespace rafter::testing {

/// A problem on the device whose lengths and pages change between runs. Results of several runs may
/// be kept.
class Rig {
 public:
  explicit Rig(const AttentionProblem& problem, std::int64_t results = 1, std::int64_t splits = 0)
      : plan_(make_plan(problem, splits)),
        p_(plan_.problem()),
        q_(random_bits(p_.batch * p_.seqlen_q * p_.heads_q * p_.head_dim, 11)),
        k_(index(p_.num_pages * p_.page_size * p_.heads_kv * p_.head_dim * 2)),
        v_(index(p_.num_pages * p_.page_size * p_.heads_kv * p_.head_dim_v * 2)),
        o_(index(results * rows() * p_.head_dim_v * 4)),
        lse_(index(results * rows() * 4)),
        used_(index(p_.batch * 4)),
        pages_(index(p_.batch * cols() * 8)),
        workspace_(index(plan_.workspace_bytes()) + 64) {
    fill_caches();
  }

  void set(const std::vector<std::int32_t>& used, std::uint32_t page_seed) {
    std::vector<std::int32_t> ids(index(p_.num_pages));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(page_seed));
    set_lengths(used);
    set_pages(ids);
  }
  /// The first of so many page ids are the table.
  template <typename Id>
  void set_pages(const std::vector<Id>& ids) {
    page_type_ = sizeof(Id) == 8 ? DType::i64 : DType::i32;
    pages_.upload(ids.data(), index(p_.batch * cols()) * sizeof(Id));
  }
  void set_lengths(const std::vector<std::int32_t>& used) {
    used_.upload(used.data(), index(p_.batch) * 4);
  }
  /// With the same values every time.
  void fill_caches() {
    const auto fill = [](DeviceBuffer& cache, std::uint32_t seed) {
      const std::vector<std::uint16_t> bits =
          random_bits(static_cast<std::int64_t>(cache.bytes() / 2), seed);
      cache.upload(bits.data(), cache.bytes());
    };
    fill(k_, 12);
    fill(v_, 13);
  }
  void poison() {
    o_.poison();
    lse_.poison();
    workspace_.poison();
  }
  TensorView k() const { return pages_of(k_, p_.head_dim); }
  TensorView v() const { return pages_of(v_, p_.head_dim_v); }
  IndexView used() const { return {used_.data(), DType::i32, p_.batch, 0}; }
  IndexView pages() const { return {pages_.data(), page_type_, p_.batch * cols(), cols()}; }
  std::int64_t cols() const { return (p_.seqlen_kv + p_.page_size - 1) / p_.page_size; }

  void run(cudaStream_t stream = nullptr, std::int64_t result = 0) const {
    ForwardInputs in{.q = TensorView::contiguous(q_.data(), p_.dtype, p_.batch, p_.seqlen_q,
                                                 p_.heads_q, p_.head_dim),
                     .k = k(),
                     .v = v()};
    in.seqused_kv = used();
    in.page_table = pages();
    float* const o = static_cast<float*>(o_.data()) + result * rows() * p_.head_dim_v;
    float* const lse = static_cast<float*>(lse_.data()) + result * rows();
    const ForwardOutputs out{.o = TensorView::contiguous(o, DType::f32, p_.batch, p_.seqlen_q,
                                                         p_.heads_q, p_.head_dim_v),
                             .lse = LseView::contiguous(lse, p_.batch, p_.heads_q, p_.seqlen_q)};
    const Status status =
        plan_.forward(in, out, {workspace_.data(), plan_.workspace_bytes()}, {stream});
    EXPECT_TRUE(status) << status.message();
  }
  /// o of all results, then their lse.
  std::vector<std::uint32_t> bits() const {
    std::vector<std::uint32_t> all = o_.download<std::uint32_t>();
    const std::vector<std::uint32_t> lse = lse_.download<std::uint32_t>();
    all.insert(all.end(), lse.begin(), lse.end());
    return all;
  }

  static std::vector<std::uint16_t> random_bits(std::int64_t count, std::uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> bits(index(count));
    for (std::uint16_t& one : bits) {
      one = f32_to_bf16(normal(random));
    }
    return bits;
  }

 private:
  static Plan make_plan(const AttentionProblem& problem, std::int64_t splits) {
    const Result<Plan> made =
        plan(problem, Device::cuda(), {.kernel = "decode_sm90", .splits = splits});
    EXPECT_TRUE(made) << made.status().message();
    return *made;
  }
  std::int64_t rows() const { return p_.batch * p_.seqlen_q * p_.heads_q; }
  TensorView pages_of(const DeviceBuffer& cache, std::int64_t dim) const {
    return TensorView::contiguous(cache.data(), p_.dtype, p_.num_pages, p_.page_size, p_.heads_kv,
                                  dim);
  }

  Plan plan_;
  DType page_type_ = DType::i32;
  AttentionProblem p_;
  DeviceBuffer q_, k_, v_, o_, lse_, used_, pages_, workspace_;
};

/// Four sequences in pages of 16, or the first `batch` of them, with so many query heads a KV head.
inline AttentionProblem rig_problem(std::int64_t batch = 4, std::int64_t group = 4) {
  return {.batch = batch,
          .heads_q = 2 * group,
          .heads_kv = 2,
          .seqlen_q = 1,
          .seqlen_kv = 2048,
          .head_dim = 128,
          .dtype = DType::bf16,
          .layout = Layout::paged,
          .page_size = 16,
          .num_pages = 4 * 128,
          .seqused_kv = true};
}

}  // namespace rafter::testing
