// What the verbs of `rafter explain` share: device, convention, and how costs are printed.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/args.h"
#include "cli/command.h"
#include "cli/output.h"
#include "rafter/attention.h"
#include "rafter/roofline.h"

namespace rafter::cli {

/// --device, --convention and each of its parameters alone, and figures that replace the device's.
struct ExplainFlags {
  std::string device;  // "": this machine's probe, else h100-sxm
  std::string convention = "exact";
  std::vector<std::pair<std::string, std::string>> parameters;  // in the order given
  std::optional<double> peak_flop_per_s, bandwidth_bytes_per_s, capacity_bytes, fast_memory_bytes,
      sm_count;
};
/// `own` names convention parameters for which the verb has a flag of its own.
void add_explain_flags(CLI::App& command, ExplainFlags& flags, Context& context,
                       const std::vector<std::string>& own = {});

/// The device with the figures of the command line in place of its own.
DeviceSpec device_of(const ExplainFlags& flags);
Convention convention_of(const ExplainFlags& flags, const DeviceSpec& device);

/// The shape flags of attention, shared by attention, crossover and recompute.
struct AttentionFlags {
  std::optional<std::int64_t> seqlen, seqlen_q, seqlen_kv, heads_q, heads_kv, group, head_dim_v;
  std::int64_t batch = 1, head_dim = 128, splits = 1;
  DType dtype = DType::bf16;
  MaskFlags mask;
  Pipeline pipeline = Pipeline::fused;
  std::string pass = "forward";
};
enum class Lengths { given, solved_for };  // crossover solves for the length
void add_attention_flags(CLI::App& command, AttentionFlags& flags, Lengths lengths);
AttentionProblem problem_of(const AttentionFlags& flags);
Pass pass_of(const AttentionFlags& flags);
/// heads_q and heads_kv from --heads-q, --heads-kv and --group, whichever were given.
std::pair<std::int64_t, std::int64_t> heads_of(std::optional<std::int64_t> heads_q,
                                               std::optional<std::int64_t> heads_kv,
                                               std::optional<std::int64_t> group);

/// Opens a document: device, convention, the problem as it was understood.
Document explain_document(const DeviceSpec& device, const std::string& convention, Json problem);
Json to_json(const AttentionProblem& problem, Pipeline pipeline);
void append_cost(Document& document, const Cost& cost);
void append_prediction(Document& document, const Prediction& prediction);
/// Cost and prediction with the sentences above and below the table.
void append_roofline(Document& document, const std::string& subject, const Cost& cost,
                     const Prediction& prediction);
/// Ceilings in their order: name, flop_per_s, advice.
Json ceilings_json(const std::vector<Ceiling>& ceilings);
/// The number, or null when the optional is empty.
Json optional_number(const std::optional<double>& value);

// One function per verb; each adds its subcommand.
void add_explain_attention(CLI::App& explain, Context& context);
void add_explain_decode(CLI::App& explain, Context& context);
void add_explain_gemm(CLI::App& explain, Context& context);
void add_explain_elementwise(CLI::App& explain, Context& context);
void add_explain_ridge(CLI::App& explain, Context& context);
void add_explain_crossover(CLI::App& explain, Context& context);
void add_explain_recompute(CLI::App& explain, Context& context);
void add_explain_tiling(CLI::App& explain, Context& context);
void add_explain_online_softmax(CLI::App& explain, Context& context);
void add_explain_merge(CLI::App& explain, Context& context);
void add_explain_model(CLI::App& explain, Context& context);
void add_explain_memory(CLI::App& explain, Context& context);
void add_explain_conventions(CLI::App& explain, Context& context);

}  // namespace rafter::cli
