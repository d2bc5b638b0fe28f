// The union of attention states over disjoint keys. Weights in f64, so that nothing overflows and
// the order of the states does not show in f32.
#include <cmath>
#include <limits>
#include <vector>

#include "api/checks.h"
#include "api/operations.h"
#include "base/element.h"
#include "dispatch/operations.h"
#include "rafter/cache.h"

namespace rafter {
namespace {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

std::string state_name(std::size_t i, const char* field) {
  return "states[" + std::to_string(i) + "]." + field;
}

Status check_same(const std::string& name, std::int64_t given, std::int64_t wanted) {
  if (given != wanted) {
    return Status::invalid_argument(name, std::to_string(given),
                                    std::to_string(wanted) + " (as out has)");
  }
  return Status::ok();
}

Status check_output(const AttentionState& out) {
  const TensorView& o = out.o;
  const LseView& lse = out.lse;
  if (o.dtype != DType::f32 && o.dtype != DType::f16 && o.dtype != DType::bf16) {
    return Status::invalid_argument("out.o.dtype", to_string(o.dtype), "f32, f16 or bf16");
  }
  const std::pair<const char*, std::int64_t> sizes[] = {{"out.o.batch", o.batch},
                                                        {"out.o.seqlen", o.seqlen},
                                                        {"out.o.heads", o.heads},
                                                        {"out.o.head_dim", o.head_dim}};
  for (const auto& [name, size] : sizes) {
    if (size < 0) {
      return Status::invalid_argument(name, std::to_string(size), "0 or more");
    }
  }
  const std::tuple<const char*, std::int64_t, std::int64_t> pairs[] = {
      {"out.lse.batch", lse.batch, o.batch},
      {"out.lse.heads", lse.heads, o.heads},
      {"out.lse.seqlen", lse.seqlen, o.seqlen}};
  for (const auto& [name, given, wanted] : pairs) {
    if (given != wanted) {
      return Status::invalid_argument(name, std::to_string(given),
                                      std::to_string(wanted) + " (as out.o has)");
    }
  }
  const api::View views[] = {api::view_of("out.o", o), api::view_of("out.lse", lse)};
  for (const api::View& view : views) {
    if (Status s = api::check_memory(view); !s) {
      return s;
    }
    if (Status s = api::check_no_self_overlap(view); !s) {
      return s;
    }
  }
  return api::check_disjoint(views[0], views[1]);
}

Status check_state(std::size_t i, const AttentionState& state, const AttentionState& out) {
  if (state.o.dtype != out.o.dtype) {
    return Status::invalid_argument(state_name(i, "o.dtype"), to_string(state.o.dtype),
                                    std::string(to_string(out.o.dtype)) + " (as out has)");
  }
  const std::tuple<const char*, std::int64_t, std::int64_t> sizes[] = {
      {"o.batch", state.o.batch, out.o.batch},
      {"o.seqlen", state.o.seqlen, out.o.seqlen},
      {"o.heads", state.o.heads, out.o.heads},
      {"o.head_dim", state.o.head_dim, out.o.head_dim},
      {"lse.batch", state.lse.batch, out.lse.batch},
      {"lse.heads", state.lse.heads, out.lse.heads},
      {"lse.seqlen", state.lse.seqlen, out.lse.seqlen}};
  for (const auto& [field, given, wanted] : sizes) {
    if (given != wanted) {
      return check_same(state_name(i, field), given, wanted);
    }
  }
  const std::string o_name = state_name(i, "o");
  const std::string lse_name = state_name(i, "lse");
  const api::View o = api::view_of(o_name, state.o);
  const api::View lse = api::view_of(lse_name, state.lse);
  const api::View out_o = api::view_of("out.o", out.o);
  const api::View out_lse = api::view_of("out.lse", out.lse);
  // In place is element by element; any other overlap would read what was already written.
  for (const Status& s : {api::check_memory(o), api::check_memory(lse)}) {
    if (!s) {
      return s;
    }
  }
  for (const Status& s :
       {api::same_place(state.o, out.o) ? Status::ok() : api::check_disjoint(out_o, o),
        api::same_place(state.lse, out.lse) ? Status::ok() : api::check_disjoint(out_lse, lse),
        api::check_disjoint(out_o, lse), api::check_disjoint(out_lse, o)}) {
    if (!s) {
      return s;
    }
  }
  return Status::ok();
}

struct RowIndex {
  std::int64_t batch, head, row;
};

std::int64_t o_offset(const TensorView& o, const RowIndex& r) {
  return r.batch * o.stride_batch + r.row * o.stride_seqlen + r.head * o.stride_heads;
}
float& lse_at(const LseView& lse, const RowIndex& r) {
  return lse
      .data[r.batch * lse.stride_batch + r.head * lse.stride_heads + r.row * lse.stride_seqlen];
}

/// One row of the result. `weights` has room for one value per state.
void merge_row(std::span<const AttentionState> states, const AttentionState& out, const RowIndex& r,
               std::vector<double>& weights) {
  double largest = kEmpty;
  std::size_t nonempty = 0;
  std::size_t last = 0;  // the last state that is not empty
  for (std::size_t i = 0; i < states.size(); ++i) {
    const double lse = lse_at(states[i].lse, r);
    weights[i] = lse;
    if (lse != kEmpty) {
      ++nonempty;
      last = i;
      largest = lse > largest || std::isnan(lse) ? lse : largest;
    }
  }
  const std::int64_t to = o_offset(out.o, r);
  if (nonempty <= 1) {  // empty, or one state to the bit
    const TensorView* from = nonempty == 1 ? &states[last].o : nullptr;
    for (std::int64_t d = 0; d < out.o.head_dim; ++d) {
      const double value =
          from == nullptr
              ? 0
              : base::load_element(*from, o_offset(*from, r) + d * from->stride_head_dim);
      base::store_element(out.o, to + d * out.o.stride_head_dim, value);
    }
    lse_at(out.lse, r) = static_cast<float>(largest);
    return;
  }
  double sum = 0;
  for (double& weight : weights) {
    weight = weight == kEmpty ? 0 : std::exp(weight - largest);
    sum += weight;
  }
  for (std::int64_t d = 0; d < out.o.head_dim; ++d) {
    double total = 0;
    for (std::size_t i = 0; i < states.size(); ++i) {
      // An empty state's o is not read: whatever lies there stays out.
      if (weights[i] != 0) {
        const TensorView& o = states[i].o;
        total += weights[i] / sum * base::load_element(o, o_offset(o, r) + d * o.stride_head_dim);
      }
    }
    base::store_element(out.o, to + d * out.o.stride_head_dim, total);
  }
  lse_at(out.lse, r) = static_cast<float>(largest + std::log(sum));
}

}  // namespace

namespace {

Status check_merge(std::span<const AttentionState> states, const AttentionState& out) {
  if (states.empty()) {
    return Status::invalid_argument("states", "none", "one state or more");
  }
  if (Status s = check_output(out); !s) {
    return s;
  }
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (Status s = check_state(i, states[i], out); !s) {
      return s;
    }
  }
  return Status::ok();
}

}  // namespace

Status merge(std::span<const AttentionState> states, const AttentionState& out) {
  if (Status s = check_merge(states, out); !s) {
    return s;
  }
  std::vector<double> weights(states.size());
  const TensorView& o = out.o;
  for (std::int64_t b = 0; b < o.batch; ++b) {
    for (std::int64_t h = 0; h < o.heads; ++h) {
      for (std::int64_t row = 0; row < o.seqlen; ++row) {
        merge_row(states, out, {b, h, row}, weights);
      }
    }
  }
  return Status::ok();
}

Status merge(std::span<const AttentionState> states, const AttentionState& out,
             const Device& device, Stream stream) {
  if (Status s = api::check_device(device, stream); !s) {
    return s;
  }
  if (device.kind == Device::Kind::cpu) {
    return merge(states, out);
  }
  const OperationEntry* const entry = dispatch::find_merge(device.kind);
  if (Status s = api::check_operation("merge", entry, device); !s) {
    return s;
  }
  if (Status s = check_merge(states, out); !s) {
    return s;
  }
  if (static_cast<std::int64_t>(states.size()) > kMostMergedStates) {
    return Status::invalid_argument(
        "states", std::to_string(states.size()),
        "at most " + std::to_string(kMostMergedStates) + " at once on CUDA");
  }
  for (std::size_t i = 0; i <= states.size(); ++i) {
    const bool last = i == states.size();
    const std::string name = last ? "out.o" : state_name(i, "o");
    if (Status s = api::check_head_dim_stride(last ? out.o : states[i].o, name.c_str(), false);
        !s) {
      return s;
    }
  }
  return entry->merge({states, out, device.index, stream});
}

}  // namespace rafter
