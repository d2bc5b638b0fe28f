// The self-test's own arithmetic: it must see faults as small as the contract forbids.
#include "cli/case_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "cli/case_backward.h"

namespace rafter::cli {
namespace {

using testing::HasSubstr;

const AttentionCase& named(const std::string& name) {
  for (const AttentionCase& c : attention_cases()) {
    if (c.name == name) {
      return c;
    }
  }
  ADD_FAILURE() << "no case " << name;
  return attention_cases()[0];
}

TEST(Cases, NamesAreUniqueAndSizesInclude0And1AndAllNeighboursOfTiles) {
  std::set<std::string> names;
  std::set<std::int64_t> lengths;
  for (const AttentionCase& c : attention_cases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_EQ(c.lengths_q.size(), c.lengths_kv.size()) << c.name;
    lengths.insert(c.lengths_q.begin(), c.lengths_q.end());
  }
  for (const std::int64_t length : {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257}) {
    EXPECT_TRUE(lengths.contains(length)) << length;
  }
}

TEST(Cases, ValuesAreRepresentableInTheirDtype) {
  const AttentionCase& c = named("peaked");
  for (const float value : make_values(c, DType::bf16).q) {
    EXPECT_EQ(bf16_to_f32(f32_to_bf16(value)), value);
  }
  for (const float value : make_values(c, DType::f16).q) {
    EXPECT_EQ(f16_to_f32(f32_to_f16(value)), value);
  }
}

TEST(Cases, BoundsAreAsTightAsTheDtype) {
  for (const AttentionCase& c : attention_cases()) {
    const auto f32 = expectation_of(c, DType::f32, make_values(c, DType::f32));
    ASSERT_TRUE(f32.is_ok()) << f32.status().message();
    EXPECT_LT(f32->o_bound, 2e-4) << c.name;
    EXPECT_LT(f32->lse_bound, 5e-4) << c.name;
  }
}

TEST(Cases, AnErrorAboveTheBoundIsSeenAndOneBelowIsNot) {
  const AttentionCase& c = named("packed");
  const CaseValues values = make_values(c, DType::f32);
  const auto expected = expectation_of(c, DType::f32, values);
  ASSERT_TRUE(expected.is_ok());
  CaseOutput output = expected->reference;
  EXPECT_EQ(difference(c, output, *expected), "");
  output.o[7] += static_cast<float>(expected->o_bound * 0.5);
  EXPECT_EQ(difference(c, output, *expected), "");
  output.o[7] += static_cast<float>(expected->o_bound * 4);
  EXPECT_THAT(difference(c, output, *expected), HasSubstr("o[sequence 0, row 0, head 0, 7] is"));
  output = expected->reference;
  // Row 6 of all belongs to the third sequence, after 5 and 0: its second row, which sees one key.
  output.lse[6 * 4 + 1] += static_cast<float>(expected->lse_bound * 4);
  EXPECT_THAT(difference(c, output, *expected), HasSubstr("lse[sequence 2, row 1, head 1] is"));
}

TEST(Cases, NanAndInfinityMustStandWhereTheReferenceHasThem) {
  const AttentionCase& c = named("causal_more_queries");
  const auto expected = expectation_of(c, DType::f32, make_values(c, DType::f32));
  ASSERT_TRUE(expected.is_ok());
  EXPECT_EQ(std::count(expected->reference.lse.begin(), expected->reference.lse.end(),
                       -std::numeric_limits<float>::infinity()),
            33);
  CaseOutput output = expected->reference;
  output.lse[0] = -1e30F;
  EXPECT_NE(difference(c, output, *expected), "");
  output = expected->reference;
  output.o.back() = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(difference(c, output, *expected), "");
  const AttentionCase& with_nan = named("nan_in_one_row");
  const auto nan_expected = expectation_of(with_nan, DType::f32, make_values(with_nan, DType::f32));
  CaseOutput laundered = nan_expected->reference;
  for (float& value : laundered.o) {
    value = value == value ? value : 0;
  }
  EXPECT_NE(difference(with_nan, laundered, *nan_expected), "");
}

TEST(Cases, BitsAreComparedAsBits) {
  const AttentionCase& c = named("one_by_one");
  CaseOutput a{std::vector<float>(64, 0.0F), {1.0F}};
  CaseOutput b = a;
  EXPECT_EQ(bit_difference(c, a, b), "");
  b.o[3] = -0.0F;
  EXPECT_NE(bit_difference(c, a, b), "");
}

TEST(Cases, AMaskLeftOutIsSeen) {
  AttentionCase c = named("causal_65");
  const CaseValues values = make_values(c, DType::bf16);
  const auto expected = expectation_of(c, DType::bf16, values);
  ASSERT_TRUE(expected.is_ok());
  c.problem.mask = Mask::none();
  const auto output = run_case(c, DType::bf16, values, {.kernel = "forward_reference"});
  ASSERT_TRUE(output.is_ok()) << output.status().message();
  EXPECT_NE(difference(c, *output, *expected), "");
}

// As tight as f32, and a fault of one element of any gradient is seen.
TEST(BackwardCases, AnErrorAboveTheBoundIsSeenAndOneBelowIsNot) {
  std::int64_t cases = 0;
  for (const AttentionCase& c : attention_cases()) {
    cases += runs_backward(c) ? 1 : 0;
  }
  EXPECT_GT(cases, 40);
  const AttentionCase& c = named("packed_seqused");
  ASSERT_TRUE(runs_backward(c));
  const auto values = make_backward_values(c, DType::f32);
  ASSERT_TRUE(values.is_ok());
  const auto expected = expectation_of(c, DType::f32, *values);
  ASSERT_TRUE(expected.is_ok());
  EXPECT_LT(expected->dq_bound, 1e-3);
  EXPECT_LT(expected->dk_bound, 1e-3);
  EXPECT_LT(expected->dv_bound, 1e-3);
  EXPECT_EQ(difference(c, expected->reference, *expected), "");
  struct Part {
    std::vector<float> CaseGradients::*gradient;
    double bound;
    const char* name;
  };
  for (const Part& part : {Part{&CaseGradients::dq, expected->dq_bound, "dq"},
                           Part{&CaseGradients::dk, expected->dk_bound, "dk"},
                           Part{&CaseGradients::dv, expected->dv_bound, "dv"}}) {
    CaseGradients g = expected->reference;
    float& element = (g.*part.gradient).back();
    element += static_cast<float>(0.5 * part.bound);
    EXPECT_EQ(difference(c, g, *expected), "");
    EXPECT_THAT(bit_difference(c, g, expected->reference), HasSubstr(part.name));
    element += static_cast<float>(4 * part.bound);
    EXPECT_THAT(difference(c, g, *expected), HasSubstr(part.name));
  }
}

}  // namespace
}  // namespace rafter::cli
