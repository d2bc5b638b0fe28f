#include <algorithm>
#include <cmath>

#include "model/attention_terms.h"
#include "model/check.h"

namespace rafter {

using model::AttentionShape;
using model::AttentionTotals;
using model::check_range;
using model::first_error;
using model::kMaxLength;

namespace {

constexpr double kIndexBytes = 4;  // page tables and lengths are i32

Status check_sequence(const SequenceLength& s) {
  return first_error(check_range("seqlen_q", s.seqlen_q, 0, kMaxLength),
                     check_range("seqlen_kv", s.seqlen_kv, 0, kMaxLength));
}

/// One sequence of the problem, with what its layout adds.
AttentionTotals sequence_totals(const AttentionProblem& p, const AttentionShape& shape,
                                const SequenceLength& s, const Convention& convention) {
  const auto keys = static_cast<double>(s.seqlen_kv);
  AttentionTotals t =
      model::totals_of(shape, static_cast<double>(s.seqlen_q), keys, p.mask, convention);
  if (p.layout == Layout::packed) {
    t.index_bytes = 2 * kIndexBytes;  // its ends in cu_seqlens_q and cu_seqlens_kv
  } else if (p.seqused_kv || p.layout == Layout::paged) {
    t.index_bytes = kIndexBytes;
  }
  if (p.layout == Layout::paged) {
    t.page_table_bytes = std::ceil(keys / static_cast<double>(p.page_size)) * kIndexBytes;
  }
  return t;
}

Result<Cost> cost_of(const AttentionShape& shape, const AttentionTotals& totals, Pipeline pipeline,
                     Pass pass, const Convention& convention) {
  const model::Counted counted = model::counted_of(convention, pipeline);
  const model::Counted unfused = model::counted_of(convention, Pipeline::unfused);
  Convention own_passes = convention;  // an override is the pipeline's, not the comparison's
  own_passes.score_passes = own_passes.backward_score_passes = std::nullopt;
  if (pass == Pass::forward) {
    Cost cost = model::forward_terms(shape, totals, pipeline, counted, convention);
    cost.unfused_bytes =
        pipeline == Pipeline::unfused && !convention.score_passes
            ? cost.bytes
            : model::forward_terms(shape, totals, Pipeline::unfused, unfused, own_passes).bytes;
    return cost;
  }
  if (pipeline == Pipeline::split_kv) {
    return Status::unsupported("pipeline", "split-kv for the backward pass",
                               "unfused, half-fused, fused");
  }
  Cost cost = model::backward_terms(shape, totals, pipeline, counted, convention);
  cost.unfused_bytes =
      model::backward_terms(shape, totals, Pipeline::unfused, unfused, own_passes).bytes;
  return cost;
}

Status check_layout(const AttentionProblem& p) {
  if (p.layout == Layout::paged) {
    return check_range("page_size", p.page_size, 1, kMaxLength);
  }
  return Status::ok();
}

/// The most work that a packed problem's rows can hold: full-length sequences, then the rest.
/// (Pairs are convex in the lengths, so whole sequences beat any other division.)
AttentionTotals packed_totals(const AttentionProblem& p, const AttentionShape& shape,
                              const Convention& convention) {
  AttentionTotals sum;
  const std::int64_t whole = std::min({p.batch, p.seqlen_q > 0 ? p.total_q / p.seqlen_q : p.batch,
                                       p.seqlen_kv > 0 ? p.total_kv / p.seqlen_kv : p.batch});
  sum.add(sequence_totals(p, shape, {p.seqlen_q, p.seqlen_kv}, convention),
          static_cast<double>(whole));
  if (whole < p.batch) {
    const SequenceLength rest = {std::min(p.seqlen_q, p.total_q - whole * p.seqlen_q),
                                 std::min(p.seqlen_kv, p.total_kv - whole * p.seqlen_kv)};
    sum.add(sequence_totals(p, shape, rest, convention), 1);
  }
  return sum;
}

}  // namespace

Result<Cost> attention_cost(const AttentionProblem& problem, Pipeline pipeline, Pass pass,
                            const Convention& convention, std::int64_t splits) {
  const Result<AttentionShape> shape = model::shape_of(problem, splits);
  const Status checked = first_error(
      shape.status(), convention.validate(), model::check_mask(problem.mask, convention),
      check_range("batch", problem.batch, 0, kMaxLength),
      check_sequence({problem.seqlen_q, problem.seqlen_kv}), check_layout(problem));
  if (!checked) {
    return checked;
  }
  AttentionTotals totals;
  if (problem.layout == Layout::packed) {
    const Status packed = first_error(check_range("total_q", problem.total_q, 0, kMaxLength),
                                      check_range("total_kv", problem.total_kv, 0, kMaxLength));
    if (!packed) {
      return packed;
    }
    totals = packed_totals(problem, *shape, convention);
  } else {
    totals.add(sequence_totals(problem, *shape, {problem.seqlen_q, problem.seqlen_kv}, convention),
               static_cast<double>(problem.batch));
  }
  return cost_of(*shape, totals, pipeline, pass, convention);
}

Result<Cost> attention_cost(const AttentionProblem& problem,
                            std::span<const SequenceLength> sequences, Pipeline pipeline, Pass pass,
                            const Convention& convention, std::int64_t splits) {
  const Result<AttentionShape> shape = model::shape_of(problem, splits);
  const Status checked =
      first_error(shape.status(), convention.validate(),
                  model::check_mask(problem.mask, convention), check_layout(problem));
  if (!checked) {
    return checked;
  }
  AttentionTotals totals;
  for (const SequenceLength& sequence : sequences) {
    if (Status s = check_sequence(sequence); !s) {
      return s;
    }
    totals.add(sequence_totals(problem, *shape, sequence, convention), 1);
  }
  return cost_of(*shape, totals, pipeline, pass, convention);
}

Result<double> visible_pairs(const AttentionProblem& problem, const Convention& convention) {
  const Result<AttentionShape> shape = model::shape_of(problem, 1);
  const Status checked = first_error(shape.status(), convention.validate(),
                                     model::check_mask(problem.mask, convention),
                                     check_sequence({problem.seqlen_q, problem.seqlen_kv}));
  if (!checked) {
    return checked;
  }
  return model::totals_of(*shape, static_cast<double>(problem.seqlen_q),
                          static_cast<double>(problem.seqlen_kv), problem.mask, convention)
      .pairs;
}

Result<Cost> decode_cost(const DecodeProblem& p, Pipeline pipeline, const Convention& convention) {
  AttentionProblem as_attention;
  as_attention.heads_q = p.heads_q;
  as_attention.heads_kv = p.heads_kv;
  as_attention.head_dim = p.head_dim;
  as_attention.head_dim_v = p.head_dim_v;
  as_attention.dtype = p.dtype;
  Result<AttentionShape> made = model::shape_of(as_attention, p.splits);
  const Status checked = first_error(
      made.status(), convention.validate(), check_range("batch", p.batch, 0, kMaxLength),
      check_sequence({p.seqlen_q, p.seqlen_kv}),
      model::check_element("kv_dtype", p.kv_dtype.value_or(p.dtype)),
      check_range("kv_scale_block", p.kv_scale_block, -1, model::kMaxHeadDim),
      p.kv_scale_bytes == model::kDefaultScaleBytes
          ? Status::ok()
          : model::check_not_negative("kv_scale_bytes", p.kv_scale_bytes),
      check_range("page_size", p.page_size, 0, kMaxLength),
      check_range("splits", p.splits, 1, std::max<std::int64_t>(1, p.seqlen_kv)));
  if (!checked) {
    return checked;
  }
  if (p.splits > 1 && pipeline != Pipeline::split_kv) {
    return Status::invalid_argument("splits", std::to_string(p.splits),
                                    fmt::format("1 with pipeline = {}", to_string(pipeline)));
  }
  AttentionShape& shape = *made;
  shape.kv_dtype = p.kv_dtype.value_or(p.dtype);
  shape.scale_bytes_per_key = model::scale_bytes_per_row(shape.head_dim, shape.kv_dtype,
                                                         p.kv_scale_block, p.kv_scale_bytes) +
                              model::scale_bytes_per_row(shape.head_dim_v, shape.kv_dtype,
                                                         p.kv_scale_block, p.kv_scale_bytes);
  const auto keys = static_cast<double>(p.seqlen_kv);
  AttentionTotals one =
      model::totals_of(shape, static_cast<double>(p.seqlen_q), keys, Mask::none(), convention);
  if (p.page_size > 0) {
    one.page_table_bytes = std::ceil(keys / static_cast<double>(p.page_size)) * kIndexBytes;
    one.index_bytes = kIndexBytes;
  }
  AttentionTotals totals;
  totals.add(one, static_cast<double>(p.batch));
  Cost cost = model::decode_terms(shape, totals, pipeline, convention);
  Convention own_passes = convention;
  own_passes.score_passes = std::nullopt;
  cost.unfused_bytes = model::decode_terms(shape, totals, Pipeline::unfused, own_passes).bytes;
  return cost;
}

Result<double> sm_fill(const DecodeProblem& p, const DeviceSpec& device) {
  const std::int64_t heads_kv = model::heads_kv_of(p.heads_q, p.heads_kv);
  const Status checked = first_error(model::check_heads(p.heads_q, heads_kv),
                                     check_range("batch", p.batch, 0, kMaxLength),
                                     check_range("splits", p.splits, 1, kMaxLength));
  if (!checked) {
    return checked;
  }
  const Result<double> sms = device.value("sm_count");
  if (!sms) {
    return sms.status();
  }
  return static_cast<double>(p.batch) * static_cast<double>(heads_kv) *
         static_cast<double>(p.splits) / *sms;
}

}  // namespace rafter
