// A sequence has the same bits in forward_sm90 whatever its layout and neighbours, on both sides of
// the lengths from which a tuning row of its own takes it.
#include <algorithm>
#include <numeric>

#include "kernels/cuda/forward_sm90_case.h"

namespace rafter {
namespace {

using namespace testing::forward_sm90;

constexpr std::int64_t kHeads = 4, kHeadsKv = 2, kHeadDim = 64;

AttentionProblem masked(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                        const Mask& mask) {
  return shape(batch, kHeads, kHeadsKv, seqlen_q, seqlen_kv, kHeadDim, mask);
}

std::vector<Mask> masks() {
  return {Mask::causal(), Mask::causal(MaskAlign::top_left), Mask::window(90, 10)};
}

/// Rows [first_q, first_q + seqlen_q) of `all`, whose keys are the seqlen_kv rows from first_kv,
/// are a dense batch of one: it has the same bits.
void expect_bits_of_dense(const Trial& all, const Answer& among, const Mask& mask,
                          std::int64_t first_q, std::int64_t seqlen_q, std::int64_t first_kv,
                          std::int64_t seqlen_kv, std::int64_t first_lse, std::int64_t lse_stride) {
  SCOPED_TRACE(std::to_string(seqlen_q) + " queries, " + std::to_string(seqlen_kv) + " keys");
  const Trial alone(make_case(masked(1, seqlen_q, seqlen_kv, mask)));
  alone.q().copy_rows(all.q(), first_q, seqlen_q);
  alone.k().copy_rows(all.k(), first_kv, seqlen_kv);
  alone.v().copy_rows(all.v(), first_kv, seqlen_kv);
  const Answer one = alone.kernel();
  EXPECT_TRUE(
      std::equal(one.o.begin(), one.o.end(), among.o.begin() + first_q * kHeads * kHeadDim));
  for (std::int64_t h = 0; h < kHeads; ++h) {
    const auto mine = one.lse.begin() + h * seqlen_q;
    EXPECT_TRUE(std::equal(mine, mine + seqlen_q, among.lse.begin() + first_lse + h * lse_stride));
  }
}

constexpr std::int64_t kQueries[] = {300, 193, 192, 520, 40, 300, 0, 512, 1, 700, 256};
constexpr std::int64_t kKeys[] = {1024, 1024, 1024, 1025, 40, 1023, 300, 512, 1100, 700, 0};

class BothKinds : public ::testing::TestWithParam<bool> {};  // with seqused_kv

TEST_P(BothKinds, APackedSequenceHasTheBitsOfADenseOne) {
  RAFTER_NEEDS_SM90();
  for (const Mask& mask : masks()) {
    Case c = make_case(masked(1, 700, 1200, mask));
    c.problem.layout = Layout::packed;
    c.lengths_q.assign(std::begin(kQueries), std::end(kQueries));
    c.lengths_kv.assign(std::begin(kKeys), std::end(kKeys));
    if (GetParam()) {
      c.used = c.lengths_kv;
      for (std::int64_t& length : c.lengths_kv) {
        length += 57;  // rows that are not used
      }
    }
    const Trial trial(c);
    const Answer all = trial.kernel(2);
    for (std::size_t b = 0; b < std::size(kQueries); ++b) {
      const std::int64_t rows = trial.outer().second;
      expect_bits_of_dense(trial, all, mask, trial.cu_q()[b], kQueries[b], trial.cu_kv()[b],
                           kKeys[b], trial.cu_q()[b], rows);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(ForwardSm90, BothKinds, ::testing::Bool());

TEST(ForwardSm90, ASequenceOfADenseBatchHasTheSameBitsWhateverIsUsed) {
  RAFTER_NEEDS_SM90();
  const std::vector<std::int64_t> used = {1100, 1025, 1024, 1023, 300, 0, 64};
  for (const std::int64_t capacity : {1100, 1024}) {  // may be of both kinds, or of one
    for (const Mask& mask : masks()) {
      const auto batch = static_cast<std::int64_t>(used.size());
      Case c = make_case(masked(batch, 300, capacity, mask), used);
      for (std::int64_t& length : c.used) {
        length = std::min(length, capacity);
      }
      const Trial trial(c);
      const Answer all = trial.kernel(2);
      for (std::int64_t b = 0; b < batch; ++b) {
        expect_bits_of_dense(trial, all, mask, b * 300, 300, b * capacity,
                             c.used[static_cast<std::size_t>(b)], b * kHeads * 300, 300);
      }
    }
  }
}

}  // namespace
}  // namespace rafter
