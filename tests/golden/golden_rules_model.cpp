// Models and memory.
#include <algorithm>

#include "golden/golden_rules.h"

namespace rafter::golden {
namespace {

ModelBudget budget_of(const Entry& e, const ModelStep& step) {
  return must(model_budget(step, e.device(), e.convention()));
}
ModelBudget prefill(const Entry& e) { return budget_of(e, e.step(Phase::prefill)); }
ModelBudget prefill_by(const Entry& e, Pipeline pipeline) {
  ModelStep step = e.step(Phase::prefill);
  step.pipeline = pipeline;
  return budget_of(e, step);
}
ModelBudget decode(const Entry& e) { return budget_of(e, e.step(Phase::decode)); }

/// As many sequences as the memory holds.
ModelBudget full_decode(const Entry& e) {
  ModelStep step = e.step(Phase::decode);
  step.batch = 0;
  return budget_of(e, step);
}

/// A decode step without the entry's quantisation and graph: what it is compared with.
ModelBudget eager(const Entry& e) {
  ModelStep step = e.step(Phase::decode);
  step.weight_dtype.reset();
  return budget_of(e, step);
}
ModelBudget graph(const Entry& e, bool quantised) {
  ModelStep step = e.step(Phase::decode);
  step.graph = true;
  if (!quantised) {
    step.weight_dtype.reset();
  }
  return budget_of(e, step);
}

/// The launches of a captured graph are the entry's one submission.
ModelBudget as_told(const Entry& e) {
  return e.has("submission_seconds") ? graph(e, true) : decode(e);
}

MemoryUse use(const Entry& e, Pipeline pipeline) {
  const DeviceSpec device = e.device();
  Convention c = e.convention();
  c.capacity = e.has("hbm_bytes") ? Capacity::total : Capacity::usable;
  c.layers_live = e.number_or("layers", 1);
  return must(memory_use(e.memory(pipeline), e.whole_or("seq_len", 1), &device, c));
}

double longest(const Entry& e, Pipeline pipeline) {
  const DeviceSpec device = e.device();
  return static_cast<double>(
      must(plan_memory(e.memory(pipeline), &device, e.convention())).max_seqlen);
}

std::string word(Wall wall) { return wall == Wall::bandwidth ? "memory" : to_string(wall); }

}  // namespace

std::vector<Rule> model_rules() {
  using E = const Entry&;
  return {
      // Prefill.
      {"l-9-5-gemm-flops-.*|l-ex3-gemm-coefficient",
       [](E e) -> Answer { return prefill(e).gemm_flops; }},
      {"l-9-5-attn-flops-.*|l-key-09-attn-flops",
       [](E e) -> Answer { return prefill(e).attention_flops; }},
      {"l-9-5-total-flops-4k|l-key-09-total-flops", [](E e) -> Answer { return prefill(e).flops; }},
      {"l-9-5-attn-share-.*", [](E e) -> Answer { return prefill(e).attention_share; }},
      {"l-9-5-attn-time-.*|l-ex2-attn-time|l-ex3-attn-unfused",
       [](E e) -> Answer { return prefill(e).attention_time_s; }},
      {"l-9-5-gemm-time-32k|l-ex2-gemm-time|l-ex3-gemm-time",
       [](E e) -> Answer { return prefill(e).gemm_time_s; }},
      {"l-9-5-prefill-fused-.*|l-9-5-prefill-129|l-9-9-prefill|l-key-10-prefill|l-ex2-prefill|"
       "l-ex2-prefill-unfused|l-ex3-total-unfused",
       [](E e) -> Answer { return prefill(e).time_s; }},
      {"l-9-5-prefill-gain-.*", [](E e) -> Answer { return prefill(e).gain_over_unfused; }},
      {"l-9-5-amdahl-.*|l-key-09-gain-32k", [](E e) -> Answer { return prefill(e).amdahl.gain; }},
      {"l-9-5-gain-if-4-6-4k",
       [](E e) -> Answer {
         Convention c = e.convention();
         c.score_passes.reset();
         c.attention_compute_efficiency = 1;  // attention at the roof, products at the entry's 50%
         return must(model_budget(e.step(Phase::prefill), e.device(), c)).gain_over_unfused;
       }},
      {"l-9-5-gain-rises-with-s",
       [](E e) -> Answer {
         std::vector<double> gains;
         for (const double s : e.values()) {
           ModelStep step = e.step(Phase::prefill);
           step.seqlen = static_cast<std::int64_t>(s);
           gains.push_back(budget_of(e, step).gain_over_unfused);
         }
         return std::ranges::adjacent_find(gains, std::greater_equal<>{}) == gains.end();
       }},
      {"l-ex2-captured",
       [](E e) -> Answer {
         const double unfused = prefill_by(e, Pipeline::unfused).time_s;
         return (unfused - prefill_by(e, Pipeline::half_fused).time_s) /
                (unfused - prefill_by(e, Pipeline::fused).time_s);
       }},
      {"l-ex3-under-1-7",
       [](E e) -> Answer { return prefill(e).gain_over_unfused < e.number("threshold"); }},
      {"l-ex3-equal-length",
       [](E e) -> Answer {
         return must(model_lengths(e.model(), e.convention())).attention_equals_gemm_seqlen;
       }},
      {"l-ex3-lecture2-crossover",
       [](E e) -> Answer {
         ModelConfig m = e.model();
         m.hidden_size = static_cast<std::int64_t>(e.values()[0]);
         m.intermediate_size = static_cast<std::int64_t>(e.values()[1]);
         return must(model_lengths(m, e.convention())).attention_equals_layer_gemm_seqlen;
       }},
      {"l-ex3-claim-above-2",
       [](E e) -> Answer {
         return *must(seqlen_for_gain(e.step(Phase::prefill), e.number("threshold"), e.device(),
                                      e.convention()));
       }},

      // Decode.
      {"l-9-3-weight-bytes|l-9-9-weights", [](E e) -> Answer { return decode(e).weight_bytes; }},
      {"l-9-8-kv-per-token-.*", [](E e) -> Answer { return decode(e).kv_bytes_per_token; }},
      {"l-9-8-step-batch-.*", [](E e) -> Answer { return *decode(e).max_batch; }},
      {"l-9-8-batched-step-(gqa8|mha)",
       [](E e) -> Answer { return full_decode(e).intensity_flop_per_byte; }},
      {"l-9-8-batched-step-verdict", [](E e) -> Answer { return full_decode(e).verdict(); }},
      {"l-9-9-decode-step|l-la-step", [](E e) -> Answer { return full_decode(e).time_s; }},
      {"l-la-spike",
       [](E e) -> Answer {
         return (prefill(e).time_s + full_decode(e).time_s) / full_decode(e).time_s;
       }},
      {"l-9-8-launches-per-layer", [](E e) -> Answer { return decode(e).launches_per_layer; }},
      {"l-9-8-dispatch-time|l-key-13-dispatch",
       [](E e) -> Answer { return decode(e).dispatch_time_s; }},
      {"l-9-8-decode-floor|l-key-13-floor|l-ex4-c-floor",
       [](E e) -> Answer { return decode(e).weights_time_s; }},
      {"l-9-8-step-dispatch-fraction|l-key-13-fraction|l-ex4-a-fraction|l-ex4-b-fraction|"
       "l-ex4-c-fraction",
       [](E e) -> Answer { return as_told(e).dispatch_fraction; }},
      {"l-ds5-forty-percent",
       [](E e) -> Answer { return decode(e).dispatch_fraction < e.number("threshold"); }},
      {"l-9-8-wall-.*", [](E e) -> Answer { return word(decode(e).wall); }},
      // The floor is stated in whole milliseconds and the products' own time is far below it.
      {"l-9-8-step-time|l-ex4-(a|b|c|bc)-step", [](E e) -> Answer { return as_told(e).time_s; }},
      {"l-ex4-b-gain", [](E e) -> Answer { return eager(e).time_s / graph(e, false).time_s; }},
      {"l-ex4-c-gain", [](E e) -> Answer { return eager(e).time_s / decode(e).time_s; }},
      {"l-ex4-bc-gain", [](E e) -> Answer { return eager(e).time_s / graph(e, true).time_s; }},
      {"l-ex4-c-supposed",
       [](E e) -> Answer { return eager(e).weight_bytes / decode(e).weight_bytes; }},
      {"l-ex4-most-misleading",
       [](E e) -> Answer {
         const std::vector<std::pair<double, std::string>> fractions = {
             {eager(e).dispatch_fraction, "a"},
             {graph(e, false).dispatch_fraction, "b"},
             {decode(e).dispatch_fraction, "c"}};
         return std::ranges::max(fractions).second;
       }},

      // Memory.
      {"l-9-5-score-layer-.*|l-9-6-store-one-way|l-key-05-score-head-4k|l-key-06-score-layer-32k|"
       "s-e1-layer",
       [](E e) -> Answer {
         return must(attention_cost(e.problem(), Pipeline::unfused, Pass::forward, e.convention()))
             .score_matrix_bytes;
       }},
      {"l-9-5-flash-footprint-.*|l-ex5-c-coefficient",
       [](E e) -> Answer {
         return must(attention_cost(e.problem(), Pipeline::fused, Pass::forward, e.convention()))
             .footprint_bytes;
       }},
      {"l-9-5-flash-ratio-32k|l-key-07-flash-ratio",
       [](E e) -> Answer {
         const Cost c =
             must(attention_cost(e.problem(), Pipeline::fused, Pass::forward, e.convention()));
         return c.score_matrix_bytes / c.footprint_bytes;
       }},
      {"s-e1-pairs",
       [](E e) -> Answer {
         return must(attention_cost(e.problem(), Pipeline::fused, Pass::forward, e.convention()))
             .pairs;
       }},
      {"l-9-5-fits-at-4k|l-key-06-does-not-fit",
       [](E e) -> Answer { return use(e, Pipeline::unfused).fits; }},
      {"s-e1-impossible",
       [](E e) -> Answer {
         const MemoryUse u = use(e, Pipeline::unfused);
         return u.fits || u.terms[0].bytes <= u.capacity_bytes;
       }},
      {"s-e1-80-layers|l-ex5-all-layers-coefficient",
       [](E e) -> Answer {
         const MemoryUse u = use(e, Pipeline::unfused);
         return std::ranges::find(u.terms, "scores", &ByteTerm::name)->bytes;
       }},
      {"s-e1-share",
       [](E e) -> Answer {
         const MemoryUse u = use(e, Pipeline::unfused);
         return std::ranges::find(u.terms, "scores", &ByteTerm::name)->bytes / u.capacity_bytes;
       }},
      {"l-ex5-b|l-ex5-inference-cap|l-ex5-training-cap",
       [](E e) -> Answer { return longest(e, Pipeline::unfused); }},
      {"l-ex5-c", [](E e) -> Answer { return longest(e, Pipeline::fused); }},
      {"l-ex5-c-orders",
       [](E e) -> Answer { return longest(e, Pipeline::fused) / longest(e, Pipeline::unfused); }},
  };
}

}  // namespace rafter::golden
