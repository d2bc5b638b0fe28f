// Arrays in memory and the bytes they are read from: shared by the readers of .npy and
// .safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter::cli {

/// A contiguous row-major array that owns its elements, 64-byte aligned.
struct Array {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::shared_ptr<std::byte[]> data;

  std::int64_t elements() const;
  std::int64_t bytes() const { return elements() * bits_of(dtype) / 8; }
  std::span<std::byte> span() const { return {data.get(), static_cast<std::size_t>(bytes())}; }
};

/// What the elements are for; the other kind is refused.
enum class Expect : std::uint8_t {
  values,       // float32, float16, bfloat16
  values_bf16,  // the same, and 16-bit words are bfloat16
  cache,        // the values of a KV cache, or int8
  cache_bf16,   // the same, and 16-bit words are bfloat16
  cache_e4m3,   // the values of a KV cache, and bytes are e4m3
  indices,      // int32, int64
};

/// "[2, 0, 3]", and "[]" for a scalar.
std::string shape_text(std::span<const std::int64_t> shape);

/// Bytes of an array of that shape; nothing when a dimension is negative or the product of the
/// dimensions (0 counted as 1, so that strides are safe too) exceeds 2^63 − 1 bits.
Result<std::int64_t> array_bytes(std::span<const std::int64_t> shape, std::int64_t bits,
                                 const std::string& label);

/// An array with uninitialised elements. Errors: more bytes than this machine has memory.
Result<Array> allocate_array(DType dtype, std::vector<std::int64_t> shape,
                             const std::string& label);

/// The array rounded (to nearest even) or widened to f32, f16 or bf16; itself when it is of that
/// dtype already.
Result<Array> convert(const Array& from, DType to, const std::string& label);

/// The largest relative error of rounding a normal number to f32, f16 or bf16: 2⁻ᵖ with p
/// significant bits.
double unit_roundoff(DType dtype);

/// Bytes at rest: a file, or memory in tests and fuzzers. `label` begins every error.
class ByteSource {
 public:
  explicit ByteSource(std::string label) : label_(std::move(label)) {}
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;
  virtual ~ByteSource() = default;

  const std::string& label() const { return label_; }
  virtual std::int64_t size() const = 0;
  /// Fills `into` from offset. The caller has checked the range against size(); an error means
  /// that the file shrank or the disk failed.
  virtual Status read(std::int64_t offset, std::span<std::byte> into) const = 0;

 private:
  std::string label_;
};

/// Opens a regular file; a directory, pipe or device is refused by name. The label is "NAME", or
/// "FLAG NAME" where a flag is given.
Result<std::shared_ptr<const ByteSource>> open_source(const std::string& path,
                                                      const std::string& flag = {});

/// Bytes that the caller keeps alive.
class MemorySource final : public ByteSource {
 public:
  MemorySource(std::span<const std::byte> bytes, std::string label)
      : ByteSource(std::move(label)), bytes_(bytes) {}
  std::int64_t size() const override { return static_cast<std::int64_t>(bytes_.size()); }
  Status read(std::int64_t offset, std::span<std::byte> into) const override;

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace rafter::cli
