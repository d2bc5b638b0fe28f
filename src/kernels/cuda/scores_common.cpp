#include "kernels/cuda/scores_common.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/checked.h"
#include "kernels/cuda/accepts_sm90.h"
#include "kernels/cuda/score_problem.h"
#include "tiles/sm90_half_fused.h"

namespace rafter::cuda {
namespace {

/// Scores and padded copies of one wave stay within this, or within 1024 rows of scores.
constexpr std::int64_t kWaveBytes = std::int64_t{4} << 30;
constexpr Reach kReach{.compute = 0.5, .bandwidth = 0.7, .fixed_seconds = 15e-6};
Acceptance accepts(const KernelProblem& problem, Pipeline pipeline) {
  const AttentionProblem& p = problem.attention;
  if (Acceptance common = cuda::accepts_sm90(problem); !common.yes) {
    return common;
  }
  if (pipeline == Pipeline::half_fused && tiles::sm90_half_fused_row_for(p.head_dim_v) < 0) {
    return Acceptance::refuse(fmt::format("head_dim_v {} is beyond 256", p.head_dim_v));
  }
  const std::int64_t longest =
      std::max({p.seqlen_q, p.seqlen_kv, p.total_q, p.total_kv, p.heads_q, p.batch});
  if (longest >= kMaxLength || !score_sizes(problem, pipeline)) {
    return Acceptance::refuse("more than 2^29 rows, or scores beyond 2^63 bytes");
  }
  return accepts_sm90_device(problem);
}

std::int64_t workspace(const KernelProblem& problem, Pipeline pipeline) {
  const std::optional<ScoreSizes> sizes = score_sizes(problem, pipeline);
  return sizes ? sizes->total_bytes : 0;
}

/// Padded sequences are multiplied whole.
std::int64_t score_block_rows(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  return lengths_are_data(p) ? std::max<std::int64_t>(1, p.seqlen_q) : kMaskedBlock;
}

std::string note(const KernelProblem& problem, Pipeline pipeline) {
  const std::optional<ScoreSizes> sizes = score_sizes(problem, pipeline);
  if (!sizes) {
    return {};
  }
  std::string text;
  if (const std::int64_t waves = sizes->waves.waves(); waves > 1) {
    const tiles::ScoreWaves& w = sizes->waves;
    const double all = 2.0 * static_cast<double>(w.pairs * w.seqlen_q) *
                       static_cast<double>(problem.attention.seqlen_kv);
    text = fmt::format("scores of {:.1f} GB go through {:.1f} GB of workspace in {} waves",
                       all / 1e9, static_cast<double>(sizes->score_bytes) / 1e9, waves);
  }
  if (sizes->gathered) {
    text += text.empty() ? "" : "; ";
    text += kPaddedNote;
  }
  return text;
}

template <typename Launch, typename... Arguments>
Status by_dtype(DType dtype, Launch bf16, Launch f16, const Arguments&... arguments) {
  return dtype == DType::f16 ? f16(arguments...) : bf16(arguments...);
}

}  // namespace

bool lengths_are_data(const AttentionProblem& p) {
  return p.layout == Layout::packed || p.seqused_kv;
}

Acceptance machine_has_scores() {
  std::string reason = why_not_sm90(0);
  if (reason.empty()) {
    reason = why_no_cublaslt();
  }
  return reason.empty() ? Acceptance::accept() : Acceptance::refuse(std::move(reason));
}

Reach scores_reach(const KernelProblem& problem, Pipeline pipeline, Pass pass, Reach reach) {
  if (!lengths_are_data(problem.attention)) {
    return reach;
  }
  AttentionProblem padded = problem.attention;
  padded.layout = Layout::dense;
  padded.total_q = padded.total_kv = 0;
  padded.seqused_kv = false;
  padded.mask = {};
  Convention convention;  // what the choice counts
  if (pass == Pass::forward) {
    convention.score_block_rows = static_cast<double>(score_block_rows(problem));
  }
  const Result<Cost> own = attention_cost(problem.attention, pipeline, pass, convention);
  const Result<Cost> all = attention_cost(padded, pipeline, pass);
  if (own && all && own->flops > 0 && own->bytes > 0) {
    reach.compute *= own->flops / all->flops;
    reach.bandwidth *= own->bytes / all->bytes;
  }
  return reach;
}

Status check_score_rows(const char* name, const TensorView& t) {
  const std::int64_t step = 16 * 8 / bits_of(t.dtype);  // elements of 16 bytes
  if (reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0) {
    return Status::invalid_argument(fmt::format("{}.data", name), fmt::format("{}", t.data),
                                    "addresses aligned to 16 bytes");
  }
  const std::pair<const char*, std::pair<std::int64_t, std::int64_t>> strides[] = {
      {"stride_batch", {t.stride_batch, t.batch}},
      {"stride_seqlen", {t.stride_seqlen, t.seqlen}},
      {"stride_heads", {t.stride_heads, t.heads}}};
  for (const auto& [field, stride_size] : strides) {
    const auto [stride, size] = stride_size;
    if (size > 1 && (stride < 0 || stride % step != 0)) {
      return Status::invalid_argument(fmt::format("{}.{}", name, field), fmt::format("{}", stride),
                                      fmt::format("multiples of {} elements from 0", step));
    }
  }
  if (t.seqlen > 1 && t.stride_seqlen < t.head_dim) {
    return Status::invalid_argument(fmt::format("{}.stride_seqlen", name),
                                    fmt::format("{}", t.stride_seqlen),
                                    fmt::format("{} (head_dim) or more", t.head_dim));
  }
  return Status::ok();
}

Status gather_views(const ScoreProblem& problem, std::initializer_list<GatheredView> views,
                    std::int64_t first_pair, std::int64_t pairs, void* stream) {
  for (const auto& [view, target, rows_of] : views) {
    const GatherRows rows{.source = view.data,
                          .stride_batch = view.stride_batch,
                          .stride_seqlen = view.stride_seqlen,
                          .stride_heads = view.stride_heads,
                          .target = target,
                          .head_dim = static_cast<int>(view.head_dim),
                          .rows_of = rows_of,
                          .first_pair = first_pair,
                          .pairs = pairs};
    if (Status status = launch_gather(problem, rows, stream); !status) {
      return status;
    }
  }
  return Status::ok();
}

std::byte* aligned_scores(void* workspace) {
  const auto past = reinterpret_cast<std::uintptr_t>(workspace) % kScoreAlign;
  return static_cast<std::byte*>(workspace) + (past == 0 ? 0 : kScoreAlign - past);
}

std::optional<ScoreSizes> score_sizes(const KernelProblem& problem, Pipeline pipeline) {
  const AttentionProblem& p = problem.attention;
  const auto pairs = base::checked_product({p.batch, p.heads_q});
  const std::int64_t stride = base::round_up(p.seqlen_kv, tiles::kScoreRowStep);
  if (!pairs || !base::checked_product({*pairs, p.seqlen_q, stride, 2})) {
    return std::nullopt;
  }
  ScoreSizes sizes;
  sizes.gathered = lengths_are_data(p);
  const std::int64_t q_bytes = 2 * p.seqlen_q * p.head_dim;
  const std::int64_t k_bytes = 2 * p.seqlen_kv * p.head_dim;
  const std::int64_t v_bytes = 2 * p.seqlen_kv * p.head_dim_v;
  // o may be asked for in f32.
  const std::int64_t o_bytes = pipeline == Pipeline::unfused ? 4 * p.seqlen_q * p.head_dim_v : 0;
  const std::int64_t pair_bytes = sizes.gathered ? q_bytes + k_bytes + v_bytes + o_bytes : 0;
  sizes.waves =
      sizes.gathered || p.mask.is_none()
          ? tiles::plan_score_waves(*pairs, p.seqlen_q, p.seqlen_kv, 2, pair_bytes, kWaveBytes)
          : tiles::plan_block_waves(*pairs, p.seqlen_q, p.seqlen_kv, 2, kMaskedBlock, kWaveBytes);
  const auto room = [](std::int64_t bytes) { return base::round_up(bytes, kScoreAlign); };
  sizes.score_bytes = room(2 * sizes.waves.score_elements());
  sizes.total_bytes = (kScoreAlign - kLentAlign) + sizes.score_bytes + kMatmulWorkspaceBytes;
  if (sizes.gathered) {
    const std::int64_t n = sizes.waves.pairs_per_wave;
    sizes.q_bytes = room(n * q_bytes);
    sizes.k_bytes = room(n * k_bytes);
    sizes.v_bytes = room(n * v_bytes);
    sizes.o_bytes = room(n * o_bytes);
    sizes.total_bytes += sizes.q_bytes + sizes.k_bytes + sizes.v_bytes + sizes.o_bytes;
  }
  return sizes;
}

template <Pipeline kPipeline>
KernelEntry entry_of(std::string_view name, Status (*forward)(const ForwardCall&)) {
  return {
      .name = name,
      .device = Device::Kind::cuda,
      .pipeline = kPipeline,
      .instruction_set = "sm_90a",
      .dtypes = {DType::bf16, DType::f16},
      .accepts_text =
          "dense and packed layouts, head_dim and head_dim_v multiples of 8 up to 256, "
          "every mask, softcap, seqused_kv; strides multiples of 16 bytes",
      .machine_has = machine_has_scores,
      .accepts = [](const KernelProblem& p) { return accepts(p, kPipeline); },
      .reach = [](const KernelProblem& p,
                  const DeviceSpec&) { return scores_reach(p, kPipeline, Pass::forward, kReach); },
      .workspace = [](const KernelProblem& p) { return workspace(p, kPipeline); },
      .forward = forward,
      .note = [](const KernelProblem& p) { return note(p, kPipeline); },
      .score_block_rows = score_block_rows};
}

KernelEntry scores_entry(std::string_view name, Pipeline pipeline,
                         Status (*forward)(const ForwardCall&)) {
  return pipeline == Pipeline::unfused ? entry_of<Pipeline::unfused>(name, forward)
                                       : entry_of<Pipeline::half_fused>(name, forward);
}

ScoreCall::ScoreCall(const ForwardCall& call, Pipeline pipeline)
    : call_(call),
      attention_(call.problem.attention),
      sizes_(*score_sizes(call.problem, pipeline)),  // accepts() has seen that there are some
      workspace_(aligned_scores(call.workspace.data)) {
  const AttentionProblem& p = attention_;
  order_ = tiles::pair_order(p.batch, p.heads_q, p.heads_q / p.heads_kv);
  problem_ = score_problem(p, call.in);
  problem_.batch_fastest = order_.batch_fastest;
  q_ = workspace_ + sizes_.score_bytes + kMatmulWorkspaceBytes;
  k_ = q_ + sizes_.q_bytes;
  v_ = k_ + sizes_.k_bytes;
  o_ = v_ + sizes_.v_bytes;
}

Status ScoreCall::check_tensors() const {
  const std::pair<const char*, const TensorView*> tensors[] = {
      {"q", &call_.in.q}, {"k", &call_.in.k}, {"v", &call_.in.v}, {"o", &call_.out.o}};
  for (const auto& [name, tensor] : tensors) {
    if (Status status = check_score_rows(name, *tensor); !status) {
      return status;
    }
  }
  return Status::ok();
}

LseTarget ScoreCall::lse() const {
  const LseView& lse = call_.out.lse;
  return {lse.data, lse.stride_batch, lse.stride_heads, lse.stride_seqlen};
}

TensorView ScoreCall::gathered_values() const {
  return TensorView::contiguous(v_, attention_.dtype, sizes_.waves.pairs_per_wave,
                                attention_.seqlen_kv, 1, attention_.head_dim_v);
}

Status ScoreCall::gather(const ScoreWave& wave) const {
  if (!sizes_.gathered) {
    return Status::ok();
  }
  return gather_views(problem_,
                      {{call_.in.q, q_, RowsOf::queries},
                       {call_.in.k, k_, RowsOf::keys},
                       {call_.in.v, v_, RowsOf::keys}},
                      wave.first_pair, wave.pairs, call_.stream.handle);
}

ScoreCall::Side ScoreCall::side_of(const TensorView& view, std::int64_t pair, std::int64_t row,
                                   std::int64_t group, std::byte* gathered,
                                   std::int64_t capacity) const {
  const std::int64_t element = bits_of(view.dtype) / 8;
  if (sizes_.gathered) {
    const std::int64_t at = ((pair - gathered_from_) * capacity + row) * view.head_dim;
    return {gathered + at * element, view.head_dim, capacity * view.head_dim};
  }
  const tiles::PairOrder::Pair place = order_.at(pair);
  const std::int64_t at = place.batch * view.stride_batch + row * view.stride_seqlen +
                          place.head / group * view.stride_heads;
  const std::int64_t row_stride = stride_or(view.seqlen, view.stride_seqlen, view.head_dim);
  const std::int64_t apart = view.seqlen * row_stride;  // where there is one alone
  const std::int64_t pair_stride = order_.batch_fastest
                                       ? stride_or(view.batch, view.stride_batch, apart)
                                   : group > 1 ? 0  // a run of heads shares them
                                               : stride_or(view.heads, view.stride_heads, apart);
  return {static_cast<std::byte*>(view.data) + at * element, row_stride, pair_stride};
}

std::int64_t ScoreCall::row_block(const ScoreWave& wave) const {
  return sizes_.gathered || attention_.mask.is_none() ? wave.rows : kMaskedBlock;
}

tiles::Range ScoreCall::keys_of(std::int64_t first_row, std::int64_t rows) const {
  if (sizes_.gathered) {
    return {0, attention_.seqlen_kv};
  }
  const std::int64_t offset = problem_.top_left ? 0 : attention_.seqlen_kv - attention_.seqlen_q;
  const tiles::MaskWindow mask{problem_.window_left, problem_.window_right, offset,
                               attention_.seqlen_kv};
  const tiles::Range hull = mask.hull(first_row, first_row + rows);
  return hull.size() == 0 ? tiles::Range{} : tiles::Range{hull.first / 8 * 8, hull.last};
}

/// Calls body(block) for every row block of every run of pairs of a wave.
template <typename Body>
Status ScoreCall::for_each_block(const ScoreWave& wave, Body body) const {
  const std::int64_t end = wave.first_pair + wave.pairs;
  for (std::int64_t pair = wave.first_pair; pair < end;) {
    RowBlock block;
    block.first_pair = pair;
    const std::int64_t run_end =
        std::min(sizes_.gathered ? end : order_.run_end(pair, end, problem_.group),
                 pair + kMostScoreMatrices);
    block.pairs = run_end - pair;
    for (std::int64_t row = 0; row < wave.rows; row += row_block(wave)) {
      block.first_row = wave.first_row + row;
      block.rows = std::min(row_block(wave), wave.rows - row);
      block.keys = keys_of(block.first_row, block.rows);
      if (Status status = body(block); !status) {
        return status;
      }
    }
    pair = run_end;
  }
  return Status::ok();
}

namespace {

/// First score of a block.
std::byte* scores_of(const ScoreWave& wave, const RowBlock& block) {
  return static_cast<std::byte*>(wave.scores) +
         2 * ((block.first_pair - wave.first_pair) * wave.pair_stride +
              (block.first_row - wave.first_row) * wave.row_stride + block.keys.first);
}

}  // namespace

Status ScoreCall::multiply_keys(const ScoreWave& wave) const {
  return for_each_block(wave, [&](const RowBlock& block) {
    if (block.keys.size() == 0) {
      return Status::ok();
    }
    const Side q =
        side_of(call_.in.q, block.first_pair, block.first_row, 1, q_, attention_.seqlen_q);
    const Side k = side_of(call_.in.k, block.first_pair, block.keys.first, problem_.group, k_,
                           attention_.seqlen_kv);
    const Matmul product{.dtype = attention_.dtype,
                         .b_transposed = true,
                         .alpha = *attention_.softmax_scale,
                         .m = block.rows,
                         .n = block.keys.size(),
                         .k = attention_.head_dim,
                         .batch = block.pairs,
                         .lda = q.row_stride,
                         .ldb = k.row_stride,
                         .ldc = wave.row_stride,
                         .stride_a = q.pair_stride,
                         .stride_b = k.pair_stride,
                         .stride_c = wave.pair_stride};
    return matmul(product, q.data, k.data, scores_of(wave, block), blas_workspace(),
                  call_.stream.handle);
  });
}

Status ScoreCall::softmax(const ScoreWave& wave) const {
  const std::int64_t rows = row_block(wave);
  std::int64_t widest = 0;
  for (std::int64_t row = 0; row < wave.rows; row += rows) {
    widest =
        std::max(widest, keys_of(wave.first_row + row, std::min(rows, wave.rows - row)).size());
  }
  return by_dtype(attention_.dtype, &launch_softmax<DType::bf16>, &launch_softmax<DType::f16>,
                  problem_, wave, lse(), static_cast<int>(rows), sizes_.gathered, widest,
                  call_.stream.handle);
}

Status ScoreCall::clear_outputs(const RowBlock& block) const {
  const TensorView& o = call_.out.o;
  const ScatterRows zeros{.source = nullptr,
                          .target = o.data,
                          .stride_batch = o.stride_batch,
                          .stride_seqlen = o.stride_seqlen,
                          .stride_heads = o.stride_heads,
                          .head_dim = static_cast<int>(o.head_dim),
                          .element_bytes = static_cast<int>(bits_of(o.dtype) / 8),
                          .first_pair = block.first_pair,
                          .pairs = block.pairs,
                          .first_row = static_cast<int>(block.first_row),
                          .rows = static_cast<int>(block.rows)};
  return launch_scatter(problem_, zeros, call_.stream.handle);
}

Status ScoreCall::multiply_values(const ScoreWave& wave) const {
  const TensorView& out = call_.out.o;
  Status status = for_each_block(wave, [&](const RowBlock& block) {
    if (block.keys.size() == 0) {
      return clear_outputs(block);
    }
    const Side v = side_of(call_.in.v, block.first_pair, block.keys.first, problem_.group, v_,
                           attention_.seqlen_kv);
    const Side o = sizes_.gathered ? Side{o_, out.head_dim, wave.rows * out.head_dim}
                                   : side_of(out, block.first_pair, block.first_row, 1, nullptr, 0);
    const Matmul product{.dtype = attention_.dtype,
                         .c_is_f32 = out.dtype == DType::f32,
                         .m = block.rows,
                         .n = attention_.head_dim_v,
                         .k = block.keys.size(),
                         .batch = block.pairs,
                         .lda = wave.row_stride,
                         .ldb = v.row_stride,
                         .ldc = o.row_stride,
                         .stride_a = wave.pair_stride,
                         .stride_b = v.pair_stride,
                         .stride_c = o.pair_stride};
    return matmul(product, scores_of(wave, block), v.data, o.data, blas_workspace(),
                  call_.stream.handle);
  });
  if (!status || !sizes_.gathered || attention_.seqlen_kv == 0) {
    return status;
  }
  const ScatterRows rows{.source = o_,
                         .target = out.data,
                         .stride_batch = out.stride_batch,
                         .stride_seqlen = out.stride_seqlen,
                         .stride_heads = out.stride_heads,
                         .head_dim = static_cast<int>(out.head_dim),
                         .element_bytes = static_cast<int>(bits_of(out.dtype) / 8),
                         .first_pair = wave.first_pair,
                         .pairs = wave.pairs,
                         .first_row = wave.first_row,
                         .rows = wave.rows};
  return launch_scatter(problem_, rows, call_.stream.handle);
}

}  // namespace rafter::cuda
