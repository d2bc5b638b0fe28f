// The machines of kernels/cpu/forward_bf16_task.h in plain loops: 16-lane vectors; with eight tiles
// and their product as the manual defines TDPBF16PS (two chains of fused multiply-adds, then their
// sum); with VDPBF16PS (two fused multiply-adds, the odd elements first).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/forward_bf16_run.h"
// after what has no instruction set
#include "kernels/cpu/forward_bf16_task.h"

namespace rafter::testing {

struct EmulatedVectors {
  struct F {
    float v[16];
  };
  struct I {
    std::int32_t v[16];
  };
  struct K {
    bool v[16];
  };
  template <typename Out, typename Op>
  static Out each(Op op) {
    Out out;
    for (int i = 0; i < 16; ++i) {
      out.v[i] = op(i);
    }
    return out;
  }
  static F load(const float* from) {
    return each<F>([&](int i) { return from[i]; });
  }
  static void store(float* to, F a) { std::memcpy(to, a.v, sizeof(a.v)); }
  static I load_i(const std::int32_t* from) {
    return each<I>([&](int i) { return from[i]; });
  }
  static F set(float value) {
    return each<F>([&](int) { return value; });
  }
  static F add(F a, F b) {
    return each<F>([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(F a, F b) {
    return each<F>([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(F a, F b) {
    return each<F>([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F div(F a, F b) {
    return each<F>([&](int i) { return a.v[i] / b.v[i]; });
  }
  static F fma(F a, F b, F c) {
    return each<F>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
  }
  static F max(F a, F b) {  // the second operand where either is NaN
    return each<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static K greater(F a, F b) {
    return each<K>([&](int i) { return a.v[i] > b.v[i]; });
  }
  static K equal(F a, F b) {
    return each<K>([&](int i) { return a.v[i] == b.v[i]; });
  }
  static K within(I first, I last, std::int32_t key) {
    return each<K>([&](int i) { return first.v[i] <= key && key < last.v[i]; });
  }
  static bool any(K k) {
    bool out = false;
    for (const bool b : k.v) {
      out = out || b;
    }
    return out;
  }
  static F select(K k, F yes, F no) {
    return each<F>([&](int i) { return k.v[i] ? yes.v[i] : no.v[i]; });
  }
  /// As VREDUCEPS: rounded, so that it is 1 just below an integer; 0 of an infinity.
  static F above_floor(F x) {
    return each<F>([&](int i) { return std::isinf(x.v[i]) ? 0.0f : x.v[i] - std::floor(x.v[i]); });
  }
  /// As VSCALEFPS.
  static F times_power_of_floor(F p, F x) {
    return each<F>([&](int i) {
      constexpr float kBeyondAll = 1000;
      const float power = std::clamp(std::floor(x.v[i]), -kBeyondAll, kBeyondAll);
      return std::isnan(power) ? power : std::ldexp(p.v[i], static_cast<int>(power));
    });
  }
  static void store_pair(std::uint32_t* to, F even, F odd) {
    for (int i = 0; i < 16; ++i) {
      to[i] = static_cast<std::uint32_t>(f32_to_bf16(even.v[i])) |
              static_cast<std::uint32_t>(f32_to_bf16(odd.v[i])) << 16;
    }
  }
  static void store_row(std::uint16_t* to, F low, F high) {
    for (int i = 0; i < 16; ++i) {
      to[i] = f32_to_bf16(low.v[i]);
      to[16 + i] = f32_to_bf16(high.v[i]);
    }
  }
  static void interleave(std::uint16_t* to0, std::uint16_t* to1, const std::uint16_t* even,
                         const std::uint16_t* odd) {
    for (int i = 0; i < 16; ++i) {
      to0[2 * i] = even[i];
      to0[2 * i + 1] = odd[i];
      to1[2 * i] = even[16 + i];
      to1[2 * i + 1] = odd[16 + i];
    }
  }
  static bool are_finite(const std::uint16_t* from) {
    return std::all_of(from, from + 32, cpu::is_finite_bf16);
  }
  static void copy_row(std::uint16_t* to, const std::uint16_t* row, std::int64_t c,
                       std::int64_t end) {
    for (std::int64_t i = 0; i < 32; ++i) {
      to[i] = row != nullptr && c + i < end ? row[c + i] : std::uint16_t{0};
    }
  }
  static bool transpose_rows(std::uint16_t* to, const std::uint16_t* const* rows, std::int64_t c,
                             std::int64_t end) {
    bool finite = true;
    for (std::int64_t column = 0; column < 32; ++column) {
      for (std::int64_t i = 0; i < 32; ++i) {
        const bool there = rows[i] != nullptr && c + column < end;
        to[column * 32 + i] = there ? rows[i][c + column] : std::uint16_t{0};
        finite = finite && cpu::is_finite_bf16(to[column * 32 + i]);
      }
    }
    return finite;
  }
  static void transpose(const std::uint32_t* from, std::int64_t from_stride, std::uint32_t* to,
                        std::int64_t to_stride) {
    for (std::int64_t i = 0; i < 16; ++i) {
      for (std::int64_t j = 0; j < 16; ++j) {
        to[j * to_stride + i] = from[i * from_stride + j];
      }
    }
  }
  static F load_f32(const float* from, std::int64_t count) {
    return each<F>([&](int i) { return i < count ? from[i] : 0.0f; });
  }
  static F load_bf16(const std::uint16_t* from, std::int64_t count) {
    return each<F>([&](int i) { return i < count ? bf16_to_f32(from[i]) : 0.0f; });
  }
  static void store_f32(float* to, F a, std::int64_t count) {
    std::memcpy(to, a.v, static_cast<std::size_t>(count) * sizeof(float));
  }
  static void store_bf16(std::uint16_t* to, F a, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = f32_to_bf16(a.v[i]);
    }
  }
};

struct EmulatedAmx : EmulatedVectors {
  using Tile = unsigned char[16][64];
  static Tile& tile(int index) {
    static thread_local Tile tiles[8];
    return tiles[index];
  }

  template <int kTile>
  static void tile_load(const void* from, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(tile(kTile)[row], static_cast<const char*>(from) + row * stride, 64);
    }
  }
  template <int kTile>
  static void tile_load_past_l1(const void* from, std::int64_t stride) {
    tile_load<kTile>(from, stride);
  }
  template <int kTile>
  static void tile_store(void* to, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(static_cast<char*>(to) + row * stride, tile(kTile)[row], 64);
    }
  }
  template <int kTile>
  static void tile_zero() {
    std::memset(tile(kTile), 0, sizeof(Tile));
  }
  template <int kC, int kA, int kB>
  static void tile_dot() {
    std::uint16_t a[16][32], b[16][32];
    float c[16][16];
    std::memcpy(a, tile(kA), sizeof(a));
    std::memcpy(b, tile(kB), sizeof(b));
    std::memcpy(c, tile(kC), sizeof(c));
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        float even = 0, odd = 0;
        for (int k = 0; k < 16; ++k) {
          even = std::fma(bf16_to_f32(a[m][2 * k]), bf16_to_f32(b[k][2 * n]), even);
          odd = std::fma(bf16_to_f32(a[m][2 * k + 1]), bf16_to_f32(b[k][2 * n + 1]), odd);
        }
        c[m][n] += even + odd;
      }
    }
    std::memcpy(tile(kC), c, sizeof(c));
  }

  template <bool kAdds, int kSlices = 1, typename Slice>
  static void product(const forward_bf16::Product& x, const Slice& slice) {
    forward_bf16::tile_product<EmulatedAmx, kAdds, kSlices>(x, slice);
  }
};

struct EmulatedDotProducts : EmulatedVectors {
  struct Pairs {
    std::uint16_t v[16][2];
  };
  static Pairs load_pairs(const std::uint16_t* from) {
    Pairs out;
    std::memcpy(out.v, from, sizeof(out.v));
    return out;
  }
  static Pairs repeat_pair(const std::uint16_t* from) {
    Pairs out;
    for (auto& pair : out.v) {
      std::memcpy(pair, from, sizeof(pair));
    }
    return out;
  }
  static F dot_pairs(F sum, const Pairs& a, const Pairs& b) {
    return each<F>([&](int i) {
      const float odd = std::fma(bf16_to_f32(a.v[i][1]), bf16_to_f32(b.v[i][1]), sum.v[i]);
      return std::fma(bf16_to_f32(a.v[i][0]), bf16_to_f32(b.v[i][0]), odd);
    });
  }

  template <bool kAdds, int kSlices = 1, typename Slice>
  static void product(const forward_bf16::Product& x, const Slice& slice) {
    forward_bf16::vector_product<EmulatedDotProducts, kAdds>(x, slice);
  }
};

}  // namespace rafter::testing
