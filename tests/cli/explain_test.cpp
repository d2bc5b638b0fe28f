// rafter explain: the keys of the contract, the three formats, and answers checked by counting.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

using Json = nlohmann::ordered_json;
using Arguments = std::vector<std::string>;

void expect_keys(const Json& document, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    EXPECT_TRUE(document.contains(key)) << key << " is not in " << document.dump();
  }
}

const std::vector<std::string> kRooflineKeys = {"device",
                                                "convention",
                                                "problem",
                                                "flops",
                                                "matmul_flops",
                                                "softmax_flops",
                                                "bytes",
                                                "bytes_by_term",
                                                "launches",
                                                "time_s",
                                                "time_compute_s",
                                                "time_bandwidth_s",
                                                "wall",
                                                "near_ridge",
                                                "time_dispatch_s",
                                                "ceilings",
                                                "footprint_bytes",
                                                "intensity_flop_per_byte",
                                                "ridge_flop_per_byte",
                                                "score_matrix_bytes",
                                                "attainable_flop_per_s"};

TEST(Explain, EveryVerbGivesTheKeysOfTheContract) {
  const Json attention = run_json({"explain", "attention", "--seqlen", "4096"});
  expect_keys(attention, kRooflineKeys);
  for (const Json& ceiling : attention.at("ceilings")) {
    EXPECT_TRUE(ceiling.at("name").is_string());
    EXPECT_TRUE(ceiling.at("flop_per_s").is_number());
  }
  const Json decode = run_json({"explain", "decode", "--seqlen-kv", "8k"});
  expect_keys(decode, kRooflineKeys);
  expect_keys(decode, {"kv_bytes", "sm_fill"});
  expect_keys(run_json({"explain", "gemm"}), kRooflineKeys);
  expect_keys(run_json({"explain", "elementwise"}), kRooflineKeys);
  expect_keys(run_json({"explain", "crossover"}), {"crossover_seqlen", "crossover_seqlen_ceil",
                                                   "intensity_limit_flop_per_byte", "reachable"});
  expect_keys(run_json({"explain", "memory"}), {"max_seqlen", "bytes_at_max", "terms"});
  expect_keys(run_json({"explain", "memory", "--seqlen", "1k"}), {"fits", "footprint_bytes"});
  expect_keys(run_json({"explain", "recompute"}),
              {"store_bytes", "store_time_s", "recompute_flops", "recompute_time_s",
               "store_over_recompute", "break_even_ridge_flop_per_byte", "cheaper"});
  expect_keys(run_json({"explain", "online-softmax"}), {"steps", "sum_exp", "lse"});
  expect_keys(run_json({"explain", "tiling"}),
              {"tile_rows", "kv_passes", "io_elements", "io_bytes", "reduction_vs_unfused"});
  for (const char* phase : {"prefill", "decode"}) {
    expect_keys(run_json({"explain", "model", phase}),
                {"n_params", "flops", "gemm_flops", "attention_flops", "weight_bytes", "kv_bytes",
                 "time_s", "gemm_time_s", "attention_time_s", "dispatch_time_s",
                 "dispatch_fraction", "attention_share", "gain_over_unfused",
                 "intensity_flop_per_byte", "max_batch", "wall", "amdahl"});
  }
}

TEST(Explain, TheProblemIsEchoedAsItWasUnderstood) {
  const Json document = run_json({"explain",      "attention",
                                  "--seqlen-q",   "2k",
                                  "--seqlen-kv",  "1m",
                                  "--batch",      "3",
                                  "--heads-q",    "8",
                                  "--heads-kv",   "2",
                                  "--head-dim",   "64",
                                  "--head-dim-v", "32",
                                  "--dtype",      "f16",
                                  "--window",     "128",
                                  "-1",           "--causal-align",
                                  "top-left",     "--pipeline",
                                  "half-fused",   "--device",
                                  "a100-80gb-sxm"});
  const Json wanted = {{"batch", 3},
                       {"heads_q", 8},
                       {"heads_kv", 2},
                       {"seqlen_q", 2048},
                       {"seqlen_kv", 1048576},
                       {"head_dim", 64},
                       {"head_dim_v", 32},
                       {"dtype", "f16"},
                       {"causal", false},
                       {"window", {128, -1}},
                       {"causal_align", "top-left"},
                       {"pipeline", "half-fused"},
                       {"pass", "forward"},
                       {"splits", 1}};
  EXPECT_EQ(document.at("problem"), wanted);
  EXPECT_EQ(document.at("device"), "a100-80gb-sxm");
  EXPECT_EQ(document.at("convention"), "exact");
}

/// Visible pairs, counted one by one.
double count_pairs(std::int64_t seqlen_q, std::int64_t seqlen_kv, std::int64_t left,
                   std::int64_t right, bool bottom_right) {
  double pairs = 0;
  const std::int64_t offset = bottom_right ? seqlen_kv - seqlen_q : 0;
  for (std::int64_t i = 0; i < seqlen_q; ++i) {
    for (std::int64_t j = 0; j < seqlen_kv; ++j) {
      pairs += (left < 0 || j >= i + offset - left) && (right < 0 || j <= i + offset + right);
    }
  }
  return pairs;
}

TEST(Explain, VisiblePairsAreCountedOneByOne) {
  struct Case {
    std::int64_t seqlen_q, seqlen_kv, left, right;
    bool bottom_right;
  };
  for (const Case& c :
       {Case{7, 7, -1, 0, true}, Case{9, 5, -1, 0, true}, Case{5, 9, -1, 0, true},
        Case{9, 5, -1, 0, false}, Case{33, 65, 7, 3, true}, Case{65, 33, 0, 0, true},
        Case{64, 64, -1, -1, true}, Case{1, 100, -1, 0, true}, Case{17, 64, 100, 2, false}}) {
    const Json document = run_json(
        {"explain", "attention", "--seqlen-q", std::to_string(c.seqlen_q), "--seqlen-kv",
         std::to_string(c.seqlen_kv), "--window", std::to_string(c.left), std::to_string(c.right),
         "--causal-align", c.bottom_right ? "bottom-right" : "top-left"});
    EXPECT_EQ(document.at("pairs").get<double>(),
              count_pairs(c.seqlen_q, c.seqlen_kv, c.left, c.right, c.bottom_right))
        << document.at("problem").dump();
  }
}

TEST(Explain, CausalIsTheWindowThatIsOpenToTheLeft) {
  Json causal = run_json({"explain", "attention", "--causal"});
  Json window = run_json({"explain", "attention", "--window", "-1", "0"});
  EXPECT_EQ(causal, window);
}

TEST(Explain, TermsAddUpAndTheTimeIsTheLargest) {
  for (const char* pipeline : {"unfused", "half-fused", "fused", "split-kv"}) {
    for (const char* pass : {"forward", "backward"}) {
      if (std::string(pipeline) == "split-kv" && std::string(pass) == "backward") {
        continue;
      }
      const Json d = run_json({"explain", "attention", "--seqlen", "777", "--heads-q", "6",
                               "--heads-kv", "2", "--pipeline", pipeline, "--pass", pass});
      double bytes = 0;
      for (const auto& [name, value] : d.at("bytes_by_term").items()) {
        bytes += value.get<double>();
      }
      EXPECT_DOUBLE_EQ(bytes, d.at("bytes").get<double>());
      EXPECT_DOUBLE_EQ(d.at("flops").get<double>(),
                       d.at("matmul_flops").get<double>() + d.at("softmax_flops").get<double>());
      EXPECT_DOUBLE_EQ(
          d.at("time_s").get<double>(),
          std::max({d.at("time_compute_s").get<double>(), d.at("time_bandwidth_s").get<double>(),
                    d.at("time_dispatch_s").get<double>()}));
      EXPECT_DOUBLE_EQ(d.at("intensity_flop_per_byte").get<double>(),
                       d.at("flops").get<double>() / d.at("bytes").get<double>());
    }
  }
}

TEST(Explain, NoAnswerHoldsNaNOrInfinity) {
  // an empty mask window at one end, one token, a device without a launch cost
  for (const Arguments& arguments :
       {Arguments{"explain", "attention", "--seqlen", "1"},
        Arguments{"explain", "attention", "--device", "device-r"},
        Arguments{"explain", "model", "decode", "--seqlen", "0", "--device", "device-r"},
        Arguments{"explain", "decode", "--device", "device-r"}}) {
    for (const char* format : {"json", "csv", "table"}) {
      Arguments all = arguments;
      all.insert(all.end(), {"--format", format});
      const ToolRun run = run_tool(all);
      EXPECT_EQ(run.exit_code, 0) << run.err;
      EXPECT_EQ(run.out.find("nan"), std::string::npos) << run.out;
      EXPECT_EQ(run.out.find(" inf"), std::string::npos) << run.out;
    }
  }
}

TEST(Explain, WhatADeviceLacksIsNullWithAReason) {
  const Json document = run_json({"explain", "attention", "--device", "device-r"});
  EXPECT_TRUE(document.at("time_dispatch_s").is_null());
  EXPECT_FALSE(document.at("time_dispatch_s_reason").get<std::string>().empty());
  const Json fusing = run_json({"explain", "model", "decode", "--fuse", "1", "--chain", "1",
                                "--device", "device-r"})
                          .at("fusing");
  EXPECT_TRUE(fusing.at("launches_time_s").is_null());
  EXPECT_THAT(fusing.at("launches_time_s_reason").get<std::string>(),
              ::testing::HasSubstr("launch_s"));
  const Json decode = run_json({"explain", "decode", "--device", "device-r"});
  EXPECT_TRUE(decode.at("sm_fill").is_null());
  EXPECT_FALSE(decode.at("sm_fill_reason").get<std::string>().empty());
}

TEST(Explain, FlagsOfAConventionChangeItAndItsName) {
  const Json document = run_json({"explain", "attention", "--convention", "lecture",
                                  "--softmax-flops", "5", "--score-passes", "3"});
  const std::string name = document.at("convention").get<std::string>();
  EXPECT_TRUE(name.starts_with("lecture")) << name;
  EXPECT_NE(name.find("softmax_flops_per_element"), std::string::npos) << name;
  EXPECT_NE(name.find("score_passes"), std::string::npos) << name;
  EXPECT_GT(document.at("softmax_flops").get<double>(), 0);
}

TEST(Explain, EachParameterOfAConventionIsAFlag) {
  const Json list = run_json({"explain", "conventions"}).at("conventions");
  EXPECT_GT(list.size(), 30U);
  for (const Json& row : list) {
    std::string flag = "--" + row.at("parameter").get<std::string>();
    std::replace(flag.begin(), flag.end(), '_', '-');
    if (flag == "--causal" || flag == "--fast-memory-bytes") {
      continue;  // a verb's own flags
    }
    const ToolRun run =
        run_tool({"explain", "attention", flag, row.at("solution").get<std::string>()});
    EXPECT_EQ(run.exit_code, 0) << flag << "\n" << run.err;
  }
}

TEST(Explain, FiguresOfTheCommandLineReplaceTheDevices) {
  const Json document = run_json({"explain", "ridge", "--peak-flops-per-s", "100e12",
                                  "--bandwidth-bytes-per-s", "1e12", "--dtype", "e4m3"});
  EXPECT_EQ(document.at("ridge_flop_per_byte"), 100);
}

TEST(Explain, ADeviceMayBeAFileAndTheProbeOfThisMachineIsTheDefault) {
  const std::string file = std::string(RAFTER_SOURCE_DIR) + "/src/devices/device-r.json";
  EXPECT_EQ(run_json({"explain", "ridge", "--device", file}),
            run_json({"explain", "ridge", "--device", "device-r"}));
  TemporaryFolder home;
  std::filesystem::copy_file(file, home / "cpu.json");
  ToolOptions options;
  options.environment = {{"RAFTER_HOME", home.path().string()}};
  EXPECT_EQ(run_json({"explain", "ridge"}, options).at("device"), "device-r");
  EXPECT_EQ(run_json({"explain", "ridge"}).at("device"), "h100-sxm");
}

TEST(Explain, AMissingPeakIsAnErrorThatNamesIt) {
  expect_refused({"explain", "attention", "--device", "a100-80gb-sxm", "--dtype", "e4m3"},
                 {"e4m3", "a100-80gb-sxm"});
}

TEST(Explain, WhatDoesNotFitExitsWithOne) {
  const ToolRun run = run_tool({"explain", "memory", "--seqlen", "1m", "--format", "json"});
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_EQ(Json::parse(run.out).at("fits"), false);
  const Json fits = run_json({"explain", "memory", "--seqlen", "1k"});
  EXPECT_EQ(fits.at("fits"), true);
  const std::string longest = fits.at("max_seqlen").dump();
  EXPECT_EQ(run_tool({"explain", "memory", "--seqlen", longest}).exit_code, 0);
  const std::string next = std::to_string(fits.at("max_seqlen").get<std::int64_t>() + 1);
  EXPECT_EQ(run_tool({"explain", "memory", "--seqlen", next}).exit_code, 1);
}

TEST(Explain, WhatFitsIsCountedInWholePages) {
  const Json memory = run_json({"explain", "memory", "--page-size", "4096"});
  const auto longest = memory.at("max_seqlen").get<std::int64_t>();
  EXPECT_GT(longest, 0);
  const auto cache = memory.at("terms").at("kv_cache").get<double>();
  EXPECT_EQ(std::fmod(cache, 4096 * 524288.0), 0);
  for (const auto& [seqlen, code] : {std::pair{longest, 0}, std::pair{longest + 1, 1}}) {
    EXPECT_EQ(
        run_tool({"explain", "memory", "--page-size", "4096", "--seqlen", std::to_string(seqlen)})
            .exit_code,
        code);
  }
  const auto decode = [](const char* seqlen, const char* page_size) {
    return run_json({"explain", "model", "decode", "--seqlen", seqlen, "--batch", "max",
                     "--capacity-bytes", "100e9", "--page-size", page_size});
  };
  const Json paged = decode("2050", "1024"), rows = decode("2050", "0");
  EXPECT_EQ(paged.at("max_batch"), decode("3072", "0").at("max_batch"));
  EXPECT_LT(paged.at("max_batch"), rows.at("max_batch"));
  EXPECT_EQ(paged.at("batch"), paged.at("max_batch"));
}

TEST(Explain, AConfigJsonIsAModel) {
  TemporaryFolder folder;
  const std::string path = folder / "config.json";
  std::ofstream(path) << R"({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16"})";
  const Json document =
      run_json({"explain", "model", "prefill", "--model", path, "--seqlen", "16"});
  // embedding and head 2·100·64; a layer: q, o 2·64·64, k, v 2·64·32, MLP 3·64·128, norms 2·64
  const double wanted = 2 * 100 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64;
  EXPECT_EQ(document.at("n_params").get<double>(), wanted);
  EXPECT_EQ(document.at("problem").at("heads_kv"), 2);
}

TEST(Explain, AMaskedKeyAndAnEmptyBlockChangeNothing) {
  const Json plain = run_json({"explain", "online-softmax", "--blocks", "1,2/3,5"});
  const Json masked = run_json({"explain", "online-softmax", "--blocks", "1,2,-inf//3,5"});
  EXPECT_EQ(plain.at("lse"), masked.at("lse"));
  EXPECT_EQ(plain.at("steps").back().at("l"), masked.at("steps").back().at("l"));
  const Json none = run_json({"explain", "online-softmax", "--blocks", "-inf"});
  EXPECT_TRUE(none.at("lse").is_null());
  EXPECT_TRUE(none.at("lse_reason").is_string());
}

// ---- formats ----

/// One RFC 4180 record.
std::vector<std::string> csv_record(std::istream& in) {
  std::vector<std::string> fields(1);
  bool quoted = false;
  for (int c = in.get(); c != EOF; c = in.get()) {
    if (quoted) {
      if (c == '"' && in.peek() == '"') {
        fields.back() += static_cast<char>(in.get());
      } else if (c == '"') {
        quoted = false;
      } else {
        fields.back() += static_cast<char>(c);
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',') {
      fields.emplace_back();
    } else if (c == '\n') {
      break;
    } else if (c != '\r') {
      fields.back() += static_cast<char>(c);
    }
  }
  return fields;
}

TEST(Explain, CsvHoldsTheFiguresOfTheJson) {
  for (const Arguments& arguments :
       {Arguments{"explain", "attention"}, Arguments{"explain", "model", "decode"},
        Arguments{"explain", "crossover", "--pipeline", "unfused"}}) {
    const Json document = run_json(arguments);
    Arguments csv = arguments;
    csv.insert(csv.end(), {"--format", "csv"});
    const ToolRun run = run_tool(csv);
    EXPECT_EQ(run.exit_code, 0);
    std::istringstream in(run.out);
    const std::vector<std::string> header = csv_record(in);
    const std::vector<std::string> row = csv_record(in);
    ASSERT_EQ(header.size(), row.size());
    for (const auto& [key, value] : document.items()) {
      if (value.is_structured()) {
        continue;
      }
      const auto at = std::find(header.begin(), header.end(), key);
      ASSERT_NE(at, header.end()) << key;
      const std::string& cell = row[static_cast<std::size_t>(at - header.begin())];
      EXPECT_EQ(cell, value.is_string() ? value.get<std::string>()
                      : value.is_null() ? ""
                                        : value.dump())
          << key;
    }
  }
}

TEST(Explain, CsvOfAListHasOneLineForEachElement) {
  const Json document = run_json({"explain", "conventions"});
  const ToolRun run = run_tool({"explain", "conventions", "--format", "csv"});
  std::istringstream in(run.out);
  const std::vector<std::string> header = csv_record(in);
  for (const Json& row : document.at("conventions")) {
    const std::vector<std::string> fields = csv_record(in);
    ASSERT_EQ(fields.size(), header.size());
    EXPECT_EQ(fields[0], row.at("parameter").get<std::string>());
    EXPECT_EQ(fields.back(), row.at("what").get<std::string>());
  }
}

TEST(Explain, TheTableSaysWhichWallAndWhatWouldMoveIt) {
  const ToolRun unfused = run_tool({"explain", "attention", "--pipeline", "unfused"});
  EXPECT_NE(unfused.out.find("memory is the wall"), std::string::npos);
  EXPECT_NE(unfused.out.find("What would move it"), std::string::npos);
  const ToolRun fused = run_tool({"explain", "attention"});
  EXPECT_NE(fused.out.find("the arithmetic units are the wall"), std::string::npos);
  EXPECT_NE(fused.out.find("TFLOP/s"), std::string::npos);
  for (const std::string& text : {unfused.out, fused.out}) {
    EXPECT_EQ(text.find("nan"), std::string::npos);
    EXPECT_EQ(text.find("null"), std::string::npos);
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
      EXPECT_FALSE(line.ends_with(' ')) << "'" << line << "'";
    }
  }
}

TEST(Explain, CeilingsAscend) {
  const Json document = run_json({"explain", "attention", "--pipeline", "unfused"});
  double before = 0;
  for (const Json& ceiling : document.at("ceilings")) {
    EXPECT_GE(ceiling.at("flop_per_s").get<double>(), before);
    before = ceiling.at("flop_per_s").get<double>();
  }
}

}  // namespace
}  // namespace rafter::test
