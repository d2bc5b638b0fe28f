// The machine of kernels/cpu/forward_amx_task.h in plain loops: 16-lane vectors and eight tiles,
// the tile product as the manual defines TDPBF16PS (two chains of fused multiply-adds, then their
// sum).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/forward_amx_task.h"

namespace rafter::testing {

struct EmulatedAmx {
  struct F {
    float v[16];
  };
  struct I {
    std::int32_t v[16];
  };
  struct K {
    bool v[16];
  };
  using Tile = unsigned char[16][64];
  static Tile& tile(int index) {
    static thread_local Tile tiles[8];
    return tiles[index];
  }

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
  static F exp2(F x) {
    return each<F>([&](int i) { return std::exp2(x.v[i]); });
  }
  static void store_pair(std::uint32_t* to, F even, F odd) {
    for (int i = 0; i < 16; ++i) {
      to[i] = static_cast<std::uint32_t>(f32_to_bf16(even.v[i])) |
              static_cast<std::uint32_t>(f32_to_bf16(odd.v[i])) << 16;
    }
  }
  static void copy_row(std::uint16_t* to, const std::uint16_t* row, std::int64_t c,
                       std::int64_t end) {
    for (std::int64_t i = 0; i < 32; ++i) {
      to[i] = row != nullptr && c + i < end ? row[c + i] : std::uint16_t{0};
    }
  }
  static bool interleave(std::uint32_t* to, const std::uint16_t* even, const std::uint16_t* odd,
                         std::int64_t c, std::int64_t end) {
    bool finite = true;
    for (std::int64_t i = 0; i < 16; ++i) {
      const std::uint16_t low = even != nullptr && c + i < end ? even[c + i] : std::uint16_t{0};
      const std::uint16_t high = odd != nullptr && c + i < end ? odd[c + i] : std::uint16_t{0};
      finite = finite && cpu::is_finite_bf16(low) && cpu::is_finite_bf16(high);
      to[i] = low | static_cast<std::uint32_t>(high) << 16;
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
  static void store_f32(float* to, F a, std::int64_t count) {
    std::memcpy(to, a.v, static_cast<std::size_t>(count) * sizeof(float));
  }
  static void store_bf16(std::uint16_t* to, F a, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = f32_to_bf16(a.v[i]);
    }
  }

  template <int kTile>
  static void tile_load(const void* from, std::int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(tile(kTile)[row], static_cast<const char*>(from) + row * stride, 64);
    }
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
};

}  // namespace rafter::testing
