#include <array>

#include "api/checks.h"

namespace rafter::api {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

using Inputs = std::array<View, 5>;  // q, k, v and the scales of k and v

bool may_have_scales(DType kv_dtype) { return kv_dtype == DType::int8 || kv_dtype == DType::e4m3; }

/// Scales are f32; int8 has them, e4m3 may, others do not.
Status check_scales(const AttentionProblem& p, const ForwardInputs& in) {
  const std::pair<const char*, const TensorView*> scales[] = {{"k_scale", &in.k_scale},
                                                              {"v_scale", &in.v_scale}};
  for (const auto& [name, scale] : scales) {
    if (!may_have_scales(*p.kv_dtype)) {
      if (scale->data != nullptr) {
        return Status::invalid_argument(
            name, "a tensor",
            std::string("none (kv_dtype is ") + to_string(*p.kv_dtype) + ", which has no scales)");
      }
      continue;
    }
    if (scale->data == nullptr && *p.kv_dtype == DType::e4m3) {
      continue;
    }
    if (scale->data == nullptr && in.k.elements() > 0) {
      return Status::invalid_argument(name, "null", "an f32 scale for each token and KV head");
    }
    if (scale->dtype != DType::f32) {
      return Status::invalid_argument(std::string(name) + ".dtype", to_string(scale->dtype), "f32");
    }
  }
  return Status::ok();
}

/// Present exactly when the problem has it, and of its size.
Status check_tree_mask(const AttentionProblem& p, const BitsView& view) {
  if (!p.tree_mask) {
    return view.data == nullptr
               ? Status::ok()
               : Status::invalid_argument("tree_mask", "an array",
                                          "none (it belongs to problems with tree_mask set)");
  }
  const std::pair<const char*, std::pair<std::int64_t, std::int64_t>> sizes[] = {
      {"tree_mask.batch", {view.batch, p.batch}}, {"tree_mask.seqlen", {view.seqlen, p.seqlen_q}}};
  for (const auto& [name, size] : sizes) {
    if (size.first != size.second) {
      return Status::invalid_argument(name, text(size.first), text(size.second));
    }
  }
  if (p.batch > 0 && p.seqlen_q > 0 && view.data == nullptr) {
    return Status::invalid_argument("tree_mask", "null", "a word for each query");
  }
  return Status::ok();
}

Status check_bad_pages(const AttentionProblem& p, const CountView& counts) {
  if (counts.data == nullptr) {
    return Status::ok();
  }
  if (p.layout != Layout::paged) {
    return Status::invalid_argument("bad_pages", "an array",
                                    "none (it belongs to the paged layout)");
  }
  if (counts.size != p.batch) {
    return Status::invalid_argument("bad_pages.size", text(counts.size), text(p.batch));
  }
  return Status::ok();
}

Status check_overlaps(const Inputs& inputs, const View& o, const View* lse, const View& workspace) {
  for (const View& input : inputs) {
    for (const View* output : {&o, lse, &workspace}) {
      if (output != nullptr) {
        if (Status s = check_disjoint(*output, input); !s) {
          return s;
        }
      }
    }
  }
  if (Status s = check_disjoint(o, workspace); !s) {
    return s;
  }
  if (lse != nullptr) {
    if (Status s = check_disjoint(*lse, workspace); !s) {
      return s;
    }
    return check_disjoint(o, *lse);
  }
  return Status::ok();
}

}  // namespace

Shapes shapes_of(const AttentionProblem& p) {
  const bool packed = p.layout == Layout::packed;
  const bool paged = p.layout == Layout::paged;
  const std::int64_t batch_q = packed ? 1 : p.batch;
  const std::int64_t rows_q = packed ? p.total_q : p.seqlen_q;
  const std::int64_t batch_kv = packed ? 1 : (paged ? p.num_pages : p.batch);
  const std::int64_t rows_kv = packed ? p.total_kv : (paged ? p.page_size : p.seqlen_kv);
  return {.q = {{batch_q, rows_q, p.heads_q, p.head_dim}},
          .k = {{batch_kv, rows_kv, p.heads_kv, p.head_dim}},
          .v = {{batch_kv, rows_kv, p.heads_kv, p.head_dim_v}},
          .o = {{batch_q, rows_q, p.heads_q, p.head_dim_v}},
          .lse = {{batch_q, p.heads_q, rows_q, 1}}};
}

Status check_shape(const View& view, const Shape& wanted) {
  for (int d = 0; d < view.rank; ++d) {
    if (view.size[d] != wanted.size[d]) {
      return Status::invalid_argument(std::string(view.name) + "." + view.dim_name[d],
                                      text(view.size[d]), text(wanted.size[d]));
    }
  }
  return Status::ok();
}

Status check_head_dim_stride(const TensorView& t, const char* name, bool any_stride) {
  if (t.stride_head_dim != 1 && t.head_dim > 1 && !any_stride) {
    return Status::invalid_argument(std::string(name) + ".stride_head_dim", text(t.stride_head_dim),
                                    "1 (this kernel needs head_dim contiguous)");
  }
  return Status::ok();
}

Status check_tensor(const char* name, const TensorView& tensor, DType dtype, const Shape& shape) {
  if (tensor.dtype != dtype) {
    return Status::invalid_argument(std::string(name) + ".dtype", to_string(tensor.dtype),
                                    to_string(dtype));
  }
  const View view = view_of(name, tensor);
  if (Status s = check_shape(view, shape); !s) {
    return s;
  }
  if (Status s = check_head_dim_stride(tensor, name, false); !s) {
    return s;
  }
  return check_memory(view);
}

Status check_rope(const Rope& rope, std::int64_t head_dim) {
  if (rope.rotary_dim < 2 || rope.rotary_dim > head_dim || rope.rotary_dim % 2 != 0) {
    return Status::invalid_argument("rope.rotary_dim", text(rope.rotary_dim),
                                    "an even number from 2 to head_dim = " + text(head_dim));
  }
  if (rope.max_position < 0) {
    return Status::invalid_argument("rope.max_position", text(rope.max_position), "0 or more");
  }
  if ((rope.cos == nullptr || rope.sin == nullptr) && rope.max_position > 0) {
    return Status::invalid_argument(rope.cos == nullptr ? "rope.cos" : "rope.sin", "null",
                                    "a table [max_position, rotary_dim / 2]");
  }
  return Status::ok();
}

Status check_dtype_of(const TensorView& t, const char* name, DType dtype, bool or_f32) {
  if (t.dtype == dtype || (or_f32 && t.dtype == DType::f32)) {
    return Status::ok();
  }
  std::string allowed = to_string(dtype);
  allowed += !or_f32 ? " (the problem's dtype)" : dtype == DType::f32 ? "" : " or f32";
  return Status::invalid_argument(std::string(name) + ".dtype", to_string(t.dtype), allowed);
}

Status check_workspace(Workspace workspace, std::int64_t bytes) {
  if (workspace.bytes < bytes) {
    return Status::invalid_argument("workspace.bytes", text(workspace.bytes),
                                    text(bytes) + " (workspace_bytes()) or more");
  }
  if (bytes > 0 && workspace.data == nullptr) {
    return Status::invalid_argument("workspace", "null", text(bytes) + " bytes");
  }
  constexpr std::uintptr_t kAlignment = 64;
  if (bytes > 0 && reinterpret_cast<std::uintptr_t>(workspace.data) % kAlignment != 0) {
    return Status::invalid_argument("workspace.data", "an address that is not a multiple of 64",
                                    "addresses aligned to 64 bytes");
  }
  return Status::ok();
}

View view_of_workspace(Workspace workspace, std::int64_t bytes) {
  return {.name = "workspace",
          .data = workspace.data,
          .dtype = DType::int8,
          .rank = 1,
          .size = {bytes, 1, 1, 1},
          .stride = {1, 0, 0, 0}};
}

Status check_forward(const AttentionProblem& p, const ForwardInputs& in, const ForwardOutputs& out,
                     Workspace workspace, const RunDemands& demands) {
  const std::pair<const char*, const TensorView*> tensors[] = {
      {"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"o", &out.o}};
  for (const auto& [name, tensor] : tensors) {
    if (*p.kv_dtype != p.dtype && (tensor == &in.k || tensor == &in.v)) {
      if (tensor->dtype != *p.kv_dtype) {
        return Status::invalid_argument(
            std::string(name) + ".dtype", to_string(tensor->dtype),
            std::string(to_string(*p.kv_dtype)) + " (the problem's kv_dtype)");
      }
      continue;
    }
    if (Status s = check_dtype_of(*tensor, name, p.dtype, tensor == &out.o); !s) {
      return s;
    }
  }
  if (Status s = check_scales(p, in); !s) {
    return s;
  }
  const Shapes sizes = shapes_of(p);
  const auto has_scale = [&p](const TensorView& scale) {
    return *p.kv_dtype == DType::int8 || scale.data != nullptr;
  };
  const auto scale_shape = [&sizes] {
    Shape shape = sizes.k;
    shape.size[3] = 1;
    return shape;
  }();
  const Inputs inputs = {view_of("q", in.q), view_of("k", in.k), view_of("v", in.v),
                         view_of("k_scale", in.k_scale), view_of("v_scale", in.v_scale)};
  const View o = view_of("o", out.o);
  const View lse = view_of("lse", out.lse);
  const bool has_lse = out.lse.data != nullptr;
  const std::pair<const View*, Shape> shapes[] = {
      {&inputs[0], sizes.q},     {&inputs[1], sizes.k},     {&inputs[2], sizes.v},
      {&inputs[3], scale_shape}, {&inputs[4], scale_shape}, {&o, sizes.o},
      {&lse, sizes.lse},
  };
  for (const auto& [view, shape] : shapes) {
    const bool absent = (view == &lse && !has_lse) ||
                        (view == &inputs[3] && !has_scale(in.k_scale)) ||
                        (view == &inputs[4] && !has_scale(in.v_scale));
    if (absent) {
      continue;
    }
    if (Status s = check_shape(*view, shape); !s) {
      return s;
    }
    if (Status s = check_memory(*view); !s) {
      return s;
    }
  }
  for (const auto& [name, tensor] : tensors) {
    if (Status s = check_head_dim_stride(*tensor, name, demands.any_head_dim_stride); !s) {
      return s;
    }
  }
  if (Status s = check_tree_mask(p, in.tree_mask); !s) {
    return s;
  }
  if (Status s = check_bad_pages(p, out.bad_pages); !s) {
    return s;
  }
  if (Status s = check_no_self_overlap(o); !s) {
    return s;
  }
  if (has_lse) {
    if (Status s = check_no_self_overlap(lse); !s) {
      return s;
    }
  }
  if (Status s = check_workspace(workspace, demands.workspace_bytes); !s) {
    return s;
  }
  const View scratch = view_of_workspace(workspace, demands.workspace_bytes);
  if (Status s = check_overlaps(inputs, o, has_lse ? &lse : nullptr, scratch); !s) {
    return s;
  }
  return check_indices(p, in, demands.host_indices);
}

}  // namespace rafter::api
