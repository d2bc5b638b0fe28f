// What a kernel tells the dispatcher about itself. One kernel file defines one function that
// returns its entries (several where the same source is compiled for several instruction sets);
// CMake lists the files, nothing else does.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rafter/attention.h"

namespace rafter {

/// A validated problem with every default filled in, and the options that matter to a kernel.
struct KernelProblem {
  AttentionProblem attention;  // heads_kv, head_dim_v and softmax_scale are set
  int threads = 1;
  std::int64_t splits = 0;
  int device_index = 0;  // CUDA: which of this machine's devices
};

/// Everything a run needs: checked views and a workspace of at least workspace() bytes, 64-byte
/// aligned.
struct ForwardCall {
  const KernelProblem& problem;
  const ForwardInputs& in;
  const ForwardOutputs& out;
  Workspace workspace;
  Stream stream = {};  // CUDA kernels queue on it
};

/// The same for the backward pass.
struct BackwardCall {
  const KernelProblem& problem;
  const BackwardInputs& in;
  const BackwardOutputs& out;
  Workspace workspace;
  Stream stream = {};
};

/// yes, or why not in one clause ("f16 is not among f32, bf16").
struct Acceptance {
  bool yes = true;
  std::string reason;
  static Acceptance accept() { return {}; }
  static Acceptance refuse(std::string reason) { return {false, std::move(reason)}; }
};

/// Shares of a device's ceilings that a kernel was measured to reach; its document in docs/kernels
/// has the figures.
struct Reach {
  double compute = 1;        // of the matmul peak of the dtype, all cores
  double bandwidth = 1;      // of the main-memory bandwidth
  double fixed_seconds = 0;  // per run, whatever the size; a GPU's launches included
};

struct KernelEntry {
  std::string_view name;  // "forward_simd_avx2"
  Device::Kind device;
  Pipeline pipeline;
  std::string_view instruction_set;  // "portable", "avx2", "avx512", "amx", "sm_90a"
  std::vector<DType> dtypes;
  std::string_view accepts_text;  // what it accepts, in words

  Acceptance (*machine_has)();  // can this machine run it?
  Acceptance (*accepts)(const KernelProblem&);
  /// What it reaches of a device's ceilings on this problem: the choice divides the exact cost of
  /// its pipeline by that.
  Reach (*reach)(const KernelProblem&, const DeviceSpec&);
  std::int64_t (*workspace)(const KernelProblem&);
  // One of the two: a kernel runs one pass.
  Status (*forward)(const ForwardCall&) = nullptr;
  Status (*backward)(const BackwardCall&) = nullptr;
  bool only_when_forced = false;     // the float64 reference: never chosen by itself
  bool any_head_dim_stride = false;  // q, k, v, o may have a head_dim stride other than 1
  /// What a user should know about how this kernel would do it here; empty when nothing. Optional.
  std::string (*note)(const KernelProblem&) = nullptr;
  std::vector<DType> kv_dtypes = {};  // of k and v, besides that of q
  bool tree_mask = false;             // takes problems with a tree mask
  /// Parts into which it would split the keys of a sequence of seqlen_kv; null: never splits.
  std::int64_t (*splits)(const KernelProblem&) = nullptr;
  /// Query rows whose products are taken together over the keys that some of them sees, as
  /// Convention::score_block_rows; null: only visible scores are counted.
  std::int64_t (*score_block_rows)(const KernelProblem&) = nullptr;

  Pass pass() const { return backward != nullptr ? Pass::backward : Pass::forward; }
};

using EntriesFunction = std::span<const KernelEntry> (*)();

}  // namespace rafter
