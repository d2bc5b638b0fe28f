// decode_sm90 in clusters, which it takes for one sequence or few heads of one length, against the
// same sequences in a batch whose lengths only the device knows, where units go round all SMs.
#include "kernels/cuda/decode_sm90_case.h"

namespace rafter::testing {
namespace {

/// Of `queries` rows for `group` query heads of a KV head.
void expect_bits_of_a_batch(std::int64_t queries, std::int64_t group) {
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t head_dim : {64, 128, 72}) {
      for (const Mask& mask : {Mask::none(), Mask::window(700, 0)}) {
        Case c = decode_sm90_case(dtype, dtype, group, head_dim);
        c.problem.mask = mask;
        c.problem.softcap = head_dim == 72 ? 5.0f : 0.0f;
        c.lengths(each(4, queries), {3000, 2, 0, 700});
        const Values values = make_values(c);
        for (const std::int64_t splits : {0, 1, 7, 40}) {
          const Output expected = run_case(c, values, on_sm90(splits));
          ASSERT_FALSE(expected.o.empty());
          for (std::size_t b = 0; b < c.lengths_kv.size(); ++b) {
            SCOPED_TRACE(::testing::Message()
                         << to_string(dtype) << " head_dim " << head_dim << " window "
                         << mask.window_left << " splits " << splits << ", sequence " << b);
            Case alone = c;
            alone.lengths({queries}, {c.lengths_kv[b]});
            const Values mine = values_of(c, values, b);
            const Output output = output_of(c, expected, b);
            EXPECT_TRUE(same_bits(run_case(alone, mine, on_sm90(splits)), output));
            EXPECT_TRUE(same_bits(run_case(paged(alone, 16), mine, on_sm90(splits)), output));
            if (c.lengths_kv[b] > 0) {
              alone.problem.seqused_kv = false;
              EXPECT_TRUE(same_bits(run_case(alone, mine, on_sm90(splits)), output));
            }
          }
        }
      }
    }
  }
}

TEST(DecodeSm90Cluster, BitsOfOneSequenceAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  expect_bits_of_a_batch(2, 4);
}

TEST(DecodeSm90Cluster, BitsOfOneSequenceOfManyHeadsAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  expect_bits_of_a_batch(1, 12);
}

TEST(DecodeSm90Cluster, BitsOfSequencesOfOneLengthAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t group : {5, 16}) {
    for (const std::size_t batch : {4, 11, 24, 50}) {  // clusters of 8, 4, 2 and 1
      Case c = decode_sm90_case(DType::bf16, DType::bf16, group, 128);
      c.lengths(each(batch, 1), std::vector<std::int64_t>(batch, 1200));
      const Values values = make_values(c);
      const Output expected = run_case(c, values, on_sm90());
      ASSERT_FALSE(expected.o.empty());
      c.problem.seqused_kv = false;
      EXPECT_TRUE(same_bits(run_case(c, values, on_sm90()), expected))
          << batch << " sequences of " << group << " heads";
    }
  }
}

}  // namespace
}  // namespace rafter::testing
