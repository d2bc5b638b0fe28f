#include <array>
#include <utility>

#include "rafter/tensor.h"

namespace rafter {
namespace {

struct Row {
  DType dtype;
  const char* name;
  std::int64_t bits;
};
constexpr std::array kRows = {
    Row{DType::f32, "f32", 32},  Row{DType::f16, "f16", 16},  Row{DType::bf16, "bf16", 16},
    Row{DType::e4m3, "e4m3", 8}, Row{DType::e5m2, "e5m2", 8}, Row{DType::int8, "int8", 8},
    Row{DType::int4, "int4", 4}, Row{DType::i32, "i32", 32},  Row{DType::i64, "i64", 64},
};

const Row& row_of(DType dtype) { return kRows[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::int64_t bits_of(DType dtype) { return row_of(dtype).bits; }
const char* to_string(DType dtype) { return row_of(dtype).name; }

Result<DType> parse_dtype(std::string_view name) {
  for (const Row& row : kRows) {
    if (name == row.name && row.dtype != DType::i32 && row.dtype != DType::i64) {
      return row.dtype;
    }
  }
  return Status::invalid_argument("dtype", std::string(name),
                                  "f32, f16, bf16, e4m3, e5m2, int8, int4");
}

}  // namespace rafter
