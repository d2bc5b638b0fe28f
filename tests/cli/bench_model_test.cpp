// rafter bench model: steps and their operations, the logits of a folder's model.
#include <gmock/gmock.h>

#include <cstring>
#include <fstream>
#include <set>

#include "cli/arrays.h"
#include "cli/run_tool.h"

namespace rafter::test {
namespace {

const char* const kTiny = R"({"model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
  "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
  "rms_norm_eps": 1e-5, "torch_dtype": "float32"})";

nlohmann::ordered_json figure(double value, const char* unit) {
  return {{"value", value}, {"unit", unit}, {"kind", "assumed"}, {"source", "a test"}};
}

/// A folder with a device file and a config.json.
struct Scene {
  Scene() {
    const nlohmann::ordered_json spec = {{"name", "test-cpu"},
                                         {"title", "A CPU on paper"},
                                         {"kind", "cpu"},
                                         {"figures",
                                          {{"peak_f32_flop_per_s", figure(1e11, "FLOP/s")},
                                           {"bandwidth_bytes_per_s", figure(1e10, "B/s")}}}};
    std::ofstream(folder / "cpu.json") << spec.dump();
    std::ofstream(folder / "config.json") << kTiny;
  }
  std::vector<std::string> bench(std::vector<std::string> more) const {
    std::vector<std::string> all = {
        "bench",  "model", "--model", folder / "config.json", "--device", folder / "cpu.json",
        "--time", "0.001"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  TemporaryFolder folder;
};

/// One thread: nothing here is large enough for two.
const ToolOptions kOneThread = {.environment = {{"OMP_NUM_THREADS", "1"}}};

double sum_of(const nlohmann::ordered_json& rows, const char* key, bool steps) {
  double sum = 0;
  for (const auto& row : rows) {
    sum += (row.at("case").at("operation") == "step") == steps ? row.at(key).get<double>() : 0;
  }
  return sum;
}

TEST(BenchModel, AStepIsTheSumOfItsOperations) {
  const Scene scene;
  for (const char* phase : {"prefill", "decode"}) {
    const auto rows = run_json(scene.bench({"--phase", phase, "--seqlen", "20", "--batch", "2",
                                            "--evidence", "0"}))
                          .at("benchmarks");
    for (const char* key : {"flops", "bytes", "launches"}) {
      EXPECT_NEAR(sum_of(rows, key, true), sum_of(rows, key, false), 1e-6) << key;
      EXPECT_GT(sum_of(rows, key, true), 0) << key;
    }
    std::set<std::string> names;
    for (const auto& row : rows) {
      names.insert(row.at("case").at("operation"));
      EXPECT_GT(row.at("time_s").get<double>(), 0);
      EXPECT_GT(row.at("predicted_time_s").get<double>(), 0);
    }
    EXPECT_THAT(names, ::testing::IsSupersetOf({"step", "qkv", "attention", "rope_append",
                                                "add_rmsnorm", "swiglu", "lm_head"}));
    EXPECT_EQ(names.contains("advance"), std::string(phase) == "decode");
    EXPECT_EQ(rows[0].at("case").at("operation"), "step");
    EXPECT_EQ(rows[0].at("predicted_launches"), rows[0].at("launches"));
  }
}

TEST(BenchModel, QuantizedWeightsAreFewerBytesAndNamed) {
  const Scene scene;
  std::ofstream(scene.folder / "config.json")
      << R"({"model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
  "torch_dtype": "float32"})";
  const auto rows = run_json(scene.bench({"--phase", "decode", "--seqlen", "16", "--weights",
                                          "f32,int8,int4", "--group-size", "32"}))
                        .at("benchmarks");
  std::map<std::string, double> bytes;
  for (const auto& row : rows) {
    const auto& shape = row.at("case");
    const std::string weights = shape.at("weights");
    EXPECT_EQ(shape.contains("group_size"), weights == "int4");
    if (shape.at("operation") == "step") {
      bytes[weights] = row.at("weight_bytes");
    } else if (shape.at("operation") == "gate_up") {
      EXPECT_EQ(row.at("kernel"), weights == "f32" ? "onednn" : "dequantize+onednn");
    }
  }
  // Two layers of q, k, v, o and three matrices of the MLP; scales of rows, or of 32 elements.
  const double elements = 2 * 128.0 * (128 + 2 * 64 + 128 + 3 * 256), n = 2 * (256 + 128 + 640);
  EXPECT_EQ(bytes["f32"] - bytes["int8"], elements * 3 - n * 4);
  EXPECT_EQ(bytes["f32"] - bytes["int4"], elements * 3.5 - elements / 32 * 2);
  expect_refused(scene.bench({"--weights", "bf16"}),
                 {"--weights: bf16 given; f32 (--dtype), int8, e4m3, int4 allowed"});
  expect_refused(scene.bench({"--weights", "int4", "--group-size", "48"}),
                 {"48 given; 32, 64 or 128 allowed"});
  std::ofstream(scene.folder / "config.json") << kTiny;
  expect_refused(scene.bench({"--weights", "int8"}),
                 {"matrices whose columns are multiples of 64"});
}

TEST(BenchModel, ProductsAndAttentionAreOfTheFlopsThatExplainModelPredicts) {
  const Scene scene;
  // A decode step's token attends to itself too: explain counts it among the keys.
  for (const auto& [phase, keys] : {std::pair{"prefill", "20"}, std::pair{"decode", "21"}}) {
    const auto predicted =
        run_json({"explain", "model", phase, "--model", scene.folder / "config.json", "--device",
                  scene.folder / "cpu.json", "--seqlen", keys, "--batch", "2"});
    const auto rows =
        run_json(
            scene.bench({"--phase", phase, "--seqlen", "20", "--batch", "2", "--evidence", "0"}),
            kOneThread)
            .at("benchmarks");
    double products = 0, attention = 0;
    for (const auto& row : rows) {
      const std::string operation = row.at("case").at("operation");
      const double flops = row.at("flops").get<double>();
      products +=
          std::set<std::string>{"qkv", "o", "gate_up", "down", "lm_head"}.contains(operation)
              ? flops
              : 0;
      attention += operation == "attention" ? flops : 0;
    }
    EXPECT_EQ(products, predicted.at("gemm_flops").get<double>()) << phase;
    EXPECT_EQ(attention, predicted.at("attention_flops").get<double>()) << phase;
  }
}

TEST(BenchModel, UnfusedIsMoreLaunches) {
  const Scene scene;
  const auto rows = run_json(scene.bench({"--phase", "decode", "--seqlen", "8", "--fuse", "0,1",
                                          "--operations", "false"}),
                             kOneThread)
                        .at("benchmarks");
  ASSERT_EQ(rows.size(), 3U);
  // SiLU, RoPE and the add apart: two of them and two adds in each of three layers; the first norm
  // of all has no add.
  EXPECT_EQ(rows.at(0).at("launches").get<int>() - rows.at(1).at("launches").get<int>(), 3 * 4);
  EXPECT_TRUE(rows.at(0).at("launches_counted").is_null());  // a CPU has none
}

TEST(BenchModel, WhatFusingSavesIsTheDifferenceOfStepsByTurns) {
  const Scene scene;
  const std::string out = scene.folder / "r.jsonl";
  const std::vector<std::string> flags = {"--phase", "prefill",      "--seqlen", "8",     "--fuse",
                                          "0,1",     "--operations", "false",    "--out", out};
  const auto rows = run_json(scene.bench(flags), kOneThread).at("benchmarks");
  ASSERT_EQ(rows.size(), 3U);
  const auto& saved = rows.at(2);
  EXPECT_EQ(saved.at("case").at("operation"), "saved by fusing");
  for (const char* key : {"bytes", "launches"}) {
    EXPECT_EQ(saved.at(key).get<double>(),
              rows.at(0).at(key).get<double>() - rows.at(1).at(key).get<double>());
  }
  EXPECT_EQ(saved.at("predicted_bytes"), saved.at("bytes"));
  EXPECT_EQ(saved.at("predicted_launches"), saved.at("launches"));
  EXPECT_EQ(saved.at("predicted_bytes_time_s").get<double>(),
            saved.at("bytes").get<double>() / 1e10);
  EXPECT_GT(saved.at("fused_s").get<double>(), 0);
  EXPECT_GE(saved.at("repetitions").get<int>(), 3);
  // A difference may be negative: a baseline file with one is read, and it is compared with none.
  std::ofstream(out, std::ios::app)
      << R"({"kind": "fusing", "name": "n", "median_s": -1, "median_low_s": -2, "median_high_s": 1})"
      << "\n";
  std::vector<std::string> again = flags;
  again.insert(again.end(), {"--baseline", out, "--threshold", "0.01"});
  const auto compared = run_json(scene.bench(again), kOneThread).at("benchmarks");
  EXPECT_EQ(compared.at(2).at("against_baseline"), "not compared");
  EXPECT_NE(compared.at(0).at("against_baseline"), "new");
}

TEST(BenchModel, EveryOperationHasAWallAndWhatWouldMoveIt) {
  const Scene scene;
  for (const char* phase : {"prefill", "decode"}) {
    const auto rows =
        run_json(scene.bench({"--phase", phase, "--seqlen", "16"}), kOneThread).at("benchmarks");
    const auto& words = ::testing::AnyOf("compute", "bandwidth", "dispatch", "mixed", "ambiguous");
    bool measured = false;
    for (const auto& row : rows) {
      EXPECT_THAT(row.at("wall_measured").get<std::string>(), words);
      if (row.at("case").at("operation") == "step") {
        continue;
      }
      EXPECT_FALSE(row.at("what_moves").get<std::string>().empty()) << row;
      measured = measured || !row.at("elasticity").is_null();
      // A product has a companion of twice its width, and every operation one of other rows.
      if (row.at("case").at("operation") == "gate_up") {
        EXPECT_FALSE(row.at("elasticity").is_null()) << row;
      }
    }
    EXPECT_TRUE(measured);
  }
  const auto rows =
      run_json(scene.bench({"--phase", "decode", "--seqlen", "16", "--evidence", "0"}), kOneThread)
          .at("benchmarks");
  for (const auto& row : rows) {
    EXPECT_EQ(row.at("wall_measured"), "ambiguous");
  }
}

TEST(BenchModel, LogitsOfAPrefillAreThoseOfDecodingTokenByToken) {
  const Scene scene;
  const std::vector<std::int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6, 49, 0};
  std::string npy("\x93NUMPY\x01\x00", 8);
  std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 5), }";
  header.resize(118 - 1, ' ');
  header += '\n';
  npy += static_cast<char>(header.size());
  npy += '\0';
  npy += header + std::string(reinterpret_cast<const char*>(tokens.data()), 4 * tokens.size());
  std::ofstream(scene.folder / "tokens.npy", std::ios::binary) << npy;
  const auto logits = [&](const char* prompt) {
    const std::string path = scene.folder / "logits.npy";
    const auto document =
        run_json({"bench", "model", "--model", scene.folder / "config.json", "--tokens",
                  scene.folder / "tokens.npy", "--logits", path, "--prompt", prompt},
                 kOneThread);
    EXPECT_EQ(document.at("tokens"), 5);
    std::ifstream file(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    EXPECT_NE(bytes.find("(2, 5, 50)"), std::string::npos);
    std::vector<float> values(2 * 5 * 50);
    EXPECT_GE(bytes.size(), values.size() * 4);
    std::memcpy(values.data(), bytes.data() + bytes.size() - values.size() * 4, values.size() * 4);
    return values;
  };
  const std::vector<float> at_once = logits("5"), one_by_one = logits("1");
  for (std::size_t i = 0; i < at_once.size(); ++i) {
    ASSERT_NEAR(at_once[i], one_by_one[i], 1e-4) << i;
  }
}

TEST(BenchModel, RefusesByName) {
  const Scene scene;
  expect_refused({"bench", "model", "--model", "gpt-5"}, {"--model", "gpt-5", "reference-60m"});
  expect_refused({"bench", "model", "--model", "/nowhere/config.json"}, {"/nowhere/config.json"});
  expect_refused({"bench", "model", "--phase", "train"}, {"--phase", "train", "prefill"});
  expect_refused({"bench", "model", "--seqlen", "0"}, {"--seqlen"});
  expect_refused({"bench", "model", "--threads", "2"}, {"--threads"});
  expect_refused({"bench", "model", "--dtype", "int8"}, {"--dtype"});
  expect_refused({"bench", "model", "--tokens", "t.npy"}, {"--tokens", "--logits"});
  expect_refused({"bench", "model", "--prompt", "3"}, {"--prompt", "--tokens"});
  expect_refused({"bench", "model", "--counters", "true"}, {"--counters"});
  expect_refused({"bench", "model", "--phase", "decode", "--pipeline", "fused"},
                 {"--pipeline", "--phase prefill"});
  expect_refused({"bench", "model", "--model", scene.folder.path(), "--seed", "2", "--tokens",
                  "t.npy", "--logits", "l.npy"},
                 {"--seed", "random weights"});
  expect_refused(scene.bench({"--phase", "decode", "--beside-prefill", "8"}),
                 {"--beside-prefill", "cuda"});
  expect_refused(scene.bench({"--phase", "decode", "--kv-dtype", "f16"}), {"--kv-dtype", "int8"});
  const auto with_tokens = [](const char* flag, const char* value,
                              const std::vector<std::string>& words) {
    expect_refused({"bench", "model", "--tokens", "t.npy", "--logits", "l.npy", flag, value},
                   words);
  };
  for (const char* flag : {"--seqlen", "--batch", "--time", "--out", "--baseline", "--operations",
                           "--phase", "--threshold"}) {
    with_tokens(flag, "1", {flag, "--tokens"});  // they are of timing
  }
  with_tokens("--device", "gpu.json", {"--device", "gpu.json", "cuda", "--tokens"});
  expect_refused({"bench", "model", "--tokens", scene.folder / "config.json", "--logits",
                  scene.folder / "./config.json"},
                 {"--logits", "config.json", "--tokens"});
  with_tokens("--fuse", "0,1", {"--fuse", "2 values", "--tokens"});
  with_tokens("--dtype", "f32,bf16", {"--dtype", "2 values", "--tokens"});
  with_tokens("--pipeline", "fused,unfused", {"--pipeline", "2 values", "--tokens"});
  std::ofstream(scene.folder / "moe.json")
      << std::string(kTiny).insert(1, "\"num_local_experts\": 8, ");
  expect_refused({"bench", "model", "--model", scene.folder / "moe.json"}, {"num_local_experts"});
}

}  // namespace
}  // namespace rafter::test
