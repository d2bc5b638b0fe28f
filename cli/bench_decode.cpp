// rafter bench decode: few new tokens against a cache.
#include <algorithm>
#include <memory>

#include "cli/bench_common.h"

namespace rafter::cli {
namespace {

struct DecodeAxes {
  std::vector<std::int64_t> seqlens_kv = {8192};
  std::vector<std::int64_t> seqlens_q = {1};
  std::vector<std::int64_t> head_dims = {128};
  std::vector<std::int64_t> heads_q = {32};
  std::vector<std::int64_t> heads_kv = {8};
  std::vector<std::int64_t> batches = {1, 8};
  std::vector<std::int64_t> page_sizes = {0};
  std::vector<DType> kv_dtypes = {};  // default: as the dtype
  std::vector<Pipeline> pipelines = {Pipeline::split_kv};
  std::vector<std::int64_t> lengths = {};  // of each sequence, the last one for the rest
  std::int64_t splits = 0;
  std::string kernel;
  bool evidence = false;
};

/// Keys in use of each sequence of a problem; none where all have seqlen_kv.
std::vector<std::int64_t> lengths_of(const DecodeAxes& axes, const AttentionProblem& p) {
  std::vector<std::int64_t> lengths = axes.lengths;
  if (!lengths.empty()) {
    lengths.resize(static_cast<std::size_t>(p.batch), lengths.back());
  }
  return lengths;
}

BenchRow decode_row(const AttentionProblem& p, const CaseResult& result, const DecodeAxes& axes) {
  BenchRow row = measured_row("decode", result);
  row.shape =
      Json{{"seqlen_kv", p.seqlen_kv},    {"seqlen_q", p.seqlen_q},
           {"head_dim", p.head_dim},      {"heads_q", p.heads_q},
           {"heads_kv", p.heads_kv},      {"batch", p.batch},
           {"dtype", to_string(p.dtype)}, {"kv_dtype", to_string(p.kv_dtype.value_or(p.dtype))},
           {"page_size", p.page_size},    {"threads", result.threads}};
  if (!axes.lengths.empty()) {
    row.shape["lengths"] = fmt::format("{}", fmt::join(axes.lengths, " "));
  }
  if (axes.splits > 0) {
    row.shape["splits"] = axes.splits;
  }
  const double median_s = result.median_s();
  row.more["kv_bytes"] = number(result.cost.kv_bytes);
  row.more["kv_bytes_per_s"] = number(result.cost.kv_bytes / median_s);
  row.more["tokens_per_s"] = number(static_cast<double>(p.batch * p.seqlen_q) / median_s);
  return row;
}

std::vector<AttentionProblem> grid_of(const DecodeAxes& axes, const std::vector<DType>& dtypes) {
  check_dtypes(dtypes);
  for (DType kv : axes.kv_dtypes) {
    if (kv != DType::f32 && kv != DType::bf16 && kv != DType::f16 && kv != DType::int8 &&
        kv != DType::e4m3) {
      fail_flag("--kv-dtype", to_string(kv), "f32, bf16, f16, int8, e4m3");
    }
  }
  std::vector<AttentionProblem> grid;
  const auto add = [&](DType dtype, DType kv, std::int64_t batch, std::int64_t page_size,
                       AttentionProblem p) {
    p.dtype = dtype;
    p.kv_dtype = kv;
    p.batch = batch;
    if (page_size > 0) {
      p.layout = Layout::paged;
      p.page_size = page_size;
      p.num_pages = batch * ((p.seqlen_kv + page_size - 1) / page_size);
    }
    const std::vector<std::int64_t> lengths = lengths_of(axes, p);
    if (static_cast<std::int64_t>(axes.lengths.size()) > batch) {
      fail_flag("--lengths",
                fmt::format("{} of them for a batch of {}", axes.lengths.size(), batch),
                "as many as there are sequences, or fewer,");
    }
    if (!lengths.empty()) {
      p.seqused_kv = true;
      p.num_pages = 0;
      for (const std::int64_t length : lengths) {
        p.num_pages += page_size > 0 ? (length + page_size - 1) / page_size : 0;
      }
    }
    grid.push_back(p);
  };
  for (DType dtype : dtypes) {
    for (DType kv : axes.kv_dtypes.empty() ? std::vector{dtype} : axes.kv_dtypes) {
      for (std::int64_t batch : axes.batches) {
        for (std::int64_t heads_q : axes.heads_q) {
          for (std::int64_t heads_kv : axes.heads_kv) {
            for (std::int64_t head_dim : axes.head_dims) {
              for (std::int64_t page_size : axes.page_sizes) {
                for (std::int64_t seqlen_q : axes.seqlens_q) {
                  for (std::int64_t seqlen_kv : axes.seqlens_kv) {
                    AttentionProblem p{.heads_q = heads_q,
                                       .heads_kv = heads_kv == 0 ? heads_q : heads_kv,
                                       .seqlen_q = seqlen_q,
                                       .seqlen_kv = seqlen_kv,
                                       .head_dim = head_dim};
                    p.mask = seqlen_q > 1 ? Mask::causal() : Mask::none();
                    add(dtype, kv, batch, page_size, p);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  return grid;
}

}  // namespace

void add_bench_decode(CLI::App& bench, Context& context) {
  auto axes = std::make_shared<DecodeAxes>();
  auto common = std::make_shared<Common>();
  common->dtypes = {DType::bf16};
  CLI::App* command = bench.add_subcommand("decode", "few new tokens against a cache");
  command->footer(examples(
      {{"rafter bench decode", "32 query heads on 8 KV heads, 8k keys, one sequence and eight"},
       {"rafter bench decode --kv-dtype bf16,int8 --batch 1 --page-size 0,16", "caches compared"},
       {"rafter bench decode --pipeline split-kv,fused,unfused", "against the other pipelines"},
       {"rafter bench decode --device cuda --kv-dtype bf16,e4m3 --page-size 0,1,16,64,256",
        "on the GPU, each call alone on a cold L2"},
       {"rafter bench decode --device cuda --batch 64 --lengths 128k,1k", "one long, 63 short"},
       {"rafter bench decode --baseline r.jsonl", "exit 1 when a row became slower"}}));
  CLI::Option* keys =
      add_lengths(*command, "--seqlen-kv", axes->seqlens_kv, "keys in the cache", {1, 1 << 22});
  add_lengths(*command, "--lengths", axes->lengths,
              "keys of each sequence, given at run time; the last one for the rest of the batch",
              {0, 1 << 22})
      ->excludes(keys);
  add_lengths(*command, "--seqlen-q", axes->seqlens_q,
              "new tokens of each sequence; causal among themselves", {1, 4096});
  add_lengths(*command, "--head-dim", axes->head_dims, "head_dim", {1, 256});
  add_lengths(*command, "--heads-q", axes->heads_q, "query heads", {1, 4096});
  add_lengths(*command, "--heads-kv", axes->heads_kv, "key and value heads (0: as --heads-q)",
              {0, 4096});
  add_lengths(*command, "--batch", axes->batches, "sequences", {1, 65536});
  add_dtypes(*command, "--kv-dtype", axes->kv_dtypes, "of the cache (default: as --dtype)");
  add_lengths(*command, "--page-size", axes->page_sizes, "keys per page; 0: not paged",
              {0, 1 << 22});
  add_length(*command, "--splits", axes->splits, "parts of the keys (0: the kernel's own)",
             {0, 1 << 20});
  add_what_runs(*command, axes->pipelines, axes->kernel, axes->evidence);
  add_counters(*command, *common);
  add_common(*command, *common, context);
  command->callback([axes, common, &context] {
    if (!axes->lengths.empty()) {
      axes->seqlens_kv = {
          std::max<std::int64_t>(1, *std::max_element(axes->lengths.begin(), axes->lengths.end()))};
    }
    bench_grid(
        "decode", *axes, *common, {.splits = axes->splits},
        [&axes](const AttentionProblem& p, const CaseResult& r) { return decode_row(p, r, *axes); },
        context);
  });
}

}  // namespace rafter::cli
