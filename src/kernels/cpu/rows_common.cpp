// Row operations, compiled once per instruction set. Sums run in lanes over blocks of 512 and then
// in f64, so that long rows lose nothing; the order depends on the row alone.
#include "kernels/cpu/rows_common.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "hw/cpu/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rows_common.cpp"
#include "hwy/foreach_target.h"
// after foreach_target, which compiles it once per instruction set
#include "kernels/cpu/forward_simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace math = forward_simd::HWY_NAMESPACE;
namespace hn = math::hn;
using math::D;
using math::kLanes;
using math::V;

constexpr std::int64_t kSumBlock = 512;

template <DType kType>
using Source = const math::Element<kType>*;

/// Calls f with the dtype as a constant.
template <typename F>
HWY_INLINE auto with_dtype(DType dtype, F f) {
  switch (dtype) {
    case DType::bf16:
      return f.template operator()<DType::bf16>();
    case DType::f16:
      return f.template operator()<DType::f16>();
    default:
      return f.template operator()<DType::f32>();
  }
}

/// The same, int8 included: K and V may be of it.
template <typename F>
HWY_INLINE auto with_source_dtype(DType dtype, F f) {
  return dtype == DType::int8 ? f.template operator()<DType::int8>() : with_dtype(dtype, f);
}

/// The first count lanes of value.
HWY_INLINE void store_some(V value, std::int64_t count, float* target) {
  if (count >= kLanes) {
    hn::StoreU(value, D(), target);
    return;
  }
  alignas(64) float buffer[kLanes];
  hn::Store(value, D(), buffer);
  std::copy_n(buffer, count, target);
}

/// Adds x − x to the lanes: stays 0 while everything is finite, NaN afterwards.
HWY_INLINE V note_nonfinite(V noted, V x) { return hn::Add(noted, hn::Sub(x, x)); }

HWY_INLINE bool all_zero(V v) {
  const D d;
  return hn::AllTrue(d, hn::Eq(v, hn::Zero(d)));
}

HWY_INLINE float lane_max(V v) {
  alignas(64) float lanes[kLanes];
  hn::Store(v, D(), lanes);
  return *std::max_element(lanes, lanes + kLanes);
}

HWY_INLINE double lane_sum(V v) {
  alignas(64) float lanes[kLanes];
  hn::Store(v, D(), lanes);
  double sum = 0;
  for (const float lane : lanes) {
    sum += static_cast<double>(lane);
  }
  return sum;
}

template <DType kType>
HWY_ATTR bool load_typed(Source<kType> source, std::int64_t count, float* target) {
  V noted = hn::Zero(D());
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const V x = math::load_some_f32<kType>(source + i, count - i);
    noted = note_nonfinite(noted, x);
    store_some(x, count - i, target + i);
  }
  return all_zero(noted);
}

template <DType kType>
HWY_ATTR bool load_strided_typed(Source<kType> source, std::int64_t stride, std::int64_t count,
                                 float* target) {
  bool finite = true;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    math::Element<kType> gathered[kLanes] = {};
    const std::int64_t lanes = std::min<std::int64_t>(kLanes, count - i);
    for (std::int64_t l = 0; l < lanes; ++l) {
      gathered[l] = source[(i + l) * stride];
    }
    finite = load_typed<kType>(gathered, lanes, target + i) && finite;
  }
  return finite;
}

template <DType kType>
HWY_ATTR void store_typed(const float* source, float factor, std::int64_t count,
                          math::Element<kType>* target) {
  const V times = hn::Set(D(), factor);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const V x = hn::Mul(math::load_some_f32<DType::f32>(source + i, count - i), times);
    if (count - i >= kLanes) {
      math::store_f32<kType>(x, target + i);
    } else {
      math::Element<kType> buffer[kLanes];
      math::store_f32<kType>(x, buffer);
      std::copy_n(buffer, count - i, target + i);
    }
  }
}

template <DType kType>
HWY_ATTR ScoreStatistics load_scores_typed(Source<kType> source, float softcap, std::int64_t count,
                                           float* target) {
  const D d;
  const V cap = hn::Set(d, softcap);
  const V inverse_cap = hn::Set(d, softcap > 0 ? 1.0f / softcap : 0.0f);
  const float lowest = -std::numeric_limits<float>::infinity();
  V largest = hn::Set(d, lowest);
  V noted = hn::Zero(d);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    V x = math::load_some_f32<kType>(source + i, count - i);
    if (softcap > 0) {
      x = hn::Mul(cap, math::tanh_of(hn::Mul(x, inverse_cap)));
    }
    store_some(x, count - i, target + i);
    if (count - i < kLanes) {  // the empty lanes take no part in the maximum
      alignas(64) float buffer[kLanes];
      std::fill_n(buffer, kLanes, lowest);
      std::copy_n(target + i, count - i, buffer);
      x = hn::Load(d, buffer);
    }
    largest = hn::Max(largest, x);
    noted = hn::Add(noted, hn::IfThenElse(hn::Eq(x, x), hn::Zero(d), x));  // NaN alone
  }
  ScoreStatistics statistics{.maximum = lane_max(largest), .usable = all_zero(noted)};
  if (!statistics.usable) {
    statistics.maximum = std::numeric_limits<float>::quiet_NaN();
  }
  statistics.usable = std::isfinite(statistics.maximum);
  return statistics;
}

HWY_ATTR double exponentials(float* row, float maximum, std::int64_t count) {
  const D d;
  const V log2e = hn::Set(d, 1.44269504088896341f);
  const V top = hn::Set(d, maximum);
  double total = 0;
  for (std::int64_t block = 0; block < count; block += kSumBlock) {
    const std::int64_t end = std::min(count, block + kSumBlock);
    V sum = hn::Zero(d);
    std::int64_t i = block;
    for (; i + kLanes <= end; i += kLanes) {
      const V e = math::exp2_of(hn::Mul(hn::Sub(hn::LoadU(d, row + i), top), log2e));
      hn::StoreU(e, d, row + i);
      sum = hn::Add(sum, e);
    }
    total += lane_sum(sum);
    if (i < end) {
      const V x = math::load_some_f32<DType::f32>(row + i, end - i);
      const V e = math::exp2_of(hn::Mul(hn::Sub(x, top), log2e));
      store_some(e, end - i, row + i);
      for (; i < end; ++i) {
        total += static_cast<double>(row[i]);
      }
    }
  }
  return total;
}

HWY_ATTR void add(float* row, const float* other, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const V x = math::load_some_f32<DType::f32>(row + i, count - i);
    const V y = math::load_some_f32<DType::f32>(other + i, count - i);
    store_some(hn::Add(x, y), count - i, row + i);
  }
}

HWY_ATTR void scale(float* row, float factor, std::int64_t count) {
  const D d;
  const V times = hn::Set(d, factor);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const V x = hn::Mul(math::load_some_f32<DType::f32>(row + i, count - i), times);
    store_some(x, count - i, row + i);
  }
}

HWY_ATTR bool load(const void* source, DType dtype, std::int64_t count, float* target) {
  return with_source_dtype(dtype, [&]<DType kType>() {
    return load_typed<kType>(static_cast<Source<kType>>(source), count, target);
  });
}
HWY_ATTR bool load_strided(const void* source, DType dtype, std::int64_t stride, std::int64_t count,
                           float* target) {
  return with_source_dtype(dtype, [&]<DType kType>() {
    return load_strided_typed<kType>(static_cast<Source<kType>>(source), stride, count, target);
  });
}
HWY_ATTR void store(const float* source, float factor, DType dtype, std::int64_t count,
                    void* target) {
  with_dtype(dtype, [&]<DType kType>() {
    store_typed<kType>(source, factor, count, static_cast<math::Element<kType>*>(target));
  });
}
HWY_ATTR ScoreStatistics load_scores(const void* source, DType dtype, float softcap,
                                     std::int64_t count, float* target) {
  return with_dtype(dtype, [&]<DType kType>() {
    return load_scores_typed<kType>(static_cast<Source<kType>>(source), softcap, count, target);
  });
}

}  // namespace

const RowOps& table() {
  static constexpr RowOps kTable = {load,         load_strided, store, load_scores,
                                    exponentials, add,          scale};
  return kTable;
}

}  // namespace HWY_NAMESPACE
}  // namespace rafter::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rafter::cpu {

const RowOps& row_ops(std::string_view instruction_set) {
  if (instruction_set == "portable") {
    return HWY_STATIC_DISPATCH(table)();
  }
#if HWY_TARGETS & HWY_AVX2
  if (instruction_set == "avx2") {
    return N_AVX2::table();
  }
#endif
#if HWY_TARGETS & HWY_AVX3
  return N_AVX3::table();
#else
  return HWY_STATIC_DISPATCH(table)();
#endif
}

}  // namespace rafter::cpu
#endif  // HWY_ONCE
