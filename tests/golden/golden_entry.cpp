#include "golden/golden_entry.h"

#include <stdexcept>
#include <string>

namespace rafter::golden {
namespace {

void must(const Status& status) {
  if (!status) {
    throw std::runtime_error(status.message());
  }
}

}  // namespace

DType Entry::dtype_of_bytes(double bytes) {
  if (bytes == 0.5) return DType::int4;
  if (bytes == 1) return DType::e4m3;
  if (bytes == 2) return DType::bf16;
  if (bytes == 4) return DType::f32;
  throw std::runtime_error("no dtype of that size");
}

DType Entry::dtype() const { return dtype_of_bytes(number_or("bytes_per_element", 2)); }

Pipeline Entry::pipeline() const {
  const std::string impl = has("impl") ? input("impl").get<std::string>() : "fused";
  if (impl == "partly-fused") return Pipeline::half_fused;
  if (impl == "unfused-vs-fused") return Pipeline::fused;
  return must(parse_pipeline(impl));
}

Convention Entry::convention() const {
  Convention c = counts_as_solution() ? Convention::solution() : Convention::lecture();
  c.compute_efficiency = number_or("compute_efficiency", 1);
  c.verdict_words = VerdictWords::solution;  // the file says memory-bound for both sources
  const auto set = [&](const char* parameter, const char* name) {
    if (has(name)) {
      const Json& value = input(name);
      must(c.set(parameter, value.is_string() ? value.get<std::string>() : value.dump()));
    }
  };
  set("softmax_flops_per_element", "softmax_flops_per_element");
  set("dead_band", "dead_band");
  set("n_params", "n_params");
  set("layers_live", "layers_live");
  set("launch_s", "launch_seconds");
  set("graph_submit_s", "submission_seconds");
  set("score_elements_per_key", "score_elements_per_key");
  set("count_qo", "count_qo");
  if (has("impl") && input("impl") == "unfused-vs-fused") {
    // Passes and Q, K, V, O describe the unfused side alone; they are the profile's own.
    if (number("score_passes") != 4 || input("count_qkvo") != false) {
      throw std::runtime_error("an unfused side that is not the lecture's");
    }
  } else if (has("impl")) {
    set("score_passes", "score_passes");
    set("count_qkvo", "count_qkvo");
  }
  return c;
}

DeviceSpec Entry::device() const {
  DeviceSpec d;
  d.name = "the entry's own figures";
  if (has("device")) {
    const std::string name = input("device").get<std::string>();
    d = must(find_device(name == "H100-SXM"        ? "h100-sxm"
                         : name == "A100-80GB-SXM" ? "a100-80gb-sxm"
                                                   : "device-r"));
  } else if (!has("peak_flops_per_s")) {
    d = must(find_device("h100-sxm"));  // for quantities that no device changes
  }
  const auto set = [&](const char* key, const char* name, const char* unit) {
    if (has(name)) {
      d.figures[key] = {.value = number(name),
                        .unit = unit,
                        .kind = FigureKind::assumed,
                        .source = "golden.json",
                        .low = 0,
                        .high = 0,
                        .samples = 0};
    }
  };
  set("peak_bf16_flop_per_s", "peak_flops_per_s", "FLOP/s");
  set("bandwidth_bytes_per_s", "bandwidth_bytes_per_s", "B/s");
  set("usable_bytes", "usable_bytes", "B");
  set("capacity_bytes", "hbm_bytes", "B");
  set("fast_memory_bytes", "smem_bytes", "B");
  set("sm_count", "sm_count", "1");
  return d;
}

AttentionProblem Entry::problem() const { return problem(whole_or("seq_len", 1)); }

AttentionProblem Entry::problem(std::int64_t seqlen) const {
  AttentionProblem p;
  p.batch = whole_or("batch", 1);
  p.heads_q = whole_or("heads", 1);
  p.seqlen_q = p.seqlen_kv = seqlen;
  p.head_dim = whole_or("head_dim", 128);
  p.dtype = dtype();
  if (has("causal") && input("causal").get<bool>()) {
    p.mask = Mask::causal();
  }
  return p;
}

DecodeProblem Entry::decode() const {
  DecodeProblem p;
  p.batch = whole_or("batch", 1);
  p.heads_q = whole_or("group", 1);
  p.heads_kv = 1;
  p.seqlen_kv = whole_or("seq_len", 1);
  p.head_dim = whole_or("head_dim", 128);
  p.dtype = dtype();
  return p;
}

ModelConfig Entry::model() const {
  ModelConfig m = must(find_model("reference-7b"));
  m.num_layers = whole_or("layers", m.num_layers);
  m.heads_q = whole_or("heads", m.heads_q);
  m.heads_kv = whole_or("kv_heads", m.heads_q);
  m.head_dim = whole_or("head_dim", m.head_dim);
  m.dtype = dtype();
  return m;
}

ModelStep Entry::step(Phase phase) const {
  ModelStep s;
  s.model = model();
  s.phase = phase;
  s.seqlen = whole_or("seq_len", phase == Phase::prefill ? 1 : 0);
  s.pipeline = pipeline();
  s.causal = has("causal") && input("causal").get<bool>();
  if (has("weight_bytes_per_param")) {
    s.weight_dtype = dtype_of_bytes(number("weight_bytes_per_param"));
  }
  if (has("launches")) {
    s.launches = number("launches");
  }
  if (has("memory_floor_seconds")) {
    s.memory_floor_s = number("memory_floor_seconds");
    s.memory_floor_dtype = dtype_of_bytes(number_or("baseline_bytes_per_param", 2));
  }
  return s;
}

MemoryProblem Entry::memory(Pipeline pipeline) const {
  MemoryProblem p;
  p.model = model();
  p.model.num_layers = whole_or("layers", 1);
  p.batch = whole_or("batch", 1);
  p.pipeline = pipeline;
  return p;
}

}  // namespace rafter::golden
