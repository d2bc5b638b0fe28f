// forward_sm90: the host side of the fused forward kernel for sm_90a.
#include "kernels/cuda/forward_sm90.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <vector>

#include "dispatch/kernel_entry.h"
#include "hw/cuda/tensor_map.h"
#include "kernels/cuda/accepts_sm90.h"
#include "tiles/tile_order.h"

namespace rafter {
namespace {

using tiles::kSm90ForwardRowCount;
using tiles::kSm90ForwardRows;

constexpr std::int64_t kCounterBytes = 64;
// K and V of the heads in flight; the L2 of an H200 has 50 MiB, of which O and Q pass through some.
constexpr std::int64_t kCacheBytes = std::int64_t{32} << 20;

using LaunchFunction = Status (*)(const cuda::ForwardParams&, unsigned, void*);
constexpr std::array<std::array<LaunchFunction, kSm90ForwardRowCount>, 2> kLaunch = {{
    {cuda::launch_forward_sm90<DType::bf16, 0>, cuda::launch_forward_sm90<DType::bf16, 1>,
     cuda::launch_forward_sm90<DType::bf16, 2>, cuda::launch_forward_sm90<DType::bf16, 3>,
     cuda::launch_forward_sm90<DType::bf16, 4>, cuda::launch_forward_sm90<DType::bf16, 5>},
    {cuda::launch_forward_sm90<DType::f16, 0>, cuda::launch_forward_sm90<DType::f16, 1>,
     cuda::launch_forward_sm90<DType::f16, 2>, cuda::launch_forward_sm90<DType::f16, 3>,
     cuda::launch_forward_sm90<DType::f16, 4>, cuda::launch_forward_sm90<DType::f16, 5>},
}};

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

int row_of(const AttentionProblem& p) {
  return tiles::sm90_forward_row_for(p.head_dim, p.head_dim_v, !p.mask.is_none());
}

/// One launch: its tuning row, and the sequences that it computes.
struct Launch {
  int row = -1;
  cuda::SequenceKind takes = cuda::SequenceKind::all;
};

/// Short sequences under a mask may have a row of their own. Where lengths are only known on the
/// device there may be both kinds.
std::vector<Launch> launches_of(const AttentionProblem& p) {
  using cuda::SequenceKind;
  const int row = row_of(p);
  const int short_row = tiles::sm90_forward_short_row_for(row);
  if (short_row < 0 || p.seqlen_q < tiles::kSm90ForwardShortQueries) {
    return {{row}};
  }
  const bool may_be_short = p.layout == Layout::packed || p.seqused_kv ||
                            tiles::is_sm90_forward_short(p.seqlen_q, p.seqlen_kv);
  if (!may_be_short) {
    return {{row}};
  }
  const bool may_be_long =
      p.layout == Layout::packed || !tiles::is_sm90_forward_short(p.seqlen_q, p.seqlen_kv);
  if (!may_be_long) {
    return {{short_row}};
  }
  const Launch others{row, SequenceKind::not_short}, short_ones{short_row, SequenceKind::is_short};
  // Last what there may be least of: its launch passes under the end of the other.
  return p.seqlen_kv > tiles::kSm90ForwardShortKeys ? std::vector<Launch>{others, short_ones}
                                                    : std::vector<Launch>{short_ones, others};
}

/// Query tiles of a launch, at most.
std::int64_t tiles_of(const AttentionProblem& p, int row) {
  const std::int64_t tile_q = kSm90ForwardRows[row].tile_q();
  const std::int64_t blocks = p.layout == Layout::packed ? div_up(p.total_q, tile_q) + p.batch
                                                         : p.batch * div_up(p.seqlen_q, tile_q);
  return blocks * p.heads_q;
}

Acceptance accepts(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (Acceptance common = cuda::accepts_sm90(problem); !common.yes) {
    return common;
  }
  if (row_of(p) < 0) {
    return Acceptance::refuse(
        fmt::format("head_dim {}, head_dim_v {} is beyond 256", p.head_dim, p.head_dim_v));
  }
  const std::int64_t longest =
      std::max({p.seqlen_q, p.seqlen_kv, p.total_q, p.total_kv, p.heads_q, p.batch});
  if (longest >= cuda::kMaxLength || tiles_of(p, row_of(p)) >= cuda::kMaxLength) {
    return Acceptance::refuse("more than 2^29 rows or query tiles");
  }
  return cuda::accepts_sm90_device(problem);
}

/// Query tiles differ in work or their number is only known on the device.
bool tiles_differ(const AttentionProblem& p) {
  return !p.mask.is_none() || p.layout == Layout::packed || p.seqused_kv;
}

/// Warpgroups without queries idle in the last query tile of each head, which is a good part of the
/// work. Dealt, it would always fall to the same CTAs: the heads in flight are as many tiles as
/// SMs.
bool last_tile_is_short(const AttentionProblem& p, int row) {
  constexpr std::int64_t kFewBlocks = 32;
  const tiles::Sm90ForwardRow& shape = kSm90ForwardRows[row];
  return shape.idles && p.seqlen_q % shape.tile_q() != 0 && p.seqlen_q > shape.tile_q() &&
         p.seqlen_q <= kFewBlocks * shape.tile_q();
}

/// Equal tiles of many keys do not take equal times: in the end SMs are 2% apart. Measured at
/// head_dim 128; with fewer keys the counter costs what it gains, with more it gains nothing.
bool equal_tiles_drift(const AttentionProblem& p, int row) {
  return kSm90ForwardRows[row].head_dim == 128 && p.seqlen_kv >= 1024 && p.seqlen_kv <= 4096;
}

/// CTAs draw tiles that differ from a counter, save where each has no more than one: a workspace
/// and its clearing would then take longer than the kernel gains.
bool draws_tiles(const AttentionProblem& p, int row, int sms) {
  return (tiles_differ(p) || last_tile_is_short(p, row) || equal_tiles_drift(p, row)) &&
         tiles_of(p, row) > sms;
}

/// Rows that walk the same key tiles, which are about as wide.
std::int64_t rows_together(const KernelProblem& problem) {
  const tiles::Sm90ForwardRow& shape = kSm90ForwardRows[row_of(problem.attention)];
  return shape.own_ranges ? 64 : shape.tile_q();
}

std::int64_t workspace(const KernelProblem& problem) {
  const cuda::DeviceScope device(problem.device_index);
  const Result<int> sms = cuda::sm_count();
  const AttentionProblem& p = problem.attention;
  const std::vector<Launch> launches = launches_of(p);
  return std::ranges::any_of(launches,
                             [&](const Launch& l) { return draws_tiles(p, l.row, sms ? *sms : 0); })
             ? kCounterBytes
             : 0;
}

/// A tile costs all of its rows, however few of them are queries: one query is decode_sm90's.
Reach reach(const KernelProblem& problem, const DeviceSpec&) {
  const AttentionProblem& p = problem.attention;
  const std::int64_t tile_q = kSm90ForwardRows[row_of(p)].tile_q();
  const std::int64_t rows = std::max<std::int64_t>(p.seqlen_q, 1);
  const auto tile_rows = static_cast<double>(div_up(rows, tile_q) * tile_q);
  return {.compute = 0.6 * static_cast<double>(rows) / tile_rows,
          .bandwidth = 0.8,
          .fixed_seconds = 5e-6};
}

void set_scores(cuda::ForwardParams& params, float softmax_scale, float softcap) {
  constexpr float kLog2E = 1.44269504088896341f;
  params.transform = softcap > 0 || !(softmax_scale > 0);
  if (!params.transform) {
    params.scale_log2 = softmax_scale * kLog2E;
    return;
  }
  params.scale_log2 = 1;
  params.transform_cap = softcap * kLog2E;
  params.transform_scale =
      softcap > 0 ? 2 * kLog2E * softmax_scale / softcap : softmax_scale * kLog2E;
}

void set_outputs(cuda::ForwardParams& params, const ForwardOutputs& out) {
  params.o = out.o.data;
  params.o_stride_batch = out.o.stride_batch;
  params.o_stride_seqlen = out.o.stride_seqlen;
  params.o_stride_heads = out.o.stride_heads;
  params.o_is_f32 = out.o.dtype == DType::f32;
  params.o_in_pairs = reinterpret_cast<std::uintptr_t>(out.o.data) % 4 == 0 &&
                      out.o.stride_batch % 2 == 0 && out.o.stride_seqlen % 2 == 0 &&
                      out.o.stride_heads % 2 == 0;
  cuda::TensorMap o{};
  params.o_by_copy = !params.o_is_f32 && cuda::make_tensor_map("o", out.o, 16, o).is_ok();
  params.o_map = o.map;
  params.o_batch_step = o.batch_step;
  params.o_heads_step = o.heads_step;
  params.lse = out.lse.data;
  params.lse_stride_batch = out.lse.stride_batch;
  params.lse_stride_heads = out.lse.stride_heads;
  params.lse_stride_seqlen = out.lse.stride_seqlen;
}

void set_problem(cuda::ForwardParams& params, const AttentionProblem& p) {
  const auto window = [](std::int64_t w) {
    return static_cast<int>(std::min(w, cuda::kMaxLength));  // wider sees no more
  };
  params.batch = static_cast<int>(p.batch);
  params.heads_q = static_cast<int>(p.heads_q);
  params.group = static_cast<int>(p.heads_q / p.heads_kv);
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.seqlen_kv = static_cast<int>(p.seqlen_kv);
  params.window_left = window(p.mask.window_left);
  params.window_right = window(p.mask.window_right);
  params.top_left = p.mask.align == MaskAlign::top_left;
  params.head_dim_v = static_cast<int>(p.head_dim_v);
}

/// Heads in flight together. Unmasked, of equal lengths: as many as give every SM a tile, so that K
/// and V come from DRAM at an even rate (512 keys: +7%). Else longest tiles come first, over as
/// many heads as the cache holds.
int section_of(const AttentionProblem& p, const Launch& launch, int sms) {
  const tiles::Sm90ForwardRow& shape = kSm90ForwardRows[launch.row];
  const std::int64_t group = p.heads_q / p.heads_kv;
  const std::int64_t keys = shape.is_short
                                ? std::min<std::int64_t>(p.seqlen_kv, tiles::kSm90ForwardShortKeys)
                                : p.seqlen_kv;
  const std::int64_t kv_bytes = keys * (p.head_dim + p.head_dim_v) * 2;
  // Of one sequence where these come one by one.
  const bool by_sequences = p.layout == Layout::packed || launch.takes != cuda::SequenceKind::all;
  const std::int64_t heads = by_sequences ? p.heads_q : p.batch * p.heads_q;
  const std::int64_t cached = tiles::heads_in_cache(heads, group, kv_bytes, kCacheBytes);
  if (tiles_differ(p)) {
    return static_cast<int>(cached);
  }
  const std::int64_t blocks = div_up(p.seqlen_q, shape.tile_q());
  return static_cast<int>(std::min(cached, tiles::heads_in_flight(group, blocks, sms)));
}

Status set_inputs(cuda::ForwardParams& params, const ForwardInputs& in, int row) {
  cuda::TensorMap q, k, v;
  const int tile_kv = kSm90ForwardRows[row].tile_kv;
  if (Status status = cuda::make_tensor_map("q", in.q, 64, q); !status) {
    return status;
  }
  if (Status status = cuda::make_tensor_map("k", in.k, tile_kv, k); !status) {
    return status;
  }
  if (Status status = cuda::make_tensor_map("v", in.v, tile_kv, v); !status) {
    return status;
  }
  params.q = q.map;
  params.k = k.map;
  params.v = v.map;
  params.q_batch_step = q.batch_step;
  params.k_batch_step = k.batch_step;
  params.v_batch_step = v.batch_step;
  params.q_heads_step = q.heads_step;
  params.k_heads_step = k.heads_step;
  params.v_heads_step = v.heads_step;
  params.cu_seqlens_q = cuda::device_indices(in.cu_seqlens_q);
  params.cu_seqlens_kv = cuda::device_indices(in.cu_seqlens_kv);
  params.seqused_kv = cuda::device_indices(in.seqused_kv);
  return Status::ok();
}

Status forward(const ForwardCall& call) {
  const AttentionProblem& p = call.problem.attention;
  const cuda::DeviceScope device(call.problem.device_index);
  if (!device.status()) {
    return device.status();
  }
  cuda::ForwardParams params;
  set_problem(params, p);
  set_scores(params, *p.softmax_scale, p.softcap);
  set_outputs(params, call.out);
  const Result<int> sms = cuda::sm_count();
  if (!sms) {
    return sms.status();
  }
  const std::vector<Launch> launches = launches_of(p);
  const auto draws = [&](const Launch& l) { return draws_tiles(p, l.row, *sms); };
  auto* const counters = static_cast<unsigned*>(call.workspace.data);
  if (std::ranges::any_of(launches, draws)) {
    if (Status status = cuda::clear(counters, kCounterBytes, call.stream.handle); !status) {
      return status;
    }
  }
  for (std::size_t i = 0; i < launches.size(); ++i) {
    const Launch& l = launches[i];
    if (Status status = set_inputs(params, call.in, l.row); !status) {
      return status;
    }
    params.takes = l.takes;
    params.is_first = launches.size() == 2 && i == 0;
    params.is_second = i == 1;
    params.section = section_of(p, l, *sms);
    params.counter = draws(l) ? counters + i : nullptr;
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(*sms, tiles_of(p, l.row)));
    const LaunchFunction queue = kLaunch[p.dtype == DType::f16 ? 1 : 0][l.row];
    if (Status status = queue(params, blocks, call.stream.handle); !status) {
      return status;
    }
  }
  return Status::ok();
}

}  // namespace

std::span<const KernelEntry> entries_forward_sm90() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "forward_sm90",
      .device = Device::Kind::cuda,
      .pipeline = Pipeline::fused,
      .instruction_set = "sm_90a",
      .dtypes = {DType::bf16, DType::f16},
      .accepts_text = "dense and packed layouts, head_dim and head_dim_v multiples of 8 up to 256, "
                      "every mask, softcap, seqused_kv; strides multiples of 8 elements",
      .machine_has = cuda::machine_has_sm90,
      .accepts = accepts,
      .reach = reach,
      .workspace = workspace,
      .forward = forward,
      .score_block_rows = rows_together}};
  return kEntries;
}

}  // namespace rafter
