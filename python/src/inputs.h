// What a call is given: its arrays and options, and the problem that they describe.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "arrays.h"
#include "rafter/attention.h"

namespace rafter::python {

/// The options of a call, as rafter/_attention.py passes them: (causal, window, align,
/// softmax_scale, softcap, pipeline, kernel, threads, splits). Each that is of another type or
/// value than allowed is a ValueError that names it.
struct Options {
  Mask mask;
  std::optional<float> softmax_scale;
  float softcap = 0;
  std::optional<Pipeline> pipeline;
  std::string kernel;
  int threads = 0;
  std::int64_t splits = 0;

  explicit Options(const nb::tuple& given);
  void describe(AttentionProblem& problem) const;
  PlanOptions plan_options(Pass pass, const DeviceSpec* spec = nullptr) const;
};

Mask mask_of(nb::handle causal, nb::handle window, nb::handle align);

/// Lengths of packed sequences that the caller states, 0 where not: arrays on a GPU are not read.
struct MaxLengths {
  std::int64_t q = 0, kv = 0;
};
MaxLengths max_lengths_of(nb::handle q, nb::handle kv);

/// Which arrays are [batch, heads, seqlen, head_dim] in place of [batch, seqlen, heads, head_dim].
enum class HeadsFirst : std::uint8_t { none, inputs, inputs_and_o };

/// What a forward pass is asked for, as the library takes it; arrays are kept by whoever made this.
struct ForwardArguments {
  struct Sizes {
    std::array<std::int64_t, 4> size;
    std::size_t rank;
    std::span<const std::int64_t> span() const { return {size.data(), rank}; }
  };

  Place place;
  ForwardInputs in;
  CountView bad_pages;
  Sizes o_shape, lse_shape;
  DType dtype;
  bool packed, decode, o_heads_first;

  /// Raises a failed status, in the caller's names.
  void raise_named(const Status& status) const;
};

/// The arrays of one call, kept alive, as rafter/_attention.py passes them: (q, k, v, cu_seqlens_q,
/// cu_seqlens_kv, seqused_kv, page_table, k_scale, v_scale, tree_mask, bad_pages).
struct Inputs {
  bool decode;  // names of rafter.decode in errors
  HeadsFirst heads_first;
  Place place;
  Tensor q, k, v, k_scale, v_scale;
  Indices cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table;
  Bits tree_mask;
  Counts bad_pages;

  /// `grad`: tensors may require grad. `torch`: those of rafter.torch, which are copied where their
  /// head_dim is not contiguous.
  Inputs(const nb::tuple& arrays, nb::handle stream, bool decode, bool grad,
         HeadsFirst heads_first = HeadsFirst::none, bool torch = false);

  bool packed() const { return !cu_seqlens_q.view.empty() || !cu_seqlens_kv.view.empty(); }
  /// Sequences may leave rows of q, k, v to nobody.
  bool leaves_rows() const { return packed() || !seqused_kv.view.empty(); }
  /// Raises a failed status, in the caller's names.
  void raise_named(const Status& status) const;
  ForwardInputs views() const;
  AttentionProblem problem(const MaxLengths& longest) const;
  ForwardArguments forward_arguments() const;
  /// Tensors were copied, so that the views are not of the caller's memory.
  bool copied() const { return copies[0] || copies[1] || copies[2]; }

 private:
  using Sizes = ForwardArguments::Sizes;
  Sizes o_shape() const;
  Sizes lse_shape() const;
  void check_layout() const;
  void copy_rows(const nb::tuple& arrays);

  nb::object copies[3];
};

}  // namespace rafter::python
