#include <fstream>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

const nlohmann::ordered_json* figure_of(const nlohmann::ordered_json& document,
                                        const std::string& key) {
  for (const auto& row : document.at("figures")) {
    if (row.at("figure") == key) {
      return &row;
    }
  }
  return nullptr;
}

TEST(ProbeCommand, WritesADeviceFileThatExplainReadsAndPrintsTheSameFigures) {
  const TemporaryFolder folder;
  const std::string path = folder / "deep/er/cpu.json";
  const auto document = run_json({"probe", "--quick", "--force", "--out", path});
  EXPECT_EQ(document.at("file"), path);
  for (const char* key :
       {"peak_f32_flop_per_s", "bandwidth_bytes_per_s", "exp_per_s", "launch_s"}) {
    const auto* row = figure_of(document, key);
    ASSERT_NE(row, nullptr) << key;
    EXPECT_GT(row->at("value").get<double>(), 0);
    EXPECT_GT(row->at("samples").get<int>(), 0);
    EXPECT_LE(row->at("low").get<double>(), row->at("value").get<double>());
  }
  for (const char* key : {"date", "commit", "compiler", "cpu", "isa", "kernel"}) {
    EXPECT_FALSE(document.at("notes").at(key).get<std::string>().empty()) << key;
  }
  // What is not measured is missing with a reason, never 0.
  for (const auto& row : document.at("figures")) {
    EXPECT_GT(row.at("value").get<double>(), 0) << row;
    EXPECT_FALSE(row.at("source").get<std::string>().empty()) << row;
  }
  for (const auto& row : document.at("missing")) {
    EXPECT_FALSE(row.at("reason").get<std::string>().empty());
  }
  const auto explained =
      run_json({"explain", "attention", "--seqlen", "1k", "--dtype", "f32", "--device", path});
  EXPECT_GT(explained.at("ridge_flop_per_byte").get<double>(), 0);
}

TEST(ProbeCommand, SaysSoWhenTheHardwareIsNotHere) {
  const ToolRun run = run_tool({"probe", "--device", "cuda"});
  EXPECT_EQ(run.exit_code, 77);
  EXPECT_EQ(run.out, "");
  EXPECT_TRUE(run.one_line_error()) << run.err;
}

TEST(ProbeCommand, RefusesWhatItDoesNotKnow) {
  expect_refused({"probe", "--device", "tpu"}, {"--device", "cpu", "cuda"});
  expect_refused({"probe", "--threads", "-1"}, {"--threads"});
  expect_refused({"probe", "--slow"}, {"--slow", "--quick"});
}

TEST(ProbeCommand, LeavesNothingBehindWhereItCannotWrite) {
  const TemporaryFolder folder;
  const std::string blocker = folder / "file";
  { std::ofstream(blocker) << "x"; }
  const ToolRun run = run_tool({"probe", "--quick", "--force", "--out", blocker + "/cpu.json"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.out, "");
  EXPECT_TRUE(run.one_line_error()) << run.err;
}

}  // namespace
}  // namespace rafter::test
