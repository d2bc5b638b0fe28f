#include "cli/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace rafter::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

std::string safetensors(const std::string& header, std::size_t data_bytes) {
  std::string bytes;
  for (std::size_t i = 0; i < 8; ++i) {
    bytes += static_cast<char>(header.size() >> (8 * i) & 0xFFU);
  }
  bytes += header;
  for (std::size_t i = 0; i < data_bytes; ++i) {
    bytes += static_cast<char>(i);
  }
  return bytes;
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   std::int64_t begin, std::int64_t end) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":[" + std::to_string(begin) + "," + std::to_string(end) + "]}";
}

/// The source keeps pointing into `bytes`.
Result<Safetensors> open(const std::string& bytes) {
  return Safetensors::open(
      std::make_shared<MemorySource>(std::as_bytes(std::span(bytes)), "a.safetensors"));
}

void expect_refusal(const std::string& bytes, const std::string& words) {
  const Result<Safetensors> result = open(bytes);
  ASSERT_FALSE(result.is_ok()) << "accepted; expected: " << words;
  EXPECT_THAT(result.status().message(), StartsWith("a.safetensors"));
  EXPECT_THAT(result.status().message(), HasSubstr(words));
  EXPECT_EQ(result.status().message().find('\n'), std::string::npos);
}

TEST(Safetensors, ReadsTensorsWhereverTheyLie) {
  // The odd header length and the u8 tensor put the f32 elements at an odd offset.
  const std::string bytes =
      safetensors("{" + tensor("b", "F32", "[2,1]", 1, 9) + "," + tensor("a", "U8", "[1]", 0, 1) +
                      ",\"__metadata__\":{\"source\":\"test\"}}",
                  9);
  const auto file = open(bytes);
  ASSERT_TRUE(file.is_ok()) << file.status().message();
  EXPECT_THAT(file->names(), ElementsAre("a", "b"));
  EXPECT_EQ(file->metadata().at("source"), "test");
  const auto b = file->read("b", Expect::values);
  ASSERT_TRUE(b.is_ok()) << b.status().message();
  EXPECT_THAT(b->shape, ElementsAre(2, 1));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b->data.get()) % 64, 0U);
  EXPECT_EQ(std::memcmp(b->data.get(), "\x01\x02\x03\x04\x05\x06\x07\x08", 8), 0);
}

TEST(Safetensors, ReadsEveryDtypeThatItsUseAllows) {
  const std::string bytes = safetensors(
      "{" + tensor("f32", "F32", "[1]", 0, 4) + "," + tensor("f16", "F16", "[1]", 4, 6) + "," +
          tensor("bf16", "BF16", "[1]", 6, 8) + "," + tensor("i32", "I32", "[1]", 8, 12) + "," +
          tensor("i64", "I64", "[1]", 12, 20) + "," + tensor("none", "F64", "[0,3]", 20, 20) + "}",
      20);
  const auto file = open(bytes);
  ASSERT_TRUE(file.is_ok()) << file.status().message();
  EXPECT_EQ(file->read("f32", Expect::values)->dtype, DType::f32);
  EXPECT_EQ(file->read("f16", Expect::values)->dtype, DType::f16);
  EXPECT_EQ(file->read("bf16", Expect::values)->dtype, DType::bf16);
  EXPECT_EQ(file->read("i32", Expect::indices)->dtype, DType::i32);
  EXPECT_EQ(file->read("i64", Expect::indices)->dtype, DType::i64);
  EXPECT_EQ(file->read("i64", Expect::values).status().message(),
            "a.safetensors tensor i64: I64 given; F32, F16, BF16 allowed");
  EXPECT_EQ(file->read("f32", Expect::indices).status().message(),
            "a.safetensors tensor f32: F32 given; I32, I64 allowed");
  EXPECT_EQ(file->read("none", Expect::values).status().message(),
            "a.safetensors tensor none: F64 given; F32, F16, BF16 allowed");
  EXPECT_EQ(file->read("q", Expect::values).status().message(),
            "a.safetensors: has no tensor q; it has bf16, f16, f32, i32, i64, none");
}

TEST(Safetensors, HeaderLengthsAreCheckedBeforeAnythingIsAllocated) {
  expect_refusal("", "the file is empty");
  expect_refusal("1234567", "is truncated: 7 bytes");
  expect_refusal(std::string("\0\0\0\0\0\0\0\x10", 8), "header of 1152921504606846976 bytes");
  expect_refusal(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8), "at most 100000000");
  expect_refusal(std::string("\x03\0\0\0\0\0\0\0{}", 10),
                 "is truncated: header of 3 bytes in a file of 10");
}

TEST(Safetensors, EveryPrefixOfAFileIsRefused) {
  const std::string whole = safetensors("{" + tensor("q", "F32", "[2]", 0, 8) + "}", 8);
  ASSERT_TRUE(open(whole).is_ok());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(open(whole.substr(0, length)).is_ok()) << length;
  }
}

TEST(Safetensors, OffsetsMustCoverTheFileOnce) {
  expect_refusal(safetensors("{" + tensor("q", "F32", "[2]", 0, 8) + "}", 9),
                 "has 1 trailing bytes");
  expect_refusal(safetensors("{" + tensor("q", "F32", "[2]", 4, 12) + "}", 12),
                 "tensor q: leaves a hole at offset 0");
  expect_refusal(
      safetensors(
          "{" + tensor("q", "F32", "[2]", 0, 8) + "," + tensor("k", "F32", "[2]", 4, 12) + "}", 12),
      "tensor k: overlaps another at offset 4");
  expect_refusal(
      safetensors(
          "{" + tensor("q", "F32", "[2]", 0, 8) + "," + tensor("k", "F32", "[2]", 0, 8) + "}", 8),
      "overlaps another");
  expect_refusal(safetensors("{" + tensor("q", "F32", "[2]", 8, 0) + "}", 8), "offsets 8 to 0");
  expect_refusal(safetensors("{" + tensor("q", "F32", "[2]", 0, 16) + "}", 8),
                 "offsets 0 to 16; the file has 8 bytes behind its header");
  expect_refusal(safetensors("{" + tensor("q", "F32", "[2]", 0, 9223372036854775807) + "}", 8),
                 "offsets");
}

TEST(Safetensors, SizesMustMatchShapes) {
  expect_refusal(safetensors("{" + tensor("q", "F32", "[3]", 0, 8) + "}", 8),
                 "shape [3] of F32 takes 12 bytes, its offsets hold 8");
  expect_refusal(safetensors("{" + tensor("q", "F32", "[4611686018427387904,4]", 0, 8) + "}", 8),
                 "exceeds 64 bits");
  expect_refusal(safetensors("{" + tensor("q", "F32", "[0,4611686018427387904,4]", 0, 0) + "}", 0),
                 "exceeds 64 bits");
  expect_refusal(safetensors("{" + tensor("q", "F31", "[2]", 0, 8) + "}", 8), "unknown dtype F31");
}

TEST(Safetensors, MalformedHeadersSayWhat) {
  const std::string good = "\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]";
  const std::pair<std::string, std::string> kCases[] = {
      {"", "not JSON at byte"},
      {"{", "not JSON at byte"},
      {"{}x", "not JSON at byte"},
      {"[]", "an array where an object is needed"},
      {"3", "a number where an object is needed"},
      {"\"q\"", "a string where an object is needed"},
      {"{\"q\":null}", "null where tensor q is described"},
      {"{\"q\":{}}", "dtype, shape and data_offsets are needed"},
      {"{\"q\":{" + good + ",\"more\":1}}", "unknown key more"},
      {"{\"q\":{" + good + ",\"dtype\":\"F32\"}}", "two of dtype"},
      {"{\"q\":{" + good + "},\"q\":{" + good + "}}", "the name q stands twice"},
      {"{\"__metadata__\":{},\"__metadata__\":{}}", "the name __metadata__ stands twice"},
      {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", "the name a stands twice"},
      {"{\"__metadata__\":{\"a\":1}}", "under __metadata__, which maps names to strings"},
      {"{\"__metadata__\":[]}", "an array"},
      {"{\"q\":{\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]}}", "a number under dtype"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}",
       "a negative number under shape"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", "not a whole number"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[18446744073709551615],\"data_offsets\":[0,8]}}",
       "beyond 63 bits"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]}}",
       "not a whole number"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[[2]],\"data_offsets\":[0,8]}}",
       "an array under shape"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", "a number under shape"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}",
       "data_offsets are two numbers"},
      {"{\"q\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8,8]}}",
       "a number under data_offsets"},
      {"{\"q\":{\"dtype\":{},\"shape\":[2],\"data_offsets\":[0,8]}}", "an object under dtype"},
  };
  for (const auto& [header, words] : kCases) {
    SCOPED_TRACE(header);
    expect_refusal(safetensors(header, 8), words);
  }
}

TEST(Safetensors, DeepAndWideHeadersAreRefusedAtOnce) {
  expect_refusal(safetensors(std::string(1'000'000, '['), 0), "an array where an object");
  std::string deep = "{\"q\":";
  for (int i = 0; i < 100'000; ++i) {
    deep += "{\"q\":";
  }
  expect_refusal(safetensors(deep, 0), "tensor q: unknown key q");
  std::string shape = "[1";
  for (int i = 0; i < 100; ++i) {
    shape += ",1";
  }
  expect_refusal(safetensors("{" + tensor("q", "F32", shape + "]", 0, 4) + "}", 4),
                 "more than 64 dimensions");
}

TEST(Safetensors, AnEmptyFileOfTheFormatHasNoTensors) {
  const std::string bytes = safetensors("{}", 0);
  const auto file = open(bytes);
  ASSERT_TRUE(file.is_ok()) << file.status().message();
  EXPECT_EQ(file->read("q", Expect::values).status().message(),
            "a.safetensors: has no tensor q; it has none");
}

}  // namespace
}  // namespace rafter::cli
