// What the kernels that materialise the scores share: oneDNN products of row blocks, K and V packed
// once, the workspace, the parallel loop over row blocks.
// One product is [row_block, head_dim] × [head_dim, ≤ kKeyChunk keys], single-threaded, inside a
// parallel loop over (sequence, head, row block); shapes and leading dimensions depend on the
// sequence alone, so that neither threads, neighbours nor the layout change a bit.
#pragma once

#include <omp.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "base/checked.h"
#include "dispatch/kernel_entry.h"
#include "kernels/cpu/rows_common.h"
#include "kernels/cpu/sequence.h"

namespace rafter::cpu {

inline constexpr std::int64_t kKeyChunk = 512;  // keys of one product; chunks start at multiples

/// The instruction set that oneDNN uses here, in the names of RAFTER_CPU_ISA, which bounds it when
/// set before the first use.
std::string_view onednn_instruction_set();
/// Whether oneDNN multiplies this dtype itself here; else row blocks are converted to f32.
bool onednn_multiplies(DType dtype);
/// The same as a note for explain(); empty for f32.
std::string onednn_note(const KernelProblem& problem);

/// What the pipelines that materialise the scores were measured to reach: half the matmul peak
/// where vectors multiply; where tile units do (bf16 on AMX), about the f32 peak: 0.26 to 0.41
/// TFLOP/s at S = 512 on two cores whose f32 peak is 0.36 and whose bf16 peak is 5.7.
inline Reach materialised_reach(const KernelProblem& problem, const DeviceSpec& spec) {
  const Result<double> f32 = spec.peak(DType::f32);
  const Result<double> own = spec.peak(problem.attention.dtype);
  const double of_peak = f32 && own && *own > *f32 ? *f32 / *own : 1;
  return {.compute = of_peak < 0.5 ? of_peak : 0.5, .bandwidth = 0.7, .fixed_seconds = 20e-6};
}

/// Products of one thread. Keeps the primitives it made, by shape.
class BlockProducts {
 public:
  explicit BlockProducts(DType operand);
  ~BlockProducts();
  BlockProducts(const BlockProducts&) = delete;
  BlockProducts& operator=(const BlockProducts&) = delete;

  struct Shape {
    std::int64_t m = 0, n = 0, k = 0;
    std::int64_t lda = 0, ldb = 0, ldc = 0;
    bool operator==(const Shape&) const = default;
  };
  /// C[m, n] = alpha · A[m, k] · B[n, k]ᵀ; A, B and C of the operand dtype. An alpha of 0 makes
  /// NaN of what is not finite, as any other product with 0.
  Status times_transposed(const Shape& shape, float alpha, const void* a, const void* b, void* c);
  /// The same with C in f32.
  Status times_transposed_f32(const Shape& shape, float alpha, const void* a, const void* b,
                              float* c);
  /// C[m, n] = A[m, k] · B[k, n]; C in f32.
  Status times(const Shape& shape, const void* a, const void* b, float* c);
  /// C[m, n] = A[k, m]ᵀ · B[k, n]; C in f32.
  Status transposed_times(const Shape& shape, const void* a, const void* b, float* c);

 private:
  struct Primitives;  // of operand dtypes other than f32
  std::unique_ptr<Primitives> primitives_;
};

/// Sizes of a problem's workspace.
struct MaterialisedSizes {
  std::int64_t row_block = 0;
  std::int64_t k_bytes = 0, v_bytes = 0, flag_bytes = 0, score_bytes = 0, thread_bytes = 0;
  std::int64_t total_bytes = 0;
};
/// Nothing when they exceed 64 bits. The rows of a thread's scratch hold `row_block` queries.
std::optional<MaterialisedSizes> materialised_sizes(const KernelProblem& problem,
                                                    std::int64_t row_block);
/// f32, f16, bf16 in sizes within 64 bits.
Acceptance accepts_materialised(const KernelProblem& problem, std::int64_t row_block);

/// A block of query rows of one head of one sequence: what a parallel loop hands out.
struct RowBlock {
  Sequence sequence;
  tiles::MaskWindow window;
  std::int64_t batch = 0, head_q = 0, head_kv = 0;
  std::int64_t first = 0, rows = 0;  // query rows [first, first + rows)
  tiles::Range hull;                 // keys that any of them sees
};

/// The part of a chunk of keys that a block or a row sees.
constexpr tiles::Range intersect(tiles::Range a, tiles::Range b) {
  const tiles::Range both = {std::max(a.first, b.first), std::min(a.last, b.last)};
  return both.size() > 0 ? both : tiles::Range{};
}

/// One thread's scratch.
struct ThreadScratch {
  void* q = nullptr;         // [row_block, head_dim] of the operand dtype
  float* chunk = nullptr;    // [row_block, kKeyChunk]
  void* operand = nullptr;   // [row_block, kKeyChunk] of the operand dtype, for its products
  float* o = nullptr;        // [row_block, head_dim_v]
  float* product = nullptr;  // [row_block, head_dim_v]: of one chunk of keys
  float* row = nullptr;      // [seqlen_kv]
  double* sum = nullptr;     // [row_block]
  float* maximum = nullptr;  // [row_block]
};

/// A call's tensors as the products want them, and the loops over its row blocks.
class MaterialisedCall {
 public:
  MaterialisedCall(const ForwardCall& call, std::int64_t row_block);

  /// scores = softmax_scale · QKᵀ over the hull of every row block, in the problem's dtype. Before
  /// it packs K and V to [heads_kv, seqlen_kv, head_dim] of each sequence, in the operand dtype:
  /// those keys that some row sees.
  Status compute_scores();
  /// Calls body(block, scratch, products) for every row block, in parallel; the first error wins.
  template <typename Body>
  Status for_each_block(Body body);

  /// Scores of a row over all keys of its sequence, and elements from one row to the next.
  std::byte* scores(const RowBlock& block, std::int64_t row, std::int64_t key) const;
  std::int64_t score_stride(const Sequence& sequence) const;

  /// scratch.o += P V over the keys of a chunk, P [rows, keys] of the operand dtype with rows
  /// `stride` apart and zeros where a row does not see a key. Values that are not finite reach only
  /// rows that see them. A chunk is summed apart and then added, so that thousands of chunks do not
  /// lose the small against the large.
  Status add_values(const RowBlock& block, tiles::Range keys, const void* p, std::int64_t stride,
                    ThreadScratch& scratch, BlockProducts& products) const;
  /// o = scratch.o · factor of a row.
  void store_output(const RowBlock& block, std::int64_t row, const float* values,
                    float factor) const;
  void store_lse(const RowBlock& block, std::int64_t row, double lse) const;

  const RowOps& ops() const { return ops_; }
  DType dtype() const { return problem_.dtype; }
  /// The dtype of the products' operands: the problem's where oneDNN has it and K and V are of it,
  /// else f32.
  DType operand() const { return operand_; }
  const AttentionProblem& problem() const { return problem_; }

 private:
  std::byte* packed(std::byte* base, const Sequence& s, std::int64_t batch, std::int64_t head_kv,
                    std::int64_t key, std::int64_t dim) const;
  std::uint8_t* finite_flag(const Sequence& s, std::int64_t batch, std::int64_t head_kv,
                            std::int64_t key) const;
  bool pack_row(const TensorView& view, std::int64_t offset, std::int64_t dim, float scale,
                void* target) const;
  float scale_of(const TensorView& scale, const Sequence& s, std::int64_t key,
                 std::int64_t head_kv) const;
  void pack_chunk(const Sequence& s, std::int64_t batch, std::int64_t head_kv,
                  tiles::Range keys) const;
  void pack_keys_and_values() const;
  Status score_block(const RowBlock& block, ThreadScratch& scratch, BlockProducts& products) const;
  ThreadScratch scratch_of(int thread) const;
  RowBlock block_of(std::int64_t batch, const Sequence& sequence, std::int64_t index) const;

  const ForwardCall& call_;
  const AttentionProblem& problem_;
  const RowOps& ops_;
  DType operand_;
  MaterialisedSizes sizes_;
  std::byte* k_ = nullptr;
  std::byte* v_ = nullptr;
  std::uint8_t* finite_ = nullptr;
  std::byte* scores_ = nullptr;
  std::byte* scratch_ = nullptr;
};

/// Holds a thread to serial oneDNN calls for as long as it lives: oneDNN asks OpenMP how many
/// threads it may use, also inside a parallel region of one thread.
class SerialScope {
 public:
  SerialScope() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SerialScope() { omp_set_num_threads(before_); }
  SerialScope(const SerialScope&) = delete;
  SerialScope& operator=(const SerialScope&) = delete;

 private:
  int before_;
};

template <typename Body>
Status MaterialisedCall::for_each_block(Body body) {
  Status first_error;
  std::mutex mutex;
#pragma omp parallel num_threads(call_.problem.threads)
  {
    const SerialScope serial;
    BlockProducts products(operand_);
    ThreadScratch scratch = scratch_of(omp_get_thread_num());
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      const Sequence sequence = sequence_of(problem_, call_.in, b);
      const std::int64_t count =
          problem_.heads_q * base::div_up(sequence.seqlen_q, sizes_.row_block);
#pragma omp for schedule(dynamic, 1) nowait
      for (std::int64_t i = 0; i < count; ++i) {
        const Status status = body(block_of(b, sequence, i), scratch, products);
        if (!status) {
          const std::lock_guard<std::mutex> lock(mutex);
          first_error = first_error ? status : first_error;
        }
      }
    }
  }
  return first_error;
}

/// The entry of a pipeline that materialises the scores; only its forward and row block are its
/// own.
template <Pipeline kPipeline, std::int64_t kRowBlock>
KernelEntry materialised_entry(std::string_view name, Status (*forward)(const ForwardCall&)) {
  return {.name = name,
          .device = Device::Kind::cpu,
          .pipeline = kPipeline,
          .instruction_set = onednn_instruction_set(),
          .dtypes = {DType::f32, DType::f16, DType::bf16},
          .accepts_text =
              "every layout, mask, softcap, group and stride; the workspace holds the scores",
          .machine_has = [] { return Acceptance::accept(); },
          .accepts = [](const KernelProblem& p) { return accepts_materialised(p, kRowBlock); },
          .reach = materialised_reach,
          .workspace =
              [](const KernelProblem& p) {
                const auto sizes = materialised_sizes(p, kRowBlock);
                return sizes ? sizes->total_bytes : std::int64_t{0};
              },
          .forward = forward,
          .any_head_dim_stride = true,
          .note = onednn_note,
          .kv_dtypes = {DType::int8}};
}

}  // namespace rafter::cpu
