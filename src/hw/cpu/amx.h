// The AMX tile unit: one wrapper per instruction, the permission to use it, and the scope that
// holds its configuration. Own wrappers, because GCC 12's intrinsics have no memory clobber and
// lose stores that a tile load should see. Tile numbers are template arguments: the instruction
// encodes them. Manual: Intel 64 and IA-32 SDM vol. 1 ch. 18, vol. 2 (TILELOADD, TDPBF16PS, …).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define RAFTER_HAS_AMX_CODE 1
#else
#define RAFTER_HAS_AMX_CODE 0
#endif

namespace rafter::hw::amx {

inline constexpr int kRows = 16;      // rows of a tile
inline constexpr int kRowBytes = 64;  // bytes of a row
inline constexpr int kDepth = 32;     // bf16 products summed by one TDPBF16PS

#if RAFTER_HAS_AMX_CODE

/// Loads 16 rows of 64 bytes, `stride` bytes apart. Pairs with whatever stored them: the clobber
/// keeps those stores before it.
template <int kTile>
inline void load(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
/// The same of what is not to stay in the L1: it does not drive out what lies there.
template <int kTile>
inline void load_past_l1(const void* from, std::int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void store(void* to, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
/// C[m][n] += Σ over k of A[m][2k] B[k][2n] + A[m][2k + 1] B[k][2n + 1], f32 sums, round to
/// nearest, subnormals as zero.
template <int kC, int kA, int kB>
inline void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

/// C[m][n] += Σ over k and i < 4 of A[m][4k + i] B[k][4n + i], signed bytes, int32 sums.
template <int kC, int kA, int kB>
inline void dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

/// The same with unsigned bytes in A.
template <int kC, int kA, int kB>
inline void dot_unsigned_int8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

struct TileShape {
  int rows = kRows, row_bytes = kRowBytes;
};

/// All eight tiles as 16 rows of 64 bytes, or of the shapes given, from here to the end of the
/// scope, on this thread. The state is per thread; releasing it lets the core leave its AMX power
/// state and makes context switches cheap again.
class TileScope {
 public:
  TileScope() : TileScope(std::array<TileShape, 8>{}) {}
  explicit TileScope(const std::array<TileShape, 8>& shapes) {
    struct alignas(64) Config {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } config;
    static_assert(sizeof(Config) == 64);
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      config.row_bytes[i] = static_cast<std::uint16_t>(shapes[i].row_bytes);
      config.rows[i] = static_cast<std::uint8_t>(shapes[i].rows);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  ~TileScope() { asm volatile("tilerelease" ::: "memory"); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

/// What the CPU and the operating system say before anyone asks for permission.
struct Facts {
  bool tiles_of_bf16 = false;  // CPUID leaf 7: AMX-TILE and AMX-BF16
  bool xsave = false;          // CPUID leaf 1: OSXSAVE, without which XCR0 cannot be read
  std::uint32_t xcr0 = 0;      // its lower half
};

inline Facts facts() {
  Facts facts;
  unsigned a = 0, b = 0, c = 0, d = 0;
  facts.tiles_of_bf16 = __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1u << 24)) != 0 &&
                        (d & (1u << 22)) != 0;
  facts.xsave = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & (1u << 27)) != 0;
  if (facts.xsave) {
    std::uint32_t high = 0;
    asm volatile("xgetbv" : "=a"(facts.xcr0), "=d"(high) : "c"(0));
  }
  return facts;
}

/// Asks the kernel for the permission (arch_prctl ARCH_REQ_XCOMP_PERM), which covers every thread
/// made afterwards and those there already; children of fork inherit it.
inline bool ask_kernel() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
}

/// Why AMX with bf16 cannot be used where these are the facts; empty when it can. `ask` is called
/// where they allow it.
inline std::string refusal(const Facts& facts, bool (*ask)()) {
  if (!facts.tiles_of_bf16) {
    return "this CPU has no AMX with bf16";
  }
  if (!facts.xsave) {
    return "the operating system does not enable XSAVE";
  }
  constexpr std::uint32_t kTileState = 3u << 17;  // XTILECFG, XTILEDATA
  if ((facts.xcr0 & kTileState) != kTileState) {
    return "the operating system does not enable the AMX state (XCR0)";
  }
  return ask() ? "" : "the kernel refuses permission to use AMX (arch_prctl)";
}

/// Why this process cannot use AMX with bf16 here; empty when it can. Costs a system call, so
/// callers ask once.
inline std::string request() { return refusal(facts(), ask_kernel); }

/// Whether a CPU with AMX multiplies bytes too.
inline bool has_int8() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & (1u << 25)) != 0;
}

#else
inline std::string request() { return "this build has no AMX code (x86-64 Linux only)"; }
#endif

}  // namespace rafter::hw::amx
