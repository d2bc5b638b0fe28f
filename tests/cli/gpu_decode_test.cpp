// rafter run and bench decode with --device cuda on a machine that has one: caches in 16 and 8
// bits, dense and in pages, trees of new tokens, forced splits.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "cli/arrays.h"
#include "cli/run_tool.h"

namespace rafter::test {
namespace {

using Arguments = std::vector<std::string>;

constexpr std::int64_t kBatch = 2, kQueries = 3, kHeadsQ = 8, kHeadsKv = 2, kDim = 64;
constexpr std::int64_t kCapacity = 304, kPageSize = 16, kPages = kCapacity / kPageSize;

class GpuDecode : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!machine_has_cuda()) {
      GTEST_SKIP() << "no sm_90 device";
    }
    const Shape q = {kBatch, kQueries, kHeadsQ, kDim};
    write_f32(path("q.npy"), q, some_values(elements_of(q), 1));
    write_array<std::int32_t>(path("used.npy"), "<i4", {kBatch}, {300, 17});
    // Page p of a sequence is that of all pages, from the last on.
    std::vector<std::int32_t> table;
    for (std::int64_t page = kBatch * kPages; page > 0; --page) {
      table.push_back(static_cast<std::int32_t>(page - 1));
    }
    write_array(path("table.npy"), "<i4", {kBatch, kPages}, table);
    // Queries see themselves, some another token too, and one only another.
    write_array<std::int64_t>(path("tree.npy"), "<i8", {kBatch, kQueries}, {1, 2, 6, 1, 3, 2});
  }
  std::string path(const std::string& name) const { return folder_ / name; }

  static Shape rows_of(bool paged, bool factors) {
    Shape shape = paged ? Shape{kBatch * kPages, kPageSize, kHeadsKv, kDim}
                        : Shape{kBatch, kCapacity, kHeadsKv, kDim};
    if (factors) {
      shape.pop_back();
    }
    return shape;
  }
  /// k and v, and in 8 bits their factors; flags that say where they are.
  Arguments write_cache(const std::string& kv_dtype, bool paged) const {
    const Shape rows = rows_of(paged, false), factors = rows_of(paged, true);
    Arguments flags;
    for (const std::string name : {"k", "v"}) {
      const std::vector<float> values = some_values(elements_of(rows), name == "k" ? 2 : 3);
      const std::string file = path(name + ".npy");
      if (kv_dtype == "bf16") {
        write_f32(file, rows, values);
        continue;
      }
      std::vector<std::uint8_t> bytes;
      for (const float value : values) {
        const auto whole = static_cast<int>(value * 127);
        // e4m3: magnitudes below 0x48, which is 4, so that factors are as large as those of int8.
        bytes.push_back(static_cast<std::uint8_t>(
            kv_dtype == "int8" ? whole : (whole < 0 ? 0x80 : 0) | (std::abs(whole) % 0x48)));
      }
      write_array(file, kv_dtype == "int8" ? "|i1" : "|u1", rows, bytes);
      std::vector<float> scales = some_values(elements_of(factors), name == "k" ? 4 : 5);
      for (float& scale : scales) {
        scale = (1.5F + scale) * (kv_dtype == "int8" ? 0.008F : 0.25F);
      }
      write_f32(path(name + "s.npy"), factors, scales);
      flags.insert(flags.end(), {"--" + name + "-scale", path(name + "s.npy")});
    }
    if (kv_dtype != "bf16") {
      flags.insert(flags.end(), {"--kv-dtype", kv_dtype});
    }
    if (paged) {
      flags.insert(flags.end(), {"--page-table", path("table.npy")});
    }
    return flags;
  }
  struct Result {
    FloatArray o, lse;
  };
  Result run(const Arguments& of_cache, const Arguments& more) const {
    Arguments command = {"run",         "--q",          path("q.npy"),    "--k",
                         path("k.npy"), "--v",          path("v.npy"),    "--dtype",
                         "bf16",        "--seqused-kv", path("used.npy"), "--out",
                         path("o.npy"), "--lse",        path("lse.npy")};
    command.insert(command.end(), of_cache.begin(), of_cache.end());
    command.insert(command.end(), more.begin(), more.end());
    const auto document = run_json(command);
    EXPECT_GT(document.at("measured_time_s").get<double>(), 0);
    return {read_f32(path("o.npy")), read_f32(path("lse.npy"))};
  }

 private:
  TemporaryFolder folder_;
};

struct DecodeCase {
  const char* kv_dtype;
  bool paged, tree;
  const char* splits;
};

class GpuDecodeRun : public GpuDecode, public ::testing::WithParamInterface<DecodeCase> {};

// Values are below 3 and weights off by 2^-8 or so: o by less than 0.02.
TEST_P(GpuDecodeRun, GivesTheResultsOfFloat64) {
  const DecodeCase c = GetParam();
  Arguments flags = write_cache(c.kv_dtype, c.paged);
  if (c.tree) {
    flags.insert(flags.end(), {"--tree-mask", path("tree.npy")});
  } else {
    flags.emplace_back("--causal");
  }
  const Result want = run(flags, {"--kernel", "forward_reference"});
  const Result got =
      run(flags, {"--device", "cuda", "--kernel", "decode_sm90", "--splits", c.splits});
  EXPECT_LT(largest_difference(got.o, want.o), 0.02);
  EXPECT_LT(largest_difference(got.lse, want.lse), 0.01);
}

INSTANTIATE_TEST_SUITE_P(Caches, GpuDecodeRun,
                         ::testing::Values(DecodeCase{"bf16", true, true, "2"},
                                           DecodeCase{"int8", true, false, "3"},
                                           DecodeCase{"int8", false, true, "1"},
                                           DecodeCase{"e4m3", true, true, "3"},
                                           DecodeCase{"e4m3", false, false, "2"}),
                         [](const ::testing::TestParamInfo<DecodeCase>& info) {
                           const DecodeCase& c = info.param;
                           return std::string(c.kv_dtype) + (c.paged ? "_paged" : "") +
                                  (c.tree ? "_tree" : "") + "_splits" + c.splits;
                         });

TEST_F(GpuDecode, BenchRowsReadTheCacheOnceAndNameAWall) {
  const auto document =
      run_json({"bench",       "decode", "--device",   "cuda",      "--batch",     "4",
                "--seqlen-kv", "4096",   "--heads-q",  "8",         "--heads-kv",  "2",
                "--head-dim",  "128",    "--kv-dtype", "bf16,int8", "--page-size", "0,16",
                "--evidence",  "1",      "--time",     "0.005"});
  ASSERT_EQ(document.at("benchmarks").size(), 4U);
  for (const auto& row : document.at("benchmarks")) {
    SCOPED_TRACE(row.at("name").get<std::string>());
    EXPECT_EQ(row.at("kernel"), "decode_sm90");
    const bool int8 = row.at("case").at("kv_dtype") == "int8";
    EXPECT_DOUBLE_EQ(row.at("kv_bytes").get<double>(),
                     4.0 * 2 * 4096 * 2 * (int8 ? 128 + 4 : 2 * 128));
    EXPECT_GT(row.at("time_s").get<double>(), 0);
    EXPECT_NEAR(row.at("tokens_per_s").get<double>() * row.at("time_s").get<double>(), 4, 1e-6);
    const auto wall = row.at("wall_measured").get<std::string>();
    EXPECT_TRUE(wall == "compute" || wall == "bandwidth" || wall == "dispatch" || wall == "mixed" ||
                wall == "ambiguous")
        << wall;
    EXPECT_FALSE(row.at("wall_reason").get<std::string>().empty());
    EXPECT_GT(row.at("time_graph_s").get<double>(), 0);
  }
}

}  // namespace
}  // namespace rafter::test
