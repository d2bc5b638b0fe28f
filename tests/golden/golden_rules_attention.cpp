// Attention, decode, crossovers, recompute against store.
#include <algorithm>
#include <cmath>

#include "golden/golden_rules.h"

namespace rafter::golden {
namespace {

Cost cost_at(const Entry& e, std::int64_t seqlen) {
  return must(attention_cost(e.problem(seqlen), e.pipeline(), Pass::forward, e.convention()));
}
Cost cost(const Entry& e) { return cost_at(e, e.whole_or("seq_len", 1)); }

Cost cost_of(const Entry& e, Pipeline pipeline) {
  return must(attention_cost(e.problem(), pipeline, Pass::forward, e.convention()));
}

/// Of any pipeline, by the entry's own profile.
Cost unmasked_cost(const Entry& e, Pipeline pipeline, bool causal) {
  AttentionProblem p = e.problem();
  p.mask = causal ? Mask::causal() : Mask::none();
  return must(attention_cost(p, pipeline, Pass::forward, e.convention()));
}

Prediction prediction(const Entry& e) { return must(predict(cost(e), e.device(), e.convention())); }

Crossover crossing(const Entry& e) {
  return must(crossover(e.problem(), e.pipeline(), e.device(), e.convention()));
}

Cost decode_at(const Entry& e, DecodeProblem p, Pipeline pipeline = Pipeline::unfused) {
  return must(decode_cost(p, pipeline, e.convention()));
}
Cost decode(const Entry& e) { return decode_at(e, e.decode()); }

FusionGain gain(const Entry& e) {
  return must(fusion_gain(e.problem(), Pipeline::fused, e.device(), e.convention()));
}
FusionGain gain_at(const Entry& e, std::int64_t seqlen) {
  return must(fusion_gain(e.problem(seqlen), Pipeline::fused, e.device(), e.convention()));
}

RecomputeChoice choice(const Entry& e) {
  return must(recompute_choice(e.problem(), e.device(), e.convention()));
}

double term(const Cost& c, const std::string& name) {
  for (const ByteTerm& t : c.bytes_by_term) {
    if (t.name == name) {
      return t.bytes;
    }
  }
  return 0;
}

double elements(const Cost& c) {
  double sum = 0;
  for (const KernelCost& k : c.kernels) {
    sum += k.elements;
  }
  return sum;
}

const KernelCost& kernel(const Cost& c, const std::string& name) {
  return *std::ranges::find(c.kernels, name, &KernelCost::name);
}

std::string without_bound(std::string verdict) { return verdict.substr(0, verdict.find('-')); }

bool intensity_doubles(const Entry& e) {
  const double one = cost(e).intensity();
  const double two = cost_at(e, 2 * e.whole_or("seq_len", 1)).intensity();
  return std::abs(two - 2 * one) <= 1e-12 * two;
}

bool increasing(const std::vector<double>& list) {
  return std::ranges::adjacent_find(list, std::greater_equal<>{}) == list.end();
}

}  // namespace

std::vector<Rule> attention_rules() {
  using E = const Entry&;
  return {
      // Ridge and rates.
      {".*-ridge-h100|l-ex1-ridge-a100|l-rg-ridge",
       [](E e) -> Answer {
         return must(ridge(e.device(), e.dtype(), e.convention())).flop_per_byte;
       }},
      {"l-9-6-recompute-rate|l-key-10-rate",
       [](E e) -> Answer {
         return must(ridge(e.device(), e.dtype(), e.convention())).achieved_flop_per_s;
       }},
      {"l-intro-peak-fraction|l-key-02-ceiling-a100-fraction|l-ex2-ceiling-fraction",
       [](E e) -> Answer { return prediction(e).peak_fraction; }},
      {"l-9-2-fused-ridge-multiple-4k", [](E e) -> Answer { return prediction(e).ridge_multiple; }},
      {"l-9-2-unfused-ceiling-h100|l-ds1-fused-attainable-512|l-key-02-ceiling-h100|"
       "s-d4-fused-rate|x-r-unfused-lecture-convention",
       [](E e) -> Answer { return prediction(e).attainable_flop_per_s; }},
      {"l-ds1-ceiling-no-fusion",
       [](E e) -> Answer {
         Convention c = e.convention();
         c.count_qkvo = CountQkvo::fused_only;  // the entry's is of the unfused side
         c.score_passes.reset();
         const Cost fused = must(attention_cost(e.problem(), Pipeline::fused, Pass::forward, c));
         const Prediction p = must(predict(fused, e.device(), c));
         return std::ranges::find(p.ceilings, "no fusion", &Ceiling::name)->flop_per_s;
       }},
      {"s-d4-fused-roof", [](E e) -> Answer { return prediction(e).bandwidth_roof_flop_per_s; }},
      {"s-d4-unfused-rate-limit",
       [](E e) -> Answer {
         const Ridge r = must(ridge(e.device(), e.dtype(), e.convention()));
         return std::min(r.peak_flop_per_s,
                         *crossing(e).intensity_limit_flop_per_byte * r.bandwidth_bytes_per_s);
       }},

      // FLOPs, bytes, elements.
      {"l-9-2-softmax-flop-share|s-a2-share(-about)?",
       [](E e) -> Answer { return cost(e).softmax_flops / cost(e).flops; }},
      {"l-9-2-softmax-byte-share",
       [](E e) -> Answer { return kernel(cost(e), "softmax").bytes / cost(e).bytes; }},
      {"l-9-2-total-flops-coefficient|s-a1-total|s-a2-gemm|s-c2-numerator|s-d4-flops",
       [](E e) -> Answer { return cost(e).flops; }},
      {"s-a1-softmax|s-a2-softmax", [](E e) -> Answer { return cost(e).softmax_flops; }},
      {"l-9-2-score-traffic-coefficient|l-9-2-fused-bytes-coefficient|l-ex2-traffic-coefficient|"
       "s-b1-bytes-8192|s-b2-bytes-8192",
       [](E e) -> Answer { return cost(e).bytes; }},
      {"l-ex2-saved-attn-coefficient",
       [](E e) -> Answer {
         return unmasked_cost(e, Pipeline::fused, false).unfused_bytes - cost(e).bytes;
       }},
      {"l-9-2-qkv-bytes-coefficient",
       [](E e) -> Answer { return term(cost(e), "q") + term(cost(e), "k") + term(cost(e), "v"); }},
      {"l-9-2-o-bytes-coefficient", [](E e) -> Answer { return term(cost(e), "o"); }},
      {"s-b[12]-bytes-linear",
       [](E e) -> Answer {
         const Cost c = cost_at(e, 4096);
         return (c.bytes - term(c, "scores")) / (4096.0 * 128);
       }},
      {"s-b1-bytes-quadratic",
       [](E e) -> Answer { return term(cost_at(e, 4096), "scores") / (4096.0 * 4096); }},
      {"s-b1-elements-(qk|softmax|pv)",
       [](E e) -> Answer {
         return kernel(cost_of(e, Pipeline::unfused), e.id().substr(14)).elements;
       }},
      {"s-b1-elements-total",
       [](E e) -> Answer { return elements(cost_of(e, Pipeline::unfused)); }},
      {"s-b1-rows-sum",
       [](E e) -> Answer {
         const double s = e.number("seq_len"), d = e.number("head_dim");
         return elements(cost_of(e, Pipeline::unfused)) == 4 * s * d + 4 * s * s;
       }},
      {"s-b3-ratio-.*",
       [](E e) -> Answer {
         Convention own = e.convention();
         own.score_passes.reset();
         const double fused =
             must(attention_cost(e.problem(), Pipeline::fused, Pass::forward, own)).bytes;
         return cost(e).bytes / fused;
       }},
      {"s-b3-grows",
       [](E e) -> Answer {
         Convention own = e.convention();
         own.score_passes.reset();
         std::vector<double> ratios;
         for (std::int64_t s = 1; s < (1 << 30); s *= 2) {
           const Cost c = must(attention_cost(e.problem(s), Pipeline::fused, Pass::forward, own));
           ratios.push_back(c.unfused_bytes / c.bytes);
         }
         return increasing(ratios) && ratios.back() > 1e6;
       }},
      {"l-rg-hbm-reduction-4k|l-9-4-byte-reduction-4k",
       [](E e) -> Answer {
         const Cost fused = unmasked_cost(e, Pipeline::fused, false);
         return fused.unfused_bytes / fused.bytes;
       }},
      {"l-9-4-flop-increase",
       [](E e) -> Answer {  // O rescaled once per block of n keys
         const double s = e.number("seq_len");
         return s * (s / e.number("n")) * e.number("head_dim") / cost(e).matmul_flops;
       }},

      // Intensity.
      {"l-intro-(unfused|fused)-intensity.*|l-9-2-(un)?fused-intensity-.*|l-key-0[13]-.*intensity|"
       "s-c3-slope|s-c4-(un)?fused-s[0-9]+|s-d4-(un)?fused-intensity|s-f1-(un)?fused-8192",
       [](E e) -> Answer { return cost(e).intensity(); }},
      {"s-c2-half-d",
       [](E e) -> Answer {
         return must(attention_cost(e.problem(), Pipeline::unfused, Pass::forward,
                                    Convention::lecture()))
             .intensity();
       }},
      {"s-c2-limit|s-f1-unfused-limit",
       [](E e) -> Answer { return *crossing(e).intensity_limit_flop_per_byte; }},
      {"l-9-1-intensity-size-invariant-(un)?fused",
       [](E e) -> Answer {
         return cost_at(e, 2 * e.whole_or("seq_len", 1)).intensity() == cost(e).intensity();
       }},
      {"s-c1-identity",
       [](E e) -> Answer {
         const double s = e.number("seq_len"), d = e.number("head_dim");
         const double closed = s * (4 * d + 5) / (8 * (d + s));
         return std::abs(cost(e).intensity() - closed) <= 1e-12 * closed;
       }},
      {"s-c2-saturates",
       [](E e) -> Answer {
         std::vector<double> list;
         for (std::int64_t s = 1; s < (1 << 24); s *= 2) {
           list.push_back(cost_at(e, s).intensity());
         }
         return increasing(list) && list.back() < *crossing(e).intensity_limit_flop_per_byte;
       }},
      {"s-c3-linear|s-e2-deeper", [](E e) -> Answer { return intensity_doubles(e); }},
      {"s-f1-flops-without-bytes",
       [](E e) -> Answer {
         return unmasked_cost(e, e.pipeline(), true).intensity() <
                unmasked_cost(e, e.pipeline(), false).intensity();
       }},

      // Crossovers.
      {"l-intro-crossover|l-key-04-crossover-a100|l-ex1-crossover-.*|s-d2-crossover|"
       "x-.*-crossover-.*",
       [](E e) -> Answer { return *crossing(e).seqlen; }},
      {".*-crossover-whole",
       [](E e) -> Answer { return static_cast<double>(*crossing(e).seqlen_ceil); }},
      {"l-intro-almost-everything-memory-bound|s-e2-pinned",
       [](E e) -> Answer { return !crossing(e).reachable; }},
      {"s-d2-numerator", [](E e) -> Answer { return crossing(e).numerator; }},
      {"s-d3-coefficient", [](E e) -> Answer { return crossing(e).coefficient; }},
      {"s-d3-2400",
       [](E e) -> Answer {
         const Crossover x =
             must(crossover(e.problem(), Pipeline::unfused, e.device(), e.convention()));
         return cost_of(e, Pipeline::unfused).flops - x.coefficient;
       }},
      {"s-d3-shortfall", [](E e) -> Answer { return *crossing(e).shortfall; }},
      {"s-f1-doubles",
       [](E e) -> Answer {
         AttentionProblem causal = e.problem();
         causal.mask = Mask::causal();
         return *must(crossover(causal, e.pipeline(), e.device(), e.convention())).seqlen /
                *crossing(e).seqlen;
       }},
      {"l-ex1-hundreds",
       [](E e) -> Answer {
         bool all = true;
         for (const auto& pair : e.input("values")) {
           DeviceSpec d = e.device();
           d.figures["peak_bf16_flop_per_s"].value = pair[0].get<double>();
           d.figures["bandwidth_bytes_per_s"].value = pair[1].get<double>();
           for (const double b : {1.0, 2.0, 4.0}) {
             AttentionProblem p = e.problem();
             p.dtype = Entry::dtype_of_bytes(b);
             all = all && *must(crossover(p, e.pipeline(), d, e.convention())).seqlen <
                              e.number("threshold");
           }
         }
         return all;
       }},

      // Verdicts and times.
      {"l-9-2-.*-verdict-.*|l-ex1-verdict-.*|l-ex2-verdict.*|l-ds1-fused-verdict-band-512|"
       "s-c4-.*-(verdict|band)-.*",
       [](E e) -> Answer { return prediction(e).verdict(); }},
      {"s-d4-(un)?fused-limit",
       [](E e) -> Answer { return without_bound(prediction(e).verdict()); }},
      {"s-d4-(un)?fused-time", [](E e) -> Answer { return prediction(e).time_s; }},
      {"l-9-5-kernel-gain-peak|l-9-9-kernel-factor|l-la-kernel-factor",
       [](E e) -> Answer { return gain(e).ceiling; }},
      {"l-9-5-kernel-gain-achieved|l-ex3-attn-speedup",
       [](E e) -> Answer { return gain(e).achieved; }},
      {"l-ex3-bound",  // half of the fused step is attention: (1 + its speedup) / 2
       [](E e) -> Answer { return (1 + gain(e).achieved) / 2; }},
      {"l-9-5-internet-2-4x",
       [](E e) -> Answer {
         return e.values()[0] <= gain(e).achieved && gain(e).achieved <= e.values()[1];
       }},
      {"s-d4-speedup-s[0-9]+", [](E e) -> Answer { return gain(e).by_times; }},
      {"s-d4-speedup-grows",
       [](E e) -> Answer {
         std::vector<double> list;
         for (const double s : e.values()) {
           list.push_back(gain_at(e, static_cast<std::int64_t>(s)).by_times);
         }
         return increasing(list);
       }},

      // Recompute against store.
      {"l-9-6-backward-extra", [](E e) -> Answer { return choice(e).extra_flops_fraction; }},
      {"l-9-6-store-bytes|l-key-11-store-bytes",
       [](E e) -> Answer { return choice(e).store_bytes; }},
      {"l-9-6-store-time|l-key-11-store", [](E e) -> Answer { return choice(e).store_time_s; }},
      {"l-9-6-recompute-flops|l-key-11-recompute-flops",
       [](E e) -> Answer { return choice(e).recompute_flops; }},
      {"l-9-6-recompute-time|l-key-11-recompute",
       [](E e) -> Answer { return choice(e).recompute_time_s; }},
      {"l-9-6-ratio.*|l-rg-recompute-check",
       [](E e) -> Answer { return choice(e).store_over_recompute; }},
      {"l-9-6-verdict|l-9-6-store-wins-above-ridge",
       [](E e) -> Answer { return std::string(choice(e).cheaper()); }},
      {"l-9-6-statistics-bytes", [](E e) -> Answer { return choice(e).statistics_bytes; }},
      {"l-ds4-break-even", [](E e) -> Answer { return choice(e).break_even_ridge_flop_per_byte; }},

      // Decode.
      {"l-9-8-decode-flops-coefficient|s-f2-total-flops",
       [](E e) -> Answer { return decode(e).flops; }},
      {"l-9-8-decode-bytes-coefficient", [](E e) -> Answer { return decode(e).bytes; }},
      {"l-9-8-decode-intensity|l-key-12-decode-intensity|s-f2-exact|s-f3-limit|s-f3-exact|"
       "x-r-decode-lecture-convention",
       [](E e) -> Answer { return decode(e).intensity(); }},
      {"s-f2-(flops|elements)-(qk|softmax|pv)",
       [](E e) -> Answer {
         const auto index = static_cast<std::size_t>(e.whole_or("block", 1)) - 1;
         const KernelCost k = decode(e).kernels[index];
         return e.id().starts_with("s-f2-flops") ? k.matmul_flops + k.softmax_flops : k.elements;
       }},
      {"s-f2-total-elements", [](E e) -> Answer { return elements(decode(e)); }},
      {"s-f2-below-ridge",
       [](E e) -> Answer {
         return 1 / must(predict(decode(e), e.device(), e.convention())).ridge_multiple;
       }},
      {"s-f2-verdict|s-f3-verdict",
       [](E e) -> Answer {
         return must(predict(decode(e), e.device(), e.convention())).verdict();
       }},
      {"s-f3-time-reduction(-exact)?",
       [](E e) -> Answer {
         DecodeProblem every = e.decode();
         every.heads_kv = every.heads_q;  // each query head its own K, V
         return decode_at(e, every).bytes / decode(e).bytes;
       }},
      {"s-f3-f2-consistent",
       [](E e) -> Answer {
         Convention f2 = e.convention(), f3 = e.convention();
         f2.score_elements_per_key = 4;
         f3.score_elements_per_key = 2;
         return elements(must(decode_cost(e.decode(), Pipeline::unfused, f3))) ==
                elements(must(decode_cost(e.decode(), Pipeline::unfused, f2)));
       }},
      {"s-f3-linear",
       [](E e) -> Answer {
         bool linear = true;
         for (std::int64_t g = 1; g <= 16; ++g) {
           DecodeProblem p = e.decode();
           p.heads_q = g;
           linear = linear &&
                    decode_at(e, p).intensity() == static_cast<double>(g) * decode(e).intensity();
         }
         return linear;
       }},
      {"l-9-8-batching-does-not-help|s-f3-batch-attention",
       [](E e) -> Answer {
         DecodeProblem one = e.decode();
         one.batch = 1;
         return decode(e).intensity() == decode_at(e, one).intensity();
       }},
      {"l-9-8-splitk-intensity",
       [](E e) -> Answer {
         DecodeProblem split = e.decode();
         split.splits = e.whole_or("blocks", 1);
         return decode_at(e, split, Pipeline::split_kv).intensity() == decode(e).intensity();
       }},
      {"l-9-8-sm-underfilled",
       [](E e) -> Answer {
         DecodeProblem p;
         p.batch = e.whole_or("batch", 1);
         p.heads_q = e.whole_or("heads", 1);
         return must(sm_fill(p, e.device()));
       }},
  };
}

}  // namespace rafter::golden
