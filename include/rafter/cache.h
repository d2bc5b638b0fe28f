// What stands around decode: append the rows of new tokens to a cache of keys and values, merge
// states where they lie.
#pragma once

#include <cstdint>
#include <span>

#include "rafter/attention.h"
#include "rafter/device.h"
#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter {

/// Rotary position embedding: elements of a row turn in pairs, (x, y) becoming (x cos − y sin, y
/// cos + x sin), by an angle of the pair and of the token's position. Source: Su et al. 2021, arXiv
/// 2104.09864.
struct Rope {
  enum class Pairs : std::uint8_t {
    half_split,   // elements i and i + rotary_dim / 2 (GPT-NeoX, Llama)
    interleaved,  // elements 2i and 2i + 1 (GPT-J)
  };
  // Tables [max_position, rotary_dim / 2], contiguous.
  const float* cos = nullptr;
  const float* sin = nullptr;
  std::int64_t max_position = 0;
  std::int64_t rotary_dim = 0;  // even, up to head_dim; elements behind it stay. 0: no rotation
  Pairs pairs = Pairs::half_split;
};

/// New tokens: row i of sequence b belongs at position seqused_kv[b] + i.
struct AppendInputs {
  TensorView k;                // [batch, seqlen, heads_kv, head_dim]: f32, f16 or bf16
  TensorView v;                // [batch, seqlen, heads_kv, head_dim_v] of the same dtype
  IndexView seqused_kv = {};   // [batch]: lengths before
  IndexView seqused_new = {};  // [batch]: how many of the seqlen rows are there; null: all
  IndexView page_table = {};   // paged caches: [batch, pages per sequence]; null: a dense cache
  Rope rope = {};              // of k, and of q where there is one
  TensorView q = {};  // [batch, seqlen, heads_q, head_dim]: queries to turn in the same launch
  // Caches in int8 or e4m3: f32 factors that are given, one per KV head, [1, 1, heads_kv, 1]; rows
  // are divided by them.
  TensorView k_scale = {}, v_scale = {};
};

struct AppendOutputs {
  // Dense [batch, capacity, heads_kv, head_dim(_v)] or paged [pages, page_size, heads_kv,
  // head_dim(_v)]: of the dtype of k, or int8, or e4m3.
  TensorView k_cache, v_cache;
  // Caches in int8 or e4m3: f32 factors that are computed, the row's largest magnitude / 127 (int8)
  // or / 448 (e4m3), in the layout of the cache with a head_dim of 1.
  TensorView k_scale = {}, v_scale = {};
  TensorView q = {};  // of q's shape and dtype; may be in.q itself
  // [batch]: how many new tokens were not written. May be null.
  CountView dropped = {};
};

/// Writes the rows of new tokens into a cache, turned and quantised as asked. One launch on CUDA
/// (two with `dropped`); allocates nothing and synchronises nothing, so a graph may capture it.
/// A token is not written, and counted in `dropped`, when its position is beyond the capacity (of
/// a dense cache, or of the page table), its page is not in [0, pages), or its position is beyond
/// the tables of rope; q rows of such tokens are turned all the same unless the tables end before.
/// int8 and e4m3 round to nearest, ties to even; a row with a NaN or an infinity in it reads as NaN
/// where its factor is computed. int8 caches want factors given or computed; e4m3 may have none: 1.
/// New tokens of different sequences must not share pages: neither which one stays is defined.
/// Errors: invalid_argument names the tensor or index that does not fit; on the CPU also a negative
/// length. unsupported says what the device lacks. On error nothing is written. On CUDA every
/// pointer is device memory and the work is queued on `stream`; a CPU refuses any stream but null.
Status append(const AppendInputs& in, const AppendOutputs& out, const Device& device,
              Stream stream = {});

/// merge() of attention.h where the states lie: on CUDA their pointers are device memory and the
/// work is queued on `stream`, in one launch, with the same weights in f64 in the same order. At
/// most kMostMergedStates states there, head_dim contiguous.
Status merge(std::span<const AttentionState> states, const AttentionState& out,
             const Device& device, Stream stream = {});
inline constexpr std::int64_t kMostMergedStates = 256;

}  // namespace rafter
