// Models and memory.
#include <algorithm>

#include "cli/golden_rules.h"

namespace rafter::test {
namespace {

using E = const Entry&;

/// Prefill; full attention unless the entry says causal.
const Json& prefill(E e, const Flags& changes = {}) {
  Flags flags = e.model();
  flags["--causal"] = e.has("causal") ? e.input("causal").dump() : "false";
  flags.erase("--count-qo");
  return ask("explain model prefill", with(flags, changes));
}
/// Decode; without a length only the weights count.
Flags decode_flags(E e) {
  Flags flags = e.model();
  flags.emplace("--seqlen", "0");
  if (e.has("memory_floor_seconds")) {
    flags["--memory-floor-s"] = e.input("memory_floor_seconds").dump();
    flags["--memory-floor-dtype"] = Entry::dtype_of_bytes(
        e.has("baseline_bytes_per_param") ? e.number("baseline_bytes_per_param") : 2);
  }
  return flags;
}
const Json& decode(E e, const Flags& changes = {}) {
  return ask("explain model decode", with(decode_flags(e), changes));
}
/// As many sequences as the memory holds.
const Json& full_decode(E e) { return decode(e, {{"--batch", "max"}}); }
/// Without the entry's quantisation and graph: what it is compared with.
const Json& eager(E e) {
  return ask("explain model decode", without(decode_flags(e), {"--weight-dtype"}));
}
const Json& graph(E e, bool quantised) {
  Flags flags = with(decode_flags(e), {{"--graph", "true"}});
  return ask("explain model decode", quantised ? flags : without(flags, {"--weight-dtype"}));
}
/// The launches of a captured graph are the entry's one submission.
const Json& as_told(E e) { return e.has("submission_seconds") ? graph(e, true) : decode(e); }

const Json& memory(E e, const std::string& pipeline) {
  return ask("explain memory", with(e.memory(), {{"--pipeline", pipeline}}));
}
double longest(E e, const std::string& pipeline) {
  return figure(memory(e, pipeline), "max_seqlen");
}
double scores(E e) { return figure(memory(e, "unfused").at("terms"), "scores"); }

const Json& attention(E e, const std::string& pipeline) {
  return ask("explain attention", with(e.attention(), {{"--impl", pipeline}}));
}

const Json& prefill_of(E e) { return prefill(e); }
const Json& decode_of(E e) { return decode(e); }

double gain_at(E e, const Flags& changes) {
  return figure(prefill(e, changes), "gain_over_unfused");
}

std::vector<GoldenRule> prefills() {
  return {
      number_of("l-9-5-gemm-flops-.*|l-ex3-gemm-coefficient", prefill_of, "gemm_flops"),
      number_of("l-9-5-attn-flops-.*|l-key-09-attn-flops", prefill_of, "attention_flops"),
      number_of("l-9-5-total-flops-4k|l-key-09-total-flops", prefill_of, "flops"),
      number_of("l-9-5-attn-share-.*", prefill_of, "attention_share"),
      number_of("l-9-5-attn-time-.*|l-ex2-attn-time|l-ex3-attn-unfused", prefill_of,
                "attention_time_s"),
      number_of("l-9-5-gemm-time-32k|l-ex2-gemm-time|l-ex3-gemm-time", prefill_of, "gemm_time_s"),
      number_of("l-9-5-prefill-fused-.*|l-9-5-prefill-129|l-9-9-prefill|l-key-10-prefill|"
                "l-ex2-prefill|l-ex2-prefill-unfused|l-ex3-total-unfused",
                prefill_of, "time_s"),
      number_of("l-9-5-prefill-gain-.*", prefill_of, "gain_over_unfused"),
      {"l-9-5-amdahl-.*|l-key-09-gain-32k",
       [](E e) -> Answer { return figure(prefill(e).at("amdahl"), "gain"); }},
      {"l-9-5-gain-if-4-6-4k",  // attention at the roof, products at the entry's efficiency
       [](E e) -> Answer {
         return gain_at(e, {{"--attention-compute-efficiency", "1"}});
       }},
      {"l-9-5-gain-rises-with-s",
       [](E e) -> Answer {
         std::vector<double> gains;
         for (const double s : e.values()) {
           gains.push_back(
               gain_at(e, {{"--seqlen", std::to_string(static_cast<std::int64_t>(s))}}));
         }
         return increasing(gains);
       }},
      {"l-ex2-captured",
       [](E e) -> Answer {
         const double unfused = figure(prefill(e, {{"--pipeline", "unfused"}}), "time_s");
         const double cheap = figure(prefill(e, {{"--pipeline", "half-fused"}}), "time_s");
         const double fused = figure(prefill(e, {{"--pipeline", "fused"}}), "time_s");
         return (unfused - cheap) / (unfused - fused);
       }},
      {"l-ex3-under-1-7", [](E e) -> Answer { return gain_at(e, {}) < e.number("threshold"); }},
      number_of("l-ex3-equal-length", prefill_of, "attention_equals_gemm_seqlen"),
      {"l-ex3-lecture2-crossover",
       [](E e) -> Answer {
         return figure(prefill(e, {{"--d-model", e.input("values")[0].dump()},
                                   {"--d-ff", e.input("values")[1].dump()}}),
                       "attention_equals_layer_gemm_seqlen");
       }},
      {"l-ex3-claim-above-2",
       [](E e) -> Answer {
         return figure(prefill(e, {{"--gain", e.input("threshold").dump()}}), "gain_seqlen");
       }},
  };
}

std::vector<GoldenRule> decodes() {
  return {
      number_of("l-9-3-weight-bytes|l-9-9-weights", decode_of, "weight_bytes"),
      number_of("l-9-8-kv-per-token-.*", decode_of, "kv_bytes_per_token"),
      number_of("l-9-8-step-batch-.*", decode_of, "max_batch"),
      number_of("l-9-8-batched-step-(gqa8|mha)", full_decode, "intensity_flop_per_byte"),
      {"l-9-8-batched-step-verdict",
       [](E e) -> Answer { return full_decode(e).at("verdict").get<std::string>(); }},
      number_of("l-9-9-decode-step|l-la-step", full_decode, "time_s"),
      {"l-la-spike",
       [](E e) -> Answer {
         const double step = figure(full_decode(e), "time_s");
         return (figure(prefill(e), "time_s") + step) / step;
       }},
      number_of("l-9-8-launches-per-layer", decode_of, "launches_per_layer"),
      number_of("l-9-8-dispatch-time|l-key-13-dispatch", decode_of, "dispatch_time_s"),
      number_of("l-9-8-decode-floor|l-key-13-floor|l-ex4-c-floor", decode_of, "weights_time_s"),
      number_of("l-9-8-step-dispatch-fraction|l-key-13-fraction|l-ex4-[abc]-fraction", as_told,
                "dispatch_fraction"),
      {"l-ds5-forty-percent",
       [](E e) -> Answer {
         return figure(decode(e), "dispatch_fraction") < e.number("threshold");
       }},
      {"l-9-8-wall-.*",
       [](E e) -> Answer {
         const std::string wall = decode(e).at("wall").get<std::string>();
         return wall == "bandwidth" ? "memory" : wall;
       }},
      number_of("l-9-8-step-time|l-ex4-(a|b|c|bc)-step", as_told, "time_s"),
      {"l-ex4-b-gain",
       [](E e) -> Answer {
         return figure(eager(e), "time_s") / figure(graph(e, false), "time_s");
       }},
      {"l-ex4-c-gain",
       [](E e) -> Answer { return figure(eager(e), "time_s") / figure(decode(e), "time_s"); }},
      {"l-ex4-bc-gain",
       [](E e) -> Answer { return figure(eager(e), "time_s") / figure(graph(e, true), "time_s"); }},
      {"l-ex4-c-supposed",
       [](E e) -> Answer {
         const std::string base = Entry::dtype_of_bytes(e.number("baseline_bytes_per_param"));
         return figure(decode(e, {{"--weight-dtype", base}}), "weight_bytes") /
                figure(decode(e), "weight_bytes");
       }},
      {"l-ex4-most-misleading",
       [](E e) -> Answer {
         const std::vector<std::pair<double, std::string>> fractions = {
             {figure(eager(e), "dispatch_fraction"), "a"},
             {figure(graph(e, false), "dispatch_fraction"), "b"},
             {figure(decode(e), "dispatch_fraction"), "c"}};
         return std::max_element(fractions.begin(), fractions.end())->second;
       }},
  };
}

std::vector<GoldenRule> memories() {
  return {
      {"l-9-5-score-layer-.*|l-9-6-store-one-way|l-key-05-score-head-4k|l-key-06-score-layer-32k|"
       "s-e1-layer",
       [](E e) -> Answer { return figure(attention(e, "unfused"), "score_matrix_bytes"); }},
      {"l-9-5-flash-footprint-.*|l-ex5-c-coefficient",
       [](E e) -> Answer { return figure(attention(e, "fused"), "footprint_bytes"); }},
      {"l-9-5-flash-ratio-32k|l-key-07-flash-ratio",
       [](E e) -> Answer {
         return figure(attention(e, "fused"), "score_matrix_bytes") /
                figure(attention(e, "fused"), "footprint_bytes");
       }},
      {"s-e1-pairs", [](E e) -> Answer { return figure(attention(e, "fused"), "pairs"); }},
      {"l-9-5-fits-at-4k|l-key-06-does-not-fit|s-e1-impossible",
       [](E e) -> Answer { return memory(e, "unfused").at("fits").get<bool>(); }},
      {"s-e1-80-layers|l-ex5-all-layers-coefficient", [](E e) -> Answer { return scores(e); }},
      {"s-e1-share",
       [](E e) -> Answer { return scores(e) / figure(memory(e, "unfused"), "capacity_bytes"); }},
      {"l-ex5-b|l-ex5-inference-cap|l-ex5-training-cap",
       [](E e) -> Answer { return longest(e, "unfused"); }},
      {"l-ex5-c", [](E e) -> Answer { return longest(e, "fused"); }},
      {"l-ex5-c-orders", [](E e) -> Answer { return longest(e, "fused") / longest(e, "unfused"); }},
  };
}

}  // namespace

std::vector<GoldenRule> model_rules() {
  std::vector<GoldenRule> all;
  for (const auto& part : {prefills(), decodes(), memories()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace rafter::test
