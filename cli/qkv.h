// The user's own q, k and v: from three .npy files or one .safetensors file, in one dtype, with
// shapes that fit each other.
#pragma once

#include <optional>
#include <string>

#include "cli/array.h"
#include "cli/command.h"
#include "rafter/attention.h"

namespace rafter::cli {

struct QkvFlags {
  std::string q, k, v;           // .npy files
  std::string qkv;               // or one .safetensors file
  std::string prefix = "";       // of its tensors' names
  std::string k_scale, v_scale;  // .npy files, for k and v in int8 or e4m3
  std::optional<DType> kv_dtype = {};
};
/// Adds --q, --k, --v, --qkv, --qkv-prefix, --k-scale, --v-scale and --kv-dtype.
void add_qkv(CLI::App& command, QkvFlags& flags);

/// How the arrays are read: CLI.md's run.
enum class QkvShape : std::uint8_t {
  dense,   // all [batch, seqlen, heads, head_dim]
  packed,  // all [total, heads, head_dim]
  paged,   // q dense, k and v [pages, page_size, heads_kv, head_dim]
};

struct Qkv {
  Array q, k, v;
  Array k_scale = {}, v_scale = {};  // of k and v in int8 or e4m3: their shape, head_dim 1
  Array page_table = {};             // of paged k and v: [batch, pages per sequence]
};
/// Reads and checks; fails the command with a line that names the flag, file or tensor. The arrays
/// come in `dtype` (converted when the files hold another), or else in the files' own, which must
/// then be the same for all three; k and v in int8 or e4m3 stay as they are, and int8 needs scales.
Qkv read_qkv(const QkvFlags& flags, std::optional<DType> dtype, QkvShape shape);

/// Sizes and dtype of dense arrays; the rest at its default.
AttentionProblem dense_problem(const Qkv& qkv);

/// The array as the library sees it: rank 4, or rank 3 as one packed batch.
TensorView view_of(const Array& array);

}  // namespace rafter::cli
