// read_npy on any bytes. The first byte chooses what the array is for.
#include <cstring>
#include <span>

#include "cli/npy.h"
#include "tools/fuzz/claims.h"

using rafter::Result;
using rafter::cli::Array;
using rafter::cli::Expect;
using rafter::fuzz::claim;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) {
    return 0;
  }
  constexpr Expect kExpect[] = {Expect::values, Expect::values_bf16, Expect::indices};
  const Expect expect = kExpect[data[0] % 3];
  const std::span<const std::byte> file = std::as_bytes(std::span(data + 1, size - 1));
  const Result<Array> array =
      rafter::cli::read_npy(rafter::cli::MemorySource(file, "input"), expect);
  if (!array) {
    rafter::fuzz::claim_error_line(array.status(), "input");
    return 0;
  }
  const auto bytes = static_cast<std::size_t>(array->bytes());
  claim(bytes <= file.size(), "an array is no larger than its file");
  claim(std::memcmp(array->data.get(), file.data() + file.size() - bytes, bytes) == 0,
        "the elements are the last bytes of the file");
  if (expect == Expect::indices) {
    return 0;
  }
  for (const rafter::DType to : {rafter::DType::f32, rafter::DType::f16, rafter::DType::bf16}) {
    const Result<Array> converted = rafter::cli::convert(*array, to, "input");
    claim(converted.is_ok() && converted->elements() == array->elements(), "values convert");
  }
  const Result<Array> wide = rafter::cli::convert(*array, rafter::DType::f32, "input");
  const std::string written = rafter::cli::npy_header(wide->shape) +
                              std::string(reinterpret_cast<const char*>(wide->data.get()),
                                          static_cast<std::size_t>(wide->bytes()));
  const Result<Array> again = rafter::cli::read_npy(
      rafter::cli::MemorySource(std::as_bytes(std::span(written)), "input"), Expect::values);
  claim(again.is_ok() && again->shape == wide->shape, "what is written reads back");
  return 0;
}
