// Argument checks behind plan, run and merge. Nothing here reads tensor data; lengths and page
// numbers are read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "rafter/attention.h"
#include "rafter/cache.h"

namespace rafter::api {

/// The problem with every default filled in, windows wider than the keys made unbounded.
/// Errors: invalid_argument names the field; also when a size does not fit 64 bits.
Result<AttentionProblem> complete_problem(const AttentionProblem& problem);

Status check_options(const PlanOptions& options);
/// A complete problem has the pass: the paged layout has no backward.
Status check_pass(const AttentionProblem& problem, Pass pass);

/// A tensor or lse as its checks see it.
struct View {
  std::string_view name;
  const void* data = nullptr;
  DType dtype = DType::f32;
  // Outermost first; lse has three dims.
  int rank = 4;
  std::int64_t size[4] = {1, 1, 1, 1};
  std::int64_t stride[4] = {0, 0, 0, 0};
  const char* dim_name[4] = {"", "", "", ""};
};
View view_of(std::string_view name, const TensorView& tensor);
View view_of(std::string_view name, const LseView& lse);

/// Null only without elements, aligned to the element, extents within 64 bits.
Status check_memory(const View& view);
/// No two elements of an output at one address, as far as sorted strides can show.
Status check_no_self_overlap(const View& view);
/// An output and another view share no element (exact for views interleaved by a common stride).
Status check_disjoint(const View& output, const View& other);
/// Of one shape: whether they are the same elements.
bool same_place(const TensorView& a, const TensorView& b);
bool same_place(const LseView& a, const LseView& b);

/// What a plan demands of a run.
struct RunDemands {
  std::int64_t workspace_bytes = 0;
  bool any_head_dim_stride = false;  // the kernel takes head_dim strides other than 1
  bool host_indices = true;          // lengths and page tables can be read here (not on CUDA)
};

struct Shape {
  std::int64_t size[4];
};
/// Sizes of the tensors of a problem, by layout.
struct Shapes {
  Shape q, k, v, o, lse;
};
Shapes shapes_of(const AttentionProblem& problem);

/// An index array of so many elements, of an index dtype.
Status check_index(const char* name, const IndexView& view, std::int64_t size);
Status check_shape(const View& view, const Shape& wanted);
Status check_head_dim_stride(const TensorView& tensor, const char* name, bool any_stride);
/// Dtype, shape, contiguous head_dim, memory.
Status check_tensor(const char* name, const TensorView& tensor, DType dtype, const Shape& shape);
/// Of an operation that turns heads: its dims and tables.
Status check_rope(const Rope& rope, std::int64_t head_dim);
/// The dtype of the problem, or f32 where `or_f32`.
Status check_dtype_of(const TensorView& tensor, const char* name, DType dtype, bool or_f32);
Status check_workspace(Workspace workspace, std::int64_t bytes);
/// The workspace as a view of bytes, so that it takes part in the overlap checks.
View view_of_workspace(Workspace workspace, std::int64_t bytes);

/// All that a run checks.
Status check_forward(const AttentionProblem& problem, const ForwardInputs& in,
                     const ForwardOutputs& out, Workspace workspace, const RunDemands& demands);
Status check_backward(const AttentionProblem& problem, const BackwardInputs& in,
                      const BackwardOutputs& out, Workspace workspace, const RunDemands& demands);
/// Shapes, dtypes and (where readable) contents of cu_seqlens, seqused_kv and page_table.
Status check_indices(const AttentionProblem& problem, const ForwardInputs& in, bool host_indices);

}  // namespace rafter::api
