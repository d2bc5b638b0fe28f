// A decode problem in device memory whose lengths and pages change between runs of one plan.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "base/element.h"
#include "kernels/cuda/decode_sm90_case.h"
#include "kernels/cuda/device_buffer.h"

namespace rafter::testing {

/// A problem on the device, dense or in pages, whose lengths and pages change between runs; bf16
/// queries, a cache of bf16 or of e4m3 without factors. Results of several runs may be kept.
class Rig {
 public:
  explicit Rig(const AttentionProblem& problem, std::int64_t results = 1, std::int64_t splits = 0)
      : plan_(make_plan(problem, splits)),
        p_(plan_.problem()),
        kv_(p_.kv_dtype.value_or(p_.dtype)),
        q_(random_bits(p_.batch * p_.seqlen_q * p_.heads_q * p_.head_dim, 11)),
        k_(index(places() * p_.heads_kv * p_.head_dim * bits_of(kv_) / 8)),
        v_(index(places() * p_.heads_kv * p_.head_dim_v * bits_of(kv_) / 8)),
        o_(index(results * rows() * p_.head_dim_v * 4)),
        lse_(index(results * rows() * 4)),
        used_(index(p_.batch * 4)),
        pages_(index(p_.batch * cols() * 8)),
        tree_(tree_words()),
        workspace_(index(plan_.workspace_bytes()) + 64) {
    fill_caches();
  }

  void set(const std::vector<std::int32_t>& used, std::uint32_t page_seed) {
    set_lengths(used);
    if (paged()) {
      std::vector<std::int32_t> ids(index(p_.num_pages));
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), std::mt19937(page_seed));
      set_pages(ids);
    }
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
    const auto fill = [this](DeviceBuffer& cache, std::uint32_t seed) {
      const std::vector<std::uint8_t> bytes = cache_bytes(cache, seed);
      cache.upload(bytes.data(), cache.bytes());
    };
    fill(k_, 12);
    fill(v_, 13);
  }
  void poison() {
    o_.poison();
    lse_.poison();
    workspace_.poison();
  }
  TensorView k() const { return rows_of(k_.data(), p_.head_dim); }
  TensorView v() const { return rows_of(v_.data(), p_.head_dim_v); }
  IndexView used() const { return {used_.data(), DType::i32, p_.batch, 0}; }
  IndexView pages() const {
    return paged() ? IndexView{pages_.data(), page_type_, p_.batch * cols(), cols()} : IndexView{};
  }
  std::int64_t cols() const {
    return paged() ? (p_.seqlen_kv + p_.page_size - 1) / p_.page_size : 0;
  }

  void run(cudaStream_t stream = nullptr, std::int64_t result = 0) const {
    ForwardInputs in{.q = TensorView::contiguous(q_.data(), p_.dtype, p_.batch, p_.seqlen_q,
                                                 p_.heads_q, p_.head_dim),
                     .k = k(),
                     .v = v()};
    in.seqused_kv = p_.seqused_kv ? used() : IndexView{};
    in.page_table = pages();
    if (p_.tree_mask) {
      in.tree_mask = BitsView::contiguous(static_cast<const std::uint64_t*>(tree_.data()), p_.batch,
                                          p_.seqlen_q);
    }
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
  /// The only result against float64, for these lengths and the pages that set() gave.
  ::testing::AssertionResult is_right(const std::vector<std::int32_t>& used) const {
    Case c{.problem = p_};
    c.lengths(each(index(p_.batch), p_.seqlen_q), {});
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      c.lengths_kv.push_back(used[index(b)]);
    }
    const std::vector<float> o = o_.download<float>(), lse = lse_.download<float>();
    Output output{o, {}};
    for (std::int64_t row = 0; row < p_.batch * p_.seqlen_q; ++row) {
      const std::int64_t b = row / p_.seqlen_q, i = row - b * p_.seqlen_q;
      for (std::int64_t h = 0; h < p_.heads_q; ++h) {  // from [batch, heads_q, seqlen_q]
        output.lse.push_back(lse[index((b * p_.heads_q + h) * p_.seqlen_q + i)]);
      }
    }
    return close_to(output, expect_values(c, values_of(used)), c);
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
  bool paged() const { return p_.layout == Layout::paged; }
  std::int64_t rows() const { return p_.batch * p_.seqlen_q * p_.heads_q; }
  /// Of tokens in the cache.
  std::int64_t places() const {
    return paged() ? p_.num_pages * p_.page_size : p_.batch * p_.seqlen_kv;
  }
  TensorView rows_of(const void* data, std::int64_t dim) const {
    return paged() ? TensorView::contiguous(data, kv_, p_.num_pages, p_.page_size, p_.heads_kv, dim)
                   : TensorView::contiguous(data, kv_, p_.batch, p_.seqlen_kv, p_.heads_kv, dim);
  }
  std::vector<std::uint8_t> cache_bytes(const DeviceBuffer& cache, std::uint32_t seed) const {
    std::vector<std::uint8_t> bytes(cache.bytes());
    if (kv_ == DType::e4m3) {
      std::mt19937 random(seed);
      std::normal_distribution<float> normal;
      for (std::uint8_t& one : bytes) {
        one = f32_to_e4m3(normal(random));
      }
    } else {
      const auto bits = random_bits(static_cast<std::int64_t>(bytes.size() / 2), seed);
      std::memcpy(bytes.data(), bits.data(), bytes.size());
    }
    return bytes;
  }
  /// Every query sees itself and any of the others; the first sees no new token.
  std::vector<std::uint64_t> tree_words() const {
    std::mt19937_64 random(14);
    std::vector<std::uint64_t> words(index(p_.batch * p_.seqlen_q));
    for (std::size_t i = 0; i < words.size(); ++i) {
      const std::size_t token = i % index(p_.seqlen_q);
      words[i] = token == 0 ? 0 : random() | std::uint64_t{1} << token;
    }
    return words;
  }
  /// What the device has of these lengths.
  Values values_of(const std::vector<std::int32_t>& used) const {
    Values values;
    for (const std::uint16_t one : q_.download<std::uint16_t>()) {
      values.q.push_back(bf16_to_f32(one));
    }
    const std::vector<std::int32_t> ids =
        paged() ? pages_.download<std::int32_t>() : std::vector<std::int32_t>{};
    const auto gather = [&](const DeviceBuffer& cache, std::int64_t dim, std::vector<float>& to) {
      const std::vector<std::uint8_t> bytes = cache.download<std::uint8_t>();
      const TensorView from = rows_of(bytes.data(), p_.heads_kv * dim);  // of elements alone
      const std::int64_t row = p_.heads_kv * dim;
      for (std::int64_t b = 0; b < p_.batch; ++b) {
        for (std::int64_t j = 0; j < used[index(b)]; ++j) {
          const std::int64_t at =
              paged() ? ids[index(b * cols() + j / p_.page_size)] * p_.page_size + j % p_.page_size
                      : b * p_.seqlen_kv + j;
          for (std::int64_t d = 0; d < row; ++d) {
            to.push_back(static_cast<float>(base::load_element(from, at * row + d)));
          }
        }
      }
    };
    gather(k_, p_.head_dim, values.k);
    gather(v_, p_.head_dim_v, values.v);
    if (p_.tree_mask) {
      values.tree_mask = tree_words();
    }
    return values;
  }

  Plan plan_;
  DType page_type_ = DType::i32;
  AttentionProblem p_;
  DType kv_;
  DeviceBuffer q_, k_, v_, o_, lse_, used_, pages_, tree_, workspace_;
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

/// 256 whole heads, two of a CTA.
inline AttentionProblem heads_problem() {
  return {.batch = 128,
          .heads_q = 8,
          .heads_kv = 2,
          .seqlen_q = 1,
          .seqlen_kv = 600,
          .head_dim = 16,
          .dtype = DType::bf16};
}

}  // namespace rafter::testing
