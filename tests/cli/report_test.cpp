#include <chrono>
#include <fstream>
#include <iterator>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

const std::string kUserData = RAFTER_SOURCE_DIR "/tests/data/minilm_l6_qkv.safetensors";

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ReportCommand, GivesAPageAndTheSameFiguresOnStdoutForRealTensors) {
  const TemporaryFolder folder;
  const std::string path = folder / "report.html";
  const auto document = run_json({"report", "--quick", "--qkv", kUserData, "--out", path});
  const std::string page = contents_of(path);
  ASSERT_FALSE(page.empty());
  EXPECT_NE(page.find("minilm_l6_qkv.safetensors"), std::string::npos);
  EXPECT_EQ(document.at("file"), path);
  // Both dtypes, three pipelines, the file's own length among others.
  int on_the_file = 0;
  for (const auto& point : document.at("points")) {
    ASSERT_FALSE(point.contains("refusal")) << point;
    EXPECT_GT(point.at("median_s").get<double>(), 0);
    EXPECT_GT(point.at("predicted_s").get<double>(), 0);
    on_the_file += point.at("seqlen") == 512 && point.at("data") == "minilm_l6_qkv.safetensors";
  }
  EXPECT_EQ(on_the_file, 6);
  ASSERT_EQ(document.at("accuracy").size(), 6U);
  for (const auto& row : document.at("accuracy")) {
    EXPECT_TRUE(row.at("ok").get<bool>()) << row;
    EXPECT_GT(row.at("max_abs_error").get<double>(), 0)
        << "exactly the reference: compared with itself?";
  }
  ASSERT_EQ(document.at("verdicts").size(), 3U);
  for (const auto& verdict : document.at("verdicts")) {
    EXPECT_FALSE(verdict.at("sentence").get<std::string>().empty());
  }
  EXPECT_GE(document.at("devices").size(), 7U);
}

TEST(ReportCommand, RefusesFilesThatAreNotAttentionInputs) {
  const TemporaryFolder folder;
  const std::string page = folder / "report.html";
  expect_refused({"report", "--qkv", folder / "none.safetensors", "--out", page},
                 {"none.safetensors"});
  const std::string cut = folder / "cut.safetensors";
  { std::ofstream(cut, std::ios::binary) << contents_of(kUserData).substr(0, 5000); }
  expect_refused({"report", "--qkv", cut, "--out", page}, {"cut.safetensors"});
  // No q in this one.
  expect_refused({"report", "--qkv", RAFTER_SOURCE_DIR "/tests/data/minilm_l6_expected.safetensors",
                  "--out", page},
                 {"q"});
  EXPECT_FALSE(std::filesystem::exists(page));
}

TEST(ReportCommand, RefusesAPlaceItCannotWriteBeforeItMeasures) {
  const auto start = std::chrono::steady_clock::now();
  expect_refused({"report", "--out", "/nonexistent/folder/report.html"},
                 {"--out /nonexistent/folder/report.html", "No such file"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
}

TEST(ReportCommand, RefusesWhatItDoesNotKnow) {
  expect_refused({"report", "--fast"}, {"--fast"});
  expect_refused({"report", "--device", "h100-sxm"}, {"--device"});
  expect_refused({"report", "--threads", "x"}, {"--threads"});
}

TEST(ReportCommand, ShowsAModelOperationByOperation) {
  const TemporaryFolder folder;
  std::ofstream(folder / "config.json")
      << R"({"model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
  "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
  "torch_dtype": "float32"})";
  const std::string path = folder / "report.html";
  const auto document = run_json(
      {"report", "--model", folder / "config.json", "--quick", "--seqlen", "16", "--out", path});
  const std::string page = contents_of(path);
  ASSERT_EQ(document.at("steps").size(), 2U);
  for (const auto& step : document.at("steps")) {
    double time_s = 0, flops = 0, launches = 0;
    for (const auto& row : step.at("operations")) {
      for (const char* key : {"bytes", "predicted_time_s", "time_s"}) {
        EXPECT_GT(row.at(key).get<double>(), 0) << row;
      }
      for (const char* key : {"kernel", "wall_predicted", "wall_measured", "what_moves"}) {
        EXPECT_FALSE(row.at(key).get<std::string>().empty()) << row;
        EXPECT_NE(page.find(row.at(key).get<std::string>()), std::string::npos) << row.at(key);
      }
      EXPECT_NE(page.find("\"operation\":\"" + row.at("operation").get<std::string>()),
                std::string::npos);
      time_s += row.at("time_s").get<double>();
      flops += row.at("flops").get<double>();
      launches += row.at("launches").get<double>();
    }
    EXPECT_NEAR(flops, step.at("flops").get<double>(), 1e-9 * flops);
    EXPECT_EQ(launches, step.at("launches").get<double>());
    EXPECT_NEAR(step.at("timeline").at("operations_sum_s").get<double>(), time_s, 1e-9 * time_s);
    // A layer in the order it runs, each operation beginning where the one before ends.
    const auto& layer = step.at("timeline").at("layer");
    ASSERT_GE(layer.size(), 9U);
    EXPECT_EQ(layer.at(1).at("operation"), "qkv");
    double end = 0;
    for (const auto& bar : layer) {
      EXPECT_NEAR(bar.at("start_s").get<double>(), end, 1e-12);
      end += bar.at("time_s").get<double>();
    }
  }
  // The roofs of a prefill that lacks an idea, at many lengths.
  ASSERT_GE(document.at("prefill_ceilings").size(), 10U);
  for (const auto& length : document.at("prefill_ceilings")) {
    bool untiled = false;
    for (const auto& ceiling : length.at("ceilings")) {
      untiled = untiled || ceiling.at("name") == "no tiling";
    }
    EXPECT_TRUE(untiled);
  }
  EXPECT_EQ(page.find("{{"), std::string::npos);
  expect_refused({"report", "--model", "gpt-5", "--out", path}, {"--model", "reference-60m"});
  expect_refused({"report", "--seqlen", "8"}, {"--seqlen", "--model"});
  expect_refused({"report", "--model", "reference-60m", "--qkv", kUserData}, {"--qkv", "--model"});
}

}  // namespace
}  // namespace rafter::test
