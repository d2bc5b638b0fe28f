#include "measure/loops.h"

#include "hw/cpu/vector_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "measure/loops.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace rafter::measure {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<float>;
using Vec = hn::Vec<Tag>;

// Eight independent accumulators: load throughput, not add latency, decides.
float Read(const float* HWY_RESTRICT floats, std::size_t count) {
  const Tag d;
  const std::size_t lanes = hn::Lanes(d);
  Vec a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0, a6 = a0, a7 = a0;
  for (std::size_t i = 0; i < count; i += 8 * lanes) {
    a0 = hn::Add(a0, hn::Load(d, floats + i));
    a1 = hn::Add(a1, hn::Load(d, floats + i + lanes));
    a2 = hn::Add(a2, hn::Load(d, floats + i + 2 * lanes));
    a3 = hn::Add(a3, hn::Load(d, floats + i + 3 * lanes));
    a4 = hn::Add(a4, hn::Load(d, floats + i + 4 * lanes));
    a5 = hn::Add(a5, hn::Load(d, floats + i + 5 * lanes));
    a6 = hn::Add(a6, hn::Load(d, floats + i + 6 * lanes));
    a7 = hn::Add(a7, hn::Load(d, floats + i + 7 * lanes));
  }
  a0 =
      hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
  return hn::GetLane(hn::SumOfLanes(d, a0));
}

void Write(float* HWY_RESTRICT floats, std::size_t count, float value) {
  const Tag d;
  const std::size_t lanes = hn::Lanes(d);
  const Vec v = hn::Set(d, value);
  for (std::size_t i = 0; i < count; i += 4 * lanes) {
    hn::Store(v, d, floats + i);
    hn::Store(v, d, floats + i + lanes);
    hn::Store(v, d, floats + i + 2 * lanes);
    hn::Store(v, d, floats + i + 3 * lanes);
  }
}

void Copy(float* HWY_RESTRICT to, const float* HWY_RESTRICT from, std::size_t count) {
  const Tag d;
  const std::size_t lanes = hn::Lanes(d);
  for (std::size_t i = 0; i < count; i += 4 * lanes) {
    const Vec v0 = hn::Load(d, from + i), v1 = hn::Load(d, from + i + lanes);
    const Vec v2 = hn::Load(d, from + i + 2 * lanes), v3 = hn::Load(d, from + i + 3 * lanes);
    hn::Store(v0, d, to + i);
    hn::Store(v1, d, to + i + lanes);
    hn::Store(v2, d, to + i + 2 * lanes);
    hn::Store(v3, d, to + i + 3 * lanes);
  }
}

// Twelve chains cover the latency of two units (4 or 5 clocks each) and leave registers for the
// two constants in a file of sixteen.
double Fma(std::int64_t rounds, float* HWY_RESTRICT sink) {
  const Tag d;
  const Vec mul = hn::Set(d, 0.999F), add = hn::Set(d, *sink);
  Vec c0 = hn::Iota(d, 0.1F), c1 = hn::Iota(d, 0.2F), c2 = hn::Iota(d, 0.3F);
  Vec c3 = hn::Iota(d, 0.4F), c4 = hn::Iota(d, 0.5F), c5 = hn::Iota(d, 0.6F);
  Vec c6 = hn::Iota(d, 0.7F), c7 = hn::Iota(d, 0.8F), c8 = hn::Iota(d, 0.9F);
  Vec c9 = hn::Iota(d, 1.1F), c10 = hn::Iota(d, 1.2F), c11 = hn::Iota(d, 1.3F);
  for (std::int64_t i = 0; i < rounds; ++i) {
    c0 = hn::MulAdd(c0, mul, add);
    c1 = hn::MulAdd(c1, mul, add);
    c2 = hn::MulAdd(c2, mul, add);
    c3 = hn::MulAdd(c3, mul, add);
    c4 = hn::MulAdd(c4, mul, add);
    c5 = hn::MulAdd(c5, mul, add);
    c6 = hn::MulAdd(c6, mul, add);
    c7 = hn::MulAdd(c7, mul, add);
    c8 = hn::MulAdd(c8, mul, add);
    c9 = hn::MulAdd(c9, mul, add);
    c10 = hn::MulAdd(c10, mul, add);
    c11 = hn::MulAdd(c11, mul, add);
  }
  c0 =
      hn::Add(hn::Add(hn::Add(c0, c1), hn::Add(c2, c3)), hn::Add(hn::Add(c4, c5), hn::Add(c6, c7)));
  c8 = hn::Add(hn::Add(c8, c9), hn::Add(c10, c11));
  *sink = 1e-9F * hn::GetLane(hn::SumOfLanes(d, hn::Add(c0, c8)));
  return 2.0 * 12.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

// exp(x) = 2^n · 2^f with n = round(x log2 e), f in [−1/2, 1/2]: Taylor coefficients (ln 2)^k / k!
// to degree 5, relative error below 3e-6.
HWY_INLINE Vec ExpLanes(Tag d, Vec x) {
  const hn::RebindToSigned<Tag> di;
  const Vec y = hn::Mul(x, hn::Set(d, 1.44269504F));
  const Vec n = hn::Round(y);
  const Vec f = hn::Sub(y, n);
  Vec p = hn::MulAdd(f, hn::Set(d, 1.33335581e-3F), hn::Set(d, 9.61812911e-3F));
  p = hn::MulAdd(p, f, hn::Set(d, 5.55041087e-2F));
  p = hn::MulAdd(p, f, hn::Set(d, 2.40226507e-1F));
  p = hn::MulAdd(p, f, hn::Set(d, 6.93147181e-1F));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0F));
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, n));
  return hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
}

// Four chains of x ← exp(−x), which stays within (0, 1).
double Exp(std::int64_t rounds, float* HWY_RESTRICT sink) {
  const Tag d;
  Vec x0 = hn::Set(d, 0.1F + *sink), x1 = hn::Set(d, 0.2F), x2 = hn::Set(d, 0.3F);
  Vec x3 = hn::Set(d, 0.4F);
  for (std::int64_t i = 0; i < rounds; ++i) {
    x0 = ExpLanes(d, hn::Neg(x0));
    x1 = ExpLanes(d, hn::Neg(x1));
    x2 = ExpLanes(d, hn::Neg(x2));
    x3 = ExpLanes(d, hn::Neg(x3));
  }
  *sink = 1e-9F * hn::GetLane(hn::Add(hn::Add(x0, x1), hn::Add(x2, x3)));
  return 4.0 * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

const char* NameOfTarget() { return hwy::TargetName(HWY_TARGET); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace rafter::measure
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace rafter::measure {

HWY_EXPORT(Read);
HWY_EXPORT(Write);
HWY_EXPORT(Copy);
HWY_EXPORT(Fma);
HWY_EXPORT(Exp);
HWY_EXPORT(NameOfTarget);

float loop_read(const float* floats, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(Read)(floats, count);
}
void loop_write(float* floats, std::size_t count, float value) {
  HWY_DYNAMIC_DISPATCH(Write)(floats, count, value);
}
void loop_copy(float* to, const float* from, std::size_t count) {
  HWY_DYNAMIC_DISPATCH(Copy)(to, from, count);
}
double loop_fma(std::int64_t rounds, float* sink) {
  return HWY_DYNAMIC_DISPATCH(Fma)(rounds, sink);
}
double loop_exp(std::int64_t rounds, float* sink) {
  return HWY_DYNAMIC_DISPATCH(Exp)(rounds, sink);
}
const char* loop_target() { return HWY_DYNAMIC_DISPATCH(NameOfTarget)(); }

}  // namespace rafter::measure
#endif  // HWY_ONCE
