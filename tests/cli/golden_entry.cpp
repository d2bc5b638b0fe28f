#include "cli/golden_entry.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

/// A JSON value as a flag takes it.
std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

const Json& ask(const std::string& verb, const Flags& flags) {
  static std::map<std::vector<std::string>, Json> answers;  // many entries ask the same
  std::vector<std::string> arguments;
  for (std::size_t begin = 0; begin < verb.size();) {
    const std::size_t end = std::min(verb.find(' ', begin), verb.size());
    arguments.push_back(verb.substr(begin, end - begin));
    begin = end + 1;
  }
  for (const auto& [flag, value] : flags) {
    arguments.push_back(value.empty() ? flag : flag + "=" + value);
  }
  arguments.insert(arguments.end(), {"--format", "json"});
  const auto found = answers.find(arguments);
  if (found != answers.end()) {
    return found->second;
  }
  const ToolRun run = run_tool(arguments);
  Json document = Json::parse(run.out, nullptr, false);
  if (document.is_discarded() || (run.exit_code != 0 && run.exit_code != 1)) {
    std::string command = "rafter";
    for (const std::string& argument : arguments) {
      command += " " + argument;
    }
    throw std::runtime_error(command + "\n" + run.err + run.out);
  }
  return answers.emplace(arguments, std::move(document)).first->second;
}

std::string Entry::dtype_of_bytes(double bytes) {
  if (bytes == 0.5) {
    return "int4";
  }
  if (bytes == 1) {
    return "e4m3";
  }
  if (bytes == 2) {
    return "bf16";
  }
  if (bytes == 4) {
    return "f32";
  }
  throw std::runtime_error("no dtype of that size");
}

std::string Entry::dtype() const { return dtype_of_bytes(number_or("bytes_per_element", 2)); }

std::string Entry::blocks(const char* name) const {
  std::string text;
  for (const Json& block : input(name)) {
    text += text.empty() ? "" : "/";
    for (std::size_t i = 0; i < block.size(); ++i) {
      text += (i == 0 ? "" : ",") + block[i].dump();
    }
  }
  return text;
}

void Entry::copy(Flags& flags, const char* flag, const char* input_name) const {
  if (has(input_name)) {
    flags[flag] = text_of(input(input_name));
  }
}

Flags Entry::counting() const {
  Flags flags;
  flags["--convention"] = counts_as_solution() ? "solution" : "lecture";
  // The file's own defaults where it states none: times at the roof, and one set of words.
  flags["--compute-efficiency"] = "1";
  flags["--verdict-words"] = "solution";
  copy(flags, "--compute-efficiency", "compute_efficiency");
  copy(flags, "--softmax-flops-per-element", "softmax_flops_per_element");
  copy(flags, "--dead-band", "dead_band");
  copy(flags, "--launch-s", "launch_seconds");
  copy(flags, "--graph-submit-s", "submission_seconds");
  copy(flags, "--score-elements-per-key", "score_elements_per_key");
  copy(flags, "--count-qo", "count_qo");
  // "unfused-vs-fused" states the unfused side of a comparison, which is the profile's own.
  if (has("impl") && input("impl") != "unfused-vs-fused") {
    copy(flags, "--score-passes", "score_passes");
    copy(flags, "--count-qkvo", "count_qkvo");
  }
  std::string device = has("device") ? input("device").get<std::string>() : "h100-sxm";
  std::transform(device.begin(), device.end(), device.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  flags["--device"] = device;
  copy(flags, "--peak-flops-per-s", "peak_flops_per_s");
  copy(flags, "--bandwidth-bytes-per-s", "bandwidth_bytes_per_s");
  copy(flags, "--capacity-bytes", "usable_bytes");
  copy(flags, "--capacity-bytes", "hbm_bytes");
  copy(flags, "--fast-memory-bytes", "smem_bytes");
  copy(flags, "--sm-count", "sm_count");
  return flags;
}

Flags Entry::attention() const {
  Flags flags = counting();
  flags["--seqlen"] = std::to_string(whole_or("seq_len", 1));
  flags["--dtype"] = dtype();
  copy(flags, "--batch", "batch");
  copy(flags, "--heads-q", "heads");
  copy(flags, "--head-dim", "head_dim");
  copy(flags, "--causal", "causal");
  if (has("impl") && input("impl") != "unfused-vs-fused") {
    copy(flags, "--impl", "impl");
  }
  return flags;
}

Flags Entry::decode() const {
  Flags flags = counting();
  flags["--seqlen-kv"] = std::to_string(whole_or("seq_len", 1));
  flags["--dtype"] = dtype();
  flags["--pipeline"] = "unfused";  // three kernels: the derivations count each
  copy(flags, "--batch", "batch");
  copy(flags, "--group", "group");
  copy(flags, "--head-dim", "head_dim");
  return flags;
}

Flags Entry::gemm() const {
  Flags flags = counting();
  flags["--m"] = std::to_string(whole_or("m", whole_or("tokens", 1)));
  flags["--n"] = std::to_string(whole_or("n", 4096));
  flags["--k"] = std::to_string(whole_or("k", 4096));
  if (has("weight_bytes_per_param")) {
    flags["--weight-dtype"] = dtype_of_bytes(number("weight_bytes_per_param"));
  }
  return flags;
}

Flags Entry::model() const {
  Flags flags = counting();
  copy(flags, "--seqlen", "seq_len");
  copy(flags, "--n-params", "n_params");
  copy(flags, "--layers", "layers");
  copy(flags, "--heads-q", "heads");
  copy(flags, "--heads-kv", "kv_heads");
  copy(flags, "--head-dim", "head_dim");
  copy(flags, "--launches", "launches");
  if (has("impl") && input("impl") != "unfused-vs-fused") {
    copy(flags, "--impl", "impl");
  }
  if (has("weight_bytes_per_param")) {
    flags["--weight-dtype"] = dtype_of_bytes(number("weight_bytes_per_param"));
  }
  return flags;
}

Flags Entry::memory() const {
  Flags flags = counting();
  flags["--layers"] = std::to_string(whole_or("layers", 1));
  flags["--layers-live"] = std::to_string(whole_or("layers_live", whole_or("layers", 1)));
  flags["--capacity"] = has("hbm_bytes") ? "total" : "usable";
  copy(flags, "--seqlen", "seq_len");
  copy(flags, "--batch", "batch");
  copy(flags, "--heads-q", "heads");
  copy(flags, "--head-dim", "head_dim");
  return flags;
}

Flags Entry::tiling() const {
  Flags flags = counting();
  flags["--dtype"] = dtype();
  copy(flags, "--seqlen", "seq_len");
  copy(flags, "--head-dim", "head_dim");
  return flags;
}

}  // namespace rafter::test
