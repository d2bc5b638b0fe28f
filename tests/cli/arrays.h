// Arrays of tests that run the tool: written as .npy byte by byte, read back, never by the tool's
// own code.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace rafter::test {

using Shape = std::vector<std::int64_t>;

inline std::int64_t elements_of(const Shape& shape) {
  std::int64_t product = 1;
  for (const std::int64_t dimension : shape) {
    product *= dimension;
  }
  return product;
}

/// "(2, 3, )".
inline std::string tuple_text(const Shape& shape) {
  std::string text = "(";
  for (const std::int64_t dimension : shape) {
    text += std::to_string(dimension) + ", ";
  }
  return text + ")";
}

/// The bytes of a .npy file of format 1.0.
inline std::string npy_bytes(const std::string& descr, const std::string& shape,
                             const std::string& data) {
  const std::string header =
      "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + "}\n";
  std::string bytes("\x93NUMPY\x01\x00", 8);
  bytes += static_cast<char>(header.size() & 0xFFU);
  bytes += static_cast<char>(header.size() >> 8U);
  return bytes + header + data;
}

inline void write_bytes(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  ASSERT_TRUE(file.good()) << path;
}

inline std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

template <typename T>
void write_array(const std::filesystem::path& path, const std::string& descr, const Shape& shape,
                 const std::vector<T>& values) {
  ASSERT_EQ(static_cast<std::int64_t>(values.size()), elements_of(shape));
  std::string data(values.size() * sizeof(T), '\0');
  if (!data.empty()) {
    std::memcpy(data.data(), values.data(), data.size());
  }
  write_bytes(path, npy_bytes(descr, tuple_text(shape), data));
}

inline void write_f32(const std::filesystem::path& path, const Shape& shape,
                      const std::vector<float>& values) {
  write_array(path, "<f4", shape, values);
}

/// Reproducible values in (−1, 1).
inline std::vector<float> some_values(std::int64_t count, std::uint32_t seed) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::uint32_t state = seed * 2654435761U + 1;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<std::int32_t>(state >> 8U) - (1 << 23)) * 0x1p-23F;
  }
  return values;
}

struct FloatArray {
  Shape shape;
  std::vector<float> values;
};

/// Reads a float32 .npy file as the tool writes it; fails the test when it is anything else.
inline FloatArray read_f32(const std::filesystem::path& path) {
  const std::string bytes = read_bytes(path);
  FloatArray array;
  if (bytes.size() < 10 || bytes.compare(0, 8, std::string("\x93NUMPY\x01\x00", 8)) != 0) {
    ADD_FAILURE() << path << " is no .npy file of format 1.0";
    return array;
  }
  const std::size_t length =
      static_cast<unsigned char>(bytes[8]) + 256U * static_cast<unsigned char>(bytes[9]);
  const std::string header = bytes.substr(10, length);
  EXPECT_NE(header.find("'descr': '<f4'"), std::string::npos) << header;
  EXPECT_NE(header.find("'fortran_order': False"), std::string::npos) << header;
  std::string dimensions = header.substr(header.find('(') + 1);
  dimensions.resize(dimensions.find(')'));
  std::replace(dimensions.begin(), dimensions.end(), ',', ' ');
  std::istringstream stream(dimensions);
  std::copy(std::istream_iterator<std::int64_t>(stream), {}, std::back_inserter(array.shape));
  array.values.resize(static_cast<std::size_t>(elements_of(array.shape)));
  EXPECT_EQ(bytes.size(), 10 + length + array.values.size() * sizeof(float)) << path;
  if (!array.values.empty()) {  // memcpy takes no null pointer
    std::memcpy(array.values.data(), bytes.data() + 10 + length,
                array.values.size() * sizeof(float));
  }
  return array;
}

/// Infinite where either is NaN, or the shapes differ.
inline double largest_difference(const FloatArray& a, const FloatArray& b) {
  if (a.shape != b.shape) {
    return HUGE_VAL;
  }
  double worst = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    const double difference = std::fabs(static_cast<double>(a.values[i]) - b.values[i]);
    worst = std::isnan(difference) ? HUGE_VAL : std::fmax(worst, difference);
  }
  return worst;
}

}  // namespace rafter::test
