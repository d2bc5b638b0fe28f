// Attention: describe a problem, plan it once, run it as often as wanted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rafter/device.h"
#include "rafter/roofline.h"
#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter {

enum class MaskAlign : std::uint8_t { bottom_right, top_left };

/// Which keys a query row sees. Row i sees key j when i + offset − window_left ≤ j ≤ i + offset +
/// window_right, where offset = seqlen_kv − seqlen_q (bottom_right) or 0 (top_left) and −1 means
/// unbounded. Causal is the window (−1, 0).
struct Mask {
  bool operator==(const Mask&) const = default;

  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  MaskAlign align = MaskAlign::bottom_right;

  static constexpr Mask none() { return {}; }
  static constexpr Mask causal(MaskAlign align = MaskAlign::bottom_right) { return {-1, 0, align}; }
  static constexpr Mask window(std::int64_t left, std::int64_t right,
                               MaskAlign align = MaskAlign::bottom_right) {
    return {left, right, align};
  }
  constexpr bool is_none() const { return window_left < 0 && window_right < 0; }
};

enum class Layout : std::uint8_t {
  dense,   // [batch, seqlen, heads, head_dim]
  packed,  // [total, heads, head_dim] with cu_seqlens_q and cu_seqlens_kv
  paged,   // q dense; k, v [pages, page_size, heads_kv, head_dim] with a page table and seqused_kv
};

/// What is asked for: shapes, dtypes and options. Lengths are capacities where the layout has
/// lengths as data.
struct AttentionProblem {
  bool operator==(const AttentionProblem&) const = default;

  std::int64_t batch = 1;
  std::int64_t heads_q = 1;
  std::int64_t heads_kv = 0;  // 0: heads_q. Must divide heads_q.
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_kv = 0;
  std::int64_t head_dim = 128;         // 1 to 256
  std::int64_t head_dim_v = 0;         // 0: head_dim
  DType dtype = DType::f32;            // of q and of k, v; o is of this dtype or f32
  std::optional<DType> kv_dtype = {};  // of k, v: dtype (the default), int8 or e4m3, which have
                                       // scales, see below
  Mask mask = {};
  std::optional<float> softmax_scale = {};  // default 1 / sqrt(head_dim)
  float softcap = 0;  // 0: off; else scores become softcap · tanh(score / softcap)
  Layout layout = Layout::dense;
  std::int64_t total_q = 0;    // packed: rows of q, o
  std::int64_t total_kv = 0;   // packed: rows of k, v
  std::int64_t page_size = 0;  // paged
  std::int64_t num_pages = 0;  // paged: pages of k, v
  bool seqused_kv =
      false;  // lengths of the keys of each sequence are given at run time (≤ seqlen_kv)
  /// The last seqlen_q keys of a sequence are its queries' own tokens, and which of those a query
  /// sees is given at run time, as bits (ForwardInputs::tree_mask): tokens proposed as a tree. All
  /// keys before them are seen. Wants seqlen_q ≤ 64, no mask, and a layout that is not packed.
  bool tree_mask = false;
};

/// How to do it: everything has a default, and whatever is asked for is done or refused by name.
struct PlanOptions {
  Pass pass = Pass::forward;              // what the plan runs: Plan::forward or Plan::backward
  std::optional<Pipeline> pipeline = {};  // default: the pipeline of the cheapest kernel
  std::string kernel = {};                // force the kernel of this name (kernels.h lists them)
  int threads = 0;                        // CPU: 0 is the OpenMP default
  std::int64_t splits = 0;                // split-kv: parts of the keys; 0 chooses
  const DeviceSpec* device_spec =
      nullptr;  // ceilings for the prediction; default: an estimate of this machine
};

struct ForwardInputs {
  TensorView q;                  // [batch, seqlen_q, heads_q, head_dim]
  TensorView k;                  // [batch, seqlen_kv, heads_kv, head_dim]
  TensorView v;                  // [batch, seqlen_kv, heads_kv, head_dim_v]
  IndexView cu_seqlens_q = {};   // packed: [batch + 1], starts with 0, ends with at most total_q
  IndexView cu_seqlens_kv = {};  // packed: [batch + 1]
  IndexView seqused_kv = {};     // [batch]
  IndexView page_table = {};     // paged: [batch, pages per sequence]
  // kv_dtype int8 or e4m3: f32 factors of each row of k and v, one per token and KV head, in the
  // layout of k with a head_dim of 1: [batch, seqlen_kv, heads_kv, 1]; packed [1, total_kv,
  // heads_kv, 1]; paged [pages, page_size, heads_kv, 1]. One factor per KV head is the same view
  // with stride_batch = stride_seqlen = 0. Null with e4m3: 1.
  TensorView k_scale = {};
  TensorView v_scale = {};
  BitsView tree_mask = {};  // problems with tree_mask set: [batch, seqlen_q]; bit j of word i says
                            // that query i sees key seqlen_kv − seqlen_q + j; bits from seqlen_q on
                            // mean nothing
};

struct ForwardOutputs {
  TensorView o;      // [batch, seqlen_q, heads_q, head_dim_v]
  LseView lse = {};  // [batch, heads_q, seqlen_q]; may be null
  // Paged: [batch], how many of the pages that a sequence's length covers are not in [0,
  // num_pages). May be null. On CUDA, where page tables are read by the kernel, the keys of such
  // pages are not seen, counted or not, and nothing is counted without queries (seqlen_q 0); on the
  // CPU they are errors, so that only zeros are ever written.
  CountView bad_pages = {};
};

/// What the forward pass took and gave, and the gradient of what it gave. q, k, v are of the
/// problem's dtype; o and d_o of that or f32, whatever the others are.
struct BackwardInputs {
  TensorView q;                  // [batch, seqlen_q, heads_q, head_dim]
  TensorView k;                  // [batch, seqlen_kv, heads_kv, head_dim]
  TensorView v;                  // [batch, seqlen_kv, heads_kv, head_dim_v]
  TensorView o;                  // [batch, seqlen_q, heads_q, head_dim_v]
  LseView lse;                   // [batch, heads_q, seqlen_q]
  TensorView d_o;                // [batch, seqlen_q, heads_q, head_dim_v]: gradient of o
  LseView dlse = {};             // [batch, heads_q, seqlen_q]: gradient of lse; null is zero
  IndexView cu_seqlens_q = {};   // packed, as in ForwardInputs
  IndexView cu_seqlens_kv = {};  // packed
  IndexView seqused_kv = {};     // [batch]
};

/// Each of the problem's dtype or f32.
struct BackwardOutputs {
  TensorView dq;  // [batch, seqlen_q, heads_q, head_dim]
  TensorView dk;  // [batch, seqlen_kv, heads_kv, head_dim]: summed over the group
  TensorView dv;  // [batch, seqlen_kv, heads_kv, head_dim_v]: summed over the group
};

/// Where a CUDA plan queues its work: a cudaStream_t, null for the default stream. CPU plans run at
/// once and refuse any other than null.
struct Stream {
  void* handle = nullptr;
};

/// One kernel that was looked at when planning: what it would cost, or why it was refused.
struct Candidate {
  std::string kernel;
  Pipeline pipeline = Pipeline::fused;
  bool accepted = false;
  double seconds = 0;   // predicted for one sequence of the capacities on every core, which is what
                        // the choice is made by; meaningless when refused
  std::string refusal;  // why, when refused
  bool only_when_forced = false;  // accepts, but is never chosen unless named
};

namespace detail {
struct PlanState;
}

/// A validated problem with its kernel, workspace size and predicted cost. Cheap to copy,
/// immutable, usable from any thread.
class Plan {
 public:
  /// O = softmax(softmax_scale · QKᵀ + mask) V, accumulated in f32.
  /// A query row that sees no key gives o = 0 and lse = −∞. Allocates nothing and synchronises
  /// nothing (only the oneDNN and cuBLASLt baselines make their products at their first run, which
  /// is then best not one that a graph captures). Errors:
  /// invalid_argument names the tensor or index that does not fit the problem, the workspace that
  /// is too small, strides with a non-contiguous head_dim, lengths that are negative, decreasing or
  /// beyond capacity. On error nothing is written. On CUDA every pointer (indices and workspace
  /// too) is device memory, the work is queued on `stream`, and lengths are read on the device:
  /// those beyond capacity are clamped to it, and keys of pages that do not exist are not seen.
  Status forward(const ForwardInputs& in, const ForwardOutputs& out, Workspace workspace = {},
                 Stream stream = {}) const;

  /// dq, dk and dv of a loss whose gradients with respect to o and lse are d_o and dlse: with
  /// P = exp(S − lse) computed again from q, k and lse,
  ///   dv = Pᵀ d_o,  dS = P ∘ (d_o vᵀ − rowsum(d_o ∘ o) + dlse),  dq = dS k,  dk = dSᵀ q,
  /// the last two times softmax_scale (and the derivative of softcap). Accumulated in f32; the same
  /// bits every time, whatever the number of threads and the neighbours in the batch. A row that
  /// sees no key has gradient 0, and so has a key that no row sees; rows that belong to no sequence
  /// and keys past seqused_kv are not written. Wants a plan made with pass = backward.
  /// Errors: as forward(). Source: Dao et al. 2022, arXiv 2205.14135, algorithm 4.
  Status backward(const BackwardInputs& in, const BackwardOutputs& out, Workspace workspace = {},
                  Stream stream = {}) const;

  const AttentionProblem& problem() const;  // with defaults filled in
  Pass pass() const;
  const std::string& kernel() const;
  Pipeline pipeline() const;
  int threads() const;
  std::int64_t workspace_bytes() const;
  const Cost& cost() const;  // of convention()
  /// Exact; where scores land under a mask, with the blocks of rows that the kernel multiplies
  /// whole (score_block_rows).
  const Convention& convention() const;
  const Prediction& prediction() const;  // on the device spec of the plan
  const std::vector<Candidate>& candidates() const;
  /// Several lines of text: the problem, the chosen kernel and its wall, every candidate with its
  /// time or its refusal.
  std::string explain() const;

  explicit Plan(std::shared_ptr<const detail::PlanState> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const detail::PlanState> state_;
};

/// Validates the problem, chooses the accepted kernel of least predicted time among those of
/// options.pass, sizes the workspace. Batch, layout and threads do not enter the choice: other
/// kernels give other bits. The paged layout has no backward pass.
/// Errors: invalid_argument names the field, what was given and what is allowed; unsupported lists
/// every kernel and why it refused.
Result<Plan> plan(const AttentionProblem& problem, const Device& device,
                  const PlanOptions& options = {});

/// Part of an attention result over some of the keys: o normalised over them, and their lse.
struct AttentionState {
  TensorView o;  // [batch, seqlen_q, heads_q, head_dim_v]
  LseView lse;   // [batch, heads_q, seqlen_q]
};

/// Merges states over disjoint key sets into the state over their union: lse = log Σ exp(lse_i), o
/// = Σ exp(lse_i − lse) o_i. Exact algebra: an empty state (o = 0, lse = −∞) with X is X to the
/// bit; nothing overflows. `out` may be one of the states. Runs on the CPU. Errors:
/// invalid_argument names the state and field that differ in shape or dtype from out. Source of the
/// algebra: Milakov & Gimelshein 2018, arXiv 1805.02867.
Status merge(std::span<const AttentionState> states, const AttentionState& out);

/// Keys that row `row` of a sequence sees, as a half-open range [first, last) within [0,
/// seqlen_kv).
struct KeyRange {
  std::int64_t first = 0, last = 0;
};
KeyRange visible_keys(const Mask& mask, std::int64_t row, std::int64_t seqlen_q,
                      std::int64_t seqlen_kv);
/// Rows of a sequence that see no key (their o is 0 and their lse −∞).
std::int64_t empty_rows(const Mask& mask, std::int64_t seqlen_q, std::int64_t seqlen_kv);

}  // namespace rafter
