#include "model/attention_terms.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "model/check.h"
#include "tiles/pairs.h"

namespace rafter::model {
namespace {

constexpr double kStatisticsBytes = 4;  // lse and delta are f32

/// A Cost under construction: bytes go to a named term and to the kernel that moves them.
class Builder {
 public:
  Builder(const AttentionShape& shape, const AttentionTotals& totals,
          const Convention& convention) {
    cost_.kernels.reserve(6);
    cost_.bytes_by_term.reserve(12);
    cost_.dtype = shape.dtype;
    cost_.convention = convention.name;
    cost_.pairs = shape.heads_q * totals.pairs;
    cost_.score_matrix_bytes = shape.heads_q * totals.all_pairs * bytes_of(shape.dtype);
  }

  void kernel(const char* name, double matmul_flops, double softmax_flops) {
    cost_.kernels.push_back({name, matmul_flops, softmax_flops, 0, 0});
    cost_.matmul_flops += matmul_flops;
    cost_.softmax_flops += softmax_flops;
    cost_.launches += 1;
  }
  /// Elements that the current kernel moves, of so many bytes each.
  void move(const char* term, double elements, double bytes_each) {
    move_bytes(term, elements * bytes_each);
    cost_.kernels.back().elements += elements;
  }
  void move_bytes(const char* term, double bytes) {
    if (bytes == 0) {
      return;
    }
    cost_.kernels.back().bytes += bytes;
    cost_.bytes += bytes;
    const auto same = std::ranges::find(cost_.bytes_by_term, term, &ByteTerm::name);
    if (same != cost_.bytes_by_term.end()) {
      same->bytes += bytes;
    } else {
      cost_.bytes_by_term.push_back({term, bytes});
    }
  }
  void hold(double bytes) { cost_.footprint_bytes += bytes; }

  Cost finish(const AttentionShape& shape) {
    cost_.flops = cost_.matmul_flops + cost_.softmax_flops;
    cost_.tile_flops = cost_.flops * whole_;
    cost_.untiled_bytes = cost_.matmul_flops * bytes_of(shape.dtype);
    return std::move(cost_);
  }
  Cost& cost() { return cost_; }
  /// Blocks are computed whole and begin: so many times the visible pairs.
  void compute_whole(double times) { whole_ = times; }

 private:
  double whole_ = 1;
  Cost cost_;
};

double score_bytes(const AttentionShape& shape, const Convention& convention) {
  return bytes_of(convention.score_dtype.value_or(shape.dtype));
}

/// Bytes of one stream of Q, K, V, O of all heads, or 0 where the convention drops them.
struct Streams {
  double q, k, v, o;  // elements
  double b, b_kv;
  double lse;  // bytes
  double kv_scales;
};

Streams streams_of(const AttentionShape& shape, const AttentionTotals& totals, Counted counted,
                   const Convention& convention) {
  const double rows = counted.qo ? shape.heads_q * totals.rows : 0;
  const double keys = counted.kv ? shape.heads_kv * totals.key_reads : 0;
  return {.q = rows * shape.head_dim,
          .k = keys * shape.head_dim,
          .v = keys * shape.head_dim_v,
          .o = rows * shape.head_dim_v,
          .b = bytes_of(shape.dtype),
          .b_kv = bytes_of(shape.kv_dtype),
          .lse = convention.count_lse ? shape.heads_q * totals.rows * kStatisticsBytes : 0,
          .kv_scales = keys * shape.scale_bytes_per_key};
}

/// Memory held by the tensors counted: K and V whole, seen or not.
double tensors_held(const AttentionShape& shape, const AttentionTotals& totals, Counted counted,
                    const Convention& convention) {
  const double dims = shape.head_dim + shape.head_dim_v;
  const double qo = shape.heads_q * totals.rows * dims * bytes_of(shape.dtype);
  const double kv =
      shape.heads_kv * totals.keys * (dims * bytes_of(shape.kv_dtype) + shape.scale_bytes_per_key);
  const double lse = convention.count_lse ? shape.heads_q * totals.rows * kStatisticsBytes : 0;
  return (counted.qo ? qo : 0) + (counted.kv ? kv : 0) + lse;
}

bool lands_scores(Pipeline pipeline) {
  return pipeline == Pipeline::unfused || pipeline == Pipeline::half_fused;
}

}  // namespace

void AttentionTotals::add(const AttentionTotals& other, double times) {
  rows += times * other.rows;
  keys += times * other.keys;
  key_reads += times * other.key_reads;
  pairs += times * other.pairs;
  landed_pairs += times * other.landed_pairs;
  landed_key_reads += times * other.landed_key_reads;
  begun_pairs += times * other.begun_pairs;
  all_pairs += times * other.all_pairs;
  index_bytes += times * other.index_bytes;
  page_table_bytes += times * other.page_table_bytes;
}

Counted counted_of(const Convention& convention, Pipeline pipeline) {
  const bool all = convention.count_qkvo == CountQkvo::always ||
                   (convention.count_qkvo == CountQkvo::fused_only && !lands_scores(pipeline));
  return {all, all};
}

double score_passes_of(const Convention& convention, Pipeline pipeline) {
  if (convention.score_passes) {
    return *convention.score_passes;
  }
  return pipeline == Pipeline::unfused ? 4 : pipeline == Pipeline::half_fused ? 2 : 0;
}

AttentionTotals totals_of(const AttentionShape& shape, double rows, double keys, const Mask& mask,
                          const Convention& convention) {
  AttentionTotals t;
  t.rows = rows;
  t.keys = keys;
  t.all_pairs = rows * keys;
  double seen = keys;
  const double offset = mask.align == MaskAlign::bottom_right ? keys - rows : 0;
  const auto left = static_cast<double>(mask.window_left);
  const auto right = static_cast<double>(mask.window_right);
  if (mask.is_none()) {
    t.pairs = t.all_pairs;
    seen = rows > 0 ? keys : 0;
  } else if (convention.causal_pairs == CausalPairs::half) {
    t.pairs = t.all_pairs / 2;
  } else {
    t.pairs = tiles::pairs(rows, keys, left, right, offset);
    seen = tiles::seen_keys(rows, keys, left, right, offset);
  }
  double passes = 1;
  if (convention.traffic_model == TrafficModel::tiled) {
    // M / head_dim rows stay on chip; the group's rows share one stream of K, V.
    const double m = convention.fast_memory_unit == MemoryUnit::bytes
                         ? convention.fast_memory_bytes
                         : convention.fast_memory_bytes / bytes_of(shape.dtype);
    passes = std::max(1.0, shape.group() * rows * shape.head_dim / m);
  }
  t.key_reads = seen * passes;
  t.landed_pairs = t.pairs;
  t.landed_key_reads = t.key_reads;
  t.begun_pairs = t.pairs > 0 ? rows * convention.score_block_rows : 0;
  if (convention.score_block_rows > 0 && !mask.is_none()) {
    const tiles::Landed landed =
        tiles::landed(rows, keys, left, right, offset, convention.score_block_rows);
    t.landed_pairs = landed.pairs;
    t.landed_key_reads = std::max(t.key_reads, landed.keys);
  }
  return t;
}

/// Products 2·pairs·head_dim (QKᵀ) and 2·pairs·head_dim_v (PV) per query head. The scores' passes
/// are shared out as the three kernels make them: QKᵀ writes one, softmax reads and writes one, PV
/// reads one (half-fused: one written, one read). A library's product takes the block that lands as
/// a whole; a kernel that knows the mask reads what is visible, and the softmax leaves zeros beside
/// it for PV.
Cost forward_terms(const AttentionShape& shape, const AttentionTotals& totals, Pipeline pipeline,
                   Counted counted, const Convention& convention) {
  Builder build(shape, totals, convention);
  const bool lands = lands_scores(pipeline);
  AttentionTotals moved = totals;
  moved.key_reads = lands ? totals.landed_key_reads : totals.key_reads;
  const Streams s = streams_of(shape, moved, counted, convention);
  const double pairs = shape.heads_q * totals.pairs;
  const double landed = lands ? shape.heads_q * totals.landed_pairs : pairs;
  const double qk_flops = 2 * landed * shape.head_dim;
  const double pv_flops = 2 * (pipeline == Pipeline::unfused ? landed : pairs) * shape.head_dim_v;
  const double softmax_flops = convention.softmax_flops_per_element * pairs;
  const double passes = score_passes_of(convention, pipeline);
  const double b_scores = score_bytes(shape, convention);
  const double partials = pipeline == Pipeline::split_kv && shape.splits > 1
                              ? shape.splits * shape.heads_q * totals.rows * (shape.head_dim_v + 1)
                              : 0;
  const auto read_q_and_k = [&] {
    build.move("q", s.q, s.b);
    build.move("k", s.k, s.b_kv);
    build.move_bytes("page_table", convention.count_indices ? totals.page_table_bytes : 0);
    build.move_bytes("lengths", convention.count_indices ? totals.index_bytes : 0);
  };
  const auto write_o = [&] {
    build.move("o", s.o, s.b);
    build.move_bytes("lse", s.lse);
  };

  if (pipeline == Pipeline::unfused) {
    build.kernel("qk", qk_flops, 0);
    read_q_and_k();
    build.move("scores", passes / 4 * landed, b_scores);
    build.kernel("softmax", 0, softmax_flops);
    build.move("scores", passes / 4 * (pairs + landed), b_scores);
    build.kernel("pv", pv_flops, 0);
    build.move("scores", passes / 4 * landed, b_scores);
    build.move("v", s.v, s.b_kv);
  } else if (pipeline == Pipeline::half_fused) {
    build.kernel("qk", qk_flops, 0);
    read_q_and_k();
    build.move("scores", passes / 2 * landed, b_scores);
    build.kernel("softmax_pv", pv_flops, softmax_flops);
    build.move("scores", passes / 2 * pairs, b_scores);
    build.move("v", s.v, s.b_kv);
  } else {
    build.kernel("attention", qk_flops + pv_flops, softmax_flops);
    build.compute_whole(totals.pairs > 0 ? (totals.landed_pairs + totals.begun_pairs) / totals.pairs
                                         : 1);
    read_q_and_k();
    build.move("v", s.v, s.b_kv);
    build.move("scores", passes * pairs, b_scores);
  }
  build.move_bytes("kv_scales", s.kv_scales);
  if (partials > 0) {  // f32 o and lse of every split: written here, read by the merge
    const double bytes = convention.count_partials ? partials * 4 : 0;
    build.move_bytes("partials", bytes);
    build.kernel("merge", 0, 0);
    build.move_bytes("partials", bytes);
    build.hold(bytes);
  }
  write_o();
  build.hold(tensors_held(shape, totals, counted, convention));
  if (lands) {
    build.hold(shape.heads_q * totals.all_pairs * b_scores);
  }
  build.cost().exponentials = pairs;
  build.cost().kv_bytes = s.k * s.b_kv + s.v * s.b_kv + s.kv_scales;
  return build.finish(shape);
}

/// Backward, with D = rowsum(dO ∘ O) by a kernel of its own (2·head_dim_v FLOPs a row):
///   fused       S = QKᵀ again, dP = dO Vᵀ, dV = Pᵀ dO, dK = dSᵀ Q, dQ = dS K in one kernel
///   unfused     P stored by the forward pass. dV reads P; dP is written; dS = P ∘ (dP − D) reads P
///               and dP and writes dS; dQ and dK read dS: 7 passes, 4 products
///   half-fused  S stored. dV reads S (P made in passing); dP and dS in one kernel read S, write
///   dS;
///               dQ and dK read dS: 5 passes, 4 products
Cost backward_terms(const AttentionShape& shape, const AttentionTotals& totals, Pipeline pipeline,
                    Counted counted, const Convention& convention) {
  Builder build(shape, totals, convention);
  const Streams s = streams_of(shape, totals, counted, convention);
  const double pairs = shape.heads_q * totals.pairs;
  const double product = 2 * pairs * shape.head_dim;      // over head_dim: QKᵀ, dQ, dK
  const double product_v = 2 * pairs * shape.head_dim_v;  // over head_dim_v: dP, dV
  const double recompute = convention.recompute_flops_per_element * pairs;
  const double gradient = convention.score_gradient_flops_per_element * pairs;
  const double b_scores = score_bytes(shape, convention);
  const double delta_flops = convention.score_gradient_flops_per_element > 0
                                 ? 2 * shape.heads_q * totals.rows * shape.head_dim_v
                                 : 0;
  const bool fused = !lands_scores(pipeline);
  const double native_passes = pipeline == Pipeline::unfused ? 7 : fused ? 0 : 5;
  const double passes = convention.backward_score_passes.value_or(native_passes);
  // Elements of one pass; an override scales the pipeline's own passes.
  const double pass = native_passes > 0 ? pairs * passes / native_passes : pairs * passes;
  const double keys_held = counted.kv ? shape.heads_kv * totals.keys : 0;

  build.kernel("delta", 0, delta_flops);
  build.move("o", s.o, s.b);
  build.move("do", s.o, s.b);
  build.move_bytes("delta", s.lse);
  if (fused) {
    build.kernel("backward", 3 * product + 2 * product_v, recompute + gradient);
    build.move("q", s.q, s.b);
    build.move("k", s.k, s.b_kv);
    build.move("v", s.v, s.b_kv);
    build.move("do", s.o, s.b);
    build.move_bytes("lse", s.lse);
    build.move_bytes("delta", s.lse);
    build.move("scores", pass, b_scores);
  } else if (pipeline == Pipeline::unfused) {
    build.kernel("dv", product_v, 0);
    build.move("scores", pass, b_scores);
    build.move("do", s.o, s.b);
  } else {
    build.kernel("dv", product_v, recompute);
    build.move("scores", pass, b_scores);
    build.move("do", s.o, s.b);
    build.move_bytes("lse", s.lse);
  }
  build.move("dv", keys_held * shape.head_dim_v, s.b_kv);
  if (pipeline == Pipeline::unfused) {
    build.kernel("dp", product_v, 0);
    build.move("do", s.o, s.b);
    build.move("v", s.v, s.b_kv);
    build.move("scores", pass, b_scores);
    build.kernel("ds", 0, gradient);
    build.move("scores", 3 * pass, b_scores);
    build.move_bytes("delta", s.lse);
  } else if (!fused) {
    build.kernel("ds", product_v, recompute + gradient);
    build.move("do", s.o, s.b);
    build.move("v", s.v, s.b_kv);
    build.move("scores", 2 * pass, b_scores);
    build.move_bytes("lse", s.lse);
    build.move_bytes("delta", s.lse);
  }
  if (!fused) {
    build.kernel("dq", product, 0);
    build.move("scores", pass, b_scores);
    build.move("k", s.k, s.b_kv);
  }
  build.move("dq", s.q, s.b);
  if (!fused) {
    build.kernel("dk", product, 0);
    build.move("scores", pass, b_scores);
    build.move("q", s.q, s.b);
  }
  build.move("dk", keys_held * shape.head_dim, s.b_kv);

  // Each tensor and its gradient; delta beside lse; P (or S) and dS where they land.
  build.hold(2 * tensors_held(shape, totals, counted, convention));
  if (!fused) {
    build.hold(2 * shape.heads_q * totals.all_pairs * b_scores);
  }
  build.cost().exponentials = pipeline == Pipeline::unfused ? 0 : pairs;
  return build.finish(shape);
}

Cost decode_terms(const AttentionShape& shape, const AttentionTotals& totals, Pipeline pipeline,
                  const Convention& convention) {
  Convention counting = convention;
  counting.score_passes =
      convention.score_elements_per_key.value_or(score_passes_of(convention, pipeline));
  return forward_terms(shape, totals, pipeline, {.qo = convention.count_qo, .kv = true}, counting);
}

Status check_mask(const Mask& mask, const Convention& convention) {
  if (mask.window_left < -1 || mask.window_right < -1) {
    return Status::invalid_argument("window",
                                    fmt::format("{} {}", mask.window_left, mask.window_right),
                                    "-1 (unbounded) and up");
  }
  const bool causal = mask.window_left == -1 && mask.window_right == 0;
  if (convention.causal_pairs == CausalPairs::half && !mask.is_none() && !causal) {
    return Status::invalid_argument(
        "window", fmt::format("{} {}", mask.window_left, mask.window_right),
        "none or -1 0 (causal) under causal_pairs = half; any under causal_pairs = exact");
  }
  return Status::ok();
}

Result<AttentionShape> shape_of(const AttentionProblem& p, std::int64_t splits) {
  const std::int64_t heads_kv = heads_kv_of(p.heads_q, p.heads_kv);
  const std::int64_t head_dim_v = p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
  const Status checked = first_error(
      check_heads(p.heads_q, heads_kv), check_range("head_dim", p.head_dim, 1, kMaxHeadDim),
      check_range("head_dim_v", head_dim_v, 1, kMaxHeadDim), check_element("dtype", p.dtype),
      check_element("kv_dtype", p.kv_dtype.value_or(p.dtype)),
      check_range("splits", splits, 1, kMaxLength));
  if (!checked) {
    return checked;
  }
  AttentionShape shape;
  shape.heads_q = static_cast<double>(p.heads_q);
  shape.heads_kv = static_cast<double>(heads_kv);
  shape.head_dim = static_cast<double>(p.head_dim);
  shape.head_dim_v = static_cast<double>(head_dim_v);
  shape.dtype = p.dtype;
  shape.kv_dtype = p.kv_dtype.value_or(p.dtype);
  for (const double dim : {shape.head_dim, shape.head_dim_v}) {
    shape.scale_bytes_per_key +=
        scale_bytes_per_row(dim, shape.kv_dtype, kDefaultScaleBlock, kDefaultScaleBytes);
  }
  shape.splits = static_cast<double>(splits);
  return shape;
}

double scale_bytes_per_row(double dim, DType dtype, std::int64_t scale_block, double scale_bytes) {
  const double block = scale_block >= 0       ? static_cast<double>(scale_block)
                       : dtype == DType::int8 ? dim
                       : dtype == DType::int4 ? 32.0
                                              : 0.0;
  const double each = scale_bytes >= 0 ? scale_bytes : dtype == DType::int8 ? 4.0 : 2.0;
  return block == 0 ? 0 : std::ceil(dim / block) * each;
}

}  // namespace rafter::model
