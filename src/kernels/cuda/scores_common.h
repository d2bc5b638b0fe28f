// What the pipelines whose scores land share on the host: sizes, checks, the waves, the products.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "dispatch/kernel_entry.h"
#include "hw/cuda/blas.h"
#include "kernels/cuda/scores.h"
#include "tiles/key_range.h"

namespace rafter::cuda {

/// Parts of a workspace begin at multiples of kScoreAlign bytes; it is lent at one of kLentAlign.
inline constexpr std::int64_t kScoreAlign = 256, kLentAlign = 64;
/// Under a mask the products take so many query rows (or keys) at a time, over the keys that those
/// see (or the rows that see those).
inline constexpr std::int64_t kMaskedBlock = 1024;
/// Matrices of one product.
inline constexpr std::int64_t kMostScoreMatrices = 65535;

/// What explain() says where lengths are data.
inline constexpr const char* kPaddedNote =
    "every sequence is padded to its capacity: lengths are on the device";
/// Packed, or with lengths of its own: products need sizes on the host, so each sequence is padded.
bool lengths_are_data(const AttentionProblem& problem);
/// A first device that runs sm_90a code, and cuBLASLt.
Acceptance machine_has_scores();
/// `reach` of the problem's own work: where lengths are data it is a part of the padded one.
Reach scores_reach(const KernelProblem& problem, Pipeline pipeline, Pass pass, Reach reach);
/// Alignment and strides that cuBLASLt and 16-byte accesses can take, or the first that they
/// cannot.
Status check_score_rows(const char* name, const TensorView& view);

/// launch_gather of each view.
struct GatheredView {
  const TensorView& view;
  void* target;
  RowsOf rows_of;
};
Status gather_views(const ScoreProblem& problem, std::initializer_list<GatheredView> views,
                    std::int64_t first_pair, std::int64_t pairs, void* stream);
/// The first address of a lent workspace that is a multiple of kScoreAlign.
std::byte* aligned_scores(void* workspace);
/// A dimension of one element has no stride of its own.
inline std::int64_t stride_or(std::int64_t size, std::int64_t stride, std::int64_t otherwise) {
  return size > 1 ? stride : otherwise;
}

/// Sizes of a problem's workspace: scores of one wave, what cuBLASLt may use and, where lengths are
/// data, padded copies of the tensors of the wave's pairs.
struct ScoreSizes {
  tiles::ScoreWaves waves;
  bool gathered = false;
  std::int64_t score_bytes = 0;
  std::int64_t q_bytes = 0, k_bytes = 0, v_bytes = 0, o_bytes = 0;  // gathered only
  std::int64_t total_bytes = 0;
};
/// Nothing when they exceed 64 bits.
std::optional<ScoreSizes> score_sizes(const KernelProblem& problem, Pipeline pipeline);

/// The entry of a pipeline whose scores land; only its forward is its own.
KernelEntry scores_entry(std::string_view name, Pipeline pipeline,
                         Status (*forward)(const ForwardCall&));

/// Rows [first, first + rows) of pairs that lie a constant stride apart, and the keys they see.
struct RowBlock {
  std::int64_t first_pair = 0, pairs = 0;  // of all pairs
  std::int64_t first_row = 0, rows = 0;    // of the sequences
  tiles::Range keys;                       // first is a multiple of 8
};

/// A checked call with its waves.
class ScoreCall {
 public:
  ScoreCall(const ForwardCall& call, Pipeline pipeline);

  /// Strides that cuBLASLt and 16-byte accesses cannot take, by name.
  Status check_tensors() const;
  /// For each wave: gathers, S = softmax_scale · QKᵀ, then finish(wave).
  template <typename Finish>
  Status for_each_wave(Finish finish);

  /// O = P V of a wave, P in place of the scores, with zeros where a row does not see a key.
  Status multiply_values(const ScoreWave& wave) const;
  /// P = softmax(S) in place, and lse.
  Status softmax(const ScoreWave& wave) const;

  const ForwardCall& call() const { return call_; }
  const ScoreProblem& problem() const { return problem_; }
  const ScoreSizes& sizes() const { return sizes_; }
  LseTarget lse() const;
  /// V of the wave's pairs where it was gathered: [pairs, seqlen_kv, 1, head_dim_v].
  TensorView gathered_values() const;

 private:
  /// Where the rows of a tensor begin for a pair, and how far pairs of a run are apart.
  struct Side {
    std::byte* data = nullptr;
    std::int64_t row_stride = 0, pair_stride = 0;
  };
  Side side_of(const TensorView& view, std::int64_t pair, std::int64_t row, std::int64_t group,
               std::byte* gathered, std::int64_t capacity) const;
  Status gather(const ScoreWave& wave) const;
  Status multiply_keys(const ScoreWave& wave) const;
  Status clear_outputs(const RowBlock& block) const;
  std::int64_t row_block(const ScoreWave& wave) const;
  tiles::Range keys_of(std::int64_t first_row, std::int64_t rows) const;
  template <typename Body>
  Status for_each_block(const ScoreWave& wave, Body body) const;
  void* blas_workspace() const { return workspace_ + sizes_.score_bytes; }

  const ForwardCall& call_;
  const AttentionProblem& attention_;
  ScoreSizes sizes_;
  ScoreProblem problem_;
  tiles::PairOrder order_;
  std::byte* workspace_ = nullptr;
  std::byte* q_ = nullptr;
  std::byte* k_ = nullptr;
  std::byte* v_ = nullptr;
  std::byte* o_ = nullptr;
  std::int64_t gathered_from_ = 0;  // the pair that the padded copies begin with
};

template <typename Finish>
Status ScoreCall::for_each_wave(Finish finish) {
  const tiles::ScoreWaves& waves = sizes_.waves;
  ScoreWave wave;
  wave.scores = workspace_;
  wave.row_stride = waves.row_stride;
  wave.pair_stride = waves.pair_stride();
  for (std::int64_t pair = 0; pair < waves.pairs; pair += waves.pairs_per_wave) {
    wave.first_pair = gathered_from_ = pair;
    wave.pairs = std::min(waves.pairs_per_wave, waves.pairs - pair);
    if (Status status = gather(wave); !status) {
      return status;
    }
    for (std::int64_t row = 0; row < waves.seqlen_q; row += waves.rows_per_wave) {
      wave.first_row = static_cast<int>(row);
      wave.rows = static_cast<int>(std::min(waves.rows_per_wave, waves.seqlen_q - row));
      if (Status status = multiply_keys(wave); !status) {
        return status;
      }
      if (Status status = finish(wave); !status) {
        return status;
      }
    }
  }
  return Status::ok();
}

}  // namespace rafter::cuda
