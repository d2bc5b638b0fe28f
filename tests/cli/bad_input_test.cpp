// Bad input of every kind gives exit 2 and one line that names the argument and what is allowed;
// nothing crashes and no partial file is left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cli/arrays.h"
#include "cli/run_tool.h"

namespace rafter::test {
namespace {

using testing::HasSubstr;

class BadInput : public ::testing::Test {
 protected:
  void SetUp() override {
    write_f32(path("q.npy"), {1, 3, 4, 8}, some_values(96, 1));
    write_f32(path("k.npy"), {1, 5, 2, 8}, some_values(80, 2));
    write_f32(path("v.npy"), {1, 5, 2, 6}, some_values(60, 3));
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  /// `run` on the good arrays with `more` behind; refused, and no file has come or gone.
  void refused(const std::vector<std::string>& more, const std::vector<std::string>& words) {
    std::vector<std::string> arguments = {"run",         "--q",         path("q.npy"),
                                          "--k",         path("k.npy"), "--v",
                                          path("v.npy"), "--out",       path("o.npy")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto before = files();
    expect_refused(arguments, words);
    EXPECT_EQ(files(), before);
  }
  /// The same with one of q, k, v replaced.
  void refused_file(const std::string& flag, const std::string& file,
                    const std::vector<std::string>& words) {
    std::vector<std::string> arguments = {"run", "--out", path("o.npy")};
    for (const std::string name : {"--q", "--k", "--v"}) {
      arguments.push_back(name);
      arguments.push_back(name == flag ? file : path(name.substr(2) + ".npy"));
    }
    const auto before = files();
    expect_refused(arguments, words);
    EXPECT_EQ(files(), before);
  }
  void refused_shape(const std::string& flag, const Shape& shape,
                     const std::vector<std::string>& words) {
    write_f32(path("bad.npy"), shape, some_values(elements_of(shape), 4));
    refused_file(flag, path("bad.npy"), words);
  }

  TemporaryFolder folder_;
};

TEST_F(BadInput, TheGoodArraysRun) {  // what all the others vary
  const ToolRun run = run_tool({"run", "--q", path("q.npy"), "--k", path("k.npy"), "--v",
                                path("v.npy"), "--out", path("o.npy")});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.err, "");
}

TEST_F(BadInput, FilesThatAreNone) {
  refused_file("--q", path("absent.npy"), {"--q", "absent.npy", "No such file", "regular file"});
  refused_file("--k", folder_.path().string(), {"--k", "is a directory"});
  refused_file("--v", "/dev/null", {"--v /dev/null", "is a device"});
  refused_file("--q", "", {"--q"});
  refused_file("--q", path("q.npy") + "/q.npy", {"--q", "Not a directory"});
  refused_file("--q", std::string(300, 'n'), {"--q", "File name too long"});
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  refused_file("--q", path("pipe"), {"--q", "is a pipe"});
  std::filesystem::create_symlink("loop", path("loop"));
  refused_file("--q", path("loop"), {"--q", "symbolic link"});
}

TEST_F(BadInput, FilesThatMayNotBeRead) {
  if (geteuid() == 0) {
    GTEST_SKIP() << "root reads every file";
  }
  ASSERT_EQ(chmod(path("q.npy").c_str(), 0), 0);
  refused({}, {"--q", "Permission denied"});
}

TEST_F(BadInput, MalformedNpyFiles) {
  const std::string good = read_bytes(path("q.npy"));
  const auto with_bytes = [&](const std::string& bytes, const std::vector<std::string>& words) {
    write_bytes(path("bad.npy"), bytes);
    refused_file("--q", path("bad.npy"), words);
  };
  with_bytes("", {"--q", "the file is empty"});
  with_bytes("hello", {"does not begin as a .npy file"});
  with_bytes(good.substr(0, 9), {"is truncated"});
  with_bytes(good.substr(0, 40), {"is truncated"});
  with_bytes(good.substr(0, good.size() - 1), {"is truncated", "384 bytes, 383 follow"});
  with_bytes(good + "x", {"has trailing bytes"});
  with_bytes(npy_bytes("<f4", "(1, 3, 4, 8", ""), {"header is malformed at byte"});
  with_bytes(npy_bytes("<f4", "(1, 3, -4, 8)", ""), {"dimensions are 0 or more"});
  with_bytes(npy_bytes("<f4", "(4294967296, 4294967296, 4, 8)", ""), {"exceeds 64 bits"});
  with_bytes(npy_bytes("<f4", "(0, 4294967296, 4294967296, 8)", ""), {"exceeds 64 bits"});
  with_bytes(npy_bytes("<f4", "(1, 1099511627776, 4, 8)", ""), {"is truncated"});
  std::string header_length = good;
  header_length.replace(6, 1, 1, '\x02');
  header_length.replace(8, 4, 4, '\xff');
  with_bytes(header_length, {"header of 4294967295 bytes", "at most 65535"});
  with_bytes("PK\x03\x04", {"does not begin as a .npy file"});
}

TEST_F(BadInput, DtypesThatAreNotRead) {
  const auto with_descr = [&](const std::string& descr, int bytes, const std::string& word) {
    write_bytes(path("bad.npy"), npy_bytes(descr, "(1, 5, 2, 8)",
                                           std::string(80U * static_cast<unsigned>(bytes), '\0')));
    refused_file("--k", path("bad.npy"), {"--k", word, "float32, float16"});
  };
  with_descr("<f8", 8, "float64 given");
  with_descr(">f4", 4, "big-endian float32 given");
  with_descr("<i4", 4, "int32 given");
  with_descr("<u2", 2, "--dtype bf16");  // what the word would need
  with_descr("|O", 8, "object given");
  with_descr("<c8", 8, "complex64 given");
  write_array<std::uint16_t>(path("bad.npy"), "<f2", {1, 5, 2, 8}, std::vector<std::uint16_t>(80));
  refused_file("--k", path("bad.npy"), {"--k", "f16 given", "f32 as in --q", "--dtype"});
}

TEST_F(BadInput, ShapesThatDoNotFit) {
  refused_shape("--q", {3, 4, 8}, {"--q", "shape [3, 4, 8]", "[batch, seqlen, heads, head_dim]"});
  refused_shape("--q", {}, {"--q", "shape []"});
  refused_shape("--q", {1, 1, 3, 4, 8}, {"--q", "shape [1, 1, 3, 4, 8]"});
  refused_shape("--k", {2, 5, 2, 8}, {"--k", "batch 2", "1 as in --q"});
  refused_shape("--k", {1, 5, 2, 7}, {"--k", "head_dim 7", "8 as in --q"});
  refused_shape("--k", {1, 5, 3, 8}, {"heads 2", "3 as in --k"});
  refused_shape("--v", {1, 4, 2, 6}, {"--v", "seqlen 4", "5 as in --k"});
  refused_shape("--v", {1, 5, 1, 6}, {"--v", "heads 1", "2 as in --k"});
  refused_shape("--v", {1, 5, 2, 0}, {"--v", "head_dim 0", "1 or more"});
  refused_shape("--v", {1, 5, 2, 257}, {"head_dim_v", "257", "1 to 256"});
  refused_shape("--q", {1, 3, 0, 8}, {"--q", "0 heads", "1 or more"});
  refused_shape("--q", {1, 3, 3, 8}, {"heads_kv", "a divisor of heads_q = 3"});
}

TEST_F(BadInput, MissingAndContradictoryInputs) {
  expect_refused({"run"}, {"--q", "--qkv"});
  expect_refused({"run", "--q", path("q.npy")}, {"--k"});
  expect_refused({"run", "--q", path("q.npy"), "--k", path("k.npy")}, {"--v"});
  refused({"--qkv", "x.safetensors"}, {"--q", "together with --qkv"});
  refused({"--qkv-prefix", "layer0."}, {"--qkv-prefix", "only with --qkv"});
  refused({"--lse", path("o.npy")}, {"--lse", "another file than that of --out"});
  refused({"--lse", path("k.npy")}, {"--lse", "another file than that of --k"});
  refused({"--lse", path("./v.npy")}, {"--lse", "another file than that of --v"});
  refused({"--cu-seqlens-q", path("q.npy")}, {"--cu-seqlens-kv", "together"});
  refused({"--cu-seqlens-kv", path("q.npy")}, {"--cu-seqlens-q", "together"});
  refused({"--causal", "--window", "3", "5"}, {"--causal", "--window"});
}

TEST_F(BadInput, FlagValues) {
  const std::pair<std::vector<std::string>, std::vector<std::string>> cases[] = {
      {{"--dtype", "f64"}, {"--dtype", "f64", "f32, f16, bf16"}},
      {{"--dtype", "e4m3"}, {"--dtype", "e4m3", "f32, f16, bf16"}},
      {{"--dtype", "i32"}, {"--dtype", "i32"}},
      {{"--device", "tpu"}, {"--device", "cpu, cuda"}},
      {{"--pipeline", "magic"}, {"--pipeline", "magic", "fused"}},
      {{"--kernel", "nothing"}, {"--kernel", "nothing", "forward_reference"}},
      {{"--kernel", ""}, {"--kernel"}},
      {{"--threads", "0"}, {"--threads", "1"}},
      {{"--threads", "-1"}, {"--threads"}},
      {{"--threads", "99999"}, {"--threads", "4096"}},
      {{"--threads", "two"}, {"--threads", "two"}},
      {{"--window", "1"}, {"--window"}},
      {{"--window", "-2", "0"}, {"--window", "-1"}},
      {{"--window", "a", "b"}, {"--window"}},
      {{"--causal-align", "middle"}, {"--causal-align", "bottom-right, top-left"}},
      {{"--causal", "maybe"}, {"--causal", "maybe"}},
      {{"--softmax-scale", "nan"}, {"--softmax-scale", "nan"}},
      {{"--softmax-scale", "inf"}, {"--softmax-scale", "inf"}},
      {{"--softmax-scale", "1e39"}, {"--softmax-scale", "1e39"}},
      {{"--softmax-scale", ""}, {"--softmax-scale"}},
      {{"--softcap", "-1"}, {"--softcap", "-1"}},
      {{"--splits", "0"}, {"--splits", "1"}},
      {{"--splits", "4", "--pipeline", "fused"}, {"splits is 4"}},
      {{"--format", "yaml"}, {"--format", "table, json, csv"}},
      {{"--pipeline", "split-kv", "--kernel", "forward_reference"}, {"--pipeline"}},
      {{"--kernel", "forward_reference", "--pipeline", "unfused"}, {"--pipeline", "unfused"}},
      {{"--unknown", "1"}, {"--unknown", "unknown flag"}},
      {{"--sofcap", "1"}, {"did you mean --softcap"}},
      {{"stray"}, {"stray", "unexpected argument"}},
      {{"--out"}, {"--out"}},
      {{"--out", "o.safetensors"}, {"--out", ".npy"}},
      {{"--q", path("q.npy")}, {"--q"}},  // twice
  };
  for (const auto& [more, words] : cases) {
    SCOPED_TRACE(testing::PrintToString(more));
    refused(more, words);
  }
}

TEST_F(BadInput, GradientsThatDoNotFitAreRefusedByName) {
  for (const char* flag : {"--dlse", "--dq", "--dk", "--dv"}) {
    refused({flag, path("d.npy")}, {flag, "--dout"});
  }
  write_f32(path("do.npy"), {1, 3, 4, 6}, some_values(72, 9));  // the shape of o
  refused({"--dout", path("missing.npy")}, {"--dout", "missing.npy"});
  refused({"--dout", path("q.npy")}, {"--dout", "shape", "[1, 3, 4, 6]"});
  refused({"--dout", path("do.npy"), "--dlse", path("q.npy")}, {"--dlse", "shape", "[1, 4, 3]"});
  refused({"--dout", path("do.npy"), "--dq", path("g.npy"), "--dk", path("g.npy")},
          {"--dk", "--dq"});
  refused({"--dout", path("do.npy"), "--dq", path("o.npy")}, {"--dq", "--out"});
  refused({"--dout", path("do.npy"), "--pipeline", "half-fused"}, {"pipeline", "half-fused"});
  refused({"--kernel", "backward_reference"}, {"--kernel", "--dout"});
}

TEST_F(BadInput, CudaWithoutAGpuIsExit77) {
  if (machine_has_cuda()) {
    GTEST_SKIP() << "this machine has a GPU";
  }
  const ToolRun run = run_tool({"run", "--q", path("q.npy"), "--k", path("k.npy"), "--v",
                                path("v.npy"), "--device", "cuda", "--out", path("o.npy")});
  EXPECT_EQ(run.exit_code, 77);
  EXPECT_TRUE(run.one_line_error()) << run.err;
  EXPECT_THAT(run.err, HasSubstr("--device cuda"));
  EXPECT_FALSE(std::filesystem::exists(path("o.npy")));
}

TEST_F(BadInput, IndexFiles) {
  const auto indices = [&](const std::string& name, const std::vector<std::int64_t>& values) {
    write_array<std::int64_t>(path(name), "<i8", {static_cast<std::int64_t>(values.size())},
                              values);
    return path(name);
  };
  const std::string used = indices("used.npy", {6});
  refused({"--seqused-kv", used}, {"seqused_kv[0]", "6", "0 to 5"});
  refused({"--seqused-kv", indices("used.npy", {-1})}, {"seqused_kv[0]", "-1"});
  refused({"--seqused-kv", indices("used.npy", {1, 2})}, {"seqused_kv", "2 given", "1 allowed"});
  refused({"--seqused-kv", path("q.npy")}, {"--seqused-kv", "float32 given", "int32, int64"});
  refused({"--seqused-kv", path("absent.npy")}, {"--seqused-kv", "No such file"});
  write_array<std::int64_t>(path("square.npy"), "<i8", {1, 1}, {3});
  refused({"--seqused-kv", path("square.npy")}, {"--seqused-kv", "shape [1, 1]", "[batch]"});
  // dense arrays with packed offsets
  refused({"--cu-seqlens-q", indices("c.npy", {0, 3}), "--cu-seqlens-kv", indices("d.npy", {0, 5})},
          {"--q", "shape [1, 3, 4, 8]", "[total, heads, head_dim]"});

  write_f32(path("q.npy"), {3, 4, 8}, some_values(96, 1));
  write_f32(path("k.npy"), {5, 2, 8}, some_values(80, 2));
  write_f32(path("v.npy"), {5, 2, 6}, some_values(60, 3));
  const auto packed = [&](const std::vector<std::int64_t>& q, const std::vector<std::int64_t>& kv,
                          const std::vector<std::string>& words) {
    refused({"--cu-seqlens-q", indices("c.npy", q), "--cu-seqlens-kv", indices("d.npy", kv)},
            words);
  };
  packed({}, {0}, {"--cu-seqlens-q", "no entry"});
  packed({0, 3}, {}, {"cu_seqlens_kv"});
  packed({0, 3}, {0, 2, 5}, {"cu_seqlens_kv", "3 given", "2 allowed"});
  packed({1, 3}, {0, 5}, {"cu_seqlens_q[0]", "1 given"});
  packed({0, 4}, {0, 5}, {"cu_seqlens_q[1]", "4 given", "at most total_q = 3"});
  packed({0, 3}, {0, 6}, {"cu_seqlens_kv[1]", "6 given"});
  packed({0, 2, 1}, {0, 2, 5}, {"cu_seqlens_q[2]", "1 given"});
  packed({0, -1}, {0, 5}, {"cu_seqlens_q[1]", "-1 given"});
  packed({0, std::int64_t{1} << 62}, {0, 5}, {"cu_seqlens_q[1]"});
  packed({std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()},
         {0, 5}, {"cu_seqlens_q[0]"});
  refused({"--cu-seqlens-q", indices("c.npy", {0, 3}), "--cu-seqlens-kv", indices("d.npy", {0, 5}),
           "--page-table", path("square.npy")},
          {"--page-table", "--cu-seqlens-q"});
}

TEST_F(BadInput, PageTables) {
  write_f32(path("k.npy"), {3, 2, 2, 8}, some_values(96, 2));
  write_f32(path("v.npy"), {3, 2, 2, 6}, some_values(72, 3));
  const auto table = [&](const Shape& shape, const std::vector<std::int32_t>& values,
                         const std::vector<std::string>& words) {
    write_array<std::int32_t>(path("t.npy"), "<i4", shape, values);
    refused({"--page-table", path("t.npy")}, words);
  };
  table({1, 2}, {0, 3}, {"page_table[0][1]", "3 given"});
  table({1, 2}, {-1, 0}, {"page_table[0][0]", "-1 given"});
  table({2, 1}, {0, 1}, {"--page-table", "shape [2, 1]", "batch = 1"});
  table({2}, {0, 1}, {"--page-table", "shape [2]", "[batch, pages per sequence]"});
}

std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string bytes;
  for (std::size_t i = 0; i < 8; ++i) {
    bytes += static_cast<char>(header.size() >> (8 * i) & 0xFFU);
  }
  return bytes + header + data;
}

TEST_F(BadInput, SafetensorsFiles) {
  const auto with_bytes = [&](const std::string& bytes, const std::vector<std::string>& words) {
    write_bytes(path("bad.safetensors"), bytes);
    const auto before = files();
    expect_refused({"run", "--qkv", path("bad.safetensors"), "--out", path("o.npy")}, words);
    EXPECT_EQ(files(), before);
  };
  const std::string f32 = "\"dtype\":\"F32\",\"shape\":[1,1,1,1],\"data_offsets\":";
  const std::string q = "\"q\":{" + f32 + "[0,4]}";
  const std::string k = "\"k\":{" + f32 + "[4,8]}";
  const std::string v = "\"v\":{" + f32 + "[8,12]}";
  with_bytes("", {"--qkv", "the file is empty"});
  with_bytes("abc", {"--qkv", "is truncated"});
  with_bytes(std::string("\0\0\0\0\0\0\0\x10", 8), {"header of 1152921504606846976 bytes"});
  with_bytes(safetensors_bytes("{" + q + "," + k + "," + v + "}", std::string(11, '\0')),
             {"tensor v", "offsets 8 to 12"});
  with_bytes(safetensors_bytes("{" + q + "," + k + "," + v + "}", std::string(13, '\0')),
             {"trailing bytes"});
  with_bytes(safetensors_bytes("{" + q + "," + q + "}", std::string(4, '\0')),
             {"the name q stands twice"});
  with_bytes(safetensors_bytes("{" + q + "}", std::string(4, '\0')),
             {"has no tensor k", "it has q"});
  with_bytes(safetensors_bytes("{\"q\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[0,8]}}",
                               std::string(8, '\0')),
             {"tensor q", "F64 given", "F32, F16, BF16"});
  with_bytes(safetensors_bytes("not json", ""), {"header is malformed"});
  with_bytes(read_bytes(path("q.npy")), {"--qkv"});
  write_bytes(path("good.safetensors"),
              safetensors_bytes("{" + q + "," + k + "," + v + "}", std::string(12, '\0')));
  expect_refused({"run", "--qkv", path("good.safetensors"), "--qkv-prefix", "layer0."},
                 {"has no tensor layer0.q", "it has k, q, v"});
  EXPECT_EQ(run_tool({"run", "--qkv", path("good.safetensors")}).exit_code, 0);
}

TEST_F(BadInput, AControlCharacterInANameStaysOnOneLine) {
  write_bytes(path("bad\nname.npy"), "x");
  refused_file("--q", path("bad\nname.npy"), {"bad\\x0aname.npy"});
}

TEST_F(BadInput, OutputsThatCannotBeWritten) {
  const auto inputs = [&](const std::string& flag, const std::string& target) {
    return std::vector<std::string>{"run", "--q",         path("q.npy"), "--k", path("k.npy"),
                                    "--v", path("v.npy"), flag,          target};
  };
  for (const std::string flag : {"--out", "--lse"}) {
    const auto before = files();
    expect_refused(inputs(flag, path("absent/o.npy")), {flag, "absent/o.npy"});
    expect_refused(inputs(flag, folder_.path().string()), {flag, "directory"});
    expect_refused(inputs(flag, "/dev/full"), {flag + " /dev/full", "No space left"});
    EXPECT_EQ(files(), before);
  }
  struct stat about = {};
  ASSERT_EQ(stat("/dev/full", &about), 0);
  EXPECT_TRUE(S_ISCHR(about.st_mode)) << "the device was replaced by a file";
  const ToolRun devnull = run_tool(inputs("--out", "/dev/null"));
  EXPECT_EQ(devnull.exit_code, 0) << devnull.err;
}

TEST_F(BadInput, AFailureLeavesTheOldOutputAsItWas) {
  write_bytes(path("o.npy"), "old contents");
  refused({"--lse", path("absent/lse.npy")}, {"--lse"});
  EXPECT_EQ(read_bytes(path("o.npy")), "old contents");
  refused({"--lse", "/dev/full"}, {"--lse"});
  EXPECT_EQ(read_bytes(path("o.npy")), "old contents");
}

TEST_F(BadInput, AFullStandardOutputIsAnError) {
  const std::vector<std::string> arguments = {"run",         "--q", path("q.npy"), "--k",
                                              path("k.npy"), "--v", path("v.npy")};
  const ToolRun run = run_tool(arguments, {.stdout_to = "/dev/full"});
  EXPECT_NE(run.exit_code, 0);
  EXPECT_TRUE(run.one_line_error()) << run.err;
}

}  // namespace
}  // namespace rafter::test
