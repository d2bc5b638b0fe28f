// Attention, decode, crossovers, recompute against store.
#include <algorithm>

#include "cli/golden_rules.h"

namespace rafter::test {
namespace {

using E = const Entry&;

const Json& attention(E e, const Flags& changes = {}) {
  return ask("explain attention", with(e.attention(), changes));
}
const Json& attention_at(E e, double seqlen, const Flags& changes = {}) {
  return attention(
      e, with({{"--seqlen", std::to_string(static_cast<std::int64_t>(seqlen))}}, changes));
}
const Json& crossover(E e, const Flags& changes = {}) {
  return ask("explain crossover", without(with(e.attention(), changes), {"--seqlen"}));
}
const Json& recompute(E e) { return ask("explain recompute", without(e.attention(), {"--impl"})); }
const Json& decode(E e, const Flags& changes = {}) {
  return ask("explain decode", with(e.decode(), changes));
}
const Json& ridge(E e) { return ask("explain ridge", with(e.counting(), {})); }

/// The same attention by another pipeline, which passes the scores as it does.
const Json& by_pipeline(E e, const std::string& pipeline) {
  Flags flags = without(e.attention(), {"--impl", "--score-passes", "--count-qkvo"});
  flags["--pipeline"] = pipeline;
  return ask("explain attention", flags);
}

double intensity(const Json& answer) { return figure(answer, "intensity_flop_per_byte"); }
double term(const Json& answer, const char* name) {
  return figure(answer.at("bytes_by_term"), name);
}
const Json& kernel(const Json& answer, const std::string& name) {
  for (const Json& each : answer.at("kernels")) {
    if (each.at("name") == name) {
      return each;
    }
  }
  throw std::runtime_error("no kernel " + name);
}
double elements(const Json& answer) {
  double sum = 0;
  for (const Json& each : answer.at("kernels")) {
    sum += figure(each, "elements");
  }
  return sum;
}
std::string verdict(const Json& answer) { return answer.at("verdict").get<std::string>(); }

const Json& attention_of(E e) { return attention(e); }
const Json& crossover_of(E e) { return crossover(e); }
const Json& decode_of(E e) { return decode(e); }

std::vector<GoldenRule> rates_and_costs() {
  return {
      number_of(".*-ridge-h100|l-ex1-ridge-a100|l-rg-ridge", ridge, "ridge_flop_per_byte"),
      number_of("l-9-6-recompute-rate|l-key-10-rate", ridge, "achieved_flop_per_s"),
      number_of("l-intro-peak-fraction|l-key-02-ceiling-a100-fraction|l-ex2-ceiling-fraction",
                attention_of, "peak_fraction"),
      number_of("l-9-2-fused-ridge-multiple-4k", attention_of, "ridge_multiple"),
      number_of("l-9-2-unfused-ceiling-h100|l-ds1-fused-attainable-512|l-key-02-ceiling-h100|"
                "s-d4-fused-rate|x-r-unfused-lecture-convention",
                attention_of, "attainable_flop_per_s"),
      {"l-ds1-ceiling-no-fusion",
       [](E e) -> Answer {
         const Json& fused = by_pipeline(e, "fused");
         for (const Json& ceiling : fused.at("ceilings")) {
           if (ceiling.at("name") == "no fusion") {
             return figure(ceiling, "flop_per_s");
           }
         }
         throw std::runtime_error("no such ceiling");
       }},
      number_of("s-d4-fused-roof", attention_of, "bandwidth_roof_flop_per_s"),
      number_of("s-d4-unfused-rate-limit", crossover_of, "attainable_limit_flop_per_s"),
      {"l-9-2-softmax-flop-share|s-a2-share(-about)?",
       [](E e) -> Answer {
         return figure(attention(e), "softmax_flops") / figure(attention(e), "flops");
       }},
      {"l-9-2-softmax-byte-share",
       [](E e) -> Answer {
         return figure(kernel(attention(e), "softmax"), "bytes") / figure(attention(e), "bytes");
       }},
      number_of("l-9-2-total-flops-coefficient|s-a1-total|s-a2-gemm|s-c2-numerator|s-d4-flops",
                attention_of, "flops"),
      number_of("s-a1-softmax|s-a2-softmax", attention_of, "softmax_flops"),
      number_of("l-9-2-score-traffic-coefficient|l-9-2-fused-bytes-coefficient|"
                "l-ex2-traffic-coefficient|s-b1-bytes-8192|s-b2-bytes-8192",
                attention_of, "bytes"),
      {"l-ex2-saved-attn-coefficient",
       [](E e) -> Answer {
         return figure(by_pipeline(e, "unfused"), "bytes") - figure(attention(e), "bytes");
       }},
      {"l-9-2-qkv-bytes-coefficient",
       [](E e) -> Answer {
         return term(attention(e), "q") + term(attention(e), "k") + term(attention(e), "v");
       }},
      {"l-9-2-o-bytes-coefficient", [](E e) -> Answer { return term(attention(e), "o"); }},
      {"s-b[12]-bytes-linear",
       [](E e) -> Answer {
         const Json& a = attention_at(e, 4096);
         return (term(a, "q") + term(a, "k") + term(a, "v") + term(a, "o")) / (4096.0 * 128);
       }},
      {"s-b1-bytes-quadratic",
       [](E e) -> Answer { return term(attention_at(e, 4096), "scores") / (4096.0 * 4096); }},
      {"s-b1-elements-(qk|softmax|pv)",
       [](E e) -> Answer {
         return figure(kernel(by_pipeline(e, "unfused"), e.id().substr(14)), "elements");
       }},
      {"s-b1-elements-total", [](E e) -> Answer { return elements(by_pipeline(e, "unfused")); }},
      {"s-b1-rows-sum",
       [](E e) -> Answer {
         const double s = e.number("seq_len");
         const double d = e.number("head_dim");
         return elements(by_pipeline(e, "unfused")) == 4 * s * d + 4 * s * s;
       }},
      {"s-b3-ratio-.*",
       [](E e) -> Answer {
         return figure(attention(e), "bytes") / figure(by_pipeline(e, "fused"), "bytes");
       }},
      {"s-b3-grows",
       [](E e) -> Answer {
         std::vector<double> ratios;
         for (double s = 1; s <= (1 << 30); s *= 64) {
           ratios.push_back(
               figure(attention_at(e, s), "bytes") /
               figure(attention_at(e, s, {{"--impl", "fused"}, {"--score-passes", "0"}}), "bytes"));
         }
         return increasing(ratios) && ratios.back() > 1e6;
       }},
      {"l-rg-hbm-reduction-4k|l-9-4-byte-reduction-4k",
       [](E e) -> Answer { return figure(by_pipeline(e, "fused"), "bytes_unfused_over_this"); }},
      {"l-9-4-flop-increase",
       [](E e) -> Answer {  // O rescaled once per block of n keys
         const double s = e.number("seq_len");
         return s * (s / e.number("n")) * e.number("head_dim") /
                figure(attention(e), "matmul_flops");
       }},
  };
}

std::vector<GoldenRule> intensities() {
  return {
      number_of("l-intro-(unfused|fused)-intensity.*|l-9-2-(un)?fused-intensity-.*|"
                "l-key-0[13]-.*intensity|s-c3-slope|s-c4-(un)?fused-s[0-9]+|"
                "s-d4-(un)?fused-intensity|s-f1-(un)?fused-8192",
                attention_of, "intensity_flop_per_byte"),
      {"s-c2-half-d",
       [](E e) -> Answer {
         return intensity(attention(e, {{"--convention", "lecture"}, {"--impl", "unfused"}}));
       }},
      number_of("s-c2-limit|s-f1-unfused-limit", crossover_of, "intensity_limit_flop_per_byte"),
      {"l-9-1-intensity-size-invariant-(un)?fused",
       [](E e) -> Answer {
         return intensity(attention_at(e, 2 * e.number("seq_len"))) == intensity(attention(e));
       }},
      {"s-c1-identity",
       [](E e) -> Answer {
         const double s = e.number("seq_len");
         const double d = e.number("head_dim");
         return close(intensity(attention(e)), s * (4 * d + 5) / (8 * (d + s)));
       }},
      {"s-c2-saturates",
       [](E e) -> Answer {
         std::vector<double> list;
         for (double s = 1; s < (1 << 24); s *= 16) {
           list.push_back(intensity(attention_at(e, s)));
         }
         return increasing(list) &&
                list.back() < figure(crossover(e), "intensity_limit_flop_per_byte");
       }},
      {"s-c3-linear|s-e2-deeper",
       [](E e) -> Answer {
         return close(intensity(attention_at(e, 2 * e.number("seq_len"))),
                      2 * intensity(attention(e)));
       }},
      {"s-f1-flops-without-bytes",
       [](E e) -> Answer {
         return intensity(attention(e, {{"--causal", "true"}})) < intensity(attention(e));
       }},
  };
}

std::vector<GoldenRule> crossovers() {
  return {
      number_of("l-intro-crossover|l-key-04-crossover-a100|l-ex1-crossover-.*|s-d2-crossover|"
                "x-.*-crossover-.*",
                crossover_of, "crossover_seqlen"),
      number_of(".*-crossover-whole", crossover_of, "crossover_seqlen_ceil"),
      {"l-intro-almost-everything-memory-bound|s-e2-pinned",
       [](E e) -> Answer { return !crossover(e).at("reachable").get<bool>(); }},
      number_of("s-d2-numerator", crossover_of, "numerator"),
      number_of("s-d3-coefficient", crossover_of, "coefficient"),
      {"s-d3-2400",
       [](E e) -> Answer {
         return figure(by_pipeline(e, "unfused"), "flops") -
                figure(crossover(e, {{"--impl", "unfused"}}), "coefficient");
       }},
      number_of("s-d3-shortfall", crossover_of, "shortfall"),
      {"s-f1-doubles",
       [](E e) -> Answer {
         return figure(crossover(e, {{"--causal", "true"}}), "crossover_seqlen") /
                figure(crossover(e), "crossover_seqlen");
       }},
      {"l-ex1-hundreds",
       [](E e) -> Answer {
         bool all = true;
         for (const Json& pair : e.input("values")) {
           for (const double b : {1.0, 2.0, 4.0}) {
             const Json& found = crossover(e, {{"--peak-flops-per-s", pair[0].dump()},
                                               {"--bandwidth-bytes-per-s", pair[1].dump()},
                                               {"--dtype", Entry::dtype_of_bytes(b)}});
             all = all && figure(found, "crossover_seqlen") < e.number("threshold");
           }
         }
         return all;
       }},
  };
}

std::vector<GoldenRule> verdicts_and_gains() {
  return {
      {"l-9-2-.*-verdict-.*|l-ex1-verdict-.*|l-ex2-verdict.*|l-ds1-fused-verdict-band-512|"
       "s-c4-.*-(verdict|band)-.*",
       [](E e) -> Answer { return verdict(attention(e)); }},
      {"s-d4-(un)?fused-limit",
       [](E e) -> Answer {
         const std::string words = verdict(attention(e));
         return words.substr(0, words.find('-'));  // "memory" of memory-bound
       }},
      number_of("s-d4-(un)?fused-time", attention_of, "time_s"),
      {"l-9-5-kernel-gain-peak|l-9-9-kernel-factor|l-la-kernel-factor",
       [](E e) -> Answer { return figure(by_pipeline(e, "fused"), "kernel_gain_ceiling"); }},
      {"l-9-5-kernel-gain-achieved|l-ex3-attn-speedup",
       [](E e) -> Answer { return figure(by_pipeline(e, "fused"), "kernel_gain_achieved"); }},
      {"l-ex3-bound",  // half of the fused step is attention: (1 + its speedup) / 2
       [](E e) -> Answer {
         return (1 + figure(by_pipeline(e, "fused"), "kernel_gain_achieved")) / 2;
       }},
      {"l-9-5-internet-2-4x",
       [](E e) -> Answer {
         const double gain = figure(by_pipeline(e, "fused"), "kernel_gain_achieved");
         return e.values()[0] <= gain && gain <= e.values()[1];
       }},
      {"s-d4-speedup-s[0-9]+",
       [](E e) -> Answer {
         return figure(attention(e), "time_s") / figure(by_pipeline(e, "fused"), "time_s");
       }},
      {"s-d4-speedup-grows",
       [](E e) -> Answer {
         std::vector<double> list;
         for (const double s : e.values()) {
           list.push_back(
               figure(attention_at(e, s, {{"--impl", "fused"}, {"--score-passes", "auto"}}),
                      "gain_over_unfused"));
         }
         return increasing(list);
       }},
  };
}

std::vector<GoldenRule> store_or_recompute() {
  return {
      number_of("l-9-6-backward-extra", recompute, "extra_flops_fraction"),
      number_of("l-9-6-store-bytes|l-key-11-store-bytes", recompute, "store_bytes"),
      number_of("l-9-6-store-time|l-key-11-store", recompute, "store_time_s"),
      number_of("l-9-6-recompute-flops|l-key-11-recompute-flops", recompute, "recompute_flops"),
      number_of("l-9-6-recompute-time|l-key-11-recompute", recompute, "recompute_time_s"),
      number_of("l-9-6-ratio.*|l-rg-recompute-check", recompute, "store_over_recompute"),
      {"l-9-6-verdict|l-9-6-store-wins-above-ridge",
       [](E e) -> Answer { return recompute(e).at("cheaper").get<std::string>(); }},
      number_of("l-9-6-statistics-bytes", recompute, "statistics_bytes"),
      number_of("l-ds4-break-even", recompute, "break_even_ridge_flop_per_byte"),
  };
}

std::vector<GoldenRule> decode_steps() {
  return {
      number_of("l-9-8-decode-flops-coefficient|s-f2-total-flops", decode_of, "flops"),
      number_of("l-9-8-decode-bytes-coefficient", decode_of, "bytes"),
      number_of("l-9-8-decode-intensity|l-key-12-decode-intensity|s-f2-exact|s-f3-limit|"
                "s-f3-exact|x-r-decode-lecture-convention",
                decode_of, "intensity_flop_per_byte"),
      {"s-f2-flops-(qk|softmax|pv)",
       [](E e) -> Answer {
         const Json& k =
             decode(e).at("kernels").at(static_cast<std::size_t>(e.whole_or("block", 1)) - 1);
         return figure(k, "matmul_flops") + figure(k, "softmax_flops");
       }},
      {"s-f2-elements-(qk|softmax|pv)",
       [](E e) -> Answer {
         return figure(
             decode(e).at("kernels").at(static_cast<std::size_t>(e.whole_or("block", 1)) - 1),
             "elements");
       }},
      {"s-f2-total-elements", [](E e) -> Answer { return elements(decode(e)); }},
      {"s-f2-below-ridge", [](E e) -> Answer { return 1 / figure(decode(e), "ridge_multiple"); }},
      {"s-f2-verdict|s-f3-verdict", [](E e) -> Answer { return verdict(decode(e)); }},
      {"s-f3-time-reduction(-exact)?",
       [](E e) -> Answer {
         // each query head its own K and V
         const Json& every =
             decode(e, {{"--group", "1"}, {"--heads-kv", std::to_string(e.whole_or("group", 1))}});
         return figure(every, "bytes") / figure(decode(e), "bytes");
       }},
      {"s-f3-f2-consistent",
       [](E e) -> Answer {
         return elements(decode(e, {{"--score-elements-per-key", "2"}})) ==
                elements(decode(e, {{"--score-elements-per-key", "4"}}));
       }},
      {"s-f3-linear",
       [](E e) -> Answer {
         bool linear = true;
         for (const int g : {1, 2, 3, 8, 16}) {
           linear = linear && intensity(decode(e, {{"--group", std::to_string(g)}})) ==
                                  g * intensity(decode(e));
         }
         return linear;
       }},
      {"l-9-8-batching-does-not-help|s-f3-batch-attention",
       [](E e) -> Answer {
         return intensity(decode(e)) == intensity(decode(e, {{"--batch", "1"}}));
       }},
      {"l-9-8-splitk-intensity",
       [](E e) -> Answer {
         const Json& split =
             decode(e, {{"--splits", e.input("blocks").dump()}, {"--pipeline", "split-kv"}});
         return intensity(split) == intensity(decode(e));
       }},
      {"l-9-8-sm-underfilled",
       [](E e) -> Answer {
         return figure(decode(e, {{"--heads-q", e.input("heads").dump()}}), "sm_fill");
       }},
  };
}

}  // namespace

std::vector<GoldenRule> attention_rules() {
  std::vector<GoldenRule> all;
  for (const auto& part : {rates_and_costs(), intensities(), crossovers(), verdicts_and_gains(),
                           store_or_recompute(), decode_steps()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

}  // namespace rafter::test
