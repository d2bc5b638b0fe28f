// Vector arithmetic of the fused forward: conversions of f32, bf16 and f16 to and from f32 and of
// int8 to f32, exp2, tanh, 4 × 4 transposes. Compiled once per instruction set (Highway's
// foreach_target).
#if defined(RAFTER_FORWARD_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef RAFTER_FORWARD_SIMD_MATH_INL_H_
#undef RAFTER_FORWARD_SIMD_MATH_INL_H_
#else
#define RAFTER_FORWARD_SIMD_MATH_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "hw/cpu/vector4.h"
#include "hwy/highway.h"
#include "rafter/tensor.h"
#include "tiles/forward_simd.h"

HWY_BEFORE_NAMESPACE();
namespace rafter::forward_simd {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_SCALAR
namespace hn = hw::vector4;
#else
namespace hn = hwy::HWY_NAMESPACE;
#endif

#if HWY_TARGET == HWY_AVX3
constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx512;
#elif HWY_TARGET == HWY_AVX2
constexpr tiles::SimdBlocking kBlocking = tiles::kSimdAvx2;
#else
constexpr tiles::SimdBlocking kBlocking = tiles::kSimdPortable;
#endif

constexpr std::int64_t kLanes = kBlocking.lanes;
using D = hn::FixedTag<float, static_cast<std::size_t>(kLanes)>;
using DI = hn::Rebind<std::int32_t, D>;
using DU = hn::Rebind<std::uint32_t, D>;
using DU16 = hn::Rebind<std::uint16_t, D>;
using D4 = hn::FixedTag<float, 4>;
using V = hn::Vec<D>;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <DType kType>
using Element =
    std::conditional_t<kType == DType::f32, float,
                       std::conditional_t<kType == DType::int8, std::int8_t, std::uint16_t>>;

// f16 bits in 32-bit lanes to f32. Subnormals are exact: the product with 2^112 normalises them.
HWY_INLINE V f32_of_f16_bits(hn::Vec<DU> half) {
  const D d;
  const DU du;
  const auto magnitude = hn::And(half, hn::Set(du, 0x7fffu));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(half, magnitude));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const V finite = hn::Mul(hn::BitCast(d, shifted), hn::Set(d, 0x1p112f));
  const V special = hn::BitCast(d, hn::Or(shifted, hn::Set(du, 0x7f800000u)));
  // magnitudes have bit 31 clear, so the signed comparison is right
  const DI di;
  const auto is_special =
      hn::RebindMask(d, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7bff)));
  return hn::Or(hn::IfThenElse(is_special, special, finite), hn::BitCast(d, sign));
}

// f32 to f16 bits, round to nearest even; overflow gives infinity, NaN stays NaN.
HWY_INLINE hn::Vec<DI> f16_bits_of_f32(V value) {
  const D d;
  const DI di;
  const auto bits = hn::BitCast(di, value);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7fffffff));
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 0x8000));
  // below 2^-14: adding 0.5 leaves the f16 subnormal, rounded, in the low mantissa bits
  const auto small = hn::Sub(hn::BitCast(di, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f))),
                             hn::BitCast(di, hn::Set(d, 0.5f)));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(di, 1));
  const auto rebias = hn::Set(di, ((15 - 127) * (1 << 23)) + 0xfff);
  const auto normal = hn::ShiftRight<13>(hn::Add(hn::Add(magnitude, rebias), odd));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(di, 0x38800000)), small, normal);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x477fefff)), hn::Set(di, 0x7c00), result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(di, 0x7f800000)), hn::Set(di, 0x7e00), result);
  return hn::Or(result, sign);
}

// f32 to bf16 bits, round to nearest even, NaN stays NaN.
HWY_INLINE hn::Vec<DI> bf16_bits_of_f32(V value) {
  const DI di;
  const DU du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du, 0x40u));
  const auto is_nan = hn::RebindMask(du, hn::Ne(value, value));
  return hn::BitCast(di, hn::IfThenElse(is_nan, quiet, rounded));
}

HWY_INLINE V f32_of_int8(const std::int8_t* HWY_RESTRICT source) {
  const D d;
#if HWY_TARGET == HWY_SCALAR
  alignas(64) float values[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) {
    values[i] = static_cast<float>(source[i]);
  }
  return hn::Load(d, values);
#else
  const DI di;
  return hn::ConvertTo(d, hn::PromoteTo(di, hn::LoadU(hn::Rebind<std::int8_t, D>(), source)));
#endif
}

/// kLanes elements from source, as f32.
template <DType kType>
HWY_INLINE V load_f32(const Element<kType>* HWY_RESTRICT source) {
  const D d;
  if constexpr (kType == DType::f32) {
    return hn::LoadU(d, source);
  } else if constexpr (kType == DType::int8) {
    return f32_of_int8(source);
  } else {
    const DU du;
    if constexpr (kType == DType::bf16) {
      return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(DU16(), source))));
    } else {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
      return hn::PromoteTo(d,
                           hn::BitCast(hn::Rebind<hwy::float16_t, D>(), hn::LoadU(DU16(), source)));
#else
      return f32_of_f16_bits(hn::PromoteTo(du, hn::LoadU(DU16(), source)));
#endif
    }
  }
}

/// The first `count` elements, zeros after them; nothing behind them is read. count may be ≤ 0.
template <DType kType>
HWY_INLINE V load_some_f32(const Element<kType>* source, std::int64_t count) {
  if (count >= kLanes) {
    return load_f32<kType>(source);
  }
  alignas(64) Element<kType> buffer[kLanes] = {};
  if (count > 0) {
    std::memcpy(buffer, source, static_cast<std::size_t>(count) * sizeof(Element<kType>));
  }
  return load_f32<kType>(buffer);
}

/// kLanes f32 as elements of kType.
template <DType kType>
HWY_INLINE void store_f32(V value, Element<kType>* target) {
  if constexpr (kType == DType::f32) {
    hn::StoreU(value, D(), target);
  } else if constexpr (kType == DType::bf16) {
    hn::StoreU(hn::DemoteTo(DU16(), bf16_bits_of_f32(value)), DU16(), target);
  } else {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
    hn::StoreU(hn::BitCast(DU16(), hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), value)), DU16(),
               target);
#else
    hn::StoreU(hn::DemoteTo(DU16(), f16_bits_of_f32(value)), DU16(), target);
#endif
  }
}

/// 2^x for x ≤ 127, relative error 2.3e-9 plus rounding; exactly 0 for −∞ and where the result
/// would be subnormal, which costs products an assist each; exactly 1 at 0; NaN stays NaN.
/// Coefficients: Remez, on [0, 1] with both ends held, or on [−1/2, 1/2] with the constant held
/// at 1.
HWY_INLINE V exp2_of(V x) {
  const D d;
#if HWY_TARGET == HWY_AVX3
  // the distance to the integer below, and a product with 2 to that integer, are one operation each
  constexpr int kFractionAboveFloor = 0x09;
  const V fraction = V{_mm512_reduce_ps(x.raw, kFractionAboveFloor)};
  V p = hn::Set(d, 0x1.c765a8p-13f);
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.462150p-10f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.3d217cp-7f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.c686b4p-5f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.ebfd74p-3f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.62e42ap-1f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 1.0f));
  const __mmask16 normal = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return V{_mm512_maskz_scalef_ps(normal, p.raw, x.raw)};
#else
  x = hn::Max(hn::Set(d, -127.0f), x);  // the second operand survives when it is NaN
  // Adding 1.5 · 2^23 + 127 rounds x to an integer and leaves its exponent field in the low bits.
  const V magic = hn::Set(d, 12583039.0f);
  const V shifted = hn::Add(x, magic);
  const V fraction = hn::Sub(x, hn::Sub(shifted, magic));
  V p = hn::Set(d, 0x1.470b4ap-13f);
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.5f7276p-10f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.3b270ep-7f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.c6ae72p-5f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.ebfbe2p-3f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 0x1.62e432p-1f));
  p = hn::MulAdd(p, fraction, hn::Set(d, 1.0f));
  const V scale = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(DU(), shifted)));
  return hn::Mul(p, scale);
#endif
}

/// tanh x: a rational-free odd polynomial below 0.625 (coefficients: Cephes, tanhf.c), beyond it
/// 1 − 2 / (e^{2|x|} + 1).
HWY_INLINE V tanh_of(V x) {
  const D d;
  const V magnitude = hn::Abs(x);
  const V square = hn::Mul(x, x);
  V p = hn::Set(d, -5.70498872745e-3f);
  p = hn::MulAdd(p, square, hn::Set(d, 2.06390887954e-2f));
  p = hn::MulAdd(p, square, hn::Set(d, -5.37397155531e-2f));
  p = hn::MulAdd(p, square, hn::Set(d, 1.33314422036e-1f));
  p = hn::MulAdd(p, square, hn::Set(d, -3.33332819422e-1f));
  const V small = hn::MulAdd(hn::Mul(p, square), x, x);
  const V bounded = hn::Min(hn::Set(d, 40.0f), magnitude);
  const V e = exp2_of(hn::Mul(bounded, hn::Set(d, 2.8853900817779268f)));
  const V one = hn::Set(d, 1.0f);
  const V large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625f)), small, hn::CopySign(large, x));
}

/// `count` f32 as elements of kType.
template <DType kType>
void store_row(const float* HWY_RESTRICT row, std::int64_t count, void* data, std::int64_t offset) {
  const D d;
  auto* const out = static_cast<Element<kType>*>(data) + offset;
  std::int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    store_f32<kType>(hn::Load(d, row + c), out + c);
  }
  if (c < count) {
    alignas(64) Element<kType> buffer[kLanes];
    store_f32<kType>(hn::Load(d, row + c), buffer);
    std::memcpy(out + c, buffer, static_cast<std::size_t>(count - c) * sizeof(Element<kType>));
  }
}

/// lse of a row whose scores times log2 e have this maximum, and this sum of powers of two. A row
/// that saw no key has sum 0.
HWY_INLINE float lse_of_log2(float maximum, float sum) {
  constexpr double kLn2 = 0.6931471805599453;
  return sum == 0 ? kMinusInfinity
                  : static_cast<float>(static_cast<double>(maximum) * kLn2 +
                                       static_cast<double>(std::log(sum)));
}

HWY_INLINE void transpose4(hn::Vec<D4>& a, hn::Vec<D4>& b, hn::Vec<D4>& c, hn::Vec<D4>& e) {
  const D4 d;
  const auto ac_low = hn::InterleaveLower(d, a, c);
  const auto ac_high = hn::InterleaveUpper(d, a, c);
  const auto be_low = hn::InterleaveLower(d, b, e);
  const auto be_high = hn::InterleaveUpper(d, b, e);
  a = hn::InterleaveLower(d, ac_low, be_low);
  b = hn::InterleaveUpper(d, ac_low, be_low);
  c = hn::InterleaveLower(d, ac_high, be_high);
  e = hn::InterleaveUpper(d, ac_high, be_high);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::forward_simd
HWY_AFTER_NAMESPACE();

#endif  // per target
