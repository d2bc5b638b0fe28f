// rafter run on what decode takes beyond a prefill: caches in e4m3, trees of new tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cli/arrays.h"
#include "cli/run_tool.h"

namespace rafter::test {
namespace {

using Arguments = std::vector<std::string>;

/// Value of e4m3 bits from its definition: 4 bits of exponent with a bias of 7, 3 of mantissa.
float e4m3_value(int bits) {
  const int exponent = (bits >> 3) & 15;
  const int mantissa = bits & 7;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return static_cast<float>((bits & 0x80) != 0 ? -size : size);
}

/// q, and k and v both in e4m3 and in the f32 that those are.
struct Files {
  TemporaryFolder folder;
  Files() {
    const Shape q{2, 5, 4, 8}, kv{2, 30, 2, 8};
    std::vector<std::uint8_t> k8, v8;
    std::vector<float> k, v;
    for (int i = 0; i < 2 * 30 * 2 * 8; ++i) {
      k8.push_back(static_cast<std::uint8_t>((i * 37 % 80) | (i % 3 == 0 ? 0x80 : 0)));
      v8.push_back(static_cast<std::uint8_t>((i * 91 % 80) | (i % 5 == 0 ? 0x80 : 0)));
      k.push_back(e4m3_value(k8.back()));
      v.push_back(0.5F * e4m3_value(v8.back()));
    }
    write_f32(folder / "q.npy", q, some_values(elements_of(q), 1));
    write_f32(folder / "k.npy", kv, k);
    write_f32(folder / "v.npy", kv, v);
    write_array(folder / "k8.npy", "|u1", kv, k8);
    write_array(folder / "v8.npy", "|u1", kv, v8);
    write_f32(folder / "vs.npy", {2, 30, 2}, std::vector<float>(120, 0.5F));
  }
  Arguments run(Arguments more, bool e4m3 = false) const {
    Arguments all{"run",
                  "--kernel",
                  "forward_reference",
                  "--q",
                  folder / "q.npy",
                  "--k",
                  folder / (e4m3 ? "k8.npy" : "k.npy"),
                  "--v",
                  folder / (e4m3 ? "v8.npy" : "v.npy")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  std::vector<float> output() const { return read_f32(folder / "o.npy").values; }
};

TEST(RunDecode, ReadsCachesInE4m3) {
  const Files files;
  run_json(files.run({"--out", files.folder / "o.npy"}));
  const std::vector<float> wanted = files.output();
  const auto json = run_json(files.run(
      {"--kv-dtype", "e4m3", "--v-scale", files.folder / "vs.npy", "--out", files.folder / "o.npy"},
      true));
  EXPECT_EQ(json.at("problem").at("kv_dtype"), "e4m3");
  EXPECT_EQ(files.output(), wanted);
  expect_refused(files.run({"--kv-dtype", "e4m3"}), {"--k", "f32", "e4m3"});
  expect_refused(files.run({}, true), {"--k", "uint8"});
  expect_refused(files.run({"--v-scale", files.folder / "vs.npy"}), {"--v-scale", "none"});
}

TEST(RunDecode, SeesTheTokensOfATree) {
  const Files files;
  const std::string mask = files.folder / "tree.npy", out = files.folder / "o.npy";
  run_json(files.run({"--causal", "--out", out}));
  const std::vector<float> causal = files.output();
  std::vector<std::int64_t> words;
  for (int i = 0; i < 10; ++i) {
    words.push_back((std::int64_t{2} << i % 5) - 1);
  }
  write_array(mask, "<i8", {2, 5}, words);
  EXPECT_EQ(run_json(files.run({"--tree-mask", mask, "--out", out})).at("problem").at("tree_mask"),
            true);
  EXPECT_EQ(files.output(), causal);
  words[9] = 0b10000;  // the last query of the last sequence sees itself alone of the new tokens
  write_array(mask, "<i8", {2, 5}, words);
  run_json(files.run({"--tree-mask", mask, "--out", out}));
  const std::vector<float> tree = files.output();
  const std::size_t row = 4 * 8;
  EXPECT_TRUE(std::equal(tree.begin(), tree.end() - row, causal.begin()));
  EXPECT_FALSE(std::equal(tree.end() - row, tree.end(), causal.end() - row));

  expect_refused(files.run({"--tree-mask", mask, "--causal"}), {"mask", "tree_mask"});
  write_array(mask, "<i8", {5, 2}, words);
  expect_refused(files.run({"--tree-mask", mask}), {"tree_mask.batch", "2"});
  write_array(mask, "<i4", {2, 5}, std::vector<std::int32_t>(10, 1));
  expect_refused(files.run({"--tree-mask", mask}), {"--tree-mask", "int64"});
}

}  // namespace
}  // namespace rafter::test
