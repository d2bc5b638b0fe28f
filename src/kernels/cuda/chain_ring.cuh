// The ring of chain_rows and who fills it: shared memory's places, what the producer tells the
// others of, the tickets that say which stripes are this CTA's.
#pragma once

#include "hw/cuda/early.cuh"
#include "kernels/cuda/chain_rows.h"
#include "kernels/cuda/packed_rows.cuh"

namespace rafter::cuda {

inline constexpr int kChainWarps = 16, kConsumers = kChainWarps * 32, kProducer = kChainWarps,
                     kFinisher = kChainWarps + 1;
inline constexpr int kChainThreads = kConsumers + 64;
inline constexpr int kMostNormVectors = kMostChainNorm / (kConsumers * kRowWidth);
inline constexpr int kMostChainStages = 12, kFewestChainStages = 4;
inline constexpr int kMostGroups = 4, kMostSides = 2 * kMostGroups;
inline constexpr int kRuns = 32, kMessages = 64;  // see Places
static_assert(kRuns >= kMostSides + kMostGroups + kMostChainStages);
static_assert(kMessages / kMostGroups > kMostChainStages / kMostGroups + kMostPhases);
inline constexpr std::int64_t kSquaresBytes = kMostChainRows * kMostNormVectors * kChainWarps * 4;

template <typename Format>
constexpr int kGroups = kChainWarps / Format::kGroup;  // of warps that share a stripe
template <typename Format>
constexpr int kSides = 2 * kGroups<Format>;  // stripes whose sums are kept at a time
template <typename Format>
constexpr std::int64_t chain_sums_bytes(std::int64_t m) {
  return std::int64_t{kSides<Format>} * Format::kSums * Format::kStripe * m * 4;
}

/// Where things lie in shared memory. A run is a stripe of this CTA, counted from 0; group run %
/// kGroups multiplies it. The finisher is told of runs; a group of its runs and, so that all bring
/// x together, of phases. runs[run % kRuns] is written again when that one has been finished: the
/// sums of kSides, the runs under way of kGroups and as many as the ring has stages are behind it.
struct Places {
  std::uint32_t barriers, x, stages, stage_bytes;
  int2 *runs, *messages;
  float *squares, *sums;
  __device__ std::uint32_t full(int slot) const { return barriers + 16 * slot; }
  __device__ std::uint32_t empty(int slot) const { return barriers + 16 * slot + 8; }
  __device__ std::uint32_t run_told(int run) const {
    return barriers + 16 * kMostChainStages + 8 * (run % kRuns);
  }
  __device__ std::uint32_t told(int message) const { return run_told(0) + 8 * (kRuns + message); }
  __device__ std::uint32_t summed(int side) const { return told(kMessages) + 16 * side; }
  __device__ std::uint32_t stored(int side) const { return summed(side) + 8; }
  __device__ std::uint32_t stage(int slot) const { return stages + slot * stage_bytes; }
};
inline constexpr std::int64_t kFrontBarriers =
    16 * kMostChainStages + 8 * (kRuns + kMessages) + 16 * kMostSides;
inline constexpr std::int64_t kFrontBytes =
    (kFrontBarriers + 8 * (kRuns + kMessages) + 63) / 64 * 64;

/// The messages of a group, in order.
template <typename Format>
struct Inbox {
  static constexpr int kSize = kMessages / kGroups<Format>;
  int first, next = 0;
  __device__ explicit Inbox(int group) : first(group * kSize) {}
  __device__ int place() const { return first + next % kSize; }
  __device__ std::uint32_t parity() const { return next / kSize & 1; }
};

/// A run: its phase, its stripe, and its first slot with that one's parity. Instead of a run: that
/// a phase begins, or the end.
struct Run {
  int2 words;
  static __device__ Run of(int phase, int stripe, const Turn& turn) {
    return {{phase << 28 | stripe, turn.slot << 1 | static_cast<int>(turn.parity)}};
  }
  static __device__ Run begins(int phase) { return {{phase << 28, -1}}; }
  static __device__ Run end() { return {{0, -2}}; }
  __device__ int phase() const { return words.x >> 28; }
  __device__ int stripe() const { return words.x & ((1 << 28) - 1); }
  __device__ bool is_begin() const { return words.y == -1; }
  __device__ bool is_end() const { return words.y == -2; }
  __device__ Turn turn() const { return {words.y >> 1, static_cast<std::uint32_t>(words.y & 1)}; }
};

__device__ inline int take(const ChainParams& p) {
  return static_cast<int>(atomicAdd(&p.words->ticket.value, 1u));
}

/// This CTA's tickets of the phases from kFixedFrom on where all CTAs have begun by then: every
/// gridDim-th, so that none has more than one above another. A CTA that takes what it has room for
/// may take one more of `down`, whose stripes are long.
inline constexpr int kFixedFrom = 2;
enum Dealing : unsigned { kUndecided, kFixed, kFree };
class FixedTickets {
 public:
  __device__ explicit FixedTickets(const ChainParams& p)
      : p_(p), begin_(p.count > kFixedFrom ? p.phases[kFixedFrom].first : p.tickets) {}
  __device__ int begin() const { return begin_; }
  /// The same for all CTAs: once all have begun, no other has to do their part.
  __device__ bool are_meant() const {
    const bool all = atomicAdd(&p_.words->begun.value, 0u) == gridDim.x;
    const unsigned before = atomicCAS(&p_.words->dealing.value, kUndecided, all ? kFixed : kFree);
    return before == kUndecided ? all : before == kFixed;
  }
  __device__ int take() {
    while (phase_ < p_.count) {
      const ChainPhase& f = p_.phases[phase_];
      const int ticket = static_cast<int>(blockIdx.x + count_ * gridDim.x);
      if (ticket < f.tickets) {
        ++count_;
        return f.first + ticket;
      }
      ++phase_;
      count_ = 0;
    }
    return p_.tickets;
  }

 private:
  const ChainParams& p_;
  int begin_, phase_ = kFixedFrom;
  unsigned count_ = 0;
};

/// The producer's way to the finisher and the groups.
template <typename Format>
class Teller {
 public:
  __device__ explicit Teller(const Places& at) : at_(at) {}
  __device__ void run(const Run& what) {
    tell_finisher(what);
    tell_group((runs_ - 1) % kGroups<Format>, what);
  }
  __device__ void begin(int phase) {
#pragma unroll
    for (int group = 0; group < kGroups<Format>; ++group) {
      tell_group(group, Run::begins(phase));
    }
  }
  __device__ void end() {
    tell_finisher(Run::end());
#pragma unroll
    for (int group = 0; group < kGroups<Format>; ++group) {
      tell_group(group, Run::end());
    }
  }

 private:
  __device__ void tell_finisher(const Run& what) {
    at_.runs[runs_ % kRuns] = what.words;
    barrier_arrive(at_.run_told(runs_++));
  }
  __device__ void tell_group(int group, const Run& what) {
    constexpr int kSize = Inbox<Format>::kSize;
    const int shift = 16 * group;
    const auto told = static_cast<int>(told_ >> shift & 0xffffu);
    const int place = group * kSize + told % kSize;
    told_ += 1ull << shift;
    at_.messages[place] = what.words;
    barrier_arrive(at_.told(place));
  }
  const Places& at_;
  int runs_ = 0;
  unsigned long long told_ = 0;  // messages of each group, 16 bits each
};

/// The producer. Of what it has asked for no more than kInFlight stages have not landed: as many as
/// keep the memory busy, for what the CTAs tell each other waits behind them. Fewer than the ring
/// has, too: a group that waits for its next stage cannot mistake for it the one that was in its
/// slot before.
template <typename Format>
__device__ void bring(const ChainParams& p, const Places& at) {
  static_assert(Format::kInFlight < kFewestChainStages);
  Turn turn{0, 1};
  Teller<Format> teller(at);
  Turn landed;
  int phase = -1, issued = 0;
  atomicAdd(&p.words->begun.value, 1u);
  FixedTickets fixed(p);
  bool is_decided = false, is_free = true;
  int now = take(p), next = take(p), dropped = 0;
  for (;;) {
    if (!is_decided && now >= fixed.begin()) {
      is_decided = true;
      is_free = !fixed.are_meant();
      if (!is_free) {
        dropped = next;
        now = fixed.take();
        next = fixed.take();
      }
    }
    if (now >= p.tickets) {
      break;
    }
    const int later = !is_free ? fixed.take() : next < p.tickets ? take(p) : p.tickets;
    while (phase + 1 < p.count && now >= p.phases[phase + 1].first) {
      teller.begin(++phase);
    }
    const ChainPhase& f = p.phases[phase];
    const int parts = f.end == LinkEnd::swiglu ? 2 : 1;
    for (int part = 0; part < parts; ++part) {
      const int stripe = now - f.first + part * f.tickets;
      Format format(f, stripe);
      const int stages = f.stages;
      for (int s = 0; s < stages; ++s) {
        barrier_wait(at.empty(turn.slot), turn.parity);
        if (s == 0) {  // consumers wait for what the producer does not: parities are opposite
          teller.run(Run::of(phase, stripe, {turn.slot, turn.parity ^ 1u}));
        }
        if (issued++ >= Format::kInFlight) {
          barrier_wait(at.full(landed.slot), landed.parity);
          landed.next(p.stages);
        }
        format.bring(at.stage(turn.slot), at.full(turn.slot));
        turn.next(p.stages);
      }
    }
    now = next;
    next = later;
  }
  teller.end();
  // No CTA takes a ticket after all have come here, so that the next launch finds the first again.
  // The last ticket's value is used, and so awaited.
  if (atomicAdd(&p.words->closed.value, (next | dropped) < 0 ? 2u : 1u) == gridDim.x - 1) {
    p.words->ticket.value = 0;
    p.words->closed.value = 0;
    p.words->begun.value = 0;
    p.words->dealing.value = kUndecided;
    __threadfence();
  }
  let_next_grid_begin();
}

}  // namespace rafter::cuda
