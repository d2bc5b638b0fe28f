// The page as a function of its JSON: self-contained, the same bytes each time, and safe against
// whatever a user's file is called. The cost model in JavaScript against the library's.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <regex>

#include "cli/array.h"
#include "cli/report_data.h"

namespace rafter::cli {
namespace {

Figure figure(double value, const char* unit) {
  Figure f;
  f.value = f.low = f.high = value;
  f.unit = unit;
  f.kind = FigureKind::measured;
  f.samples = 10;
  f.source = "made up";
  return f;
}

ReportContent content(const std::string& file_name) {
  ReportContent c;
  c.machine.spec.name = "this-cpu";
  c.machine.spec.title = "A machine";
  c.machine.spec.kind = Device::Kind::cpu;
  c.machine.spec.figures["peak_f32_flop_per_s"] = figure(1e11, "FLOP/s");
  c.machine.spec.figures["bandwidth_bytes_per_s"] = figure(1e10, "B/s");
  c.machine.spec.figures["launch_s"] = figure(1e-6, "s");
  c.machine.source = "a test";
  c.shape.heads_q = c.shape.heads_kv = 2;
  c.data_source = "q, k, v of " + file_name;
  for (Pipeline pipeline : {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused}) {
    ReportPoint point;
    point.problem = c.shape;
    point.problem.seqlen_q = point.problem.seqlen_kv = 512;
    point.data = file_name;
    CaseResult& r = point.result;
    r.pipeline = pipeline;
    r.kernel = "k";
    r.cost = *attention_cost(point.problem, pipeline);
    r.level = {"memory", 1e10};
    r.predicted = r.at_level = *predict(r.cost, c.machine.spec);
    const double scale = pipeline == Pipeline::fused ? 1 : 3;
    const double seconds[] = {scale * 0.020, scale * 0.021, scale * 0.022};
    r.timing.seconds = *statistics(seconds);
    c.points.push_back(point);
  }
  return c;
}

std::size_t count_of(std::string_view text, std::string_view what) {
  std::size_t count = 0;
  for (std::size_t at = text.find(what); at != std::string_view::npos;
       at = text.find(what, at + 1)) {
    ++count;
  }
  return count;
}

// What the report's bound of the unfused pipeline rests on, from what rounding does to a binade.
TEST(Report, UnitRoundoffIsTheWorstThatRoundingDoes) {
  constexpr std::int64_t kSteps = 1 << 14;
  Array exact = *allocate_array(DType::f32, {kSteps}, "x");
  std::vector<float> values(kSteps), rounded(kSteps);
  for (std::int64_t i = 0; i < kSteps; ++i) {
    values[static_cast<std::size_t>(i)] = 1 + static_cast<float>(i) / kSteps;
  }
  std::memcpy(exact.data.get(), values.data(), sizeof(float) * kSteps);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    const Array back = *convert(*convert(exact, dtype, "x"), DType::f32, "x");
    std::memcpy(rounded.data(), back.data.get(), sizeof(float) * kSteps);
    double worst = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      worst = std::max(worst, std::abs(double{rounded[i]} - values[i]) / values[i]);
    }
    EXPECT_LE(worst, unit_roundoff(dtype)) << to_string(dtype);
    EXPECT_GT(worst, 0.99 * unit_roundoff(dtype)) << to_string(dtype);
  }
}

TEST(ReportPage, TheSameJsonGivesTheSameBytes) {
  const Json json = report_json(content("a.safetensors"));
  EXPECT_EQ(report_html(json), report_html(Json::parse(json.dump())));
}

TEST(ReportPage, AFileNameCannotEndTheScriptOrAddMarkup) {
  const std::string evil = "</script><script>alert(1)</script><!-- ]]> & {{data}} \xE2\x80\xA8";
  const std::string plain = report_html(report_json(content("plain")));
  const std::string page = report_html(report_json(content(evil)));
  for (const char* markup : {"<script", "</script", "<!--"}) {
    EXPECT_EQ(count_of(page, markup), count_of(plain, markup)) << markup;
  }
  EXPECT_NE(page.find("\\u003c/script\\u003e"), std::string::npos);
  // What the page parses is what went in.
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const std::size_t begin = page.find(open) + open.size();
  const Json parsed = Json::parse(page.substr(begin, page.find("</script>", begin) - begin));
  EXPECT_EQ(parsed.at("points").at(0).at("data"), evil);
}

TEST(ReportPage, AsksForNothingFromOutside) {
  const std::string page = report_html(report_json(content("plain")));
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  EXPECT_FALSE(std::regex_search(page.substr(0, page.find("<script type")),
                                 std::regex("(src|href)\\s*=|@import|url\\(")));
  for (const char* placeholder : {"{{style.css}}", "{{chart.min.js}}", "{{model.js}}",
                                  "{{page.js}}", "{{roofline.js}}", "{{data}}"}) {
    EXPECT_EQ(page.find(placeholder), std::string::npos) << placeholder;
  }
}

TEST(ReportPage, AVerdictNamesItsWallAndWhatWouldMoveIt) {
  ReportContent c = content("plain");
  const Sentence unfused = verdict_sentence(Pipeline::unfused, c.points);
  EXPECT_NE(unfused.headline.find(to_string(c.points[0].result.at_level.wall)), std::string::npos);
  EXPECT_NE(unfused.text.find("fewer bytes"), std::string::npos) << unfused.text;
  EXPECT_EQ(count_of(unfused.text, ". "), 0U) << unfused.text;  // one sentence
  const Sentence fused = verdict_sentence(Pipeline::fused, c.points);
  EXPECT_NE(fused.text.find("would move it"), std::string::npos) << fused.text;
  for (ReportPoint& point : c.points) {
    point.result.refusal = "no kernel";
  }
  EXPECT_EQ(verdict_sentence(Pipeline::fused, c.points).headline, "not run");
}

TEST(ReportPage, ItsCostModelAgreesWithTheLibrary) {
  if (std::system("node --version > /dev/null 2>&1") != 0) {
    GTEST_SKIP() << "no node to run the page's JavaScript";
  }
  const Json grid = model_check_grid();
  ASSERT_GE(grid.size(), 100U);
  for (const char* wall : {"compute", "bandwidth", "dispatch"}) {
    EXPECT_TRUE(std::any_of(grid.begin(), grid.end(),
                            [&](const Json& row) { return row.at("wall") == wall; }))
        << wall << " does not occur in the grid";
  }
  Json broken = grid;
  broken[0]["bytes"] = broken[0]["bytes"].get<double>() * 1.001;
  for (const auto& [rows, expected] :
       {std::pair{&grid, 0}, std::pair<const Json*, int>{&broken, 1}}) {
    const std::string path = (std::filesystem::temp_directory_path() /
                              ("rafter-grid-" + std::to_string(getpid()) + ".json"))
                                 .string();
    { std::ofstream(path) << rows->dump(); }
    const std::string command =
        "node -e 'const M = require(\"" RAFTER_SOURCE_DIR
        "/cli/report/model.js\"); const wrong = M.check(JSON.parse(require(\"fs\")"
        ".readFileSync(process.argv[1]))); console.error(wrong.slice(0, 3).join(\"\\n\")); "
        "process.exit(wrong.length ? 1 : 0)' " +
        path;
    const int status = std::system(command.c_str());
    std::filesystem::remove(path);
    EXPECT_EQ(status == 0 ? 0 : 1, expected);
  }
}

}  // namespace
}  // namespace rafter::cli
