// A decode step's products between two attentions, with what stands between them, in one launch:
// up to four phases of y = f(norm(x) weightᵀ), one or two rows x, weights packed or in x's dtype.
#include <type_traits>

#include "kernels/cuda/chain_rows.cuh"
#include "kernels/cuda/packed_digits.cuh"
#include "kernels/cuda/packed_pairs.cuh"

namespace rafter::cuda {
namespace {

__device__ void store_chunk(std::uint32_t to, const Raw<false>& raw) {
  const uint4 w = raw.words[0];
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w.x), "r"(w.y), "r"(w.z),
               "r"(w.w)
               : "memory");
}

/// A stripe of packed weights, for the producer: one stream of units, some of which are a stage.
template <int kUnitsOfStage, int kUnitSize, int kColsOfUnit>
class PackedStream {
 public:
  static constexpr int kStageUnits = kUnitsOfStage, kUnit = kUnitSize, kCols = kColsOfUnit;
  static constexpr int kStageBytes = kStageUnits * kUnit, kStageCols = kStageUnits * kCols;

  __device__ PackedStream(const ChainPhase& f, int stripe)
      : from_(static_cast<const std::uint8_t*>(f.weight) +
              stripe * (std::int64_t{f.k / kCols} * kUnit)),
        left_(f.k / kCols) {}
  __device__ void bring(std::uint32_t to, std::uint32_t full) {
    const auto bytes = static_cast<std::uint32_t>(min(kStageUnits, left_) * kUnit);
    barrier_arrive_expect(full, bytes);
    bulk_load(to, from_, bytes, full);
    from_ += bytes;
    left_ -= kStageUnits;
  }

 private:
  const std::uint8_t* from_;
  int left_;
};

/// And what a warp knows of a phase of them.
template <typename Products, int kCols>
struct PackedWorker {
  Products products{0, 1, 0, 0};
  int units = 0, warp = 0, m = 1;

  __device__ void begin(const ChainPhase& f, int rows, std::uint32_t x, int which, int lane) {
    products = Products(f.k, rows, x, lane);
    units = f.k / kCols;
    warp = which;
    m = rows;
  }
};

/// int4 by digits; the sums of packed_digits.cu, and its bits.
template <DType kX, int kScales>
class DigitChain : public PackedStream<16, base::kUnitBytes + kScales * 32, kUnitCols> {
 public:
  using Stream = PackedStream<16, base::kUnitBytes + kScales * 32, kUnitCols>;
  using Stream::Stream, Stream::kStageUnits, Stream::kUnit;
  static constexpr DType kDType = kX;
  static constexpr int kStripe = kRows, kSums = 16;
  static constexpr int kInFlight = 2;
  static constexpr int kGroup = kScales > 1 ? 8 : 4;  // sums of four units would spill there
  static constexpr int kOfWarp = kStageUnits / kGroup;
  using Products = Digits<kX, kScales, kGroup, kOfWarp>;
  struct Sums {
    float sum[kOfWarp][4];
  };

  static constexpr std::int64_t x_bytes(std::int64_t m, std::int64_t k) {
    return digits_bytes(m, k);
  }
  static __device__ void put(const Raw<false>& raw, std::uint32_t x, int k, int m, int row,
                             int chunk, bool exists) {
    const auto pitch = static_cast<std::uint32_t>(plane_pitch(k));
    take_apart<kX>(raw, x + row * kDigits * pitch, pitch,
                   x + static_cast<std::uint32_t>(m) * kDigits * pitch, row, chunk, exists);
  }

  static __device__ float scale(const ChainPhase&, std::int64_t) { return 1; }

  struct Worker : PackedWorker<Products, kUnitCols> {
    using Known = PackedWorker<Products, kUnitCols>;
    using Known::products, Known::units, Known::warp, Known::m;
    __device__ void add(std::uint32_t at, int stage, Sums& sums) const {
      std::uint32_t of_weight[kOfWarp];
#pragma unroll
      for (int n = 0; n < kOfWarp; ++n) {
        of_weight[n] = at + static_cast<std::uint32_t>((warp + n * kGroup) * kUnit);
      }
      const int u = stage * kStageUnits + warp;
      if (u + (kOfWarp - 1) * kGroup < units) {
#pragma unroll
        for (int n = 0; n < kOfWarp; n += 2) {
          products.template add_units<2, kGroup>(of_weight + n, u + n * kGroup, sums.sum + n);
        }
        return;
      }
#pragma unroll
      for (int n = 0; n < kOfWarp - 1; ++n) {
        if (u + n * kGroup < units) {
          products.template add_units<1, kGroup>(of_weight + n, u + n * kGroup, sums.sum + n);
        }
      }
    }
    __device__ void keep(const Sums& sums, float* to) const {
#pragma unroll
      for (int n = 0; n < kOfWarp; ++n) {
        products.keep(sums.sum[n], to + (warp + n * kGroup) * m * kRows, m);
      }
    }
  };
};

/// int8 and e4m3 by pairs; the sums of packed_rows.cu, and its bits.
template <DType kX, DType kW>
class PairChain : public PackedStream<16, base::kUnitBytes, 64> {
 public:
  using Stream = PackedStream<16, base::kUnitBytes, 64>;
  using Stream::Stream;
  static constexpr DType kDType = kX;
  static constexpr int kStripe = kRows, kSums = 8, kGroup = 8, kInFlight = 3;
  static_assert(kStageUnits == 2 * kGroup);
  using Products = Pairs<kX, kW, 0, kGroup>;
  struct Sums {
    float sum[1][4];
  };

  static constexpr std::int64_t x_bytes(std::int64_t m, std::int64_t k) { return m * x_pitch(k); }
  static __device__ void put(const Raw<false>& raw, std::uint32_t x, int k, int, int row, int chunk,
                             bool exists) {
    if (exists) {
      store_chunk(x + row * static_cast<std::uint32_t>(x_pitch(k)) + chunk * 16, raw);
    }
  }
  /// A row's, behind all values.
  static __device__ float scale(const ChainPhase& f, std::int64_t row) {
    return __ldg(
        reinterpret_cast<const float*>(static_cast<const std::uint8_t*>(f.weight) + f.n * f.k) +
        row);
  }

  struct Worker : PackedWorker<Products, kCols> {
    using Known = PackedWorker<Products, kCols>;
    using Known::products, Known::units, Known::warp, Known::m;
    __device__ void add(std::uint32_t at, int stage, Sums& sums) const {
      const auto first = at + static_cast<std::uint32_t>(warp * base::kUnitBytes);
      const std::uint32_t of_weight[2] = {
          first, first + static_cast<std::uint32_t>(kGroup * base::kUnitBytes)};
      const int u = stage * kStageUnits + warp;
      if (u + kGroup < units) {
        products.template add<2>(of_weight, u, sums.sum);
      } else if (u < units) {
        products.template add<1>(of_weight, u, sums.sum);
      }
    }
    __device__ void keep(const Sums& sums, float* to) const {
      products.keep(sums.sum[0], to + warp * m * kRows, m);
    }
  };
};

/// A plain weight; the sums of vector_rows.cu, and its bits: eight warps share the rows of a
/// stripe.
template <DType kX, int kM>
class PlainChain {
 public:
  static constexpr DType kDType = kX;
  static constexpr int kStripe = 4, kSums = 8, kGroup = 8, kInFlight = 3;
  static constexpr int kStageCols = kSums * 32 * kRowWidth;
  static constexpr int kStageBytes = kStripe * kStageCols * 2, kPitch = kStageCols * 2;
  struct Sums {
    float sum[kM][kStripe];
  };

  static constexpr std::int64_t x_bytes(std::int64_t m, std::int64_t k) {
    return (m * k * 2 + 127) / 128 * 128;
  }
  static __device__ void put(const Raw<false>& raw, std::uint32_t x, int k, int, int row, int chunk,
                             bool exists) {
    if (exists) {
      store_chunk(x + row * k * 2 + chunk * 16, raw);
    }
  }

  static __device__ float scale(const ChainPhase&, std::int64_t) { return 1; }

  __device__ PlainChain(const ChainPhase& f, int stripe)
      : from_(static_cast<const std::uint8_t*>(f.weight) +
              stripe * (std::int64_t{f.k} * 2 * kStripe)),
        row_bytes_(f.k * 2),
        left_(f.k * 2) {}
  __device__ void bring(std::uint32_t to, std::uint32_t full) {
    const auto bytes = static_cast<std::uint32_t>(min(kPitch, left_));
    barrier_arrive_expect(full, bytes * kStripe);
#pragma unroll
    for (int r = 0; r < kStripe; ++r) {
      bulk_load(to + r * kPitch, from_ + r * row_bytes_, bytes, full);
    }
    from_ += bytes;
    left_ -= kPitch;
  }

  class Worker {
   public:
    __device__ void begin(const ChainPhase& f, int m, std::uint32_t x, int warp, int lane) {
      x_ = x;
      k_ = f.k;
      warp_ = warp;
      lane_ = lane;
      m_ = m;
    }
    __device__ void add(std::uint32_t stage_at, int stage, Sums& sums) const {
      const int col = (warp_ * 32 + lane_) * kRowWidth, at = stage * kStageCols + col;
      if (at >= k_) {
        return;
      }
      Raw<false> w[kStripe];
#pragma unroll
      for (int r = 0; r < kStripe; ++r) {
        w[r].words[0] = load_shared(stage_at + static_cast<std::uint32_t>(r * kPitch + col * 2));
      }
      float of_x[kM][kRowWidth];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Raw<false> raw;
        raw.words[0] = load_shared(x_ + static_cast<std::uint32_t>(m * k_ + at) * 2);
        unpack(kX, raw, of_x[m]);
      }
#pragma unroll
      for (int r = 0; r < kStripe; ++r) {
        float of_w[kRowWidth];
        unpack(kX, w[r], of_w);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int i = 0; i < kRowWidth; ++i) {
            sums.sum[m][r] = fmaf(of_w[i], of_x[m][i], sums.sum[m][r]);
          }
        }
      }
    }
    /// Adds lanes 16, 8, 4, 2 and 1 apart; after each of the first two a lane has half of the rows.
    __device__ void keep(const Sums& sums, float* to) const {
      static_assert(kStripe == 4);
      const bool upper = (lane_ & 16) != 0, odd = (lane_ & 8) != 0;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const auto& sum = sums.sum[m];
        float two[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          two[i] = (upper ? sum[2 + i] : sum[i]) +
                   __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[2 + i], 16);
        }
        float all =
            (odd ? two[1] : two[0]) + __shfl_xor_sync(0xffffffffu, odd ? two[0] : two[1], 8);
#pragma unroll
        for (int step = 4; step > 0; step /= 2) {
          all += __shfl_xor_sync(0xffffffffu, all, step);
        }
        if (lane_ % 8 == 0) {
          to[(warp_ * kM + m) * kStripe + lane_ / 8] = all;
        }
      }
    }

   private:
    std::uint32_t x_ = 0;
    int k_ = 0, warp_ = 0, lane_ = 0, m_ = 1;
  };

 private:
  const std::uint8_t* from_;
  int row_bytes_, left_;
};

template <typename Format>
__global__ void __launch_bounds__(kChainThreads, 1)
    chain_rows(const __grid_constant__ ChainParams p) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  run_chain<Format>(p, shared);
}

/// run(Format{}) of what the chain's weights are.
template <DType kX, typename Run>
auto with_weights(const ChainParams& params, Run run) {
  const ChainPhase& first = params.phases[0];
  if (!first.packed) {
    return params.m == 1 ? run(std::type_identity<PlainChain<kX, 1>>{})
                         : run(std::type_identity<PlainChain<kX, 2>>{});
  }
  switch (*first.packed) {
    case DType::int8:
      return run(std::type_identity<PairChain<kX, DType::int8>>{});
    case DType::e4m3:
      return run(std::type_identity<PairChain<kX, DType::e4m3>>{});
    default:
      return first.group_size == 32   ? run(std::type_identity<DigitChain<kX, 4>>{})
             : first.group_size == 64 ? run(std::type_identity<DigitChain<kX, 2>>{})
                                      : run(std::type_identity<DigitChain<kX, 1>>{});
  }
}
template <typename Run>
auto with_format(const ChainParams& params, Run run) {
  return params.dtype == DType::bf16 ? with_weights<DType::bf16>(params, run)
                                     : with_weights<DType::f16>(params, run);
}

}  // namespace

std::string why_no_chain(const ChainParams& params) {
  return with_format(params,
                     [&](auto format) { return why_not<typename decltype(format)::type>(params); });
}

Status launch_chain_rows(const ChainParams& params, void* stream) {
  return with_format(params, [&](auto format) {
    using Format = typename decltype(format)::type;
    return launch_chain<Format>(reinterpret_cast<const void*>(&chain_rows<Format>), params, stream);
  });
}

}  // namespace rafter::cuda
