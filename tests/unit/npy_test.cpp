#include "cli/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace rafter::cli {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

/// A file as NumPy writes it: magic, version, little-endian header length, header, elements.
std::string npy(const std::string& header, const std::string& data, int major = 1) {
  std::string bytes = "\x93NUMPY";
  bytes += {static_cast<char>(major), '\0'};
  for (std::size_t i = 0; i < (major == 1 ? 2U : 4U); ++i) {
    bytes += static_cast<char>(header.size() >> (8 * i) & 0xFFU);
  }
  return bytes + header + data;
}

std::string dict(const std::string& descr, const std::string& shape,
                 const std::string& order = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + order + ", 'shape': " + shape + ", }\n";
}

Result<Array> read(const std::string& bytes, Expect expect = Expect::values) {
  return read_npy(MemorySource(std::as_bytes(std::span(bytes)), "q.npy"), expect);
}

template <typename T>
std::string bytes_of(std::initializer_list<T> values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

void expect_refusal(const Result<Array>& result, const std::string& words) {
  ASSERT_FALSE(result.is_ok()) << "accepted; expected: " << words;
  EXPECT_THAT(result.status().message(), StartsWith("q.npy"));
  EXPECT_THAT(result.status().message(), HasSubstr(words));
  EXPECT_EQ(result.status().message().find('\n'), std::string::npos);
}

TEST(Npy, ReadsEveryFormatVersion) {
  for (const int major : {1, 2, 3}) {
    const auto array = read(npy(dict("<f4", "(2, 1)"), bytes_of<float>({1.5F, -2}), major));
    ASSERT_TRUE(array.is_ok()) << array.status().message();
    EXPECT_EQ(array->dtype, DType::f32);
    EXPECT_THAT(array->shape, ElementsAre(2, 1));
    EXPECT_EQ(std::memcmp(array->data.get(), bytes_of<float>({1.5F, -2}).data(), 8), 0);
  }
}

TEST(Npy, ReadsEveryDtypeThatItsUseAllows) {
  const std::string two(2, 'x');
  EXPECT_EQ(read(npy(dict("<f2", "(1,)"), two))->dtype, DType::f16);
  EXPECT_EQ(read(npy(dict("<u2", "(1,)"), two), Expect::values_bf16)->dtype, DType::bf16);
  EXPECT_EQ(read(npy(dict("<V2", "(1,)"), two), Expect::values_bf16)->dtype, DType::bf16);
  EXPECT_EQ(read(npy(dict("|V2", "(1,)"), two), Expect::values_bf16)->dtype, DType::bf16);
  EXPECT_EQ(read(npy(dict("<i4", "(1,)"), two + two), Expect::indices)->dtype, DType::i32);
  EXPECT_EQ(read(npy(dict("<i8", "(1,)"), two + two + two + two), Expect::indices)->dtype,
            DType::i64);
}

TEST(Npy, RefusesEveryOtherDtypeByName) {
  const std::string data(16, '\0');
  expect_refusal(read(npy(dict("<f8", "(2,)"), data)), "float64 given; little-endian float32");
  expect_refusal(read(npy(dict(">f4", "(4,)"), data)), "big-endian float32 given");
  expect_refusal(read(npy(dict("<i8", "(2,)"), data)), "int64 given");
  expect_refusal(read(npy(dict("<u2", "(8,)"), data)), "uint16 given");
  expect_refusal(read(npy(dict("|O", "(2,)"), data)), "object given");
  expect_refusal(read(npy(dict("<c8", "(2,)"), data)), "complex64 given");
  expect_refusal(read(npy(dict("|b1", "(16,)"), data)), "bool given");
  expect_refusal(read(npy(dict("<U4", "(1,)"), data)), "dtype '<U4' given");
  expect_refusal(read(npy(dict("", "(1,)"), data)), "given; little-endian float32");
  expect_refusal(read(npy(dict("<f99999999999", "(1,)"), data)), "given; little-endian float32");
  expect_refusal(
      read(npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }", data)),
      "structured dtype given");
  expect_refusal(read(npy(dict("<f4", "(4,)"), data), Expect::indices),
                 "float32 given; little-endian int32, int64 allowed");
  expect_refusal(read(npy(dict("<u4", "(4,)"), data), Expect::indices), "uint32 given");
}

TEST(Npy, FortranOrderIsRefusedWhereItMatters) {
  const std::string data(16, '\0');
  expect_refusal(read(npy(dict("<f4", "(2, 2)", "True"), data)), "Fortran order given");
  EXPECT_TRUE(read(npy(dict("<f4", "(4,)", "True"), data)).is_ok());
}

TEST(Npy, AFileShorterOrLongerThanItsHeaderSaysIsRefused) {
  expect_refusal(read(npy(dict("<f4", "(2, 3)"), std::string(23, 'x'))),
                 "is truncated: shape [2, 3] of f32 takes 24 bytes, 23 follow the header");
  expect_refusal(read(npy(dict("<f4", "(2, 3)"), std::string(25, 'x'))), "has trailing bytes");
}

TEST(Npy, EveryPrefixOfAFileIsRefused) {
  const std::string whole = npy(dict("<f4", "(2,)"), bytes_of<float>({1, 2}));
  ASSERT_TRUE(read(whole).is_ok());
  for (std::size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(read(whole.substr(0, length)).is_ok()) << length;
  }
}

TEST(Npy, ShapesThatOverflowAreRefusedBeforeAnythingIsAllocated) {
  expect_refusal(read(npy(dict("<f4", "(4611686018427387904, 4)"), "")), "exceeds 64 bits");
  expect_refusal(read(npy(dict("<f4", "(0, 4611686018427387904, 4)"), "")), "exceeds 64 bits");
  expect_refusal(read(npy(dict("<f4", "(9223372036854775808,)"), "")), "whole number");
  expect_refusal(read(npy(dict("<f4", "(-1, 2)"), "")), "dimensions are 0 or more");
  expect_refusal(read(npy(dict("<f4", "(1099511627776,)"), "")), "is truncated");
}

TEST(Npy, HeaderLengthsBeyondTheFileAreRefused) {
  std::string huge = "\x93NUMPY\x02";
  huge += std::string("\0\xff\xff\xff\xff{}", 7);
  expect_refusal(read(huge), "header of 4294967295 bytes; at most 65535");
  std::string beyond = "\x93NUMPY\x01";
  beyond += std::string("\0\xff\xff{}", 5);
  expect_refusal(read(beyond), "is truncated");
}

TEST(Npy, MalformedHeadersSayWhere) {
  for (const std::string header : {
           "",
           "{",
           "}",
           "[]",
           "{}",
           "{'descr': '<f4'}",
           "{'descr': '<f4', 'shape': (1,)}",
           "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'more': 1}",
           "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1,}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': [1]}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1.0,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (,)}",
           "{'descr': <f4, 'fortran_order': False, 'shape': (1,)}",
           "{'descr': '<f4, 'fortran_order': False, 'shape': (1,)}",
           "{'descr': '\\x3cf4', 'fortran_order': False, 'shape': (1,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} more",
       }) {
    SCOPED_TRACE(header);
    expect_refusal(read(npy(header, std::string(4, 'x'))), "header is malformed at byte");
  }
}

TEST(Npy, KeysInAnyOrderAndPython2NumbersAreRead) {
  const auto array =
      read(npy("{\"shape\": (2L, 0L), \"fortran_order\": False, \"descr\": \"<f4\"}   \n", ""));
  ASSERT_TRUE(array.is_ok()) << array.status().message();
  EXPECT_THAT(array->shape, ElementsAre(2, 0));
  EXPECT_NE(array->data, nullptr);
}

TEST(Npy, OtherFilesAndVersionsAreRefused) {
  expect_refusal(read(""), "the file is empty");
  expect_refusal(read("PK\x03\x04 a zip file"), "does not begin as a .npy file");
  expect_refusal(read(npy(dict("<f4", "(1,)"), "1234", 4)), ".npy format 4.0; 1.0, 2.0 and 3.0");
}

TEST(Npy, TheWriterIsTheReadersInverse) {
  for (const std::vector<std::int64_t>& shape : std::vector<std::vector<std::int64_t>>{
           {}, {3}, {0}, {2, 3, 4, 5}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}}) {
    const std::string header = npy_header(shape);
    EXPECT_EQ(header.size() % 64, 0U);
    EXPECT_EQ(header.back(), '\n');
    std::int64_t elements = 1;
    for (const std::int64_t dimension : shape) {
      elements *= dimension;
    }
    const auto array = read(header + std::string(static_cast<std::size_t>(elements) * 4, 'z'));
    ASSERT_TRUE(array.is_ok()) << array.status().message();
    EXPECT_EQ(array->shape, shape);
    EXPECT_EQ(array->dtype, DType::f32);
  }
}

TEST(Npy, FilesWrittenByNumPyRead) {
  const std::string folder = std::string(RAFTER_SOURCE_DIR) + "/tests/data/npy/";
  const auto f32 = read_npy(folder + "f32_v1.npy", Expect::values);
  ASSERT_TRUE(f32.is_ok()) << f32.status().message();
  EXPECT_THAT(f32->shape, ElementsAre(1, 2, 1, 3));
  const float* values = reinterpret_cast<const float*>(f32->data.get());
  EXPECT_THAT(std::vector<float>(values, values + 4), ElementsAre(0, 0.5F, 1, 1.5F));
  EXPECT_TRUE(std::isnan(values[4]));
  EXPECT_TRUE(std::isinf(values[5]));
  for (const char* name : {"f16_v2.npy", "f16_v3.npy"}) {
    const auto f16 = read_npy(folder + name, Expect::values);
    ASSERT_TRUE(f16.is_ok()) << f16.status().message();
    EXPECT_EQ(f16->dtype, DType::f16);
    EXPECT_THAT(f16->shape, ElementsAre(4));
  }
  const auto bf16 = read_npy(folder + "ml_dtypes_bf16.npy", Expect::values_bf16);
  ASSERT_TRUE(bf16.is_ok()) << bf16.status().message();
  const auto widened = convert(*bf16, DType::f32, "bf16");
  const float* wide = reinterpret_cast<const float*>(widened->data.get());
  EXPECT_THAT(std::vector<float>(wide, wide + 3), ElementsAre(1, -2.5F, 256));
  EXPECT_TRUE(read_npy(folder + "i64.npy", Expect::indices).is_ok());
}

TEST(Npy, ThingsThatAreNoRegularFileAreRefused) {
  const auto refusal = [](const std::string& path) {
    const auto result = read_npy(path, Expect::values, "--q");
    return result ? "accepted" : result.status().message();
  };
  EXPECT_EQ(refusal("/nonexistent/q.npy"),
            "--q /nonexistent/q.npy: cannot be opened: No such file or directory; a readable "
            "regular file is needed");
  EXPECT_THAT(refusal("/tmp"), HasSubstr("is a directory"));
  EXPECT_THAT(refusal("/dev/zero"), HasSubstr("is a device"));
  EXPECT_THAT(refusal(std::string("a\0b", 3)), HasSubstr("zero byte"));
  EXPECT_THAT(refusal(std::string(5000, 'a')), HasSubstr("cannot be opened"));
}

TEST(Npy, ASparseFileLargerThanMemoryIsRefused) {
  const std::string path = testing::TempDir() + "rafter_sparse.npy";
  const std::string header = npy(dict("<f4", "(274877906944,)"), "");  // 1 TiB
  std::ofstream(path, std::ios::binary) << header;
  std::error_code error;
  std::filesystem::resize_file(path, header.size() + (std::uintmax_t{1} << 40), error);
  if (error) {
    GTEST_SKIP() << "no sparse files here: " << error.message();
  }
  const auto result = read_npy(path, Expect::values);
  std::filesystem::remove(path);
  ASSERT_FALSE(result.is_ok());
  EXPECT_THAT(result.status().message(), HasSubstr("bytes of memory"));
}

// ---- 16-bit floats: the oracle is arithmetic on the definition, not on bits ----

double value_of(std::uint16_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const double mantissa = fraction * std::ldexp(1.0, -fraction_bits) + (exponent != 0 ? 1 : 0);
  return sign * std::ldexp(mantissa, (exponent != 0 ? exponent : 1) - bias);
}

TEST(HalfFloats, EveryValueOfBothFormatsWidensExactlyAndComesBack) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const double f16 = value_of(bits, 5, 10);
    const double bf16 = value_of(bits, 8, 7);
    if (std::isnan(f16)) {
      EXPECT_TRUE(std::isnan(f16_to_f32(bits)));
      EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(f16_to_f32(bits)))));
    } else {
      ASSERT_EQ(static_cast<double>(f16_to_f32(bits)), f16) << i;
      ASSERT_EQ(f32_to_f16(f16_to_f32(bits)), bits) << i;
    }
    if (std::isnan(bf16)) {
      EXPECT_TRUE(std::isnan(bf16_to_f32(bits)));
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(bf16_to_f32(bits)))));
    } else {
      ASSERT_EQ(static_cast<double>(bf16_to_f32(bits)), bf16) << i;
      ASSERT_EQ(f32_to_bf16(bf16_to_f32(bits)), bits) << i;
    }
  }
}

TEST(HalfFloats, RoundingIsToNearestEven) {
  for (std::uint32_t i = 0; i < 0x7BFF; ++i) {  // neighbours below the largest finite f16
    const auto low = static_cast<std::uint16_t>(i);
    const float a = f16_to_f32(low);
    const float b = f16_to_f32(static_cast<std::uint16_t>(i + 1));
    const float middle = (a + b) / 2;
    const auto even = static_cast<std::uint16_t>(i % 2 == 0 ? i : i + 1);
    ASSERT_EQ(f32_to_f16(middle), even) << i;
    ASSERT_EQ(f32_to_f16(std::nextafter(middle, a)), low) << i;
    ASSERT_EQ(f32_to_f16(std::nextafter(middle, b)), i + 1) << i;
  }
  for (std::uint32_t i = 0; i < 0x7F7F; ++i) {
    const auto low = static_cast<std::uint16_t>(i);
    const double a = bf16_to_f32(low);
    const double b = bf16_to_f32(static_cast<std::uint16_t>(i + 1));
    const auto middle = static_cast<float>((a + b) / 2);
    ASSERT_EQ(f32_to_bf16(middle), i % 2 == 0 ? i : i + 1) << i;
    ASSERT_EQ(f32_to_bf16(std::nextafter(middle, 0.0F)), low) << i;
    ASSERT_EQ(f32_to_bf16(std::nextafter(middle, 3.4e38F)), i + 1) << i;
  }
  EXPECT_EQ(f32_to_f16(65519), 0x7BFF);
  EXPECT_EQ(f32_to_f16(65520), 0x7C00);
  EXPECT_EQ(f32_to_f16(-1e30F), 0xFC00);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
}

}  // namespace
}  // namespace rafter::cli
