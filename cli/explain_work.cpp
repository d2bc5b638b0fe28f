// explain gemm, elementwise, ridge, online-softmax, merge.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/explain.h"

namespace rafter::cli {
namespace {

struct GemmOptions {
  ExplainFlags explain;
  GemmProblem problem{4096, 4096, 4096, 1, DType::bf16, {}};
};

void explain_gemm(const GemmOptions& options, const Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  const GemmProblem& problem = options.problem;
  const Cost cost = value_or_fail(gemm_cost(problem, convention));
  Json echo = Json::object();
  echo["m"] = problem.m;
  echo["n"] = problem.n;
  echo["k"] = problem.k;
  echo["batch"] = problem.batch;
  echo["dtype"] = to_string(problem.dtype);
  echo["weight_dtype"] = to_string(problem.weight_dtype.value_or(problem.dtype));
  Document document = explain_document(device, cost.convention, std::move(echo));
  append_roofline(document,
                  fmt::format("A matrix product {} by {} by {} in {}", problem.m, problem.n,
                              problem.k, to_string(problem.dtype)),
                  cost, value_or_fail(predict(cost, device, convention)));
  document.print(context);
}

struct ElementwiseOptions {
  ExplainFlags explain;
  std::string kind = "rmsnorm";
  std::int64_t elements = 4096 * 4096;
  std::optional<double> reads, writes, flops;
  DType dtype = DType::bf16;
};

ElementwiseProblem elementwise_of(const ElementwiseOptions& options) {
  const double elements = static_cast<double>(options.elements);
  ElementwiseProblem problem = ElementwiseProblem::rmsnorm(elements, options.dtype);
  if (options.kind == "residual-add") {
    problem = ElementwiseProblem::residual_add(elements, options.dtype);
  } else if (options.kind == "swiglu") {
    problem = ElementwiseProblem::swiglu(elements, options.dtype);
  } else if (options.kind == "rope") {
    problem = ElementwiseProblem::rope(elements, options.dtype);
  }
  problem.reads = options.reads.value_or(problem.reads);
  problem.writes = options.writes.value_or(problem.writes);
  problem.flops_per_element = options.flops.value_or(problem.flops_per_element);
  return problem;
}

void explain_elementwise(const ElementwiseOptions& options, const Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  const ElementwiseProblem problem = elementwise_of(options);
  const Cost cost = value_or_fail(elementwise_cost(problem, convention));
  Json echo = Json::object();
  echo["kind"] = options.kind;
  echo["elements"] = number(problem.elements);
  echo["reads"] = number(problem.reads);
  echo["writes"] = number(problem.writes);
  echo["flops_per_element"] = number(problem.flops_per_element);
  echo["dtype"] = to_string(problem.dtype);
  Document document = explain_document(device, cost.convention, std::move(echo));
  append_roofline(document, fmt::format("An elementwise kernel ({})", options.kind), cost,
                  value_or_fail(predict(cost, device, convention)));
  document.print(context);
}

struct RidgeOptions {
  ExplainFlags explain;
  DType dtype = DType::bf16;
};

void explain_ridge(const RidgeOptions& options, const Context& context) {
  const DeviceSpec device = device_of(options.explain);
  const Convention convention = convention_of(options.explain, device);
  const Ridge at = value_or_fail(ridge(device, options.dtype, convention));
  Json echo = Json::object();
  echo["dtype"] = to_string(options.dtype);
  Document document = explain_document(device, convention.name, std::move(echo));
  document.headline(
      fmt::format("A kernel on {} must do {} FLOP of {} arithmetic for each byte it moves before "
                  "arithmetic, not memory, is its wall.",
                  device.name, plain_number(at.flop_per_byte), to_string(options.dtype)));
  document.set("ridge_flop_per_byte", at.flop_per_byte);
  document.set("ridge_rounded_flop_per_byte", at.rounded_flop_per_byte);
  document.set("ridge_low_flop_per_byte", at.low_flop_per_byte);
  document.set("ridge_high_flop_per_byte", at.high_flop_per_byte);
  document.set("peak_flop_per_s", at.peak_flop_per_s);
  document.set("achieved_flop_per_s", at.achieved_flop_per_s);
  document.set("bandwidth_bytes_per_s", at.bandwidth_bytes_per_s);
  if (const Figure* vector = device.find("peak_vector_f32_flop_per_s"); vector != nullptr) {
    document.set("peak_vector_f32_flop_per_s", vector->value);
    document.set("matrix_over_vector", at.peak_flop_per_s / vector->value);
    document.label("matrix_over_vector", "matrix units over vector units");
  }
  document.label("achieved_flop_per_s", "peak times its efficiency");
  document.print(context);
}

// ---- online softmax ----

Result<double> parse_score(std::string_view text) {
  if (text == "-inf") {
    return -std::numeric_limits<double>::infinity();  // a masked key
  }
  return parse_real(text, -1e300, 1e300);
}

/// "1,2/3,5": blocks of numbers. An empty block is one of the cases that a split has.
std::vector<std::vector<double>> blocks_of(const std::string& flag, const std::string& text,
                                           bool masked_allowed) {
  std::vector<std::vector<double>> blocks;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find('/', begin), text.size());
    std::vector<double> block;
    if (end > begin) {
      const Result<std::vector<std::string>> pieces =
          split_list(std::string_view(text).substr(begin, end - begin));
      if (!pieces.is_ok()) {
        fail_flag(flag, text, "numbers such as 1,2/3,5 without empty entries");
      }
      for (const std::string& piece : *pieces) {
        const Result<double> score =
            masked_allowed ? parse_score(piece) : parse_real(piece, -1e300, 1e300);
        if (!score.is_ok()) {
          fail_flag(
              flag, piece,
              masked_allowed ? "finite numbers, or -inf for a masked key," : "finite numbers");
        }
        block.push_back(*score);
      }
    }
    blocks.push_back(std::move(block));
    begin = end + 1;
  }
  return blocks;
}

struct SoftmaxOptions {
  std::string scores, blocks, values;
  std::optional<std::int64_t> block;
};

std::vector<std::vector<double>> split(const std::vector<double>& row,
                                       const SoftmaxOptions& options) {
  return value_or_fail(split_blocks(row, options.block.value_or(2)));
}

/// The blocks, from --blocks or from --scores cut every --block.
std::vector<std::vector<double>> score_blocks(const SoftmaxOptions& options) {
  if (options.blocks.empty()) {
    const std::string text = options.scores.empty() ? "1,2,3,5" : options.scores;
    const auto rows = blocks_of("--scores", text, true);
    if (rows.size() != 1) {
      fail_flag("--scores", text, "one row such as 1,2,3,5 (--blocks takes 1,2/3,5)");
    }
    return split(rows.front(), options);
  }
  if (!options.scores.empty() || options.block) {
    fail_flag("--blocks", options.block ? "together with --block" : "together with --scores",
              "--blocks alone, or --scores with --block,");
  }
  return blocks_of("--blocks", options.blocks, true);
}

/// One value per score, in the same blocks; written in blocks or as one row.
std::vector<std::vector<double>> value_blocks(const SoftmaxOptions& options,
                                              const std::vector<std::vector<double>>& scores) {
  if (options.values.empty()) {
    return {};
  }
  std::vector<double> all;
  for (const auto& block : blocks_of("--values", options.values, false)) {
    all.insert(all.end(), block.begin(), block.end());
  }
  std::size_t wanted = 0;
  for (const auto& block : scores) {
    wanted += block.size();
  }
  if (all.size() != wanted) {
    fail_flag("--values", fmt::format("{} numbers", all.size()),
              fmt::format("{}, one for each score,", wanted));
  }
  std::vector<std::vector<double>> blocks;
  auto next = all.begin();
  for (const auto& block : scores) {
    blocks.emplace_back(next, next + static_cast<std::ptrdiff_t>(block.size()));
    next += static_cast<std::ptrdiff_t>(block.size());
  }
  return blocks;
}

/// Sets a value that may be infinite; JSON has no infinity, so null with the reason.
void set_or_reason(Document& document, const std::string& key, double value, const char* reason) {
  if (std::isfinite(value)) {
    document.set(key, value);
  } else {
    document.missing(key, reason);
  }
}

void explain_online_softmax(const SoftmaxOptions& options, const Context& context) {
  const auto scores = score_blocks(options);
  const auto values = value_blocks(options, scores);
  const SoftmaxTrace trace = value_or_fail(online_softmax(scores, values));
  Document document;
  document.headline(
      "Softmax over blocks of scores, one pass: m is the running maximum, l the "
      "running sum of exp(score - m); what was summed before is multiplied by "
      "rescale when m grows.");
  Json echo = Json::object();
  Json block_list = Json::array();
  for (const auto& block : scores) {
    Json row = Json::array();
    for (const double score : block) {
      row.push_back(number(score));
    }
    block_list.push_back(std::move(row));
  }
  echo["blocks"] = std::move(block_list);
  document.set("problem", std::move(echo)).label("problem", "Problem");
  Json steps = Json::array();
  for (std::size_t i = 0; i < trace.steps.size(); ++i) {
    const SoftmaxStep& step = trace.steps[i];
    Json row = Json::object();
    row["block"] = i + 1;
    row["m"] = number(step.m);
    row["l"] = number(step.l);
    row["rescale"] = number(step.rescale);
    if (!values.empty()) {
      row["output"] = number(step.output);
    }
    steps.push_back(std::move(row));
  }
  document.set("steps", std::move(steps)).rows("steps").label("steps", "Blocks");
  set_or_reason(document, "sum_exp", trace.sum_exp, "beyond the range of a double; lse is not");
  set_or_reason(document, "lse", trace.lse, "minus infinity: no key is seen");
  if (trace.output) {
    document.set("output", *trace.output);
  }
  document.label("sum_exp", "sum of exp(score)").label("lse", "its natural logarithm (lse)");
  document.label("output", "weighted output");
  document.print(context);
}

void explain_merge(const std::string& text, const Context& context) {
  const auto rows = blocks_of("--states", text, true);
  SoftmaxState all;
  Json states = Json::array();
  for (const auto& row : rows) {
    if (row.size() != 3 || row[1] < 0 || !std::isfinite(row[1]) || !std::isfinite(row[2])) {
      fail_flag("--states", text, "m,l,output/m,l,output/… with l at least 0");
    }
    const SoftmaxState state{row[0], row[1], row[2]};
    all = merge_states(all, state);
    Json entry = Json::object();
    entry["m"] = number(state.m);
    entry["l"] = number(state.l);
    entry["output"] = number(state.output);
    states.push_back(std::move(entry));
  }
  Document document;
  document.headline(
      "The union of softmax states, each over its own keys: as if one pass had seen "
      "all of them.");
  document.set("states", std::move(states)).label("states", "States");
  set_or_reason(document, "m", all.m, "minus infinity: no key is seen");
  document.set("l", all.l);
  set_or_reason(document, "lse", all.lse(), "minus infinity: no key is seen");
  document.set("output", all.output);
  document.print(context);
}

}  // namespace

void add_explain_gemm(CLI::App& explain, Context& context) {
  auto options = std::make_shared<GemmOptions>();
  CLI::App* command =
      explain.add_subcommand("gemm", "a matrix product C [m, n] = A [m, k] B [k, n]");
  command->footer(examples({{"rafter explain gemm --m 4096 --n 4096 --k 4096", "compute-bound"},
                            {"rafter explain gemm --m 1 --n 4096 --k 4096",
                             "one token against a weight: bandwidth-bound at 1 FLOP/B"}}));
  GemmProblem& problem = options->problem;
  add_length(*command, "--m", problem.m, "rows of A and C (tokens)");
  add_length(*command, "--n", problem.n, "columns of B and C");
  add_length(*command, "--k", problem.k, "columns of A, rows of B");
  add_length(*command, "--batch", problem.batch, "such products");
  add_dtype(*command, "--dtype", problem.dtype, "of A, C and the arithmetic");
  add_dtype(*command, "--weight-dtype", problem.weight_dtype, "of B (default: as --dtype)");
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_gemm(*options, context); });
}

void add_explain_elementwise(CLI::App& explain, Context& context) {
  auto options = std::make_shared<ElementwiseOptions>();
  CLI::App* command = explain.add_subcommand(
      "elementwise", "a kernel that touches each element a fixed number of times");
  command->footer(
      examples({{"rafter explain elementwise --kind rmsnorm --elements 16m",
                 "about 1 FLOP/B: always bandwidth-bound"},
                {"rafter explain elementwise --flops-per-element 2 --reads 1 --writes 1",
                 "any other kernel of the sort"}}));
  add_choice(*command, "--kind", options->kind, {"rmsnorm", "residual-add", "swiglu", "rope"},
             "what each element costs, unless said below");
  add_length(*command, "--elements", options->elements, "elements");
  add_real(*command, "--reads", options->reads, "elements read per element");
  add_real(*command, "--writes", options->writes, "elements written per element");
  add_real(*command, "--flops-per-element", options->flops, "FLOP per element");
  add_dtype(*command, "--dtype", options->dtype, "of the elements");
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_elementwise(*options, context); });
}

void add_explain_ridge(CLI::App& explain, Context& context) {
  auto options = std::make_shared<RidgeOptions>();
  CLI::App* command = explain.add_subcommand(
      "ridge", "the intensity at which a device turns from bandwidth-bound to compute-bound");
  command->footer(examples({{"rafter explain ridge --device h100-sxm", "295 FLOP/B in bf16"},
                            {"rafter explain ridge --device h100-sxm --dtype e4m3", "in fp8"}}));
  add_dtype(*command, "--dtype", options->dtype, "whose peak counts");
  add_explain_flags(*command, options->explain, context, {"causal"});
  command->callback([options, &context] { explain_ridge(*options, context); });
}

void add_explain_online_softmax(CLI::App& explain, Context& context) {
  auto options = std::make_shared<SoftmaxOptions>();
  CLI::App* command =
      explain.add_subcommand("online-softmax", "softmax in one pass over blocks, step by step");
  command->footer(
      examples({{"rafter explain online-softmax --scores 1,2,3,5 --block 2",
                 "two blocks: m, l and the rescale factor after each"},
                {"rafter explain online-softmax --blocks 1,5/2,3 --values 1,10,100,1000",
                 "any split, with the weighted output"}}));
  add_text(*command, "--scores", options->scores, "a row of scores (default 1,2,3,5)", "X,X,...");
  add_length(*command, "--block", options->block, "scores per block (default 2)");
  add_text(*command, "--blocks", options->blocks, "scores already in blocks", "X,X/X,X");
  add_text(*command, "--values", options->values, "one value for each score", "X,X,...");
  add_format(*command, context);
  command->callback([options, &context] { explain_online_softmax(*options, context); });
}

void add_explain_merge(CLI::App& explain, Context& context) {
  auto states = std::make_shared<std::string>();
  CLI::App* command = explain.add_subcommand(
      "merge", "the union of partial softmax states (m, l, output), as split-kv merges them");
  command->footer(examples({{"rafter explain merge --states 2,1.367879,7.579/5,1.135335,892.8",
                             "two halves of the keys"}}));
  add_text(*command, "--states", *states, "running maximum, sum and output of each part",
           "M,L,O/M,L,O")
      ->required();
  add_format(*command, context);
  command->callback([states, &context] { explain_merge(*states, context); });
}

}  // namespace rafter::cli
