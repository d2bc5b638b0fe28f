// Checks of append(), then the device's kernel.
#include "api/checks.h"
#include "api/operations.h"
#include "base/checked.h"
#include "dispatch/operations.h"
#include "rafter/cache.h"

namespace rafter {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;

std::string text(std::int64_t value) { return std::to_string(value); }

bool is_quantised(DType dtype) { return dtype == DType::int8 || dtype == DType::e4m3; }

/// One tensor of the call and what it must be.
struct Wanted {
  const char* name;
  const TensorView* tensor;
  DType dtype;
  api::Shape shape;
  bool is_output = false;
};

Status check_tensor(const Wanted& wanted) {
  Status s = api::check_tensor(wanted.name, *wanted.tensor, wanted.dtype, wanted.shape);
  return s && wanted.is_output
             ? api::check_no_self_overlap(api::view_of(wanted.name, *wanted.tensor))
             : s;
}

Status check_sizes(const AppendInputs& in, const AppendOutputs& out) {
  const std::pair<const char*, std::int64_t> counts[] = {{"k.batch", in.k.batch},
                                                         {"k.seqlen", in.k.seqlen},
                                                         {"k_cache.batch", out.k_cache.batch},
                                                         {"k_cache.seqlen", out.k_cache.seqlen}};
  for (const auto& [name, value] : counts) {
    if (value < 0) {
      return Status::invalid_argument(name, text(value), "0 or more");
    }
  }
  const std::pair<const char*, std::int64_t> dims[] = {{"k.head_dim", in.k.head_dim},
                                                       {"v.head_dim", in.v.head_dim}};
  for (const auto& [name, value] : dims) {
    if (value < 1 || value > kMaxHeadDim) {
      return Status::invalid_argument(name, text(value), "1 to " + text(kMaxHeadDim));
    }
  }
  if (in.k.heads < 1) {
    return Status::invalid_argument("k.heads", text(in.k.heads), "1 or more");
  }
  if (in.q.data != nullptr && in.q.heads < 1) {
    return Status::invalid_argument("q.heads", text(in.q.heads), "1 or more");
  }
  if (!in.page_table.empty() && out.k_cache.seqlen < 1) {
    return Status::invalid_argument("k_cache.seqlen", text(out.k_cache.seqlen),
                                    "1 (a page of one token) or more");
  }
  return Status::ok();
}

Status check_dtypes(const AppendInputs& in, const AppendOutputs& out) {
  if (in.k.dtype != DType::f32 && in.k.dtype != DType::f16 && in.k.dtype != DType::bf16) {
    return Status::invalid_argument("k.dtype", to_string(in.k.dtype), "f32, f16 or bf16");
  }
  const DType cache = out.k_cache.dtype;
  if (cache != in.k.dtype && !is_quantised(cache)) {
    return Status::invalid_argument("k_cache.dtype", to_string(cache),
                                    std::string(to_string(in.k.dtype)) + ", int8 or e4m3");
  }
  return Status::ok();
}

/// RoPE may be left out, and then all of it.
Status check_rope(const AppendInputs& in) {
  const Rope& rope = in.rope;
  if (rope.rotary_dim != 0) {
    return api::check_rope(rope, in.k.head_dim);
  }
  if (rope.cos != nullptr || rope.sin != nullptr || rope.max_position != 0 ||
      rope.pairs != Rope::Pairs::half_split) {
    return Status::invalid_argument("rope.rotary_dim", "0, with tables, positions or pairs",
                                    "an even number above 0, or nothing else of rope");
  }
  return in.q.data == nullptr
             ? Status::ok()
             : Status::invalid_argument("q", "a tensor", "none without rope (it would not turn)");
}

/// Factors of a quantised cache are given or computed; int8 wants one of them.
Status check_factors(const char* name, const char* given_name, const char* computed_name,
                     DType cache, const TensorView& given, const TensorView& computed) {
  if (!is_quantised(cache)) {
    const bool has_given = given.data != nullptr;
    if (has_given || computed.data != nullptr) {
      return Status::invalid_argument(has_given ? given_name : computed_name, "a tensor",
                                      std::string("none (the cache is ") + to_string(cache) + ")");
    }
    return Status::ok();
  }
  if (given.data != nullptr && computed.data != nullptr) {
    return Status::invalid_argument(name, "factors given and to be computed", "one of the two");
  }
  if (cache == DType::int8 && given.data == nullptr && computed.data == nullptr) {
    return Status::invalid_argument(name, "null", "f32 factors, given or to be computed");
  }
  return Status::ok();
}

Status check_indices(const AppendInputs& in, const AppendOutputs& out, bool on_host) {
  const std::int64_t batch = in.k.batch;
  if (Status s = api::check_index("seqused_kv", in.seqused_kv, batch); !s) {
    return s;
  }
  const bool some_new = !in.seqused_new.empty();
  if (Status s = some_new ? api::check_index("seqused_new", in.seqused_new, batch) : Status::ok();
      !s) {
    return s;
  }
  if (!in.page_table.empty()) {
    const auto size = base::checked_product({batch, in.page_table.cols});
    if (in.page_table.cols < 0 || !size) {
      return Status::invalid_argument("page_table.cols", text(in.page_table.cols),
                                      "0 or more, less than 2^63 / batch");
    }
    if (Status s = api::check_index("page_table", in.page_table, *size); !s) {
      return s;
    }
  }
  if (out.dropped.data != nullptr && out.dropped.size != batch) {
    return Status::invalid_argument("dropped.size", text(out.dropped.size), text(batch));
  }
  if (!on_host) {
    return Status::ok();
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 62;
  for (std::int64_t b = 0; b < batch; ++b) {
    if (in.seqused_kv[b] < 0 || in.seqused_kv[b] > kMost) {
      return Status::invalid_argument("seqused_kv[" + text(b) + "]", text(in.seqused_kv[b]),
                                      "0 to 2^62");
    }
    if (some_new && (in.seqused_new[b] < 0 || in.seqused_new[b] > in.k.seqlen)) {
      return Status::invalid_argument("seqused_new[" + text(b) + "]", text(in.seqused_new[b]),
                                      "0 to " + text(in.k.seqlen));
    }
  }
  return Status::ok();
}

Status check_overlaps(const AppendInputs& in, const AppendOutputs& out) {
  const std::pair<const char*, const TensorView*> inputs[] = {{"k", &in.k},
                                                              {"v", &in.v},
                                                              {"q", &in.q},
                                                              {"k_scale (in)", &in.k_scale},
                                                              {"v_scale (in)", &in.v_scale}};
  const std::pair<const char*, const TensorView*> outputs[] = {{"k_cache", &out.k_cache},
                                                               {"v_cache", &out.v_cache},
                                                               {"k_scale", &out.k_scale},
                                                               {"v_scale", &out.v_scale},
                                                               {"q (out)", &out.q}};
  for (std::size_t i = 0; i < std::size(outputs); ++i) {
    const api::View output = api::view_of(outputs[i].first, *outputs[i].second);
    for (const auto& [name, input] : inputs) {
      if (outputs[i].second == &out.q && input == &in.q && api::same_place(in.q, out.q)) {
        continue;
      }
      if (Status s = api::check_disjoint(output, api::view_of(name, *input)); !s) {
        return s;
      }
    }
    for (std::size_t j = i + 1; j < std::size(outputs); ++j) {
      if (Status s =
              api::check_disjoint(output, api::view_of(outputs[j].first, *outputs[j].second));
          !s) {
        return s;
      }
    }
  }
  return Status::ok();
}

Status check_tensors(const AppendInputs& in, const AppendOutputs& out) {
  const bool paged = !in.page_table.empty();
  const std::int64_t batch = in.k.batch, seqlen = in.k.seqlen, heads = in.k.heads;
  const std::int64_t places = paged ? out.k_cache.batch : batch, rows = out.k_cache.seqlen;
  const DType dtype = in.k.dtype, cache = out.k_cache.dtype;
  const Wanted always[] = {
      {"k", &in.k, dtype, {{batch, seqlen, heads, in.k.head_dim}}},
      {"v", &in.v, dtype, {{batch, seqlen, heads, in.v.head_dim}}},
      {"k_cache", &out.k_cache, cache, {{places, rows, heads, in.k.head_dim}}, true},
      {"v_cache", &out.v_cache, cache, {{places, rows, heads, in.v.head_dim}}, true}};
  for (const Wanted& wanted : always) {
    if (Status s = check_tensor(wanted); !s) {
      return s;
    }
  }
  const Wanted optional[] = {
      {"q", &in.q, dtype, {{batch, seqlen, in.q.heads, in.k.head_dim}}},
      {"k_scale (in)", &in.k_scale, DType::f32, {{1, 1, heads, 1}}},
      {"v_scale (in)", &in.v_scale, DType::f32, {{1, 1, heads, 1}}},
      {"k_scale", &out.k_scale, DType::f32, {{places, rows, heads, 1}}, true},
      {"v_scale", &out.v_scale, DType::f32, {{places, rows, heads, 1}}, true}};
  for (const Wanted& wanted : optional) {
    if (wanted.tensor->data == nullptr) {
      continue;
    }
    if (Status s = check_tensor(wanted); !s) {
      return s;
    }
  }
  if (in.q.data == nullptr && out.q.data == nullptr) {
    return Status::ok();
  }
  if (in.q.data == nullptr) {
    return Status::invalid_argument("q", "null", "a tensor where q (out) is one");
  }
  return check_tensor(
      {"q (out)", &out.q, dtype, {{batch, seqlen, in.q.heads, in.k.head_dim}}, true});
}

Status check_append(const AppendInputs& in, const AppendOutputs& out, bool on_host) {
  for (const auto check : {check_sizes, check_dtypes, check_tensors}) {
    if (Status s = check(in, out); !s) {
      return s;
    }
  }
  if (Status s = check_rope(in); !s) {
    return s;
  }
  if (Status s = check_factors("k_scale", "k_scale (in)", "k_scale (out)", out.k_cache.dtype,
                               in.k_scale, out.k_scale);
      !s) {
    return s;
  }
  if (Status s = check_factors("v_scale", "v_scale (in)", "v_scale (out)", out.v_cache.dtype,
                               in.v_scale, out.v_scale);
      !s) {
    return s;
  }
  if (Status s = check_indices(in, out, on_host); !s) {
    return s;
  }
  return check_overlaps(in, out);
}

}  // namespace

Status append(const AppendInputs& in, const AppendOutputs& out, const Device& device,
              Stream stream) {
  if (Status s = api::check_device(device, stream); !s) {
    return s;
  }
  const OperationEntry* const entry = dispatch::find_append(device.kind);
  if (Status s = api::check_operation("append", entry, device); !s) {
    return s;
  }
  if (Status s = check_append(in, out, device.kind == Device::Kind::cpu); !s) {
    return s;
  }
  return entry->append({in, out, device.index, stream});
}

}  // namespace rafter
