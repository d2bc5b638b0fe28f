// rafter run: results against an oracle of our own, and against numpy's on captured real input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cli/arrays.h"
#include "cli/run_tool.h"

namespace rafter::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::string kData = std::string(RAFTER_SOURCE_DIR) + "/tests/data/";

/// Attention of dense arrays [batch, seqlen, heads, head_dim] in float64; row i of the queries sees
/// key j when `sees(i, j)`.
template <typename Sees>
std::vector<double> oracle(const Shape& q_shape, const std::vector<float>& q, const Shape& k_shape,
                           const std::vector<float>& k, const std::vector<float>& v,
                           std::int64_t dim_v, double scale, Sees sees,
                           std::vector<double>* lse = nullptr) {
  const std::int64_t batch = q_shape[0], rows = q_shape[1], heads = q_shape[2], dim = q_shape[3];
  const std::int64_t keys = k_shape[1], heads_kv = k_shape[2];
  std::vector<double> o(static_cast<std::size_t>(batch * rows * heads * dim_v));
  if (lse != nullptr) {
    lse->assign(static_cast<std::size_t>(batch * heads * rows), 0);
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t g = h * heads_kv / heads;
        double sum = 0;
        std::vector<double> row(static_cast<std::size_t>(dim_v));
        for (std::int64_t j = 0; j < keys; ++j) {
          if (!sees(i, j)) {
            continue;
          }
          double score = 0;
          for (std::int64_t d = 0; d < dim; ++d) {
            score += static_cast<double>(
                         q[static_cast<std::size_t>(((b * rows + i) * heads + h) * dim + d)]) *
                     static_cast<double>(
                         k[static_cast<std::size_t>(((b * keys + j) * heads_kv + g) * dim + d)]);
          }
          const double weight = std::exp(score * scale);  // scores are small here
          sum += weight;
          for (std::int64_t d = 0; d < dim_v; ++d) {
            row[static_cast<std::size_t>(d)] +=
                weight *
                static_cast<double>(
                    v[static_cast<std::size_t>(((b * keys + j) * heads_kv + g) * dim_v + d)]);
          }
        }
        for (std::int64_t d = 0; d < dim_v; ++d) {
          o[static_cast<std::size_t>(((b * rows + i) * heads + h) * dim_v + d)] =
              sum > 0 ? row[static_cast<std::size_t>(d)] / sum : 0;
        }
        if (lse != nullptr) {
          (*lse)[static_cast<std::size_t>((b * heads + h) * rows + i)] = std::log(sum);
        }
      }
    }
  }
  return o;
}

double largest_error(const std::vector<float>& got, const std::vector<double>& want) {
  EXPECT_EQ(got.size(), want.size());
  double most = 0;
  for (std::size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    if (std::isinf(want[i])) {
      EXPECT_EQ(static_cast<double>(got[i]), want[i]) << i;
    } else {
      most = std::max(most, std::fabs(static_cast<double>(got[i]) - want[i]));
    }
  }
  return most;
}

class Run : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  /// Writes q, k, v and returns the arguments that name them.
  std::vector<std::string> inputs(const Shape& q_shape, const Shape& k_shape,
                                  const Shape& v_shape) {
    q_ = some_values(elements_of(q_shape), 1);
    k_ = some_values(elements_of(k_shape), 2);
    v_ = some_values(elements_of(v_shape), 3);
    write_f32(path("q.npy"), q_shape, q_);
    write_f32(path("k.npy"), k_shape, k_);
    write_f32(path("v.npy"), v_shape, v_);
    return {"run", "--q", path("q.npy"), "--k", path("k.npy"), "--v", path("v.npy")};
  }

  FloatArray o_of(std::vector<std::string> arguments, const std::vector<std::string>& more = {}) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    arguments.insert(arguments.end(), {"--out", path("o.npy")});
    const ToolRun run = run_tool(arguments);
    EXPECT_EQ(run.exit_code, 0) << run.err;
    return read_f32(path("o.npy"));
  }

  TemporaryFolder folder_;
  std::vector<float> q_, k_, v_;
};

constexpr double kF32 = 2e-6;  // values below 1, weights that sum to 1: some ulp of f32

TEST_F(Run, GivesAttentionOfTheArraysAndTheirLse) {
  const Shape q = {2, 5, 4, 8}, k = {2, 7, 2, 8}, v = {2, 7, 2, 6};
  const FloatArray o = o_of(inputs(q, k, v), {"--lse", path("lse.npy")});
  EXPECT_THAT(o.shape, ElementsAre(2, 5, 4, 6));
  std::vector<double> lse;
  const auto want = oracle(
      q, q_, k, k_, v_, 6, 1 / std::sqrt(8.0), [](std::int64_t, std::int64_t) { return true; },
      &lse);
  EXPECT_LT(largest_error(o.values, want), kF32);
  const FloatArray written_lse = read_f32(path("lse.npy"));
  EXPECT_THAT(written_lse.shape, ElementsAre(2, 4, 5));
  EXPECT_LT(largest_error(written_lse.values, lse), kF32);
}

TEST_F(Run, EveryOptionThatChangesTheResultDoes) {
  const Shape q = {1, 6, 2, 16}, k = {1, 4, 2, 16}, v = {1, 4, 2, 16};
  const auto arguments = inputs(q, k, v);
  const double scale = 0.25;
  const auto expect = [&](const std::vector<std::string>& more, double s, auto sees) {
    SCOPED_TRACE(testing::PrintToString(more));
    const auto want = oracle(q, q_, k, k_, v_, 16, s, sees);
    EXPECT_LT(largest_error(o_of(arguments, more).values, want), kF32);
  };
  using I = std::int64_t;
  expect({}, scale, [](I, I) { return true; });
  expect({"--softmax-scale", "0.7"}, 0.7, [](I, I) { return true; });
  expect({"--softmax-scale", "-0.7"}, -0.7, [](I, I) { return true; });
  expect({"--causal"}, scale, [](I i, I j) { return j <= i - 2; });  // 2 rows see nothing
  expect({"--causal", "--causal-align", "top-left"}, scale, [](I i, I j) { return j <= i; });
  expect({"--window", "1", "0"}, scale, [](I i, I j) { return j <= i - 2 && j >= i - 3; });
  expect({"--window", "-1", "1"}, scale, [](I i, I j) { return j <= i - 1; });
  const auto capped = o_of(arguments, {"--softcap", "0.1"});
  EXPECT_GT(
      largest_error(capped.values, oracle(q, q_, k, k_, v_, 16, scale, [](I, I) { return true; })),
      1e-3);
}

TEST_F(Run, ARowThatSeesNoKeyIsZeroWithMinusInfinityLse) {
  const FloatArray o =
      o_of(inputs({1, 3, 1, 4}, {1, 1, 1, 4}, {1, 1, 1, 4}), {"--causal", "--lse", path("l.npy")});
  EXPECT_THAT(std::vector<float>(o.values.begin(), o.values.begin() + 8), testing::Each(0.0F));
  const float infinity = std::numeric_limits<float>::infinity();
  const FloatArray lse = read_f32(path("l.npy"));
  EXPECT_THAT(lse.values, ElementsAre(-infinity, -infinity, testing::Gt(-10.0F)));
}

TEST_F(Run, EmptyArraysAreData) {
  EXPECT_THAT(o_of(inputs({0, 3, 1, 4}, {0, 5, 1, 4}, {0, 5, 1, 4})).shape,
              ElementsAre(0, 3, 1, 4));
  EXPECT_THAT(o_of(inputs({1, 0, 1, 4}, {1, 5, 1, 4}, {1, 5, 1, 4})).shape,
              ElementsAre(1, 0, 1, 4));
  EXPECT_THAT(o_of(inputs({1, 2, 1, 4}, {1, 0, 1, 4}, {1, 0, 1, 4})).values, testing::Each(0.0F));
}

TEST_F(Run, NanIsDataAndIsCounted) {
  auto arguments = inputs({1, 3, 1, 4}, {1, 5, 1, 4}, {1, 5, 1, 4});
  q_[5] = std::numeric_limits<float>::quiet_NaN();
  write_f32(path("q.npy"), {1, 3, 1, 4}, q_);
  arguments.insert(arguments.end(), {"--out", path("o.npy")});
  EXPECT_EQ(run_json(arguments)["nan_elements"], 4);
  const FloatArray o = read_f32(path("o.npy"));
  for (std::size_t i = 0; i < 12; ++i) {
    EXPECT_EQ(std::isnan(o.values[i]), i / 4 == 1) << i;
  }
}

TEST_F(Run, PackedSequencesAreTheSameAsEachAlone) {
  const auto arguments = inputs({5, 2, 8}, {9, 1, 8}, {9, 1, 8});
  write_array<std::int64_t>(path("cq.npy"), "<i8", {4}, {0, 3, 3, 5});
  write_array<std::int32_t>(path("ck.npy"), "<i4", {4}, {0, 4, 4, 9});
  const FloatArray o = o_of(arguments, {"--cu-seqlens-q", path("cq.npy"), "--cu-seqlens-kv",
                                        path("ck.npy"), "--causal", "--lse", path("lse.npy")});
  EXPECT_THAT(o.shape, ElementsAre(5, 2, 8));
  EXPECT_THAT(read_f32(path("lse.npy")).shape, ElementsAre(2, 5));
  const std::vector<float> q = q_, k = k_, v = v_;
  const auto alone = [&](std::int64_t rows, std::int64_t q0, std::int64_t keys, std::int64_t k0) {
    const auto slice = [&](const std::vector<float>& from, std::int64_t first, std::int64_t count,
                           std::int64_t width) {
      return std::vector<float>(from.begin() + first * width,
                                from.begin() + (first + count) * width);
    };
    write_f32(path("q1.npy"), {1, rows, 2, 8}, slice(q, q0, rows, 16));
    write_f32(path("k1.npy"), {1, keys, 1, 8}, slice(k, k0, keys, 8));
    write_f32(path("v1.npy"), {1, keys, 1, 8}, slice(v, k0, keys, 8));
    return o_of({"run", "--q", path("q1.npy"), "--k", path("k1.npy"), "--v", path("v1.npy")},
                {"--causal"})
        .values;
  };
  std::vector<float> want = alone(3, 0, 4, 0);
  const std::vector<float> second = alone(2, 3, 5, 4);
  want.insert(want.end(), second.begin(), second.end());
  EXPECT_EQ(o.values, want);  // to the bit
}

TEST_F(Run, PagesAndLengthsInUseSelectTheKeys) {
  const Shape k_shape = {1, 6, 1, 8};
  const auto dense = inputs({1, 2, 2, 8}, k_shape, k_shape);
  write_array<std::int64_t>(path("used.npy"), "<i8", {1}, {5});
  const auto want = o_of(dense, {"--seqused-kv", path("used.npy")}).values;
  // The same keys in pages of 2, in the order 2, 0, 3; page 1 holds NaN.
  const auto paged = [](const std::vector<float>& rows) {
    std::vector<float> pages(4 * 16, std::numeric_limits<float>::quiet_NaN());
    const std::size_t order[] = {2, 0, 3};
    for (std::size_t page = 0; page < 3; ++page) {
      std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(page * 16), 16,
                  pages.begin() + static_cast<std::ptrdiff_t>(order[page] * 16));
    }
    return pages;
  };
  write_f32(path("k.npy"), {4, 2, 1, 8}, paged(k_));
  write_f32(path("v.npy"), {4, 2, 1, 8}, paged(v_));
  write_array<std::int32_t>(path("table.npy"), "<i4", {1, 3}, {2, 0, 3});
  EXPECT_EQ(
      o_of(dense, {"--seqused-kv", path("used.npy"), "--page-table", path("table.npy")}).values,
      want);
}

TEST_F(Run, DtypesAreReadAndConvertedAsAsked) {
  const Shape shape = {1, 2, 1, 2};
  // 1, 2, 3, 4 as float16 and as bfloat16 words: the same results
  write_array<std::uint16_t>(path("f16.npy"), "<f2", shape, {0x3C00, 0x4000, 0x4200, 0x4400});
  write_array<std::uint16_t>(path("bf16.npy"), "<u2", shape, {0x3F80, 0x4000, 0x4040, 0x4080});
  write_f32(path("f32.npy"), shape, {1, 2, 3, 4});
  const auto all = [&](const std::string& name) {
    return std::vector<std::string>{"run", "--q", path(name), "--k", path(name), "--v", path(name)};
  };
  const auto f32 = o_of(all("f32.npy")).values;
  EXPECT_EQ(o_of(all("f16.npy"), {"--dtype", "f32"}).values, f32);
  const auto bf16 = o_of(all("bf16.npy"), {"--dtype", "bf16"}).values;
  EXPECT_EQ(o_of(all("f16.npy"), {"--dtype", "bf16"}).values, bf16);
  EXPECT_EQ(o_of(all("f32.npy"), {"--dtype", "bf16"}).values, bf16);
  EXPECT_EQ(o_of({"run", "--q", path("f32.npy"), "--k", path("f16.npy"), "--v", path("bf16.npy")},
                 {"--dtype", "bf16"})
                .values,
            bf16);
  EXPECT_EQ(run_json(all("f16.npy"))["problem"]["dtype"], "f16");
}

/// A small .safetensors file, read by hand: names to the bytes of their data.
std::string tensor_bytes(const std::string& path, const std::string& name) {
  const std::string bytes = read_bytes(path);
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  const auto header = nlohmann::json::parse(bytes.substr(8, length));
  const std::size_t begin = header[name]["data_offsets"][0];
  const std::size_t end = header[name]["data_offsets"][1];
  return bytes.substr(8 + length + begin, end - begin);
}

template <typename T>
std::vector<T> tensor(const std::string& path, const std::string& name) {
  const std::string bytes = tensor_bytes(path, name);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

TEST_F(Run, CapturedRealInputGivesWhatNumpyGave) {
  const std::string expected = kData + "minilm_l6_expected.safetensors";
  const auto rows = tensor<std::int64_t>(expected, "rows");
  const auto want_o = tensor<float>(expected, "o_rows");      // [3, rows, 2, 32]
  const auto want_lse = tensor<float>(expected, "lse_rows");  // [3, 2, rows]
  ASSERT_EQ(rows.size(), 14U);
  // In bf16 the pipelines that keep the scores in memory round them: scores of up to 72 by 0.25,
  // which moves their weights by as much. The fused one rounds no score.
  struct Bound {
    const char* dtype;
    const char* pipeline;
    double o;
  };
  for (const auto& [dtype, pipeline, bound] :
       {Bound{"f32", "unfused", 1e-5}, Bound{"f32", "half-fused", 1e-5},
        Bound{"f32", "fused", 1e-5}, Bound{"bf16", "unfused", 5e-2},
        Bound{"bf16", "half-fused", 5e-2}, Bound{"bf16", "fused", 1e-2}}) {
    SCOPED_TRACE(std::string(dtype) + " " + pipeline);
    const FloatArray o = o_of({"run", "--qkv", kData + "minilm_l6_qkv.safetensors"},
                              {"--dtype", dtype, "--pipeline", pipeline, "--lse", path("lse.npy")});
    ASSERT_THAT(o.shape, ElementsAre(3, 512, 2, 32));
    const FloatArray lse = read_f32(path("lse.npy"));
    double error_o = 0, error_lse = 0;
    for (std::size_t b = 0; b < 3; ++b) {
      for (std::size_t r = 0; r < rows.size(); ++r) {
        const auto row = static_cast<std::size_t>(rows[r]);
        for (std::size_t i = 0; i < 64; ++i) {
          error_o = std::max(
              error_o, std::fabs(static_cast<double>(o.values[(b * 512 + row) * 64 + i] -
                                                     want_o[(b * rows.size() + r) * 64 + i])));
        }
        for (std::size_t h = 0; h < 2; ++h) {
          error_lse = std::max(
              error_lse, std::fabs(static_cast<double>(lse.values[(b * 2 + h) * 512 + row] -
                                                       want_lse[(b * 2 + h) * rows.size() + r])));
        }
      }
    }
    EXPECT_LT(error_o, bound);
    EXPECT_LT(error_lse, 20 * bound);  // lse is up to 72
  }
}

TEST_F(Run, JsonSaysWhatRanAndHowLongItTook) {
  const auto json = run_json({"run", "--qkv", kData + "minilm_l6_qkv.safetensors", "--kernel",
                              "forward_reference", "--threads", "1", "--causal"});
  EXPECT_EQ(json["kernel"], "forward_reference");
  EXPECT_EQ(json["threads"], 1);
  EXPECT_EQ(json["problem"]["seqlen_q"], 512);
  EXPECT_EQ(json["problem"]["window_right"], 0);
  EXPECT_EQ(json["problem"]["dtype"], "bf16");
  EXPECT_THAT(json["wall"].get<std::string>(), testing::AnyOf("compute", "bandwidth", "dispatch"));
  EXPECT_GT(json["predicted_time_s"].get<double>(), 0);
  EXPECT_GT(json["measured_time_s"].get<double>(), 0);
  EXPECT_GT(json["workspace_bytes"].get<double>(), 0);
  EXPECT_TRUE(json["out"].is_null());
}

TEST_F(Run, EveryKernelOfThisMachineCanBeForced) {
  const auto arguments = inputs({1, 5, 2, 8}, {1, 7, 2, 8}, {1, 7, 2, 8});
  const auto want = o_of(arguments, {"--kernel", "forward_reference"}).values;
  int ran = 0;
  const auto listed = run_json({"kernels"});
  for (const auto& kernel : listed["kernels"]) {
    const auto& dtypes = kernel["dtypes"];
    if (kernel["device"] == "cpu" && kernel["pass"] == "forward" &&
        kernel["machine_has"].get<bool>() &&
        std::find(dtypes.begin(), dtypes.end(), "f32") != dtypes.end()) {
      const auto got = o_of(arguments, {"--kernel", kernel["kernel"].get<std::string>()}).values;
      EXPECT_LT(largest_error(got, std::vector<double>(want.begin(), want.end())), kF32)
          << kernel["kernel"];
      ++ran;
    }
  }
  EXPECT_GE(ran, 3);
}

// The gradients against differences of the loss Σ o ∘ dout + Σ lse ∘ dlse by the oracle.
TEST_F(Run, GradientsAreThoseOfTheLoss) {
  const Shape q = {1, 5, 4, 8}, k = {1, 7, 2, 8}, v = {1, 7, 2, 6};
  std::vector<std::string> arguments = inputs(q, k, v);
  const std::vector<float> d_o = some_values(1 * 5 * 4 * 6, 4), d_lse = some_values(1 * 4 * 5, 5);
  write_f32(path("do.npy"), {1, 5, 4, 6}, d_o);
  write_f32(path("dlse.npy"), {1, 4, 5}, d_lse);
  arguments.insert(arguments.end(),
                   {"--causal", "--dout", path("do.npy"), "--dlse", path("dlse.npy"), "--dq",
                    path("dq.npy"), "--dk", path("dk.npy"), "--dv", path("dv.npy")});
  const auto loss = [&] {
    std::vector<double> lse;
    const auto o = oracle(
        q, q_, k, k_, v_, 6, 1 / std::sqrt(8.0),
        [](std::int64_t i, std::int64_t j) { return j <= i + 2; }, &lse);
    double sum = 0;
    for (std::size_t i = 0; i < o.size(); ++i) {
      sum += o[i] * static_cast<double>(d_o[i]);
    }
    for (std::size_t i = 0; i < lse.size(); ++i) {
      sum += lse[i] * static_cast<double>(d_lse[i]);
    }
    return sum;
  };
  const std::pair<const char*, std::vector<float>*> tensors[] = {
      {"dq.npy", &q_}, {"dk.npy", &k_}, {"dv.npy", &v_}};
  for (const char* kernel : {"", "backward_reference"}) {
    std::vector<std::string> forced = arguments;
    if (*kernel != '\0') {
      forced.insert(forced.end(), {"--kernel", kernel});
    }
    const ToolRun run = run_tool(forced);
    ASSERT_EQ(run.exit_code, 0) << run.err;
    for (const auto& [file, values] : tensors) {
      const FloatArray gradient = read_f32(path(file));
      ASSERT_EQ(gradient.values.size(), values->size());
      for (std::size_t i = 0; i < values->size(); i += 3) {
        const float before = (*values)[i];
        (*values)[i] = before + 0.0625F;  // exact in f32: values have steps of 2^-23
        const double step_up = static_cast<double>((*values)[i]) - static_cast<double>(before);
        const double up = loss();
        (*values)[i] = before - 0.0625F;
        const double step_down = static_cast<double>(before) - static_cast<double>((*values)[i]);
        const double down = loss();
        (*values)[i] = before;
        EXPECT_NEAR(static_cast<double>(gradient.values[i]), (up - down) / (step_up + step_down),
                    2e-3)
            << file << " " << i;
      }
    }
  }
}

TEST_F(Run, GradientsAreReportedBesideTheForward) {
  const Shape q = {1, 5, 2, 8};
  std::vector<std::string> arguments = inputs(q, q, q);
  write_f32(path("do.npy"), q, some_values(80, 4));
  arguments.insert(arguments.end(), {"--dout", path("do.npy"), "--kernel", "backward_reference"});
  const auto json = run_json(arguments);
  EXPECT_EQ(json.at("backward").at("kernel"), "backward_reference");
  EXPECT_NE(json.at("kernel"), "backward_reference");
  for (const char* key : {"measured_time_s", "predicted_time_s", "flops", "workspace_bytes"}) {
    EXPECT_GE(json.at("backward").at(key).get<double>(), 0) << key;
  }
  EXPECT_TRUE(json.at("dq").is_null());
}

TEST_F(Run, OutputThroughALinkKeepsTheLink) {
  const auto arguments = inputs({1, 2, 1, 4}, {1, 2, 1, 4}, {1, 2, 1, 4});
  std::filesystem::create_symlink(path("target.npy"), path("o.npy"));
  write_bytes(path("target.npy"), "old");
  EXPECT_THAT(o_of(arguments).shape, ElementsAre(1, 2, 1, 4));
  EXPECT_TRUE(std::filesystem::is_symlink(path("o.npy")));
}

TEST(RunCommand, ReadsACacheInInt8WithItsScales) {
  using Arguments = std::vector<std::string>;
  const TemporaryFolder folder;
  const Shape q_shape{1, 1, 4, 8}, k_shape{1, 70, 2, 8}, scale_shape{1, 70, 2};
  const std::vector<float> q = some_values(32, 1);
  std::vector<float> k, v, k_scale, v_scale;
  std::vector<std::int8_t> k8, v8;
  for (int i = 0; i < 140 * 8; ++i) {
    k8.push_back(static_cast<std::int8_t>(i * 37 % 255 - 127));
    v8.push_back(static_cast<std::int8_t>(i * 91 % 255 - 127));
  }
  for (int row = 0; row < 140; ++row) {
    k_scale.push_back(static_cast<float>(1 + row % 3) / 128);
    v_scale.push_back(static_cast<float>(1 + row % 5) / 128);
    for (int d = 0; d < 8; ++d) {
      k.push_back(k_scale.back() * static_cast<float>(k8[static_cast<std::size_t>(row * 8 + d)]));
      v.push_back(v_scale.back() * static_cast<float>(v8[static_cast<std::size_t>(row * 8 + d)]));
    }
  }
  write_f32(folder / "q.npy", q_shape, q);
  write_array(folder / "k.npy", "|i1", k_shape, k8);
  write_array(folder / "v.npy", "|i1", k_shape, v8);
  write_f32(folder / "ks.npy", scale_shape, k_scale);
  write_f32(folder / "vs.npy", scale_shape, v_scale);
  const Arguments files{"run", "--q",           folder / "q.npy", "--k", folder / "k.npy",
                        "--v", folder / "v.npy"};
  const auto with = [&](Arguments more) {
    Arguments all = files;
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  const auto json = run_json(with(
      {"--k-scale", folder / "ks.npy", "--v-scale", folder / "vs.npy", "--out", folder / "o.npy"}));
  EXPECT_EQ(json.at("problem").at("kv_dtype"), "int8");
  const std::vector<double> wanted =
      oracle(q_shape, q, k_shape, k, v, 8, 1 / std::sqrt(8.0), [](auto, auto) { return true; });
  const FloatArray o = read_f32(folder / "o.npy");
  ASSERT_EQ(o.values.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(o.values[i]), wanted[i], 2e-6);
  }
  expect_refused(files, {"--k-scale", "int8"});
  expect_refused(with({"--k-scale", folder / "ks.npy"}), {"--v-scale", "int8"});
  expect_refused(with({"--k-scale", folder / "ks.npy", "--v-scale", folder / "q.npy"}),
                 {"--v-scale", "[1, 70, 2, 1]"});
  expect_refused({"run", "--q", folder / "q.npy", "--k", folder / "q.npy", "--v", folder / "q.npy",
                  "--k-scale", folder / "ks.npy"},
                 {"--k-scale", "none"});
}

}  // namespace
}  // namespace rafter::test
