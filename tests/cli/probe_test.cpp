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
  if (machine_has_cuda()) {
    GTEST_SKIP() << "this machine has a GPU";
  }
  const TemporaryFolder folder;
  const std::vector<std::vector<std::string>> commands = {
      {"probe"},
      {"check"},
      {"bench", "attention"},
      {"bench", "gemm"},
      {"report", "--out", folder / "report.html"}};
  for (std::vector<std::string> command : commands) {
    command.insert(command.end(), {"--device", "cuda"});
    const ToolRun run = run_tool(command);
    EXPECT_EQ(run.exit_code, 77) << command.front();
    EXPECT_EQ(run.out, "");
    EXPECT_TRUE(run.one_line_error()) << run.err;
    EXPECT_NE(run.err.find("--device cuda: "), std::string::npos) << run.err;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "report.html"));
}

TEST(ProbeCommand, MeasuresTheGpuIntoAFileThatExplainReads) {
  if (!machine_has_cuda()) {
    GTEST_SKIP() << "no sm_90 device";
  }
  const TemporaryFolder folder;
  const std::string path = folder / "gpu.json";
  const auto probe = run_json({"probe", "--device", "cuda", "--quick", "--force", "--out", path});
  std::vector<std::string> keys;
  for (const auto& row : probe.at("figures")) {
    keys.push_back(row.at("figure").get<std::string>());
    EXPECT_GT(row.at("value").get<double>(), 0) << keys.back();
  }
  for (const char* key :
       {"bandwidth_read_bytes_per_s", "bandwidth_write_bytes_per_s", "bandwidth_copy_bytes_per_s",
        "burst_bf16_flop_per_s", "sustained_bf16_flop_per_s", "burst_e4m3_flop_per_s", "launch_s",
        "graph_launch_s", "graph_submit_s", "exp_per_s", "peak_vector_f32_flop_per_s"}) {
    EXPECT_NE(std::find(keys.begin(), keys.end(), key), keys.end()) << key;
  }
  const auto explained = run_json({"explain", "attention", "--seqlen", "1k", "--device", path});
  EXPECT_GT(explained.at("ridge_flop_per_byte").get<double>(), 0);
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
