// The packing and schedule of forward_amx_bf16 and forward_avx512_bf16 on emulated machines, so
// that they are under test where those instructions are not. The arithmetic of the real ones is
// tested where they are, as every kernel's is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/bf16_emulated.h"

namespace rafter::testing {
namespace {

using forward_bf16::Functions;
using forward_bf16::kFunctions;
using forward_bf16::Schedule;
using tiles::Bf16Blocking;
using Bits = std::vector<std::uint16_t>;

const Functions kTiles = kFunctions<EmulatedAmx>;
const Functions kVectors = kFunctions<EmulatedDotProducts, Schedule{.interleave = false}>;

/// Sequences one after another: lengths of q and of k.
struct Shape {
  std::vector<std::int64_t> rows, keys;
  std::int64_t heads_q = 1, heads_kv = 1, head_dim = 16, head_dim_v = 16;
  Mask mask = {};
  float softcap = 0;
  float softmax_scale = 0.25f;

  std::int64_t total_q() const { return std::accumulate(rows.begin(), rows.end(), std::int64_t{}); }
  std::int64_t total_kv() const {
    return std::accumulate(keys.begin(), keys.end(), std::int64_t{});
  }
};

struct Tensors {
  Bits q, k, v;
  std::vector<float> o, lse;  // lse [total_q][heads_q]
};

Tensors random_tensors(const Shape& s) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  const auto fill = [&](std::int64_t elements) {
    Bits out(static_cast<std::size_t>(elements));
    for (std::uint16_t& x : out) {
      x = f32_to_bf16(normal(generator));
    }
    return out;
  };
  const auto outputs = static_cast<std::size_t>(s.total_q() * s.heads_q);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  return {fill(s.total_q() * s.heads_q * s.head_dim), fill(s.total_kv() * s.heads_kv * s.head_dim),
          fill(s.total_kv() * s.heads_kv * s.head_dim_v),
          std::vector<float>(outputs * static_cast<std::size_t>(s.head_dim_v), nan),
          std::vector<float>(outputs, nan)};
}

struct How {
  Functions functions = kTiles;
  int threads = 1;
  Bf16Blocking blocking = {};
  std::int64_t page_size = 0;  // of a paged cache of one sequence
};

AttentionProblem problem_of(const Shape& s, const How& how) {
  const bool one = s.rows.size() == 1;
  AttentionProblem p = {.batch = static_cast<std::int64_t>(s.rows.size()),
                        .heads_q = s.heads_q,
                        .heads_kv = s.heads_kv,
                        .seqlen_q = *std::max_element(s.rows.begin(), s.rows.end()),
                        .seqlen_kv = *std::max_element(s.keys.begin(), s.keys.end()),
                        .head_dim = s.head_dim,
                        .head_dim_v = s.head_dim_v,
                        .dtype = DType::bf16,
                        .mask = s.mask,
                        .softmax_scale = s.softmax_scale,
                        .softcap = s.softcap};
  if (how.page_size > 0) {
    p.layout = Layout::paged;
    p.page_size = how.page_size;
    p.seqlen_kv += 3 * how.page_size;  // capacity
    p.num_pages = base::div_up(p.seqlen_kv, how.page_size);
    p.seqused_kv = true;
  } else if (!one) {
    p.layout = Layout::packed;
    p.total_q = s.total_q();
    p.total_kv = s.total_kv();
  }
  return p;
}

std::vector<std::int32_t> offsets_of(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int32_t> out = {0};
  for (const std::int64_t n : lengths) {
    out.push_back(out.back() + static_cast<std::int32_t>(n));
  }
  return out;
}

/// Rows of a paged cache, last page first, NaN where no row is.
Bits paged(const Bits& rows, std::int64_t width, std::int64_t page_size, std::int64_t pages) {
  Bits out(static_cast<std::size_t>(pages * page_size * width), 0x7fc0);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / width;
    const std::int64_t page = pages - 1 - row / page_size;
    out[static_cast<std::size_t>((page * page_size + row % page_size) * width +
                                 static_cast<std::int64_t>(i) % width)] = rows[i];
  }
  return out;
}

void run_emulated(const Shape& s, Tensors& t, const How& how = {}) {
  const KernelProblem problem = {.attention = problem_of(s, how), .threads = how.threads};
  const AttentionProblem& p = problem.attention;
  const std::int64_t bytes = forward_bf16::workspace(problem, how.blocking);
  // a workspace of NaN: what lies outside the valid region must not matter
  std::vector<std::byte> memory(static_cast<std::size_t>(bytes) + 128, std::byte{0xff});
  void* aligned = memory.data();
  std::size_t space = memory.size();
  std::align(64, static_cast<std::size_t>(bytes), aligned, space);
  const std::vector<std::int32_t> rows = offsets_of(s.rows), keys = offsets_of(s.keys);
  ForwardInputs in = {
      TensorView::contiguous(t.q.data(), DType::bf16, 1, s.total_q(), s.heads_q, s.head_dim),
      TensorView::contiguous(t.k.data(), DType::bf16, 1, s.total_kv(), s.heads_kv, s.head_dim),
      TensorView::contiguous(t.v.data(), DType::bf16, 1, s.total_kv(), s.heads_kv, s.head_dim_v)};
  Bits k, v;
  std::vector<std::int32_t> pages;
  const std::int32_t used = keys[1];
  if (p.layout == Layout::packed) {
    in.cu_seqlens_q = {rows.data(), DType::i32, p.batch + 1};
    in.cu_seqlens_kv = {keys.data(), DType::i32, p.batch + 1};
  } else if (p.layout == Layout::paged) {
    k = paged(t.k, s.heads_kv * s.head_dim, p.page_size, p.num_pages);
    v = paged(t.v, s.heads_kv * s.head_dim_v, p.page_size, p.num_pages);
    in.k = TensorView::contiguous(k.data(), DType::bf16, p.num_pages, p.page_size, s.heads_kv,
                                  s.head_dim);
    in.v = TensorView::contiguous(v.data(), DType::bf16, p.num_pages, p.page_size, s.heads_kv,
                                  s.head_dim_v);
    for (std::int64_t page = p.num_pages; page > 0; --page) {
      pages.push_back(static_cast<std::int32_t>(page - 1));
    }
    in.page_table = {pages.data(), DType::i32, p.num_pages, p.num_pages};
    in.seqused_kv = {&used, DType::i32, 1};
  }
  const ForwardOutputs out = {
      TensorView::contiguous(t.o.data(), DType::f32, 1, s.total_q(), s.heads_q, s.head_dim_v),
      {t.lse.data(), 1, s.heads_q, s.total_q(), 0, 1, s.heads_q}};
  const ForwardCall call = {
      .problem = problem, .in = in, .out = out, .workspace = {aligned, bytes}};
  ASSERT_TRUE(forward_bf16::forward<cpu::NoScope>(call, how.functions, how.blocking));
}

Tensors results(const Shape& s, const How& how = {}) {
  Tensors t = random_tensors(s);
  run_emulated(s, t, how);
  return t;
}

void expect_same_bits(const Tensors& a, const Tensors& b, const std::string& what) {
  EXPECT_EQ(a.o, b.o) << what;
  EXPECT_EQ(a.lse, b.lse) << what;
}

/// Checks one row of one head against float64 loops. P is rounded to bf16, by at most 2^-8 of each
/// weight, so |error| ≤ 2^-8 Σ p |v|; f32 adds parts in 10^5.
void expect_row(const Shape& s, const Tensors& t, std::int64_t h, std::int64_t i, std::int64_t row,
                std::int64_t first_key, std::int64_t rows, std::int64_t seqlen_kv) {
  const std::int64_t head_kv = h / (s.heads_q / s.heads_kv);
  const KeyRange keys = visible_keys(s.mask, i, rows, seqlen_kv);
  std::vector<double> p;
  double sum = 0;
  for (std::int64_t j = first_key + keys.first; j < first_key + keys.last; ++j) {
    double score = 0;
    for (std::int64_t d = 0; d < s.head_dim; ++d) {
      const auto at_q = static_cast<std::size_t>((row * s.heads_q + h) * s.head_dim + d);
      const auto at_k = static_cast<std::size_t>((j * s.heads_kv + head_kv) * s.head_dim + d);
      score += double{bf16_to_f32(t.q[at_q])} * double{bf16_to_f32(t.k[at_k])};
    }
    score *= double{s.softmax_scale};
    score = s.softcap > 0 ? s.softcap * std::tanh(score / s.softcap) : score;
    p.push_back(std::exp(score));
    sum += p.back();
  }
  const float lse = t.lse[static_cast<std::size_t>(row * s.heads_q + h)];
  if (p.empty()) {
    EXPECT_EQ(lse, -std::numeric_limits<float>::infinity()) << "head " << h << " row " << row;
  } else {
    EXPECT_NEAR(lse, std::log(sum), 2e-5) << "head " << h << " row " << row;
  }
  for (std::int64_t d = 0; d < s.head_dim_v; ++d) {
    double o = 0, size = 0;
    for (std::size_t j = 0; j < p.size(); ++j) {
      const std::int64_t key = first_key + keys.first + static_cast<std::int64_t>(j);
      const auto at = static_cast<std::size_t>((key * s.heads_kv + head_kv) * s.head_dim_v + d);
      o += p[j] / sum * double{bf16_to_f32(t.v[at])};
      size += p[j] / sum * std::fabs(double{bf16_to_f32(t.v[at])});
    }
    const float got = t.o[static_cast<std::size_t>((row * s.heads_q + h) * s.head_dim_v + d)];
    ASSERT_NEAR(got, o, (0x1p-8 + 2e-5) * size)
        << "head " << h << " row " << row << " column " << d;
  }
}

void expect_float64(const Shape& s, const Tensors& t) {
  std::int64_t row = 0, key = 0;
  for (std::size_t b = 0; b < s.rows.size(); ++b) {
    for (std::int64_t i = 0; i < s.rows[b]; ++i, ++row) {
      for (std::int64_t h = 0; h < s.heads_q; ++h) {
        expect_row(s, t, h, i, row, key, s.rows[b], s.keys[b]);
      }
    }
    key += s.keys[b];
  }
}

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> kShapes = {
      {{1}, {1}, 1, 1, 1, 1},
      {{33}, {40}, 2, 1, 17, 40, Mask::causal()},
      {{65}, {32}, 2, 2, 20, 24, Mask::causal()},  // the first 33 rows see nothing
      {{129}, {300}, 3, 1, 16, 16, Mask::window(32, 64)},
      {{50}, {260}, 2, 2, 16, 33, Mask::window(5, -1), 5.0f},
      {{40}, {150}, 1, 1, 128, 96, Mask::causal(MaskAlign::top_left)},
      {{3}, {140}, 71, 1, 32, 32, Mask::causal()},
      {{2}, {31}, 300, 1, 8, 8},  // a group in two parts
      {{5}, {0}, 1, 1, 8, 8},
      {{3}, {129}, 1, 1, 256, 256},
      {{200}, {300}, 1, 1, 64, 32, Mask::causal(), 0, 2.0f},  // the maximum moves often
      {{70}, {90}, 1, 1, 16, 16, Mask::causal(), 0, -0.5f},
      {{40}, {70}, 1, 1, 16, 16, Mask::causal(), 0, 0.0f},
      {{40, 0, 100, 1}, {300, 5, 100, 33}, 4, 2, 32, 16, Mask::causal()},
  };
  return kShapes;
}

TEST(ForwardBf16Emulated, MatchesFloat64WithinTheRoundingOfP) {
  for (const Functions& functions : {kTiles, kVectors}) {
    for (std::size_t i = 0; i < shapes().size(); ++i) {
      SCOPED_TRACE("shape " + std::to_string(i));
      expect_float64(shapes()[i], results(shapes()[i], {.functions = functions}));
    }
  }
}

// A lone key weighs 1 whatever rounding makes of the distance to the maximum, which is itself.
TEST(ForwardBf16Emulated, AKeySeenAloneGivesItsValue) {
  const Shape shape = {{300}, {300}, 1, 1, 24, 16, Mask::window(0, 0)};
  for (const Functions& functions : {kTiles, kVectors}) {
    const Tensors t = results(shape, {.functions = functions});
    for (std::size_t i = 0; i < t.v.size(); ++i) {
      const float value = bf16_to_f32(t.v[i]);
      ASSERT_NEAR(t.o[i], value, 2e-7f * std::fabs(value)) << "element " << i;
    }
  }
}

/// exp2_of on the emulated vectors.
float exp2_of(float x) {
  return forward_bf16::exp2_of<EmulatedVectors>(EmulatedVectors::set(x)).v[0];
}

TEST(ForwardBf16Emulated, Exp2IsExactAtZeroAndCloseBelow) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  double largest = 0;
  const auto check = [&](float x) {
    const double exact = std::exp2(double{x});
    largest = std::fmax(largest, std::fabs(double{exp2_of(x)} - exact) / exact);
  };
  for (int i = 0; i <= 126; ++i) {
    const auto x = static_cast<float>(-i);
    EXPECT_EQ(exp2_of(x), std::ldexp(1.0f, -i));
    check(i == 126 ? x : std::nextafter(x, -kInfinity));
    check(std::nextafter(x, 0.0f));
  }
  for (int i = 1; i < 60000; ++i) {
    check(-126.0f * static_cast<float>(i) / 60000);
    check(-static_cast<float>(i) / 60000);
    check(-std::ldexp(1.0f, -i % 149));
  }
  EXPECT_LT(largest, 2e-7);
  EXPECT_EQ(exp2_of(-0.0f), 1.0f);
  EXPECT_EQ(exp2_of(-0x1p-149f), 1.0f);
  EXPECT_EQ(exp2_of(-0x1p-30f), 1.0f);
  EXPECT_EQ(exp2_of(-kInfinity), 0.0f);
  EXPECT_EQ(exp2_of(-1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(exp2_of(std::numeric_limits<float>::quiet_NaN())));
}

/// Packs K and V before the tasks even where that is not worth it, as little at once as may be.
constexpr Bf16Blocking kPackedAlways = {.packed_bytes = 0, .least_saved = 0};

TEST(ForwardBf16Emulated, ThreadsChunksAndWavesChangeNoBit) {
  const std::vector<Bf16Blocking> blockings = {
      kPackedAlways,
      {.lanes = 32, .chunk = 32, .packed_bytes = 0, .least_saved = 0},
      {.lanes = 64, .chunk = 64, .least_saved = 0},
      {.lanes = 256, .chunk = 256, .own_chunk = 32},
      {.own_chunk = 512},
  };
  for (const std::size_t i : {4, 10, 13}) {
    const Shape& shape = shapes()[i];
    const Tensors once = results(shape);
    for (std::size_t b = 0; b < blockings.size(); ++b) {
      const int threads = 1 + 2 * static_cast<int>(b);
      expect_same_bits(once, results(shape, {.threads = threads, .blocking = blockings[b]}),
                       "shape " + std::to_string(i) + ", blocking " + std::to_string(b));
    }
  }
}

// A thread is woken for so many FLOPs, and a part of a block costs as much as all of it.
TEST(ForwardBf16Emulated, ThreadsAreWorthWholeBlocks) {
  const AttentionProblem p = {.heads_q = 12, .heads_kv = 3, .head_dim = 64, .head_dim_v = 128};
  // 10 queries of a group of 4 are two blocks of 32 lanes, 33 keys two blocks of 32
  const cpu::TaskShape shape = {.positions = 10, .heads = 4, .block = 32};
  const cpu::Task task = {.first = 0, .last = 10, .work = 10 * 33};
  EXPECT_EQ(cpu::flops_of(p, shape, &task, 1), 2.0 * 3 * (64 * 64) * (64 + 128));
  const cpu::TaskShape single = {.positions = 10, .heads = 4};
  EXPECT_EQ(cpu::flops_of(p, single, &task, 1), 2.0 * 12 * 10 * 33 * (64 + 128));
}

TEST(ForwardBf16Emulated, WhatIsOverlappedChangesNoBit) {
  const Shape& shape = shapes()[10];
  const Functions apart = kFunctions<EmulatedAmx, Schedule{.interleave = false, .prefetch = false}>;
  const How together = {.blocking = {.chunk = 64, .least_saved = 0}};
  How one_by_one = together;
  one_by_one.functions = apart;
  expect_same_bits(results(shape, together), results(shape, one_by_one), "interleaved or not");
}

TEST(ForwardBf16Emulated, LayoutsAndNeighboursChangeNoBit) {
  const Shape& packed = shapes()[13];
  const Tensors all = results(packed, {.threads = 3, .blocking = kPackedAlways});
  Shape alone = packed;
  alone.rows = {packed.rows[0]};
  alone.keys = {packed.keys[0]};
  Tensors first = random_tensors(alone);
  const auto head_of = [](const auto& from, auto& to) {
    to.assign(from.begin(), from.begin() + static_cast<std::ptrdiff_t>(to.size()));
  };
  head_of(all.q, first.q);
  head_of(all.k, first.k);
  head_of(all.v, first.v);
  Tensors expected = first;
  head_of(all.o, expected.o);
  head_of(all.lse, expected.lse);
  for (const std::int64_t page_size : {0, 1, 24}) {
    for (const Bf16Blocking& blocking : {Bf16Blocking{}, kPackedAlways}) {
      Tensors got = first;
      run_emulated(alone, got, {.threads = 2, .blocking = blocking, .page_size = page_size});
      expect_same_bits(expected, got, "page size " + std::to_string(page_size));
    }
  }
}

TEST(ForwardBf16Emulated, AValueThatIsNotFiniteReachesOnlyTheRowsThatSeeIt) {
  const Shape shape = {{100}, {100}, 1, 1, 16, 16, Mask::causal()};
  constexpr std::int64_t kKey = 60, kColumn = 5;
  for (const Bf16Blocking& blocking : {Bf16Blocking{}, kPackedAlways}) {
    const How how = {.blocking = blocking};
    const Tensors clean = results(shape, how);
    Tensors poisoned = random_tensors(shape);
    poisoned.v[kKey * 16 + kColumn] = 0x7fc0;  // NaN
    run_emulated(shape, poisoned, how);
    for (std::int64_t i = 0; i < 100; ++i) {
      for (std::int64_t d = 0; d < 16; ++d) {
        const auto at = static_cast<std::size_t>(i * 16 + d);
        if (i >= kKey && d == kColumn) {
          EXPECT_TRUE(std::isnan(poisoned.o[at])) << "row " << i;
        } else {
          EXPECT_EQ(poisoned.o[at], clean.o[at]) << "row " << i << " column " << d;
        }
      }
    }
  }
}

TEST(ForwardBf16Emulated, PackingOnceIsForHeadsThatManyTasksRead) {
  const auto packed_bytes = [](AttentionProblem p, int threads) {
    p.heads_q = p.heads_kv = 8;
    p.head_dim = p.head_dim_v = 128;
    p.dtype = DType::bf16;
    const tiles::Bf16Layout layout = forward_bf16::layout_of({.attention = p, .threads = threads});
    EXPECT_LT(layout.bytes, 1 << 20) << "scratch of a thread";
    return layout.packed_blocks * 2 * (layout.block_k() + layout.block_v());
  };
  constexpr std::int64_t kMiB = 1 << 20;
  EXPECT_EQ(packed_bytes({.seqlen_q = 64, .seqlen_kv = 64}, 16), 0);
  EXPECT_EQ(packed_bytes({.seqlen_q = 32, .seqlen_kv = 8192}, 2), 0);
  EXPECT_EQ(packed_bytes({.seqlen_q = 4096, .seqlen_kv = 4096}, 2), 16 * kMiB);  // all of K and V
  EXPECT_EQ(packed_bytes({.batch = 64, .seqlen_q = 32768, .seqlen_kv = 32768}, 2), 32 * kMiB);
  // two tasks a head, 16 threads: a head (16 MiB) for each of them
  EXPECT_EQ(packed_bytes({.batch = 64, .seqlen_q = 1024, .seqlen_kv = 32768}, 16), 256 * kMiB);
}

TEST(ForwardBf16Emulated, EveryTaskOfAWaveHasOnePlace) {
  for (const std::int64_t threads : {1, 2, 16}) {
    for (const std::int64_t tasks : {1, 5, 40}) {
      const cpu::Wave wave = {.sequences = {0, 1}, .heads = {3, 10}, .tasks = tasks};
      constexpr std::int64_t kChunks = 2;
      std::vector<int> seen(static_cast<std::size_t>(tasks * 7 * kChunks));
      for (std::int64_t i = 0; i < tasks * 7 * kChunks; ++i) {
        const cpu::TaskPlace at = cpu::task_place(wave, kChunks, threads, i);
        ASSERT_TRUE(at.task < tasks && at.head_kv >= 3 && at.head_kv < 10);
        ++seen[static_cast<std::size_t>((at.task * 7 + at.head_kv - 3) * kChunks + at.head_chunk)];
      }
      EXPECT_EQ(seen, std::vector<int>(seen.size(), 1)) << threads << " threads, " << tasks;
    }
  }
}

}  // namespace
}  // namespace rafter::testing
