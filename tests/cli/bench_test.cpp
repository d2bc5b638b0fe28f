#include <cmath>
#include <fstream>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

// A device file of our own: these tests time kernels, not the machine.
std::string device_file(const TemporaryFolder& folder) {
  const auto figure = [](double value, const char* unit) {
    return nlohmann::ordered_json{
        {"value", value}, {"unit", unit}, {"kind", "assumed"}, {"source", "a test"}};
  };
  const nlohmann::ordered_json device = {{"name", "test-cpu"},
                                         {"title", "A CPU on paper"},
                                         {"kind", "cpu"},
                                         {"figures",
                                          {{"peak_f32_flop_per_s", figure(1e11, "FLOP/s")},
                                           {"bandwidth_bytes_per_s", figure(1e10, "B/s")},
                                           {"clock_hz", figure(3e9, "Hz")},
                                           {"launch_s", figure(1e-6, "s")}}}};
  const std::string path = folder / "cpu.json";
  std::ofstream(path) << device.dump();
  return path;
}

TEST(BenchCommand, AttentionRowsCarryPredictionBesideMeasurement) {
  const TemporaryFolder folder;
  const auto document =
      run_json({"bench", "attention", "--seqlen", "128,256", "--head-dim", "32", "--heads-q", "2",
                "--causal", "0,1", "--time", "0.01", "--device", device_file(folder)});
  EXPECT_TRUE(document.at("context").contains("date"));
  EXPECT_TRUE(document.at("context").contains("commit"));
  EXPECT_TRUE(document.at("context").contains("num_cpus"));
  const auto& rows = document.at("benchmarks");
  ASSERT_EQ(rows.size() + document.at("refused").size(), 12U);  // 2 lengths, 2 masks, 3 pipelines
  for (const auto& row : rows) {
    const double seconds = row.at("time_s").get<double>();
    EXPECT_GT(seconds, 0);
    EXPECT_NEAR(row.at("real_time").get<double>(), seconds * 1e9, seconds);
    EXPECT_GE(row.at("repetitions").get<int>(), 1);
    EXPECT_LE(row.at("time_p10_s").get<double>(), seconds);
    EXPECT_GE(row.at("time_p90_s").get<double>(), seconds);
    EXPECT_GT(row.at("predicted_time_s").get<double>(), 0);
    EXPECT_NEAR(row.at("flop_per_s").get<double>() * seconds, row.at("flops").get<double>(),
                1e-6 * row.at("flops").get<double>());
    EXPECT_NEAR(row.at("share_of_bound").get<double>() * seconds, row.at("bound_s").get<double>(),
                1e-6 * seconds);
    EXPECT_EQ(row.at("bytes_source"), "modelled");
    EXPECT_TRUE(row.at("counted_bytes").is_null());
    EXPECT_EQ(row.at("counted_bytes_reason"), "no memory counters are read on a CPU");
    EXPECT_FALSE(row.at("kernel").get<std::string>().empty());
    EXPECT_FALSE(row.at("wall_reason").get<std::string>().empty());
    EXPECT_EQ(row.at("cache_resident").get<bool>(), row.at("level") != "memory");
    // Counted differently: 2·S·S·D for each product, half of the pairs (and the diagonal) causal.
    const auto& shape = row.at("case");
    const double s = shape.at("seqlen").get<double>();
    const double pairs = shape.at("causal").get<bool>() ? s * (s + 1) / 2 : s * s;
    EXPECT_DOUBLE_EQ(row.at("flops").get<double>(), 2 * pairs * (2 * 32 + 2 * 32 + 5));
  }
}

TEST(BenchCommand, RecordsAreKeptAndComparedWith) {
  const TemporaryFolder folder;
  const std::string device = device_file(folder), path = folder / "records.jsonl";
  const std::vector<std::string> bench = {"bench",      "attention", "--seqlen",   "128",
                                          "--pipeline", "fused",     "--evidence", "false",
                                          "--time",     "0.02",      "--device",   device};
  auto keep = bench;
  keep.insert(keep.end(), {"--out", path});
  run_json(keep);
  run_json(keep);
  std::vector<nlohmann::ordered_json> records;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    records.push_back(nlohmann::ordered_json::parse(line));
  }
  ASSERT_EQ(records.size(), 2U);
  for (const char* key :
       {"date", "commit", "device", "driver", "clock_hz", "kernel", "case", "repeats", "median_s",
        "p10_s", "p90_s", "wall", "bound_s", "share_of_bound"}) {
    EXPECT_TRUE(records[1].contains(key)) << key;
  }
  // A baseline a thousand times quicker makes the row slower: exit 1. One as much slower: faster.
  for (const auto& [factor, verdict, exit_code] :
       {std::tuple{1e-3, "slower", 1}, std::tuple{1e3, "faster", 0}}) {
    auto record = records[1];
    for (const char* key : {"median_s", "median_low_s", "median_high_s"}) {
      record[key] = record.at(key).get<double>() * factor;
    }
    const std::string other = folder / "other.jsonl";
    { std::ofstream(other) << record.dump() << "\n"; }
    auto compare = bench;
    compare.insert(compare.end(), {"--baseline", other, "--format", "json"});
    const ToolRun run = run_tool(compare);
    EXPECT_EQ(run.exit_code, exit_code) << run.err;
    const auto document = nlohmann::ordered_json::parse(run.out);
    EXPECT_EQ(document.at("benchmarks").at(0).at("against_baseline"), verdict);
  }
}

TEST(BenchCommand, AMalformedBaselineIsNamedWithItsLine) {
  const TemporaryFolder folder;
  const std::string path = folder / "bad.jsonl";
  { std::ofstream(path) << "{\"name\": \"x\"}\n"; }
  expect_refused({"bench", "attention", "--seqlen", "16", "--time", "0.001", "--evidence", "false",
                  "--device", device_file(folder), "--baseline", path},
                 {"bad.jsonl:1", "median_s"});
}

// FLOPs of the backward by the field's count are 2.5 times the forward's.
TEST(BenchCommand, BackwardRowsCompareWithTheForward) {
  const TemporaryFolder folder;
  const std::vector<std::string> grid = {"--seqlen",   "64",
                                         "--head-dim", "16",
                                         "--heads-q",  "2",
                                         "--pipeline", "fused",
                                         "--evidence", "0",
                                         "--time",     "0.01",
                                         "--device",   device_file(folder)};
  const auto rows = [&grid](const char* verb) {
    std::vector<std::string> arguments = {"bench", verb};
    arguments.insert(arguments.end(), grid.begin(), grid.end());
    return run_json(arguments).at("benchmarks");
  };
  const auto forward = rows("attention"), backward = rows("backward");
  ASSERT_EQ(backward.size(), 1U);
  EXPECT_DOUBLE_EQ(backward.at(0).at("forward_flops_x2.5").get<double>(),
                   2.5 * forward.at(0).at("flops").get<double>());
  EXPECT_GT(backward.at(0).at("flops").get<double>(), 2 * forward.at(0).at("flops").get<double>());
  EXPECT_EQ(backward.at(0).at("kernel").get<std::string>().rfind("backward_", 0), 0U);
}

// One record has both ways, beside what `explain recompute` says of the same device.
TEST(BenchCommand, RecomputeMeasuresBothWaysBesideThePrediction) {
  const TemporaryFolder folder;
  const std::string device = device_file(folder), path = folder / "records.jsonl";
  const auto document =
      run_json({"bench", "recompute", "--seqlen", "96", "--head-dim", "16", "--heads-q", "2",
                "--time", "0.01", "--device", device, "--out", path});
  const auto explained = run_json({"explain", "recompute", "--seqlen", "96", "--head-dim", "16",
                                   "--heads-q", "2", "--dtype", "f32", "--device", device});
  std::ifstream file(path);
  std::string line;
  ASSERT_TRUE(std::getline(file, line));
  const auto record = nlohmann::ordered_json::parse(line);
  ASSERT_EQ(document.at("benchmarks").size(), 1U);
  const auto& row = document.at("benchmarks").at(0);
  const auto of = [](const nlohmann::ordered_json& json, const char* key) {
    return json.at(key).get<double>();
  };
  for (const auto& [key, of_explain] :
       {std::pair{"store_predicted_s", "store_time_s"},
        std::pair{"recompute_predicted_s", "recompute_time_s"},
        std::pair{"store_over_recompute_predicted", "store_over_recompute"}}) {
    EXPECT_DOUBLE_EQ(of(row, key), of(explained, of_explain)) << key;
    EXPECT_DOUBLE_EQ(of(record, key), of(row, key)) << key;
  }
  const double ratio = of(row, "stored_over_recomputed");
  EXPECT_NEAR(ratio, of(record, "stored_s") / of(record, "median_s"), 1e-9 * ratio);
  EXPECT_LT(of(record, "stored_over_recomputed_at_least"), ratio);
  EXPECT_GT(of(record, "stored_workspace_bytes"), 2.0 * 2 * 96 * 96 * 4);  // P and dS of two heads
  EXPECT_EQ(record.at("kernel").get<std::string>().rfind("backward_simd", 0), 0U);
  EXPECT_EQ(record.at("stored_kernel"), "backward_unfused_onednn");
}

TEST(BenchCommand, DecodeTakesLengthsOfEachSequence) {
  const TemporaryFolder folder;
  const std::vector<std::string> bench{
      "bench",     "decode", "--batch",    "3",   "--lengths",  "40,7",
      "--heads-q", "2",      "--heads-kv", "1",   "--head-dim", "16",
      "--time",    "0.001",  "--dtype",    "f32", "--device",   device_file(folder)};
  for (const char* page_size : {"0", "16"}) {
    std::vector<std::string> all = bench;
    all.insert(all.end(), {"--page-size", page_size});
    const auto json = run_json(all);
    const auto& row = json.at("benchmarks").at(0);
    EXPECT_EQ(row.at("case").at("lengths"), "40 7");
    EXPECT_DOUBLE_EQ(row.at("kv_bytes").get<double>(), (40 + 7 + 7) * 2 * 16 * 4.0);
  }
  std::vector<std::string> many = bench;
  many[5] = "1,2,3,4";
  expect_refused(many, {"--lengths", "3"});
}

TEST(BenchCommand, AppendTimesRowsIntoCaches) {
  const TemporaryFolder folder;
  const auto json = run_json({"bench",       "append",
                              "--batch",     "2",
                              "--seqlen",    "3",
                              "--seqlen-kv", "5",
                              "--heads-q",   "4",
                              "--heads-kv",  "2",
                              "--head-dim",  "16",
                              "--time",      "0.001",
                              "--kv-dtype",  "bf16,int8,e4m3",
                              "--page-size", "0,4",
                              "--device",    device_file(folder)});
  EXPECT_EQ(json.at("benchmarks").size(), 12U);  // dtypes × pages × with and without RoPE
  for (const auto& row : json.at("benchmarks")) {
    const auto& shape = row.at("case");
    // K and V read in bf16 and written as kept, with factors; q read and written; angles.
    const double kept = shape.at("kv_dtype") == "bf16" ? 2 : 1;
    const double kv = 2 * 3 * 2 * (2 * 16 * (2 + kept) + (kept == 1 ? 8 : 0));
    const double rope = shape.at("rope") == true ? 2 * 3 * 4 * 16 * 4 + 3 * 16 * 4 : 0;
    EXPECT_DOUBLE_EQ(row.at("bytes").get<double>(), kv + rope) << shape.dump();
  }
  expect_refused({"bench", "append", "--kv-dtype", "f16", "--device", device_file(folder)},
                 {"--kv-dtype", "e4m3"});
  expect_refused({"bench", "append", "--threads", "2"}, {"--threads"});
  expect_refused({"bench", "append", "--counters", "1"}, {"--counters"});  // none are read
}

TEST(BenchCommand, DecodeRowsReadTheCacheOnce) {
  const TemporaryFolder folder;
  const auto document = run_json({"bench",       "decode",
                                  "--seqlen-kv", "1030",
                                  "--heads-q",   "4",
                                  "--heads-kv",  "2",
                                  "--head-dim",  "32",
                                  "--batch",     "1,2",
                                  "--kv-dtype",  "f32,int8",
                                  "--dtype",     "f32",
                                  "--page-size", "0,16",
                                  "--time",      "0.001",
                                  "--device",    device_file(folder)});
  const auto& rows = document.at("benchmarks");
  ASSERT_EQ(rows.size(), 8U);
  for (const auto& row : rows) {
    const auto& shape = row.at("case");
    EXPECT_EQ(row.at("pipeline"), "split-kv");
    // A row of K and one of V for each token and KV head; int8 has a factor of 4 bytes for each.
    const bool int8 = shape.at("kv_dtype") == "int8";
    const double keys = shape.at("batch").get<double>() * 2 * 1030;
    EXPECT_DOUBLE_EQ(row.at("kv_bytes").get<double>(), keys * 2 * (int8 ? 32 + 4 : 4 * 32));
    EXPECT_NEAR(row.at("tokens_per_s").get<double>() * row.at("time_s").get<double>(),
                shape.at("batch").get<double>(), 1e-6);
  }
}

TEST(BenchCommand, GemmRowsCountTwoMnk) {
  const TemporaryFolder folder;
  const auto document = run_json({"bench", "gemm", "--m", "64", "--n", "48", "--k", "32", "--time",
                                  "0.01", "--device", device_file(folder)});
  ASSERT_EQ(document.at("benchmarks").size(), 1U);
  const auto& row = document.at("benchmarks").at(0);
  EXPECT_DOUBLE_EQ(row.at("flops").get<double>(), 2.0 * 64 * 48 * 32);
  EXPECT_DOUBLE_EQ(row.at("bytes").get<double>(), 4.0 * (64 * 32 + 32 * 48 + 64 * 48));
  EXPECT_EQ(row.at("wall_measured"), "ambiguous");
  EXPECT_EQ(row.at("wall_reason"), "only one size of work was timed");
  expect_refused({"bench", "gemm", "--counters", "1"}, {"--counters"});
}

TEST(BenchCommand, RefusesByName) {
  expect_refused({"bench", "attention", "--seqlen", "0"}, {"--seqlen"});
  expect_refused({"bench", "attention", "--seqlen", ""}, {"--seqlen"});
  expect_refused({"bench", "attention", "--head-dim", "257"}, {"--head-dim"});
  expect_refused({"bench", "attention", "--pipeline", "quick"}, {"--pipeline", "fused"});
  expect_refused({"bench", "attention", "--time", "0"}, {"--time"});
  expect_refused({"bench", "attention", "--device", "h100-sxm"}, {"--device"});
  expect_refused({"bench", "attention", "--kernel", "fused", "--pipeline", "fused"}, {"--kernel"});
  expect_refused({"bench", "attention", "--threshold", "2"}, {"--threshold"});
  expect_refused({"bench", "decode", "--kv-dtype", "e5m2"}, {"--kv-dtype", "int8", "e4m3"});
  expect_refused({"bench", "decode", "--seqlen-kv", "0"}, {"--seqlen-kv"});
}

}  // namespace
}  // namespace rafter::test
