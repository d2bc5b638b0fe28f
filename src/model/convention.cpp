// The parameters of a Convention as a table: one row names a parameter, reads it from text, prints
// it and knows which values mean something.
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <utility>

#include "rafter/roofline.h"

namespace rafter {
namespace {

struct Range {
  double low = 0;
  bool open = false;  // low itself is excluded
  double high = HUGE_VAL;
  const char* text = "a number from 0 up";
  bool contains(double x) const {
    return std::isfinite(x) && (open ? x > low : x >= low) && x <= high;
  }
};
constexpr Range kNotNegative = {};
constexpr Range kPositive = {0, true, HUGE_VAL, "a number above 0"};
constexpr Range kEfficiency = {0, true, 1, "a number above 0, at most 1"};
constexpr Range kFactor = {1, false, HUGE_VAL, "a number from 1 up"};

struct Field {
  ConventionParameter info;
  std::function<bool(Convention&, std::string_view)> set;  // false: the text is not allowed
  std::function<std::string(const Convention&)> get;
  std::function<bool(const Convention&)> valid;
};

std::optional<double> parse_number(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end) {
    return std::nullopt;
  }
  return value;
}

Field number(const char* name, double Convention::*member, Range range, const char* what) {
  return {{name, range.text, what},
          [=](Convention& c, std::string_view text) {
            const std::optional<double> value = parse_number(text);
            if (!value || !range.contains(*value)) {
              return false;
            }
            c.*member = *value;
            return true;
          },
          [=](const Convention& c) { return fmt::format("{}", c.*member); },
          [=](const Convention& c) { return range.contains(c.*member); }};
}

Field optional_number(const char* name, std::optional<double> Convention::*member, Range range,
                      const char* what) {
  return {{name, fmt::format("auto, {}", range.text), what},
          [=](Convention& c, std::string_view text) {
            if (text == "auto") {
              c.*member = std::nullopt;
              return true;
            }
            const std::optional<double> value = parse_number(text);
            if (!value || !range.contains(*value)) {
              return false;
            }
            c.*member = *value;
            return true;
          },
          [=](const Convention& c) {
            return c.*member ? fmt::format("{}", *(c.*member)) : std::string("auto");
          },
          [=](const Convention& c) { return !(c.*member) || range.contains(*(c.*member)); }};
}

template <typename E>
Field choice(const char* name, E Convention::*member,
             std::initializer_list<std::pair<const char*, E>> choices, const char* what) {
  const std::vector<std::pair<const char*, E>> table = choices;
  std::string allowed;
  for (const auto& [text, value] : table) {
    allowed += (allowed.empty() ? "" : ", ") + std::string(text);
  }
  return {{name, allowed, what},
          [=](Convention& c, std::string_view given) {
            for (const auto& [text, value] : table) {
              if (given == text) {
                c.*member = value;
                return true;
              }
            }
            return false;
          },
          [=](const Convention& c) -> std::string {
            for (const auto& [text, value] : table) {
              if (c.*member == value) {
                return text;
              }
            }
            return "?";
          },
          [=](const Convention& c) {
            for (const auto& [text, value] : table) {
              if (c.*member == value) {
                return true;
              }
            }
            return false;
          }};
}

Field flag(const char* name, bool Convention::*member, const char* what) {
  return choice<bool>(name, member, {{"true", true}, {"false", false}}, what);
}

Field score_dtype_field() {
  return {{"score_dtype", "auto, f32, f16, bf16, e4m3, e5m2, int8, int4",
           "dtype of scores that land in memory"},
          [](Convention& c, std::string_view text) {
            if (text == "auto") {
              c.score_dtype = std::nullopt;
              return true;
            }
            const Result<DType> dtype = parse_dtype(text);
            if (dtype) {
              c.score_dtype = *dtype;
            }
            return dtype.is_ok();
          },
          [](const Convention& c) {
            return std::string(c.score_dtype ? to_string(*c.score_dtype) : "auto");
          },
          [](const Convention& c) {
            return !c.score_dtype || (*c.score_dtype != DType::i32 && *c.score_dtype != DType::i64);
          }};
}

Field layers_live_field() {
  Field field = number("layers_live", &Convention::layers_live, kNotNegative,
                       "layers whose scores and activations are held at once");
  field.info.allowed = "one, all, a number from 0 up (0: all)";
  field.set = [set = field.set](Convention& c, std::string_view text) {
    return set(c, text == "one" ? "1" : text == "all" ? "0" : text);
  };
  return field;
}

std::vector<Field> attention_fields() {
  using C = Convention;
  return {
      number("softmax_flops_per_element", &C::softmax_flops_per_element, kNotNegative,
             "FLOPs of the softmax per visible score"),
      number("recompute_flops_per_element", &C::recompute_flops_per_element, kNotNegative,
             "backward: FLOPs per score to make P again"),
      number("score_gradient_flops_per_element", &C::score_gradient_flops_per_element, kNotNegative,
             "backward: FLOPs per score of its gradient"),
      choice("causal_pairs", &C::causal_pairs,
             {{"exact", CausalPairs::exact}, {"half", CausalPairs::half}},
             "visible scores of a causal mask: summed per row, or half of all"),
      flag("causal", &C::causal,
           "whether a model's prefill is causal, where the step does not say"),
      optional_number("score_passes", &C::score_passes, kNotNegative,
                      "passes of the scores through memory, forward"),
      optional_number("backward_score_passes", &C::backward_score_passes, kNotNegative,
                      "passes of score matrices through memory, backward"),
      score_dtype_field(),
      {{"score_block_rows", "a whole number from 0 up",
        "query rows that are multiplied (and land) together over the keys that some of them sees; "
        "0: visible scores alone"},
       [](Convention& c, std::string_view text) {
         const std::optional<double> value = parse_number(text);
         const bool allowed =
             value && kNotNegative.contains(*value) && *value == std::floor(*value);
         c.score_block_rows = allowed ? *value : c.score_block_rows;
         return allowed;
       },
       [](const Convention& c) { return fmt::format("{}", c.score_block_rows); },
       [](const Convention& c) {
         return kNotNegative.contains(c.score_block_rows) &&
                c.score_block_rows == std::floor(c.score_block_rows);
       }},
      choice("count_qkvo", &C::count_qkvo,
             {{"true", CountQkvo::always},
              {"false", CountQkvo::never},
              {"fused-only", CountQkvo::fused_only}},
             "whether Q, K, V, O enter the bytes"),
      flag("count_lse", &C::count_lse, "whether the row statistics (f32) enter the bytes"),
      flag("count_indices", &C::count_indices, "whether page tables and lengths enter the bytes"),
      flag("count_partials", &C::count_partials, "whether split-kv's partials enter the bytes"),
      choice("traffic_model", &C::traffic_model,
             {{"compulsory", TrafficModel::compulsory}, {"tiled", TrafficModel::tiled}},
             "K, V read once, or once per tile of queries that fits fast memory"),
      number("fast_memory_bytes", &C::fast_memory_bytes, kNotNegative,
             "M of the tiled traffic model"),
      choice("fast_memory_unit", &C::fast_memory_unit,
             {{"elements", MemoryUnit::elements}, {"bytes", MemoryUnit::bytes}},
             "what M counts in the tiled model's formulas"),
      optional_number("score_elements_per_key", &C::score_elements_per_key, kNotNegative,
                      "decode: score elements through memory per key and query row"),
      flag("count_qo", &C::count_qo, "decode: whether q and o enter the bytes"),
  };
}

std::vector<Field> model_fields() {
  using C = Convention;
  return {
      flag("count_gemm_activations", &C::count_gemm_activations,
           "whether A and C of a GEMM enter its bytes beside the weights"),
      flag("count_elementwise", &C::count_elementwise,
           "whether norms, RoPE, SwiGLU and residual adds of a model are counted"),
      optional_number("n_params", &C::n_params, kPositive, "parameters of a model"),
      choice("gemm_flops", &C::gemm_flops,
             {{"all-params", GemmFlops::all_params}, {"matmul-params", GemmFlops::matmul_params}},
             "2 FLOPs per token for every parameter, or for those that multiply the token"),
      layers_live_field(),
      choice("capacity", &C::capacity, {{"usable", Capacity::usable}, {"total", Capacity::total}},
             "the planner's memory: left after the weights, or the device's"),
      flag("count_weights", &C::count_weights, "planner: whether weights take memory"),
      flag("count_kv_cache", &C::count_kv_cache, "planner: whether the KV cache takes memory"),
      flag("count_activations", &C::count_activations,
           "planner: whether the residual stream and the MLP take memory"),
  };
}

std::vector<Field> device_fields() {
  using C = Convention;
  return {
      number("compute_efficiency", &C::compute_efficiency, kEfficiency,
             "fraction of the peak that times assume"),
      number("bandwidth_efficiency", &C::bandwidth_efficiency, kEfficiency,
             "fraction of the bandwidth that times assume"),
      optional_number("attention_compute_efficiency", &C::attention_compute_efficiency, kEfficiency,
                      "the same of a model's attention"),
      flag("peak_per_precision", &C::peak_per_precision,
           "each dtype's own peak, or the bf16 peak for all"),
      flag("count_dispatch", &C::count_dispatch, "whether launches are a third wall"),
      optional_number("launch_s", &C::launch_s, kNotNegative, "cost of one launch"),
      optional_number("graph_submit_s", &C::graph_submit_s, kNotNegative,
                      "cost of submitting a captured graph"),
      optional_number("graph_launch_s", &C::graph_launch_s, kNotNegative,
                      "cost of one launch inside a graph"),
      choice("time_model", &C::time_model, {{"max", TimeModel::max}, {"sum", TimeModel::sum}},
             "dispatch overlaps the device, or they take turns"),
      number("dead_band", &C::dead_band, kFactor,
             "factor around the ridge inside which no wall is named (1: strict)"),
      choice("kernel_gain", &C::kernel_gain,
             {{"ceiling", KernelGain::ceiling}, {"achieved", KernelGain::achieved}},
             "gain of fusing at the roofs, or at the efficiencies"),
      choice("ridge_rounding", &C::ridge_rounding,
             {{"none", RidgeRounding::none}, {"nearest", RidgeRounding::nearest}},
             "how the rounded ridge is rounded"),
      choice("crossover_rounding", &C::crossover_rounding,
             {{"real", CrossoverRounding::real},
              {"ceil", CrossoverRounding::ceil},
              {"rounded-ridge", CrossoverRounding::rounded_ridge}},
             "how the rounded crossover is rounded"),
      choice("verdict_words", &C::verdict_words,
             {{"exact", VerdictWords::exact},
              {"lecture", VerdictWords::lecture},
              {"solution", VerdictWords::solution}},
             "bandwidth-bound and dispatch-bound, … overhead-bound, or memory-bound"),
  };
}

const std::vector<Field>& fields() {
  static const std::vector<Field> all = [] {
    std::vector<Field> list = attention_fields();
    for (Field& field : model_fields()) {
      list.push_back(std::move(field));
    }
    for (Field& field : device_fields()) {
      list.push_back(std::move(field));
    }
    return list;
  }();
  return all;
}

}  // namespace

Convention Convention::exact() { return {}; }

Convention Convention::lecture() {
  Convention c;
  c.name = "lecture";
  c.softmax_flops_per_element = 0;
  c.recompute_flops_per_element = 0;
  c.score_gradient_flops_per_element = 0;
  c.causal_pairs = CausalPairs::half;
  c.causal = false;
  c.count_qkvo = CountQkvo::fused_only;
  c.count_lse = c.count_indices = c.count_partials = false;
  c.score_elements_per_key = 0;
  c.count_qo = false;
  c.count_gemm_activations = c.count_elementwise = false;
  c.gemm_flops = GemmFlops::all_params;
  c.compute_efficiency = 0.5;
  c.peak_per_precision = false;
  c.count_dispatch = false;
  c.launch_s = 5e-6;
  c.graph_submit_s = 10e-6;
  c.graph_launch_s = 0;
  c.time_model = TimeModel::sum;
  c.ridge_rounding = RidgeRounding::nearest;
  c.crossover_rounding = CrossoverRounding::rounded_ridge;
  c.verdict_words = VerdictWords::lecture;
  c.capacity = Capacity::usable;
  c.count_weights = c.count_kv_cache = c.count_activations = false;
  return c;
}

Convention Convention::solution() {
  Convention c;
  c.name = "solution";
  c.causal_pairs = CausalPairs::half;
  c.causal = false;
  c.count_lse = c.count_indices = c.count_partials = false;
  c.score_elements_per_key = 4;
  c.count_gemm_activations = c.count_elementwise = false;
  c.gemm_flops = GemmFlops::all_params;
  c.count_dispatch = false;
  c.kernel_gain = KernelGain::ceiling;
  c.verdict_words = VerdictWords::solution;
  c.count_weights = c.count_kv_cache = c.count_activations = false;
  return c;
}

Status Convention::set(std::string_view parameter, std::string_view value) {
  std::string wanted(parameter);
  for (char& ch : wanted) {
    ch = ch == '-' ? '_' : ch;
  }
  std::string known;
  for (const Field& field : fields()) {
    if (field.info.name == wanted) {
      if (!field.set(*this, value)) {
        return Status::invalid_argument(wanted, std::string(value), field.info.allowed);
      }
      name += fmt::format(", {}={}", wanted, value);
      return Status::ok();
    }
    known += (known.empty() ? "" : ", ") + field.info.name;
  }
  return Status::invalid_argument("convention parameter", std::string(parameter), known);
}

Status Convention::validate() const {
  for (const Field& field : fields()) {
    if (!field.valid(*this)) {
      return Status::invalid_argument(field.info.name, field.get(*this), field.info.allowed);
    }
  }
  if (traffic_model == TrafficModel::tiled && fast_memory_bytes <= 0) {
    return Status::invalid_argument("fast_memory_bytes", fmt::format("{}", fast_memory_bytes),
                                    "with traffic_model = tiled, a number above 0");
  }
  return Status::ok();
}

std::vector<std::string> Convention::values() const {
  std::vector<std::string> list;
  for (const Field& field : fields()) {
    list.push_back(field.get(*this));
  }
  return list;
}

Result<Convention> find_convention(std::string_view name) {
  if (name == "exact") {
    return Convention::exact();
  }
  if (name == "lecture") {
    return Convention::lecture();
  }
  if (name == "solution") {
    return Convention::solution();
  }
  return Status::invalid_argument("convention", std::string(name), "exact, lecture, solution");
}

const std::vector<ConventionParameter>& convention_parameters() {
  static const std::vector<ConventionParameter> list = [] {
    std::vector<ConventionParameter> infos;
    for (const Field& field : fields()) {
      infos.push_back(field.info);
    }
    return infos;
  }();
  return list;
}

}  // namespace rafter
