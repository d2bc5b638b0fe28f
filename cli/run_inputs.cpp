#include "cli/run_inputs.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/args.h"
#include "cli/files.h"
#include "cli/npy.h"
#include "cli/npy_output.h"
#include "cli/resident.h"

namespace rafter::cli {

void check_flags(const RunFlags& flags) {
  for (const auto& [flag, path] : {std::pair("--dlse", &flags.dlse), std::pair("--dq", &flags.dq),
                                   std::pair("--dk", &flags.dk), std::pair("--dv", &flags.dv)}) {
    if (!path->empty() && flags.dout.empty()) {
      fail_flag(flag, "without --dout", "only with --dout, the gradient of o,");
    }
  }
  if (!flags.dout.empty() && !flags.page_table.empty()) {
    fail_flag("--dout", "together with --page-table",
              "dense or packed keys (a gradient has no pages)");
  }
  if (required_device(flags.device).kind == Device::Kind::cuda && flags.threads) {
    fail_flag("--threads", std::to_string(*flags.threads), "none with --device cuda");
  }
  const auto outputs = flags.outputs();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [flag, path] = outputs[i];
    for (std::size_t j = 0; j < i && !path->empty(); ++j) {
      if (same_file(*path, *outputs[j].second)) {
        fail_flag(flag, *path, fmt::format("another file than that of {}", outputs[j].first));
      }
    }
    for (const auto& [input, read] : flags.inputs()) {
      if (same_file(*path, *read)) {
        fail_flag(flag, *path, fmt::format("another file than that of {}", input));
      }
    }
    if (path->ends_with(".safetensors")) {
      fail_flag(flag, *path, "a .npy file");
    }
  }
}

namespace {

IndexView view_of_indices(const std::optional<Array>& array) {
  if (!array) {
    return {};
  }
  return value_or_fail(Resident::copy_of(Device::cpu(), *array)).indices();
}

std::optional<Array> read_indices(const std::string& path, const std::string& flag,
                                  std::size_t rank, const char* shape) {
  if (path.empty()) {
    return std::nullopt;
  }
  Array array = value_or_fail(read_npy(path, Expect::indices, flag));
  if (array.shape.size() != rank) {
    fail(Status::invalid_argument(flag + " " + one_line(path), "shape " + shape_text(array.shape),
                                  shape));
  }
  return array;
}

}  // namespace

Indices read_all_indices(const RunFlags& flags) {
  if (flags.cu_seqlens_q.empty() != flags.cu_seqlens_kv.empty()) {
    fail_flag(flags.cu_seqlens_q.empty() ? "--cu-seqlens-q" : "--cu-seqlens-kv", "nothing",
              "--cu-seqlens-q and --cu-seqlens-kv together");
  }
  if (!flags.cu_seqlens_q.empty() && !flags.page_table.empty()) {
    fail_flag("--page-table", "together with --cu-seqlens-q", "one of the two layouts");
  }
  Indices indices;
  indices.cu_seqlens_q = read_indices(flags.cu_seqlens_q, "--cu-seqlens-q", 1, "[batch + 1]");
  indices.cu_seqlens_kv = read_indices(flags.cu_seqlens_kv, "--cu-seqlens-kv", 1, "[batch + 1]");
  indices.seqused_kv = read_indices(flags.seqused_kv, "--seqused-kv", 1, "[batch]");
  indices.page_table =
      read_indices(flags.page_table, "--page-table", 2, "[batch, pages per sequence]");
  indices.tree_mask = read_indices(flags.tree_mask, "--tree-mask", 2, "[batch, seqlen_q]");
  if (indices.tree_mask && indices.tree_mask->dtype != DType::i64) {
    fail(Status::invalid_argument("--tree-mask " + one_line(flags.tree_mask), "int32",
                                  "int64, a word of bits for each query,"));
  }
  if (indices.cu_seqlens_q && indices.cu_seqlens_q->elements() == 0) {
    fail(Status::invalid_argument("--cu-seqlens-q " + one_line(flags.cu_seqlens_q), "no entry",
                                  "[batch + 1] entries, the first of them 0,"));
  }
  return indices;
}

namespace {

/// The longest sequence, at most `total`: entries that are out of order or range are left for the
/// library to name.
std::int64_t longest(const IndexView& cu_seqlens, std::int64_t total) {
  std::int64_t most = 0;
  for (std::int64_t b = 0; b + 1 < cu_seqlens.size; ++b) {
    std::int64_t length = 0;
    if (!__builtin_sub_overflow(cu_seqlens[b + 1], cu_seqlens[b], &length)) {
      most = std::max(most, length);
    }
  }
  return std::min(most, total);
}

AttentionProblem packed_problem(const Qkv& qkv, const Indices& indices) {
  AttentionProblem problem;
  problem.layout = Layout::packed;
  problem.batch = indices.cu_seqlens_q->elements() - 1;
  problem.total_q = qkv.q.shape[0];
  problem.total_kv = qkv.k.shape[0];
  problem.seqlen_q = longest(view_of_indices(indices.cu_seqlens_q), problem.total_q);
  problem.seqlen_kv = longest(view_of_indices(indices.cu_seqlens_kv), problem.total_kv);
  problem.heads_q = qkv.q.shape[1];
  problem.heads_kv = qkv.k.shape[1];
  problem.head_dim = qkv.q.shape[2];
  problem.head_dim_v = qkv.v.shape[2];
  problem.dtype = qkv.q.dtype;
  problem.kv_dtype = qkv.k.dtype;
  return problem;
}

AttentionProblem paged_problem(const Qkv& qkv, const Array& table, const std::string& path) {
  AttentionProblem problem = dense_problem(qkv);
  problem.layout = Layout::paged;
  problem.num_pages = qkv.k.shape[0];
  problem.page_size = qkv.k.shape[1];
  if (table.shape[0] != problem.batch) {
    fail(Status::invalid_argument("--page-table " + one_line(path),
                                  "shape " + shape_text(table.shape),
                                  fmt::format("[batch = {}, pages per sequence]", problem.batch)));
  }
  if (__builtin_mul_overflow(table.shape[1], problem.page_size, &problem.seqlen_kv)) {
    fail(Status::invalid_argument("--page-table " + one_line(path),
                                  "shape " + shape_text(table.shape),
                                  "fewer than 2^63 keys per sequence"));
  }
  return problem;
}

}  // namespace

AttentionProblem problem_of(const RunFlags& flags, const Qkv& qkv, const Indices& indices) {
  AttentionProblem problem = indices.cu_seqlens_q ? packed_problem(qkv, indices)
                             : indices.page_table
                                 ? paged_problem(qkv, *indices.page_table, flags.page_table)
                                 : dense_problem(qkv);
  problem.mask = mask_of(flags.mask);
  if (flags.softmax_scale) {
    problem.softmax_scale = static_cast<float>(*flags.softmax_scale);
  }
  problem.softcap = static_cast<float>(flags.softcap);
  problem.seqused_kv = indices.seqused_kv.has_value();
  problem.tree_mask = indices.tree_mask.has_value();
  return problem;
}

Array read_gradient(const std::string& path, const char* flag, const RunFlags& flags,
                    const std::vector<std::int64_t>& shape, DType dtype) {
  Array array = value_or_fail(
      read_npy(path, flags.dtype == DType::bf16 ? Expect::values_bf16 : Expect::values, flag));
  const std::string label = std::string(flag) + " " + one_line(path);
  if (array.shape != shape) {
    fail(Status::invalid_argument(label, "shape " + shape_text(array.shape), shape_text(shape)));
  }
  return value_or_fail(convert(array, dtype, label));
}

}  // namespace rafter::cli
