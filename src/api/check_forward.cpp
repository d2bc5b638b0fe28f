#include <array>

#include "api/checks.h"

namespace rafter::api {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

struct Shape {
  std::int64_t size[4];
};

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

Status check_dtypes(const AttentionProblem& p, const ForwardInputs& in, const ForwardOutputs& out) {
  const std::pair<const char*, const TensorView*> inputs[] = {
      {"q", &in.q}, {"k", &in.k}, {"v", &in.v}};
  for (const auto& [name, tensor] : inputs) {
    if (tensor->dtype != p.dtype) {
      return Status::invalid_argument(std::string(name) + ".dtype", to_string(tensor->dtype),
                                      std::string(to_string(p.dtype)) + " (the problem's dtype)");
    }
  }
  if (out.o.dtype != p.dtype && out.o.dtype != DType::f32) {
    std::string allowed = to_string(p.dtype);
    allowed += p.dtype == DType::f32 ? "" : " or f32";
    return Status::invalid_argument("o.dtype", to_string(out.o.dtype), allowed);
  }
  return Status::ok();
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

/// The workspace as a view of bytes, so that it takes part in the overlap checks.
View view_of_workspace(Workspace workspace, std::int64_t bytes) {
  return {.name = "workspace",
          .data = workspace.data,
          .dtype = DType::int8,
          .rank = 1,
          .size = {bytes, 1, 1, 1},
          .stride = {1, 0, 0, 0}};
}

Status check_overlaps(const std::array<View, 3>& inputs, const View& o, const View* lse,
                      const View& workspace) {
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

Status check_forward(const AttentionProblem& p, const ForwardInputs& in, const ForwardOutputs& out,
                     Workspace workspace, const RunDemands& demands) {
  if (Status s = check_dtypes(p, in, out); !s) {
    return s;
  }
  const bool packed = p.layout == Layout::packed;
  const bool paged = p.layout == Layout::paged;
  const std::int64_t batch_q = packed ? 1 : p.batch;
  const std::int64_t rows_q = packed ? p.total_q : p.seqlen_q;
  const std::int64_t batch_kv = packed ? 1 : (paged ? p.num_pages : p.batch);
  const std::int64_t rows_kv = packed ? p.total_kv : (paged ? p.page_size : p.seqlen_kv);
  const std::array<View, 3> inputs = {view_of("q", in.q), view_of("k", in.k), view_of("v", in.v)};
  const View o = view_of("o", out.o);
  const View lse = view_of("lse", out.lse);
  const bool has_lse = out.lse.data != nullptr;
  const std::pair<const View*, Shape> shapes[] = {
      {&inputs[0], {{batch_q, rows_q, p.heads_q, p.head_dim}}},
      {&inputs[1], {{batch_kv, rows_kv, p.heads_kv, p.head_dim}}},
      {&inputs[2], {{batch_kv, rows_kv, p.heads_kv, p.head_dim_v}}},
      {&o, {{batch_q, rows_q, p.heads_q, p.head_dim_v}}},
      {&lse, {{batch_q, p.heads_q, rows_q, 1}}},
  };
  for (const auto& [view, shape] : shapes) {
    if (view == &lse && !has_lse) {
      continue;
    }
    if (Status s = check_shape(*view, shape); !s) {
      return s;
    }
    if (Status s = check_memory(*view); !s) {
      return s;
    }
  }
  const std::pair<const char*, const TensorView*> tensors[] = {
      {"q", &in.q}, {"k", &in.k}, {"v", &in.v}, {"o", &out.o}};
  for (const auto& [name, tensor] : tensors) {
    if (Status s = check_head_dim_stride(*tensor, name, demands.any_head_dim_stride); !s) {
      return s;
    }
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
