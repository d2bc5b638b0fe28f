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

}  // namespace
}  // namespace rafter::test
