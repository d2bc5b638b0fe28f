// NumPy's .npy files, format 1.0 to 3.0: read with every claim of the header checked, written as
// float32.
// Source of the format: numpy.org, "NEP 1 — A simple file format for NumPy arrays".
#pragma once

#include <span>
#include <string>

#include "cli/array.h"
#include "rafter/status.h"

namespace rafter::cli {

/// Reads one array of little-endian elements in C order. Accepted: float32, float16, int32, int64
/// as `expect` says; uint16 and the two-byte void that bfloat16 arrays of ml_dtypes are saved as,
/// where `expect` is values_bf16. Refused by name: every other dtype, big-endian, Fortran order,
/// structured and object arrays, and a file that is longer or shorter than its header says.
/// Nothing is allocated before the sizes are checked against the file.
Result<Array> read_npy(const ByteSource& source, Expect expect);
Result<Array> read_npy(const std::string& path, Expect expect, const std::string& flag = {});

/// The bytes in front of the elements of a C-order float32 array: format 1.0, a multiple of 64.
std::string npy_header(std::span<const std::int64_t> shape);

}  // namespace rafter::cli
