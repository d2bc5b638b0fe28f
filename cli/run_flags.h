// The flags of rafter run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/args.h"
#include "cli/qkv.h"

namespace rafter::cli {

struct RunFlags {
  QkvFlags qkv;
  std::string out, lse;
  std::optional<DType> dtype;
  std::string device = "cpu";
  std::optional<Pipeline> pipeline;
  std::string kernel;
  std::optional<std::int64_t> threads, splits;
  MaskFlags mask;
  std::optional<double> softmax_scale;
  double softcap = 0;
  std::string cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table, tree_mask;
  std::string dout, dlse, dq, dk, dv;

  /// The flags that name files to write, and where to.
  std::vector<std::pair<const char*, const std::string*>> outputs() const {
    return {{"--out", &out}, {"--lse", &lse}, {"--dq", &dq}, {"--dk", &dk}, {"--dv", &dv}};
  }
  /// Those that name files to read.
  std::vector<std::pair<const char*, const std::string*>> inputs() const {
    return {{"--q", &qkv.q},
            {"--k", &qkv.k},
            {"--v", &qkv.v},
            {"--qkv", &qkv.qkv},
            {"--k-scale", &qkv.k_scale},
            {"--v-scale", &qkv.v_scale},
            {"--dout", &dout},
            {"--dlse", &dlse},
            {"--cu-seqlens-q", &cu_seqlens_q},
            {"--cu-seqlens-kv", &cu_seqlens_kv},
            {"--seqused-kv", &seqused_kv},
            {"--page-table", &page_table},
            {"--tree-mask", &tree_mask}};
  }
};

}  // namespace rafter::cli
