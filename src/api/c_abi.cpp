// The C ABI (rafter.h): every entry converts, calls the C++ function of the same meaning, and keeps
// what went wrong for rafter_error_message().
#include <exception>
#include <initializer_list>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "api/c_convert.h"

struct rafter_plan {
  rafter::Plan plan;
  std::string explain;
};

namespace rafter::c_abi {
namespace {

static_assert(static_cast<int>(StatusCode::kIoError) == RAFTER_IO_ERROR &&
              static_cast<int>(StatusCode::kInvalidArgument) == RAFTER_INVALID_ARGUMENT);

/// What the last failing call of this thread left. The pointers are to the strings or to literals.
struct LastError {
  std::string message_text, parameter_text;
  const char* message = "";
  const char* parameter = "";
};
thread_local LastError last_error;

rafter_status fail_with(rafter_status code, const char* message, const char* parameter) noexcept {
  last_error.message = message;
  last_error.parameter = parameter;
  return code;
}

rafter_status to_status(const Status& status) {
  if (status) {
    return RAFTER_OK;
  }
  last_error.message_text = status.message();
  last_error.parameter_text = status.parameter();
  return fail_with(static_cast<rafter_status>(status.code()), last_error.message_text.c_str(),
                   last_error.parameter_text.c_str());
}

/// Runs the body of an entry; nothing that is thrown beneath gets out.
template <typename Body>
rafter_status guarded(Body&& body) noexcept {
  try {
    return to_status(std::forward<Body>(body)());
  } catch (const std::bad_alloc&) {
    return fail_with(RAFTER_DEVICE_ERROR, "memory: none left", "memory");
  } catch (...) {
    return fail_with(RAFTER_DEVICE_ERROR, "an exception that should not have been", "");
  }
}

Status null_argument(const char* name) {
  return Status::invalid_argument(name, "null", "an address");
}

Status create(const rafter_problem* problem, const rafter_plan_options* options,
              rafter_plan** plan) {
  if (plan == nullptr) {
    return null_argument("plan");
  }
  *plan = nullptr;
  rafter_problem problem_read{};
  AttentionProblem asked;
  if (Status s = read_sized(problem, "problem", kProblemSize, problem_read); !s) {
    return s;
  }
  if (Status s = to_problem(problem_read, asked); !s) {
    return s;
  }
  rafter_plan_options options_read{};
  if (options != nullptr) {
    if (Status s = read_sized(options, "options", kOptionsSize, options_read); !s) {
      return s;
    }
  }
  Device device;
  PlanOptions how;
  if (Status s = to_options(options_read, device, how); !s) {
    return s;
  }
  DeviceSpec spec;
  if (options_read.device_spec != nullptr) {
    Result<DeviceSpec> found = to_device_spec(options_read.device_spec);
    if (!found) {
      return found.status();
    }
    spec = *std::move(found);
    how.device_spec = &spec;
  }
  Result<Plan> made = rafter::plan(asked, device, how);
  if (!made) {
    return made.status();
  }
  std::string explain = made->explain();
  *plan = new rafter_plan{*std::move(made), std::move(explain)};
  return Status::ok();
}

template <typename Given, typename View>
struct Named {
  const char* name;
  const Given& given;
  View& to;
};

Status to_tensors(std::initializer_list<Named<rafter_tensor, TensorView>> tensors) {
  for (const auto& [name, given, to] : tensors) {
    if (Status s = to_tensor(name, given, to); !s) {
      return s;
    }
  }
  return Status::ok();
}
/// Leaves a view of a tensor that is not given as it is.
Status to_optional_tensors(std::initializer_list<Named<rafter_tensor, TensorView>> tensors) {
  for (const auto& [name, given, to] : tensors) {
    if (Status s = given.data == nullptr ? Status::ok() : to_tensor(name, given, to); !s) {
      return s;
    }
  }
  return Status::ok();
}
Status to_rows(std::initializer_list<Named<rafter_indices, IndexView>> rows) {
  for (const auto& [name, given, to] : rows) {
    if (Status s = to_indices(name, given, false, to); !s) {
      return s;
    }
  }
  return Status::ok();
}

Status forward(const rafter_plan* plan, const rafter_forward_args* args) {
  if (plan == nullptr) {
    return null_argument("plan");
  }
  rafter_forward_args a{};
  if (Status s = read_sized(args, "args", kForwardSize, a); !s) {
    return s;
  }
  ForwardInputs in;
  in.tree_mask = {a.tree_mask.data, a.tree_mask.rows, a.tree_mask.cols, a.tree_mask.row_stride};
  ForwardOutputs out{.o = {}, .lse = to_lse(a.lse), .bad_pages = to_counts(a.bad_pages)};
  for (const Status& s :
       {to_tensors({{"q", a.q, in.q}, {"k", a.k, in.k}, {"v", a.v, in.v}, {"o", a.o, out.o}}),
        to_optional_tensors(
            {{"k_scale", a.k_scale, in.k_scale}, {"v_scale", a.v_scale, in.v_scale}}),
        to_rows({{"cu_seqlens_q", a.cu_seqlens_q, in.cu_seqlens_q},
                 {"cu_seqlens_kv", a.cu_seqlens_kv, in.cu_seqlens_kv},
                 {"seqused_kv", a.seqused_kv, in.seqused_kv}}),
        to_indices("page_table", a.page_table, true, in.page_table)}) {
    if (!s) {
      return s;
    }
  }
  return plan->plan.forward(in, out, {a.workspace, a.workspace_bytes}, {a.stream});
}

Status backward(const rafter_plan* plan, const rafter_backward_args* args) {
  if (plan == nullptr) {
    return null_argument("plan");
  }
  rafter_backward_args a{};
  if (Status s = read_sized(args, "args", kBackwardSize, a); !s) {
    return s;
  }
  BackwardInputs in;
  in.lse = to_lse(a.lse);
  in.dlse = to_lse(a.dlse);
  BackwardOutputs out;
  for (const Status& s : {to_tensors({{"q", a.q, in.q},
                                      {"k", a.k, in.k},
                                      {"v", a.v, in.v},
                                      {"o", a.o, in.o},
                                      {"d_o", a.d_o, in.d_o},
                                      {"dq", a.dq, out.dq},
                                      {"dk", a.dk, out.dk},
                                      {"dv", a.dv, out.dv}}),
                          to_rows({{"cu_seqlens_q", a.cu_seqlens_q, in.cu_seqlens_q},
                                   {"cu_seqlens_kv", a.cu_seqlens_kv, in.cu_seqlens_kv},
                                   {"seqused_kv", a.seqused_kv, in.seqused_kv}})}) {
    if (!s) {
      return s;
    }
  }
  return plan->plan.backward(in, out, {a.workspace, a.workspace_bytes}, {a.stream});
}

Status to_state(const std::string& name, const rafter_state& given, AttentionState& out) {
  out.lse = to_lse(given.lse);
  return to_tensor((name + ".o").c_str(), given.o, out.o);
}

Status append(const rafter_append_args* args) {
  rafter_append_args a{};
  if (Status s = read_sized(args, "args", kAppendSize, a); !s) {
    return s;
  }
  Device device;
  AppendInputs in;
  in.rope = {.cos = a.rope_cos,
             .sin = a.rope_sin,
             .max_position = a.rope_positions,
             .rotary_dim = a.rotary_dim};
  AppendOutputs out;
  out.dropped = to_counts(a.dropped);
  for (const Status& s :
       {to_device(a.device, a.device_index, device), reserved("args.reserved", a.reserved),
        to_rope_pairs(a.rope_pairs, in.rope.pairs),
        to_tensors({{"k", a.k, in.k},
                    {"v", a.v, in.v},
                    {"k_cache", a.k_cache, out.k_cache},
                    {"v_cache", a.v_cache, out.v_cache}}),
        to_optional_tensors({{"k_scale_given", a.k_scale_given, in.k_scale},
                             {"v_scale_given", a.v_scale_given, in.v_scale},
                             {"k_scale", a.k_scale, out.k_scale},
                             {"v_scale", a.v_scale, out.v_scale},
                             {"q", a.q, in.q},
                             {"q_out", a.q_out, out.q}}),
        to_rows({{"seqused_kv", a.seqused_kv, in.seqused_kv},
                 {"seqused_new", a.seqused_new, in.seqused_new}}),
        to_indices("page_table", a.page_table, true, in.page_table)}) {
    if (!s) {
      return s;
    }
  }
  return rafter::append(in, out, device, {a.stream});
}

Status merge(const Device& device, void* stream, const rafter_state* states, std::size_t count,
             const rafter_state* out) {
  if (out == nullptr || (states == nullptr && count > 0)) {
    return null_argument(out == nullptr ? "out" : "states");
  }
  AttentionState merged;
  if (Status s = to_state("out", *out, merged); !s) {
    return s;
  }
  std::vector<AttentionState> parts(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (Status s = to_state("states[" + std::to_string(i) + "]", states[i], parts[i]); !s) {
      return s;
    }
  }
  return rafter::merge(parts, merged, device, {stream});
}

Status write_cost(const Cost& cost, const Prediction& prediction, rafter_cost* out) {
  if (out == nullptr) {
    return null_argument("cost");
  }
  if (out->size < kCostSize) {
    return Status::invalid_argument(
        "cost.size", std::to_string(out->size),
        "sizeof of the struct, " + std::to_string(kCostSize) + " or more");
  }
  const std::size_t size = out->size;
  rafter_cost written = to_cost(cost, prediction);
  written.size = size;
  std::memset(out, 0, size);
  std::memcpy(out, &written, std::min(size, sizeof(written)));
  return Status::ok();
}

Status explain(const rafter_problem* problem, rafter_pipeline pipeline, Pass pass,
               const char* device, rafter_cost* cost) {
  if (device == nullptr) {
    return null_argument("device");
  }
  rafter_problem problem_read{};
  AttentionProblem asked;
  std::optional<Pipeline> how;
  if (Status s = read_sized(problem, "problem", kProblemSize, problem_read); !s) {
    return s;
  }
  for (const Status& s : {to_problem(problem_read, asked), to_pipeline(pipeline, how)}) {
    if (!s) {
      return s;
    }
  }
  const Result<DeviceSpec> spec = to_device_spec(device);
  if (!spec) {
    return spec.status();
  }
  const Result<Cost> counted = attention_cost(asked, how.value_or(Pipeline::fused), pass);
  if (!counted) {
    return counted.status();
  }
  const Result<Prediction> prediction = predict(*counted, *spec);
  if (!prediction) {
    return prediction.status();
  }
  return write_cost(*counted, *prediction, cost);
}

}  // namespace
}  // namespace rafter::c_abi

extern "C" {

const char* rafter_status_name(rafter_status status) {
  const bool known = status >= RAFTER_OK && status <= RAFTER_IO_ERROR;
  return known ? rafter::to_string(static_cast<rafter::StatusCode>(status)) : "unknown";
}

const char* rafter_error_message(void) { return rafter::c_abi::last_error.message; }
const char* rafter_error_parameter(void) { return rafter::c_abi::last_error.parameter; }
const char* rafter_version(void) { return RAFTER_VERSION; }

rafter_tensor rafter_contiguous(const void* data, rafter_dtype dtype, int64_t batch, int64_t seqlen,
                                int64_t heads, int64_t head_dim) {
  return {const_cast<void*>(data),
          {batch, seqlen, heads, head_dim},
          {seqlen * heads * head_dim, heads * head_dim, head_dim, 1},
          dtype,
          0};
}

rafter_lse rafter_contiguous_lse(float* data, int64_t batch, int64_t heads, int64_t seqlen) {
  return {data, {batch, heads, seqlen}, {heads * seqlen, seqlen, 1}};
}

rafter_status rafter_plan_create(const rafter_problem* problem, const rafter_plan_options* options,
                                 rafter_plan** plan) {
  return rafter::c_abi::guarded([&] { return rafter::c_abi::create(problem, options, plan); });
}

void rafter_plan_destroy(rafter_plan* plan) { delete plan; }

int64_t rafter_plan_workspace_bytes(const rafter_plan* plan) {
  return plan == nullptr ? -1 : plan->plan.workspace_bytes();
}
const char* rafter_plan_kernel(const rafter_plan* plan) {
  return plan == nullptr ? nullptr : plan->plan.kernel().c_str();
}
const char* rafter_plan_explain(const rafter_plan* plan) {
  return plan == nullptr ? nullptr : plan->explain.c_str();
}

rafter_status rafter_forward(const rafter_plan* plan, const rafter_forward_args* args) {
  return rafter::c_abi::guarded([&] { return rafter::c_abi::forward(plan, args); });
}

rafter_status rafter_backward(const rafter_plan* plan, const rafter_backward_args* args) {
  return rafter::c_abi::guarded([&] { return rafter::c_abi::backward(plan, args); });
}

rafter_status rafter_merge(const rafter_state* states, size_t count, const rafter_state* out) {
  return rafter_merge_on(RAFTER_CPU, 0, nullptr, states, count, out);
}

rafter_status rafter_merge_on(rafter_device device, int32_t device_index, void* stream,
                              const rafter_state* states, size_t count, const rafter_state* out) {
  return rafter::c_abi::guarded([&] {
    rafter::Device where;
    rafter::Status known = rafter::c_abi::to_device(device, device_index, where);
    return known ? rafter::c_abi::merge(where, stream, states, count, out) : known;
  });
}

rafter_status rafter_append(const rafter_append_args* args) {
  return rafter::c_abi::guarded([&] { return rafter::c_abi::append(args); });
}

rafter_status rafter_plan_cost(const rafter_plan* plan, rafter_cost* cost) {
  return rafter::c_abi::guarded([&] {
    return plan == nullptr
               ? rafter::c_abi::null_argument("plan")
               : rafter::c_abi::write_cost(plan->plan.cost(), plan->plan.prediction(), cost);
  });
}

rafter_status rafter_explain(const rafter_problem* problem, rafter_pipeline pipeline,
                             const char* device, rafter_cost* cost) {
  return rafter::c_abi::guarded([&] {
    return rafter::c_abi::explain(problem, pipeline, rafter::Pass::forward, device, cost);
  });
}
rafter_status rafter_explain_backward(const rafter_problem* problem, rafter_pipeline pipeline,
                                      const char* device, rafter_cost* cost) {
  return rafter::c_abi::guarded([&] {
    return rafter::c_abi::explain(problem, pipeline, rafter::Pass::backward, device, cost);
  });
}

}  // extern "C"
