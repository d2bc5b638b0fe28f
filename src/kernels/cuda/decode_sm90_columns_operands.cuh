// Operands of the products of decode_sm90_columns, from shared memory.
#pragma once

#include "hw/cuda/mma.cuh"
#include "hw/cuda/wgmma.cuh"
#include "kernels/cuda/decode_sm90_units.cuh"
#include "kernels/cuda/decode_sm90_widen.cuh"

namespace rafter::cuda {

/// A pair of words, and four, of shared memory.
__device__ inline void load_shared(std::uint32_t address, std::uint32_t& a, std::uint32_t& b) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(address) : "memory");
}
__device__ inline void load_shared(std::uint32_t address, std::uint32_t (&w)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(address)
               : "memory");
}
__device__ inline float4 load_shared_four(std::uint32_t address) {
  std::uint32_t w[4];
  load_shared(address, w);
  return make_float4(__uint_as_float(w[0]), __uint_as_float(w[1]), __uint_as_float(w[2]),
                     __uint_as_float(w[3]));
}
__device__ inline void store_shared(std::uint32_t address, std::uint32_t a, std::uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

template <DType kDType, int kWidth, int kRow>
struct DecodeColumnsOperands {
  using Shared = DecodeColumns<kWidth, kRow>;
  static constexpr tiles::Sm90DecodeRow kShape = Shared::kShape;
  static constexpr bool kBytes = kWidth == 1;
  static constexpr int kPieces = kShape.pieces();
  static constexpr int kKeys = tiles::kDecodeBlockKeys, kRows = tiles::kDecodeBlockRows;
  // An 8-bit V is exact in bf16, whose range holds p · factor; where q is f16 a second product adds
  // what bf16 drops of p.
  static constexpr DType kValues = kBytes ? DType::bf16 : kDType;
  static constexpr bool kTwoProducts = kBytes && kDType == DType::f16;

  const DecodeParams& params;
  const bool e4m3;
  const Shared shared;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);

  /// Where this lane's words of the queries begin. 8-bit K gives a thread four columns in a row: q
  /// follows.
  __device__ std::uint32_t own_queries(std::uint32_t queries) const {
    int own = lane;
    asm volatile("" : "+r"(own));  // else it stays in a register where there is none
    return queries + (kBytes ? own / 4 * kShape.query_pitch() + own % 4 * 8
                             : own % 8 * kShape.query_pitch() + own / 8 * 16);
  }
  /// Operands of steps i and i + 1 of a block of query rows.
  __device__ static void query_words(std::uint32_t own, int block, int i,
                                     std::uint32_t (&word)[4]) {
    const std::uint32_t from = own + block * kRows * kShape.query_pitch() + 32 * i;
    if constexpr (kBytes) {
      load_shared(from, word[0], word[1]);
      load_shared(from + 32, word[2], word[3]);
    } else {
      load_matrices(word, from);
    }
  }
  /// This warp's 16 keys, columns of steps i and i + 1.
  __device__ void key_operands(std::uint32_t keys, int i, std::uint32_t (&a)[2][4]) const {
    const int r = warp * kKeys + lane % 8 + lane / 8 % 2 * 8;
    const int column = lane / 16;
    if constexpr (!kBytes) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_matrices(a[h], keys + Shared::place(r, 2 * (i + h) + column));
      }
    } else {
      std::uint32_t b[4];
      load_matrices(b, keys + Shared::place(r, i + column));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        a[h][0] = widen<kDType>(b[2 * h] & 0xffffu, e4m3);
        a[h][1] = widen<kDType>(b[2 * h + 1] & 0xffffu, e4m3);
        a[h][2] = widen<kDType>(b[2 * h] >> 16, e4m3);
        a[h][3] = widen<kDType>(b[2 * h + 1] >> 16, e4m3);
      }
    }
  }

  /// 16 columns of 32 keys, those of warps `of` and `of` + 1.
  __device__ void value_operands(std::uint32_t values, int piece, int of,
                                 std::uint32_t (&a)[2][4]) const {
    const int columns = warp * kPieces + piece;
    if constexpr (!kBytes) {
      const int r = of * kKeys + lane % 8 + lane / 16 * 8;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        load_matrices_transposed(a[h],
                                 values + Shared::place(r + h * kKeys, 2 * columns + lane / 8 % 2));
      }
    } else {
      std::uint32_t b[4];
      load_matrices_transposed(b, values + Shared::place(of * kKeys + lane, columns));
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // keys 2t and 2t + 1, columns 2g and 2g + 1 of each
        a[h][0] = widen<kValues>(__byte_perm(b[2 * h], 0, 0x4420), e4m3);
        a[h][1] = widen<kValues>(__byte_perm(b[2 * h], 0, 0x4431), e4m3);
        a[h][2] = widen<kValues>(__byte_perm(b[2 * h + 1], 0, 0x4420), e4m3);
        a[h][3] = widen<kValues>(__byte_perm(b[2 * h + 1], 0, 0x4431), e4m3);
      }
    }
  }
};

}  // namespace rafter::cuda
