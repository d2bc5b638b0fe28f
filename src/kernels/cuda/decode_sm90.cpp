// decode_sm90: the host side of the decode kernel for sm_90a.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/checked.h"
#include "dispatch/kernel_entry.h"
#include "hw/cuda/tensor_map.h"
#include "kernels/cuda/accepts_sm90.h"
#include "kernels/cuda/decode_sm90_cluster.h"
#include "tiles/sm90_decode_cluster.h"

namespace rafter {
namespace {

using base::checked_product;
using base::div_up;
using base::round_up;
using cuda::DecodeCache;
using cuda::DecodeParams;

using LaunchFunction = Status (*)(const DecodeParams&, const cuda::DecodeMaps&, bool, unsigned,
                                  void*);
using LaunchFunctions = std::array<LaunchFunction, tiles::kSm90DecodeRowCount>;
template <DType kDType>
constexpr LaunchFunctions kByKeys = {cuda::launch_decode_sm90<kDType, 0>,
                                     cuda::launch_decode_sm90<kDType, 1>,
                                     cuda::launch_decode_sm90<kDType, 2>};
template <DType kDType, int kWidth>
constexpr LaunchFunctions kByColumns = {cuda::launch_decode_sm90_columns<kDType, kWidth, 0>,
                                        cuda::launch_decode_sm90_columns<kDType, kWidth, 1>,
                                        cuda::launch_decode_sm90_columns<kDType, kWidth, 2>};
constexpr std::array<LaunchFunctions, 3> kLaunch[2] = {
    {kByKeys<DType::bf16>, kByColumns<DType::bf16, 0>, kByColumns<DType::bf16, 1>},
    {kByKeys<DType::f16>, kByColumns<DType::f16, 0>, kByColumns<DType::f16, 1>}};

using ClusterFunction = Status (*)(const DecodeParams&, bool, unsigned, unsigned, void*);
constexpr int kClusterRows = 2;
template <DType kDType>
constexpr ClusterFunction kClustersOf[3][kClusterRows] = {
    {cuda::launch_decode_sm90_cluster<kDType, 0>, cuda::launch_decode_sm90_cluster<kDType, 1>},
    {cuda::launch_decode_sm90_columns_cluster<kDType, 0, 0>,
     cuda::launch_decode_sm90_columns_cluster<kDType, 0, 1>},
    {cuda::launch_decode_sm90_columns_cluster<kDType, 1, 0>,
     cuda::launch_decode_sm90_columns_cluster<kDType, 1, 1>}};

using HeadsFunction = Status (*)(const DecodeParams&, unsigned, void*);
template <DType kDType>
constexpr HeadsFunction kHeadsOf[kClusterRows] = {cuda::launch_decode_sm90_heads<kDType, 0>,
                                                  cuda::launch_decode_sm90_heads<kDType, 1>};

constexpr std::int64_t kAlign = 256;  // bytes, of the parts of the workspace

/// How a problem is cut, whatever its lengths turn out to be.
struct Cut {
  int row_blocks = 1;  // of query rows
  int partial_rows = 8;
  int blocks = 1;  // of 8 query rows: 1, 2, 4 or 8
  int max_parts = 1;
  std::int64_t slots = 0;  // of partial results
  std::int64_t units = 0;  // at most
  std::int64_t partial_bytes = 0, state_bytes = 0, arrived_bytes = 0;
  std::int64_t bytes() const { return partial_bytes + state_bytes + arrived_bytes; }
};

int width_of(const AttentionProblem& p) { return bits_of(p.kv_dtype.value_or(p.dtype)) == 8; }
bool by_columns(const AttentionProblem& p) {
  return tiles::sm90_decode_by_columns(width_of(p) == 1 ? 1 : 2, p.heads_q / p.heads_kv);
}
const tiles::Sm90DecodeRow& row_of(const AttentionProblem& p) {
  return tiles::kSm90DecodeRows[width_of(p)][tiles::sm90_decode_row_for(p.head_dim, p.head_dim_v)];
}

int window(std::int64_t w) {
  return static_cast<int>(std::min(w, cuda::kMaxLength));  // wider sees no more
}

tiles::Sm90DecodeParts parts_of(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  return tiles::sm90_decode_parts(row_of(p).element_bytes, p.heads_kv,
                                  static_cast<int>(problem.splits));
}

/// The cut of a sequence of the capacities.
tiles::Sm90DecodeCut same_cut(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_kv = static_cast<int>(p.seqlen_kv);
  const int offset = p.mask.align == MaskAlign::top_left ? 0 : seqlen_kv - seqlen_q;
  return tiles::sm90_decode_cut(
      row_of(p), {window(p.mask.window_left), window(p.mask.window_right), offset, seqlen_kv},
      seqlen_q, static_cast<int>(p.heads_q / p.heads_kv), parts_of(problem));
}

/// Nothing when numbers of units or bytes are beyond what the kernel counts with.
std::optional<Cut> cut_of(const KernelProblem& problem) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  const AttentionProblem& p = problem.attention;
  const tiles::Sm90DecodeRow& row = row_of(p);
  const auto rows = checked_product({p.seqlen_q, p.heads_q / p.heads_kv});
  if (!rows || *rows > kMost) {
    return std::nullopt;
  }
  Cut cut;
  cut.row_blocks = static_cast<int>(std::max<std::int64_t>(1, div_up(*rows, row.tile_rows())));
  const std::int64_t rows_here = std::min<std::int64_t>(*rows, row.tile_rows());
  const std::int64_t blocks = std::max<std::int64_t>(1, div_up(rows_here, tiles::kDecodeBlockRows));
  cut.partial_rows = static_cast<int>(blocks) * tiles::kDecodeBlockRows;
  cut.blocks = static_cast<int>(std::bit_ceil(
      static_cast<unsigned>(std::max<std::int64_t>(blocks, row.least_column_blocks()))));
  // One more tile where a window begins within one.
  const int tiles = static_cast<int>(div_up(p.seqlen_kv, row.tile_keys())) + 1;
  cut.max_parts = parts_of(problem).of(tiles);
  const auto units = checked_product({p.batch, p.heads_kv, cut.row_blocks, cut.max_parts});
  if (!units || *units > kMost) {
    return std::nullopt;
  }
  cut.units = *units;
  if (cut.max_parts > 1) {
    cut.slots = *units;
    if (by_columns(p)) {
      cut.partial_bytes = cut.slots * row.column_bytes(cut.blocks);
      cut.state_bytes = round_up(cut.slots * cut.blocks * 64, kAlign);
      cut.arrived_bytes = cut.slots * row.value_warps() * 8;
      return cut;
    }
    cut.partial_bytes = round_up(
        cut.slots * cut.partial_rows * round_up(p.head_dim_v, std::int64_t{4}) * 4, kAlign);
    cut.state_bytes = round_up(cut.slots * cut.partial_rows * 8, kAlign);
    cut.arrived_bytes = cut.slots * tiles::kDecodeFinishWarps * 8;
  }
  return cut;
}

/// Parts of one sequence of seqlen_kv.
std::int64_t splits(const KernelProblem& problem) { return same_cut(problem).parts; }

Acceptance accepts(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return Acceptance::refuse(fmt::format("{} is not among bf16, f16", to_string(p.dtype)));
  }
  if (tiles::sm90_decode_row_for(p.head_dim, p.head_dim_v) < 0) {
    return Acceptance::refuse(
        fmt::format("head_dim {}, head_dim_v {} is beyond 256", p.head_dim, p.head_dim_v));
  }
  const std::int64_t longest = std::max({p.seqlen_q, p.seqlen_kv, p.total_q, p.total_kv, p.heads_q,
                                         p.batch, p.num_pages, p.page_size});
  if (longest >= cuda::kMaxLength || problem.splits >= cuda::kMaxLength || !cut_of(problem)) {
    return Acceptance::refuse("more than 2^29 rows or 2^30 parts");
  }
  return cuda::accepts_sm90_device(problem);
}

std::int64_t workspace(const KernelProblem& problem) {
  return cut_of(problem).value_or(Cut{}).bytes();
}

/// Each block of query rows reads the keys again, from the L2.
Reach reach(const KernelProblem& problem, const DeviceSpec&) {
  const int row_blocks = cut_of(problem).value_or(Cut{}).row_blocks;
  return {.compute = 0.15, .bandwidth = 0.9 / row_blocks, .fixed_seconds = 5e-6};
}

DecodeCache cache_of(const TensorView& view, const TensorView& scale, std::int64_t head_dim) {
  const std::int64_t size = bits_of(view.dtype) / 8;
  DecodeCache cache;
  cache.data = static_cast<const unsigned char*>(view.data);
  cache.stride_batch = view.stride_batch * size;
  cache.stride_seqlen = view.stride_seqlen * size;
  cache.stride_heads = view.stride_heads * size;
  cache.row_bytes = static_cast<int>(head_dim * size);
  cache.chunks = static_cast<int>(div_up(std::int64_t{cache.row_bytes}, std::int64_t{16}));
  const auto whole = [](std::int64_t bytes, std::int64_t count) {
    return count <= 1 || bytes % 16 == 0;
  };
  cache.aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
                  cache.row_bytes % 16 == 0 && whole(cache.stride_batch, view.batch) &&
                  whole(cache.stride_seqlen, view.seqlen) && whole(cache.stride_heads, view.heads);
  cache.scale = static_cast<const float*>(scale.data);
  cache.scale_batch = scale.stride_batch;
  cache.scale_seqlen = scale.stride_seqlen;
  cache.scale_heads = scale.stride_heads;
  return cache;
}

/// Rows of K and V by 32-bit numbers of units.
void set_rows(DecodeParams& params, const ForwardInputs& in) {
  const std::pair<DecodeCache*, const TensorView*> caches[] = {{&params.k, &in.k},
                                                               {&params.v, &in.v}};
  const auto unless_one = [](std::int64_t stride, std::int64_t count) {
    return count <= 1 ? 0 : stride;
  };
  std::int64_t all = std::int64_t{1} << 30;
  for (const auto& [cache, view] : caches) {
    all |= unless_one(cache->stride_batch, view->batch) |
           unless_one(cache->stride_seqlen, view->seqlen);
  }
  const int zeros = std::countr_zero(static_cast<std::uint64_t>(all));
  params.row_unit = 1 << zeros;
  for (const auto& [cache, view] : caches) {
    const std::int64_t outer = unless_one(cache->stride_batch, view->batch) >> zeros;
    const std::int64_t inner = unless_one(cache->stride_seqlen, view->seqlen) >> zeros;
    cache->step_batch = static_cast<int>(outer);
    cache->step_seqlen = static_cast<int>(inner);
    const std::int64_t reach = std::abs(outer) * view->batch + std::abs(inner) * view->seqlen;
    cache->aligned = cache->aligned && reach <= std::numeric_limits<std::int32_t>::max();
  }
}

/// Rows of a box of the copy engine for a tile of K or V; 0: pages have no whole boxes.
int box_rows(const AttentionProblem& p) {
  int rows = row_of(p).tile_keys();
  while (p.page_size % rows != 0) {
    rows /= 2;
  }
  return rows >= tiles::kDecodeBoxRows ? rows : 0;
}

/// K and V go by the copy engine where it can read both.
cuda::DecodeMaps set_maps(DecodeParams& params, const AttentionProblem& p,
                          const ForwardInputs& in) {
  cuda::TensorMap k{}, v{};
  const int rows = box_rows(p);
  params.by_box = rows > 0 && cuda::make_tensor_map("k", in.k, rows, k).is_ok() &&
                  cuda::make_tensor_map("v", in.v, rows, v).is_ok();
  params.box_log2 = std::countr_zero(static_cast<unsigned>(std::max(rows, 1)));
  params.k.heads_step = k.heads_step;
  params.k.outer_step = k.batch_step;
  params.v.heads_step = v.heads_step;
  params.v.outer_step = v.batch_step;
  return {k.map, v.map};
}

/// An id that no memory holds by chance and no other launch has.
std::uint64_t next_launch_id() {
  static const std::uint64_t kSeed =
      static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  static std::atomic<std::uint64_t> count{0};
  // splitmix64 (Steele, Lea, Flood 2014): a bijection, so that ids of one process differ.
  std::uint64_t z = kSeed + (++count) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return z != 0 ? z : kSeed;
}

void set_problem(DecodeParams& params, const KernelProblem& problem, const Cut& cut) {
  const AttentionProblem& p = problem.attention;
  constexpr float kLog2E = 1.44269504088896341f;
  params.batch = static_cast<int>(p.batch);
  params.heads_kv = static_cast<int>(p.heads_kv);
  params.group = static_cast<int>(p.heads_q / p.heads_kv);
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.seqlen_kv = static_cast<int>(p.seqlen_kv);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.page_size = static_cast<int>(p.page_size);
  params.num_pages = static_cast<int>(p.num_pages);
  params.by_page = tiles::divisor_of(std::max<std::int64_t>(p.page_size, 1));
  params.window_left = window(p.mask.window_left);
  params.window_right = window(p.mask.window_right);
  params.top_left = p.mask.align == MaskAlign::top_left;
  params.row_blocks = cut.row_blocks;
  params.parts = parts_of(problem);
  params.likely_parts =
      params.parts.likely(static_cast<int>(div_up(p.seqlen_kv, row_of(p).tile_keys())));
  params.by_likely_parts = tiles::divisor_of(params.likely_parts);
  params.max_parts = cut.max_parts;
  params.same_cut = same_cut(problem);
  params.partial_rows = cut.partial_rows;
  params.blocks = cut.blocks;
  params.scale_log2 = *p.softmax_scale * kLog2E;
  params.transform_cap = p.softcap * kLog2E;
  params.transform_scale = p.softcap > 0 ? 2 * kLog2E * *p.softmax_scale / p.softcap : 0;
}

void set_tensors(DecodeParams& params, const ForwardInputs& in, const ForwardOutputs& out) {
  params.q = cache_of(in.q, {}, in.q.head_dim);
  params.k = cache_of(in.k, in.k_scale, in.k.head_dim);
  params.v = cache_of(in.v, in.v_scale, in.v.head_dim);
  set_rows(params, in);
  params.o = out.o.data;
  params.o_batch = out.o.stride_batch;
  params.o_seqlen = out.o.stride_seqlen;
  params.o_heads = out.o.stride_heads;
  params.o_is_f32 = out.o.dtype == DType::f32;
  params.o_in_fours = out.o.head_dim % 4 == 0 &&
                      reinterpret_cast<std::uintptr_t>(out.o.data) %
                              static_cast<std::uintptr_t>(bits_of(out.o.dtype) / 2) ==
                          0 &&
                      out.o.stride_batch % 4 == 0 && out.o.stride_seqlen % 4 == 0 &&
                      out.o.stride_heads % 4 == 0;
  params.lse = out.lse.data;
  params.lse_batch = out.lse.stride_batch;
  params.lse_heads = out.lse.stride_heads;
  params.lse_seqlen = out.lse.stride_seqlen;
  params.cu_seqlens_q = cuda::device_indices(in.cu_seqlens_q);
  params.cu_seqlens_kv = cuda::device_indices(in.cu_seqlens_kv);
  params.seqused_kv = cuda::device_indices(in.seqused_kv);
  params.page_table = cuda::device_indices(in.page_table);
  params.page_table_batch = in.page_table.cols;
  params.bad_pages = out.bad_pages.data;
  params.tree_mask = in.tree_mask.data;
  params.tree_mask_batch = in.tree_mask.stride_batch;
}

/// Warps may copy their own keys where whole heads are a CTA's or a cluster's. Sequences of lengths
/// that only the device knows share all SMs, unless there is but one.
bool has_own_keys(const DecodeParams& params, const AttentionProblem& p, int most_blocks) {
  return tiles::sm90_decode_row_for(p.head_dim, p.head_dim_v) < kClusterRows &&
         p.seqlen_q * params.group <= tiles::kDecodeBlockRows * most_blocks &&
         p.layout != Layout::packed && (p.batch == 1 || params.seqused_kv.data == nullptr) &&
         params.q.aligned && params.k.aligned && params.v.aligned;
}

/// CTAs of a cluster, where every head of every sequence gets one; 0: another way.
int cluster_of(const DecodeParams& params, const KernelProblem& problem, const Cut& cut) {
  const AttentionProblem& p = problem.attention;
  if (!has_own_keys(params, p, by_columns(p) ? tiles::kDecodeClusterBlocks : 1) ||
      (p.layout == Layout::paged && by_columns(p) &&
       p.seqlen_kv > tiles::kDecodeClusterMostPagedKeys)) {
    return 0;
  }
  const std::int64_t rows = p.seqlen_q * params.group;
  const std::int64_t heads = p.batch * p.heads_kv;
  const std::int64_t bytes = heads * p.seqlen_kv * (params.k.row_bytes + params.v.row_bytes);
  const int ctas = tiles::sm90_decode_cluster(heads, cut.max_parts, bytes,
                                              tiles::kDecodeClusterRates[width_of(p)]);
  if (ctas == 0 || (ctas == 1 && by_columns(p))) {
    return 0;
  }
  const std::int64_t shared =
      by_columns(p)
          ? tiles::sm90_decode_column_cluster_bytes(row_of(p), cut.max_parts, cut.blocks, ctas)
          : tiles::sm90_decode_cluster_bytes(row_of(p), cut.max_parts, static_cast<int>(rows),
                                             ctas);
  const int pages =
      p.layout == Layout::paged ? tiles::sm90_decode_cluster_page_bytes(row_of(p)) : 0;
  return shared + pages <= tiles::kDecodeClusterMostBytes ? ctas : 0;
}

/// Heads of a CTA, where all have as many and there are more than SMs; 0: CTAs get shares.
int heads_of(const DecodeParams& params, const AttentionProblem& p) {
  const std::int64_t heads = p.batch * p.heads_kv;
  if (by_columns(p) || p.layout == Layout::paged || !has_own_keys(params, p, 1) ||
      tiles::sm90_decode_cluster_size(heads) > 0) {
    return 0;
  }
  const int tiles = params.same_cut.end_tile - params.same_cut.first_tile;
  return params.seqused_kv.data == nullptr && tiles >= tiles::sm90_decode_head_tiles(row_of(p))
             ? static_cast<int>(tiles::sm90_decode_heads(heads))
             : 0;
}

/// How many units a CTA has, where lengths are no data.
void set_shares(DecodeParams& params, std::int64_t ctas) {
  const std::int64_t units = std::int64_t{params.batch} * params.same_cut.units(params.heads_kv);
  const std::int64_t even = tiles::sm90_decode_even_share(units, ctas);
  params.share = static_cast<int>(even > 0 ? even : units / ctas);
  params.longer_shares = static_cast<int>(even > 0 ? 0 : units % ctas);
}

Status forward(const ForwardCall& call) {
  const AttentionProblem& p = call.problem.attention;
  const cuda::DeviceScope device(call.problem.device_index);
  if (!device.status()) {
    return device.status();
  }
  const Cut cut = cut_of(call.problem).value_or(Cut{});
  DecodeParams params;
  set_problem(params, call.problem, cut);
  set_tensors(params, call.in, call.out);
  const int row = tiles::sm90_decode_row_for(p.head_dim, p.head_dim_v);
  const int dtype = p.dtype == DType::f16 ? 1 : 0;
  const int way = by_columns(p) ? 1 + width_of(p) : 0;
  const bool e4m3 = p.kv_dtype == DType::e4m3;
  if (const int ctas = cluster_of(params, call.problem, cut); ctas > 0) {
    params.head_ctas = ctas;
    const auto& clusters = dtype == 1 ? kClustersOf<DType::f16> : kClustersOf<DType::bf16>;
    return clusters[way][row](params, e4m3, static_cast<unsigned>(p.batch * p.heads_kv),
                              static_cast<unsigned>(ctas), call.stream.handle);
  }
  if (const int each = heads_of(params, p); each > 0) {
    params.share = each;
    const auto& heads = dtype == 1 ? kHeadsOf<DType::f16> : kHeadsOf<DType::bf16>;
    return heads[row](params,
                      static_cast<unsigned>(div_up(p.batch * p.heads_kv, std::int64_t{each})),
                      call.stream.handle);
  }
  const cuda::DecodeMaps maps = set_maps(params, p, call.in);
  if (cut.slots > 0) {
    auto* const bytes = static_cast<std::byte*>(call.workspace.data);
    params.partial_o = reinterpret_cast<float*>(bytes);
    params.partial_state = reinterpret_cast<float2*>(bytes + cut.partial_bytes);
    params.partial_columns = reinterpret_cast<float4*>(bytes);
    params.partial_states = reinterpret_cast<float4*>(bytes + cut.partial_bytes);
    params.arrived = reinterpret_cast<std::uint64_t*>(bytes + cut.partial_bytes + cut.state_bytes);
    params.launch_id = next_launch_id();
  }
  const Result<int> sms = cuda::sm_count();
  if (!sms) {
    return sms.status();
  }
  const std::int64_t blocks = std::min<std::int64_t>(*sms, cut.units);
  set_shares(params, blocks);
  return kLaunch[dtype][way][row](params, maps, e4m3, static_cast<unsigned>(blocks),
                                  call.stream.handle);
}

}  // namespace

std::span<const KernelEntry> entries_decode_sm90() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "decode_sm90",
      .device = Device::Kind::cuda,
      .pipeline = Pipeline::split_kv,
      .instruction_set = "sm_90a",
      .dtypes = {DType::bf16, DType::f16},
      .accepts_text =
          "every layout, mask, softcap, tree mask and group, head dimensions up to 256; "
          "k and v also in int8 and e4m3",
      .machine_has = cuda::machine_has_sm90,
      .accepts = accepts,
      .reach = reach,
      .workspace = workspace,
      .forward = forward,
      .kv_dtypes = {DType::int8, DType::e4m3},
      .tree_mask = true,
      .splits = splits}};
  return kEntries;
}

}  // namespace rafter
