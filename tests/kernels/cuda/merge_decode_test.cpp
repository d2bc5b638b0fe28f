// decode_sm90 of a prefix that all sequences share and of the keys that each has behind it, merged
// where they lie: against float64 over all keys of each.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/decode_sm90_case.h"
#include "kernels/cuda/device_buffer.h"
#include "rafter/cache.h"

namespace rafter::testing {
namespace {

constexpr std::int64_t kPrefix = 700;

/// Cuts rows [Σ keys, heads_kv, head_dim] of sequences that begin with the same kPrefix keys.
struct Cut {
  std::vector<std::uint16_t> prefix, suffixes;
};

std::vector<std::uint16_t> bf16_bits(const std::vector<float>& values) {
  std::vector<std::uint16_t> bits;
  for (const float value : values) {
    bits.push_back(f32_to_bf16(value));  // exact: values are bf16 ones
  }
  return bits;
}

/// Writes the first sequence's prefix over all others', and cuts.
Cut share_prefix(const Case& whole, std::vector<float>& rows) {
  const std::int64_t row = whole.problem.heads_kv * whole.problem.head_dim;
  const std::vector<float> prefix(rows.begin(), rows.begin() + kPrefix * row);
  std::vector<float> suffixes;
  auto of_sequence = rows.begin();
  for (const std::int64_t keys : whole.lengths_kv) {
    const auto own = std::copy(prefix.begin(), prefix.end(), of_sequence);
    of_sequence += keys * row;
    suffixes.insert(suffixes.end(), own, of_sequence);
  }
  return {bf16_bits(prefix), bf16_bits(suffixes)};
}

/// A plan and what it writes: o [1, rows, heads_q, head_dim], lse [1, heads_q, rows].
class Part {
 public:
  Part(const AttentionProblem& problem, std::int64_t rows, DType o)
      : plan_(must(plan(problem, Device::cuda(), {.kernel = "decode_sm90"}))),
        rows_(rows),
        dtype_(o),
        o_(index(rows * problem.heads_q * problem.head_dim * bits_of(o) / 8)),
        lse_(index(rows * problem.heads_q * 4)),
        workspace_(index(plan_.workspace_bytes()) + 64) {}

  AttentionState state() const {
    const AttentionProblem& p = plan_.problem();
    return {TensorView::contiguous(o_.data(), dtype_, 1, rows_, p.heads_q, p.head_dim),
            LseView::contiguous(static_cast<float*>(lse_.data()), 1, p.heads_q, rows_)};
  }
  Status run(const ForwardInputs& in) const {
    return plan_.forward(in, {.o = state().o, .lse = state().lse},
                         {workspace_.data(), plan_.workspace_bytes()});
  }
  /// As cases have it: o [rows, heads_q, head_dim], lse [rows, heads_q].
  Output fetch() const {
    Output output;
    if (dtype_ == DType::f32) {
      output.o = o_.download<float>();
    } else {
      for (const std::uint16_t bits : o_.download<std::uint16_t>()) {
        output.o.push_back(bf16_to_f32(bits));
      }
    }
    const std::vector<float> lse = lse_.download<float>();
    const std::int64_t heads = plan_.problem().heads_q;
    for (std::int64_t i = 0; i < rows_ * heads; ++i) {
      output.lse.push_back(lse[index(i % heads * rows_ + i / heads)]);
    }
    EXPECT_TRUE(o_.guards_intact() && lse_.guards_intact() && workspace_.guards_intact());
    return output;
  }

 private:
  Plan plan_;
  std::int64_t rows_;
  DType dtype_;
  DeviceBuffer o_, lse_, workspace_;
};

/// Sequences of one query; `own` keys behind the prefix. The prefix has all their queries as rows
/// of one sequence, and keys behind it are packed.
void expect_whole(const std::vector<std::int64_t>& own, std::int64_t group, DType o) {
  Case whole = decode_sm90_case(DType::bf16, DType::bf16, group, 128);
  const auto batch = static_cast<std::int64_t>(own.size());
  std::vector<std::int64_t> lengths = own;
  std::vector<std::int32_t> cu_q = {0}, cu_kv = {0};
  for (std::int64_t& keys : lengths) {
    cu_q.push_back(cu_q.back() + 1);
    cu_kv.push_back(cu_kv.back() + static_cast<std::int32_t>(keys));
    keys += kPrefix;
  }
  whole.lengths(each(own.size(), 1), lengths);
  Values values = make_values(whole);
  const Cut k = share_prefix(whole, values.k), v = share_prefix(whole, values.v);

  AttentionProblem p = whole.problem;
  p.seqused_kv = false;
  p.seqlen_q = batch;
  p.seqlen_kv = kPrefix;
  const Part prefix(p, batch, o);
  p.layout = Layout::packed;
  p.batch = p.total_q = batch;
  p.seqlen_q = 1;
  p.seqlen_kv = max_of(own);
  p.total_kv = sum_of(own);
  const Part suffixes(p, batch, o);

  const auto rows = [&](const DeviceBuffer& memory, std::int64_t count, std::int64_t heads) {
    return TensorView::contiguous(memory.data(), DType::bf16, 1, count, heads, p.head_dim);
  };
  const DeviceBuffer q(bf16_bits(values.q)), k_prefix(k.prefix), v_prefix(v.prefix);
  const DeviceBuffer k_own(k.suffixes), v_own(v.suffixes), starts_q(cu_q), starts_kv(cu_kv);
  const Status first = prefix.run({.q = rows(q, batch, p.heads_q),
                                   .k = rows(k_prefix, kPrefix, p.heads_kv),
                                   .v = rows(v_prefix, kPrefix, p.heads_kv)});
  const Status second =
      suffixes.run({.q = rows(q, batch, p.heads_q),
                    .k = rows(k_own, p.total_kv, p.heads_kv),
                    .v = rows(v_own, p.total_kv, p.heads_kv),
                    .cu_seqlens_q = {starts_q.data(), DType::i32, batch + 1, 0},
                    .cu_seqlens_kv = {starts_kv.data(), DType::i32, batch + 1, 0}});
  const AttentionState states[] = {prefix.state(), suffixes.state()};
  const Status third = merge(states, suffixes.state(), Device::cuda());
  for (const Status& status : {first, second, third}) {
    ASSERT_TRUE(status) << status.message();
  }
  Expected expected = expect_values(whole, values);
  if (o == DType::bf16) {  // both parts are rounded before their sum is
    double largest = 0;
    for (const double x : expected.o) {
      largest = std::fmax(largest, std::fabs(x));
    }
    expected.naive_error_o += 0x1p-8 * largest;
  }
  EXPECT_TRUE(close_to(suffixes.fetch(), expected, whole));
}

/// The prefix in shares of all SMs, in a cluster, and with columns to warps. One sequence has
/// nothing of its own.
TEST(MergeDecode, ASharedPrefixAndWhatFollowsGiveFloat64OfTheWhole) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const DType o : {DType::bf16, DType::f32}) {
    for (const std::int64_t group : {4, 12}) {
      for (const std::vector<std::int64_t>& own :
           {std::vector<std::int64_t>{300, 0, 1, 40, 129}, std::vector<std::int64_t>{77, 0}}) {
        SCOPED_TRACE(::testing::Message()
                     << to_string(o) << ", group " << group << ", " << own.size() << " sequences");
        expect_whole(own, group, o);
      }
    }
  }
}

}  // namespace
}  // namespace rafter::testing
