// The C ABI around decode: new tokens into caches, states merged where they lie.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "rafter/cache.h"
#include "support/c_abi_case.h"

namespace rafter::c_abi_case {
namespace {

static_assert(offsetof(rafter_append_args, dropped) == 960);

constexpr std::int64_t kNew = 3, kPageSize = 4, kPages = 6, kPerSequence = 3, kRotary = 8;
constexpr std::int64_t kCapacity = kPerSequence * kPageSize;

/// Two sequences of 2 and 7 tokens get three more each, in pages, turned by their positions.
struct Append {
  std::vector<float> k = Call::wave(kBatch * kNew * kHeadsKv * kDim, 0.37f);
  std::vector<float> v = Call::wave(kBatch * kNew * kHeadsKv * kDim, 0.61f);
  std::vector<float> cos = Call::wave(kCapacity * kRotary / 2, 0.5f);
  std::vector<float> sin = Call::wave(kCapacity * kRotary / 2, 0.9f);
  std::vector<float> k_cache =
      std::vector<float>(static_cast<std::size_t>(kPages * kPageSize * kHeadsKv * kDim), 5.0f);
  std::vector<float> v_cache = k_cache;
  std::vector<std::int32_t> lengths = {2, 7}, pages = {5, 1, -1, 0, 2, 3}, dropped = {9, 9};
  rafter_append_args args{};

  Append() {
    args.size = sizeof(args);
    args.k = rafter_contiguous(k.data(), RAFTER_F32, kBatch, kNew, kHeadsKv, kDim);
    args.v = rafter_contiguous(v.data(), RAFTER_F32, kBatch, kNew, kHeadsKv, kDim);
    args.k_cache = rafter_contiguous(k_cache.data(), RAFTER_F32, kPages, kPageSize, kHeadsKv, kDim);
    args.v_cache = rafter_contiguous(v_cache.data(), RAFTER_F32, kPages, kPageSize, kHeadsKv, kDim);
    args.seqused_kv = {lengths.data(), 1, kBatch, RAFTER_I32, 0};
    args.page_table = {pages.data(), kBatch, kPerSequence, RAFTER_I32, 0};
    args.rope_cos = cos.data();
    args.rope_sin = sin.data();
    args.rope_positions = kCapacity;
    args.rotary_dim = kRotary;
    args.dropped = {dropped.data(), kBatch};
  }
  /// Where token `position` of a sequence begins in a cache.
  std::size_t place(std::int64_t sequence, std::int64_t position) const {
    const std::int64_t page =
        pages[static_cast<std::size_t>(sequence * kPerSequence + position / kPageSize)];
    return static_cast<std::size_t>((page * kPageSize + position % kPageSize) * kHeadsKv * kDim);
  }
};

TEST_F(CAbi, AppendedTokensLieAtTheirPositionsInPages) {
  Append a;
  a.args.rotary_dim = 0;
  a.args.rope_positions = 0;
  a.args.rope_cos = a.args.rope_sin = nullptr;
  ASSERT_EQ(rafter_append(&a.args), RAFTER_OK) << rafter_error_message();
  std::size_t untouched = a.k_cache.size();
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t i = 0; i < kNew; ++i) {
      for (std::int64_t x = 0; x < kHeadsKv * kDim; ++x) {
        const auto from = static_cast<std::size_t>((b * kNew + i) * kHeadsKv * kDim + x);
        const std::size_t to =
            a.place(b, a.lengths[static_cast<std::size_t>(b)] + i) + static_cast<std::size_t>(x);
        ASSERT_EQ(a.k_cache[to], a.k[from]) << b << " " << i << " " << x;
        ASSERT_EQ(a.v_cache[to], a.v[from]) << b << " " << i << " " << x;
        --untouched;
      }
    }
  }
  EXPECT_EQ(static_cast<std::size_t>(std::count(a.k_cache.begin(), a.k_cache.end(), 5.0f)),
            untouched);
  EXPECT_EQ(a.dropped, (std::vector<std::int32_t>{0, 0}));
}

TEST_F(CAbi, TurnedKeysHaveTheBitsOfTheCppApi) {
  for (const rafter_rope_pairs pairs : {RAFTER_ROPE_HALF_SPLIT, RAFTER_ROPE_INTERLEAVED}) {
    Append c, cpp;
    c.args.rope_pairs = pairs;
    ASSERT_EQ(rafter_append(&c.args), RAFTER_OK) << rafter_error_message();
    const auto cache = [](std::vector<float>& data) {
      return TensorView::contiguous(data.data(), DType::f32, kPages, kPageSize, kHeadsKv, kDim);
    };
    const auto rows = [](std::vector<float>& data) {
      return TensorView::contiguous(data.data(), DType::f32, kBatch, kNew, kHeadsKv, kDim);
    };
    ASSERT_TRUE(
        append({.k = rows(cpp.k),
                .v = rows(cpp.v),
                .seqused_kv = {.data = cpp.lengths.data(), .dtype = DType::i32, .size = kBatch},
                .page_table = {.data = cpp.pages.data(),
                               .dtype = DType::i32,
                               .size = kBatch * kPerSequence,
                               .cols = kPerSequence},
                .rope = {.cos = cpp.cos.data(),
                         .sin = cpp.sin.data(),
                         .max_position = kCapacity,
                         .rotary_dim = kRotary,
                         .pairs = pairs == RAFTER_ROPE_INTERLEAVED ? Rope::Pairs::interleaved
                                                                   : Rope::Pairs::half_split}},
               {.k_cache = cache(cpp.k_cache), .v_cache = cache(cpp.v_cache)}, Device::cpu()));
    EXPECT_TRUE(same(c.k_cache, cpp.k_cache));
    EXPECT_TRUE(same(c.v_cache, cpp.v_cache));
    EXPECT_NE(c.k_cache[c.place(0, 2)], c.k[0]);  // they were turned
  }
}

TEST_F(CAbi, TokensWithoutAPageAreCounted) {
  Append a;
  a.lengths[0] = 7;  // its third page is -1: tokens 8 and 9 have none
  ASSERT_EQ(rafter_append(&a.args), RAFTER_OK) << rafter_error_message();
  EXPECT_EQ(a.dropped, (std::vector<std::int32_t>{2, 0}));
}

TEST_F(CAbi, WhatDoesNotFitACacheIsNamed) {
  Append a;
  a.args.v_cache.shape[2] = 1;
  EXPECT_EQ(rafter_append(&a.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "v_cache.heads") << rafter_error_message();
  a = Append();
  a.args.rope_pairs = 5;
  EXPECT_EQ(rafter_append(&a.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "rope_pairs");
  a = Append();
  a.args.stream = &a;
  EXPECT_EQ(rafter_append(&a.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "stream") << rafter_error_message();
  a = Append();
  a.args.size = 16;
  EXPECT_EQ(rafter_append(&a.args), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "args.size");
  EXPECT_EQ(rafter_append(nullptr), RAFTER_INVALID_ARGUMENT);
}

TEST_F(CAbi, MergingOnTheCpuIsMerging) {
  std::vector<float> o = Call::wave(2 * 3 * 4, 0.7f), lse = Call::wave(2 * 3, 0.9f);
  std::vector<float> o_there(o.size()), lse_there(lse.size()), o_plain(o.size()),
      lse_plain(lse.size());
  const auto state = [](std::vector<float>& o_, std::vector<float>& lse_) {
    return rafter_state{rafter_contiguous(o_.data(), RAFTER_F32, 1, 3, 2, 4),
                        rafter_contiguous_lse(lse_.data(), 1, 2, 3)};
  };
  const rafter_state parts[] = {state(o, lse), state(o, lse)};
  const rafter_state there = state(o_there, lse_there), plain = state(o_plain, lse_plain);
  ASSERT_EQ(rafter_merge(parts, 2, &plain), RAFTER_OK) << rafter_error_message();
  ASSERT_EQ(rafter_merge_on(RAFTER_CPU, 0, nullptr, parts, 2, &there), RAFTER_OK)
      << rafter_error_message();
  EXPECT_TRUE(same(o_there, o_plain));
  EXPECT_TRUE(same(lse_there, lse_plain));
  EXPECT_EQ(rafter_merge_on(7, 0, nullptr, parts, 2, &there), RAFTER_INVALID_ARGUMENT);
  EXPECT_STREQ(rafter_error_parameter(), "device");
}

}  // namespace
}  // namespace rafter::c_abi_case
