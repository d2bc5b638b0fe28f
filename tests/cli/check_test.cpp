// rafter check: the self-test, its counts and its filters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

using testing::EndsWith;
using testing::HasSubstr;

std::string last_line(const std::string& text) {
  const std::size_t end = text.find_last_not_of('\n') + 1;
  const std::size_t begin = text.rfind('\n', end - 1) + 1;
  return text.substr(begin, end - begin);
}

TEST(Check, EveryKernelOfThisMachinePassesOnEveryCase) {
  const auto json = run_json({"check"});
  EXPECT_EQ(json["failed"], 0) << json["failures"].dump(2);
  std::int64_t passed = 0;
  std::int64_t kernels = 0;
  for (const auto& kernel : json["kernels"]) {
    EXPECT_GT(kernel["passed"].get<int>(), kernel["pass"] == "forward" ? 100 : 40)
        << kernel["kernel"];
    passed += kernel["passed"].get<int>();
    ++kernels;
  }
  EXPECT_GE(kernels, 5);
  EXPECT_EQ(json["passed"], passed);
  // A refusal is said, with its reason, and is neither a pass nor a failure.
  EXPECT_EQ(json["refusals"].size(), json["refused"].get<std::size_t>());
  for (const auto& refusal : json["refusals"]) {
    EXPECT_NE(refusal["reason"], "") << refusal;
  }
}

TEST(Check, TheLastLineCounts) {
  const ToolRun run = run_tool({"check", "--case", "causal_65"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(last_line(run.out), testing::MatchesRegex("[1-9][0-9]* passed, 0 failed"));
  EXPECT_EQ(run.err, "");
}

TEST(Check, OneKernelOnOneCase) {
  const auto json = run_json({"check", "--kernel", "forward_reference", "--case", "one_by_one"});
  ASSERT_EQ(json["kernels"].size(), 1U);
  EXPECT_EQ(json["kernels"][0]["kernel"], "forward_reference");
  EXPECT_EQ(json["passed"], 3);  // f32, bf16, f16
}

TEST(Check, ABackwardKernelOnOneCase) {
  const auto json = run_json({"check", "--kernel", "backward_reference", "--case", "causal_17"});
  ASSERT_EQ(json["kernels"].size(), 1U);
  EXPECT_EQ(json["kernels"][0]["pass"], "backward");
  EXPECT_EQ(json["passed"], 3);  // f32, bf16, f16
  expect_refused({"check", "--kernel", "backward_reference", "--case", "paged_16"},
                 {"--case", "backward"});
}

TEST(Check, UnknownNamesAreRefusedWithTheKnownOnes) {
  expect_refused({"check", "--kernel", "forward_refrence"}, {"--kernel", "forward_reference"});
  expect_refused({"check", "--kernel", "backward_reference", "--device", "cuda"},
                 {"--kernel", "cuda"});
  expect_refused({"check", "--case", "causal_66"}, {"--case", "causal_65"});
  expect_refused({"check", "--format", "xml"}, {"--format", "table, json, csv"});
  expect_refused({"check", "--seqlen", "4"}, {"--seqlen", "unknown flag"});
}

TEST(Check, AKernelThatThisMachineLacksIsExit77) {
  const auto listed = run_json({"kernels"});
  for (const auto& kernel : listed["kernels"]) {
    if (!kernel["machine_has"].get<bool>()) {
      const ToolRun run = run_tool({"check", "--kernel", kernel["kernel"].get<std::string>()});
      EXPECT_EQ(run.exit_code, 77);
      EXPECT_TRUE(run.one_line_error()) << run.err;
      EXPECT_THAT(run.err, HasSubstr(kernel["machine_reason"].get<std::string>()));
      return;
    }
  }
  GTEST_SKIP() << "this machine has every kernel";
}

}  // namespace
}  // namespace rafter::test
