// The fused bf16 backward outside its arithmetic: how a call is cut, where the records of its tiles
// of query rows lie, and the run itself. No instruction set: included before any target region.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/checked.h"
#include "kernels/cpu/backward_tasks.h"
#include "kernels/cpu/forward_bf16_run.h"
#include "tiles/backward_bf16.h"

namespace rafter::backward_bf16 {

using forward_bf16::kBlock;
using forward_bf16::kPanel;
using forward_bf16::kTileElements;
using forward_bf16::kTileSums;
using forward_bf16::Product;

/// What a measurement may switch; no bit of a result depends on it.
struct Schedule {
  bool interleave = true;  // exponentials between the products, or before them
};

/// A tile of query rows of one head, packed before the tasks, and its dQ (tiles/backward_bf16.h):
///   q, d_o            [panel][channel / 32][16 pairs of channels][16 rows][2]
///   q_rows, d_o_rows  [channel / 16][row / 32][16 pairs of rows][16 channels][2]
///   dq                [panel][channel][16 rows]
struct Record {
  std::uint16_t *q = nullptr, *d_o = nullptr, *q_rows = nullptr, *d_o_rows = nullptr;
  float* lse = nullptr;                                     // −lse · log2 e
  float* delta = nullptr;                                   // rowsum(dO ∘ O) − dlse
  std::uint8_t *q_finite = nullptr, *d_o_finite = nullptr;  // of each pair of panels
  float* dq = nullptr;
};

/// Byte offsets in the workspace: scratch of each thread, tasks, turns, records.
struct Places {
  std::int64_t tasks = 0, turns = 0, records = 0, total = 0;
};

inline cpu::KeyTaskShape shape_of(const tiles::Bf16BackwardLayout& layout) {
  return {layout.keys, layout.tile_q};
}

inline tiles::Bf16BackwardLayout layout_of(const KernelProblem& problem,
                                           const tiles::Bf16BackwardBlocking& blocking = {}) {
  const AttentionProblem& p = problem.attention;
  return tiles::bf16_backward_layout({.head_dim = p.head_dim,
                                      .head_dim_v = p.head_dim_v,
                                      .seqlen_q = p.seqlen_q,
                                      .seqlen_kv = p.seqlen_kv,
                                      .heads = p.batch * p.heads_kv,
                                      .tasks_wanted = problem.threads * cpu::kTasksPerThread},
                                     blocking);
}

inline Places places_of(const KernelProblem& problem, const tiles::Bf16BackwardLayout& layout) {
  const AttentionProblem& p = problem.attention;
  const std::int64_t tiles = cpu::most_tiles(p, shape_of(layout)) * p.heads_q;
  const auto list_bytes = [](std::int64_t count, std::size_t each) {
    return base::round_up(count * static_cast<std::int64_t>(each), 64);
  };
  Places out;
  out.tasks = problem.threads * layout.scratch_bytes;
  out.turns =
      out.tasks + list_bytes(cpu::most_key_tasks(p, shape_of(layout)), sizeof(cpu::KeyTask));
  out.records = out.turns + list_bytes(tiles, sizeof(std::int32_t));
  out.total = out.records + tiles * layout.record_bytes;
  return out;
}

inline std::int64_t workspace(const KernelProblem& problem,
                              const tiles::Bf16BackwardBlocking& blocking = {}) {
  return places_of(problem, layout_of(problem, blocking)).total;
}

/// bf16, and records that 64 bits can count.
inline Acceptance accepts(const KernelProblem& problem) {
  if (Acceptance dtype = forward_bf16::accepts(problem); !dtype.yes) {
    return dtype;
  }
  const AttentionProblem& p = problem.attention;
  constexpr std::int64_t kWidestRow = 256 * (4 * 2 + 4) + 64;  // of a record, in bytes
  constexpr std::int64_t kLimit = std::int64_t{1} << 60;
  const auto bytes = base::checked_product(
      {cpu::total_rows(p) / 32 + p.batch, std::int64_t{32}, p.heads_q, kWidestRow});
  return bytes && *bytes <= kLimit
             ? Acceptance::accept()
             : Acceptance::refuse("packed rows of q and d_o would need 2^60 bytes or more");
}

/// What full blocks of rows and keys reach of the matmul peak is `measured`; the rest of the last
/// block of each head is lost.
inline Reach reach(const KernelProblem& problem, double measured) {
  const AttentionProblem& p = problem.attention;
  const auto full = [](std::int64_t n) {
    n = std::max<std::int64_t>(1, n);
    return static_cast<double>(n) / static_cast<double>(base::round_up(n, kBlock));
  };
  return {.compute = measured * full(p.seqlen_q) * full(p.seqlen_kv),
          .bandwidth = 0.8,
          .fixed_seconds = 4e-6};
}

/// One call, the same for all its tasks.
struct Run {
  const BackwardCall& call;
  tiles::Bf16BackwardLayout layout;
  Places places;
  float capped_input = 0;  // softcap: what raw scores are multiplied by before tanh, else 0
  float scale_log2 = 0;    // of a raw score, or of a capped one

  Run(const BackwardCall& of, const tiles::Bf16BackwardLayout& shape)
      : call(of), layout(shape), places(places_of(of.problem, shape)) {
    constexpr float kLog2E = 1.4426950408889634f;
    const AttentionProblem& p = problem();
    capped_input = p.softcap > 0 ? *p.softmax_scale / p.softcap : 0.0f;
    scale_log2 = kLog2E * (p.softcap > 0 ? p.softcap : *p.softmax_scale);
  }

  const AttentionProblem& problem() const { return call.problem.attention; }
  std::byte* at(std::int64_t bytes) const {
    return static_cast<std::byte*>(call.workspace.data) + bytes;
  }
  std::byte* scratch(int thread) const { return at(thread * layout.scratch_bytes); }

  /// Tiles of one head of a sequence stand heads_q apart.
  std::int64_t place_of(const cpu::Sequence& s, std::int64_t sequence, std::int64_t head_q,
                        std::int64_t tile) const {
    const std::int64_t before = cpu::first_tile(problem(), s, sequence, layout.tile_q);
    return (before + tile) * problem().heads_q + head_q;
  }
  /// How many blocks have added to the dQ of a tile.
  std::int32_t& turn(std::int64_t place) const {
    return reinterpret_cast<std::int32_t*>(at(places.turns))[place];
  }
  Record record(std::int64_t place) const {
    std::byte* const from = at(places.records + place * layout.record_bytes);
    const auto half = [from](std::int64_t bytes) {
      return reinterpret_cast<std::uint16_t*>(from + bytes);
    };
    const auto single = [from](std::int64_t bytes) {
      return reinterpret_cast<float*>(from + bytes);
    };
    auto* const finite = reinterpret_cast<std::uint8_t*>(from + layout.finite);
    return {.q = half(layout.q),
            .d_o = half(layout.d_o),
            .q_rows = half(layout.q_rows),
            .d_o_rows = half(layout.d_o_rows),
            .lse = single(layout.lse),
            .delta = single(layout.delta),
            .q_finite = finite,
            .d_o_finite = finite + layout.pairs,
            .dq = single(layout.dq)};
  }
};

/// The code of one machine. pack: a tile of query rows [first, last) of a head into its record, and
/// dq = 0 where none of them sees a key. task: a block of keys of a KV head.
struct Functions {
  void (*pack)(const Run&, const cpu::Sequence&, std::int64_t sequence, std::int64_t head_q,
               tiles::Range rows, std::byte* scratch);
  void (*task)(const Run&, const cpu::KeyTask&, std::int64_t head_kv, std::byte* scratch);
};

template <typename Scope>
Status backward(const BackwardCall& call, const Functions& functions,
                const tiles::Bf16BackwardBlocking& blocking = {}) {
  const Run run(call, layout_of(call.problem, blocking));
  cpu::run_key_tasks<Scope>(
      call, shape_of(run.layout),
      {reinterpret_cast<cpu::KeyTask*>(run.at(run.places.tasks)), &run.turn(0)},
      [&](std::int64_t sequence, const cpu::Sequence& s, std::int64_t head_q, std::int64_t first,
          std::int64_t last) {
        functions.pack(run, s, sequence, head_q, {first, last}, run.scratch(omp_get_thread_num()));
      },
      [&](const cpu::KeyTask& task, std::int64_t head_kv) {
        functions.task(run, task, head_kv, run.scratch(omp_get_thread_num()));
      });
  return Status::ok();
}

}  // namespace rafter::backward_bf16
