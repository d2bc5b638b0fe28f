#include <array>
#include <span>

#include "api/checks.h"

namespace rafter::api {
namespace {

/// One tensor of a call: what is wanted of it.
struct Operand {
  View view;
  Shape shape;
  const TensorView* tensor = nullptr;  // null: an lse
  bool or_f32 = false;
  bool present = true;
};

Operand operand(const char* name, const TensorView& tensor, const Shape& shape, bool or_f32) {
  return {view_of(name, tensor), shape, &tensor, or_f32, true};
}

Status check_operand(const Operand& operand, DType dtype, const RunDemands& demands) {
  if (operand.tensor != nullptr) {
    const std::string name(operand.view.name);
    if (Status s = check_dtype_of(*operand.tensor, name.c_str(), dtype, operand.or_f32); !s) {
      return s;
    }
    if (Status s =
            check_head_dim_stride(*operand.tensor, name.c_str(), demands.any_head_dim_stride);
        !s) {
      return s;
    }
  }
  if (Status s = check_shape(operand.view, operand.shape); !s) {
    return s;
  }
  return check_memory(operand.view);
}

/// No output meets an input, another output or the workspace, and no input meets the workspace.
Status check_apart(std::span<const Operand> inputs, std::span<const Operand> outputs,
                   const View& workspace) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const View& output = outputs[i].view;
    if (Status s = check_no_self_overlap(output); !s) {
      return s;
    }
    for (const Operand& input : inputs) {
      if (Status s = input.present ? check_disjoint(output, input.view) : Status::ok(); !s) {
        return s;
      }
    }
    for (std::size_t j = i + 1; j < outputs.size(); ++j) {
      if (Status s = check_disjoint(output, outputs[j].view); !s) {
        return s;
      }
    }
    if (Status s = check_disjoint(output, workspace); !s) {
      return s;
    }
  }
  for (const Operand& input : inputs) {
    if (Status s = input.present ? check_disjoint(workspace, input.view) : Status::ok(); !s) {
      return s;
    }
  }
  return Status::ok();
}

}  // namespace

Status check_backward(const AttentionProblem& p, const BackwardInputs& in,
                      const BackwardOutputs& out, Workspace workspace, const RunDemands& demands) {
  const Shapes shapes = shapes_of(p);
  const std::array inputs = {
      operand("q", in.q, shapes.q, false),
      operand("k", in.k, shapes.k, false),
      operand("v", in.v, shapes.v, false),
      operand("o", in.o, shapes.o, true),
      operand("d_o", in.d_o, shapes.o, true),
      Operand{.view = view_of("lse", in.lse), .shape = shapes.lse},
      Operand{.view = view_of("dlse", in.dlse),
              .shape = shapes.lse,
              .present = in.dlse.data != nullptr},
  };
  const std::array outputs = {
      operand("dq", out.dq, shapes.q, true),
      operand("dk", out.dk, shapes.k, true),
      operand("dv", out.dv, shapes.v, true),
  };
  for (const std::span<const Operand> operands : {std::span<const Operand>(inputs), {outputs}}) {
    for (const Operand& one : operands) {
      if (Status s = one.present ? check_operand(one, p.dtype, demands) : Status::ok(); !s) {
        return s;
      }
    }
  }
  if (Status s = check_workspace(workspace, demands.workspace_bytes); !s) {
    return s;
  }
  if (Status s =
          check_apart(inputs, outputs, view_of_workspace(workspace, demands.workspace_bytes));
      !s) {
    return s;
  }
  const ForwardInputs indices{.q = in.q,
                              .k = in.k,
                              .v = in.v,
                              .cu_seqlens_q = in.cu_seqlens_q,
                              .cu_seqlens_kv = in.cu_seqlens_kv,
                              .seqused_kv = in.seqused_kv};
  return check_indices(p, indices, demands.host_indices);
}

}  // namespace rafter::api
