// Four 32-bit lanes by the compiler's own vectors (GCC and Clang, any architecture), under the
// names and meanings of Highway's operations: for baselines where Highway has a single lane
// (x86-64 without SSSE3, or a GCC whose EMU128 is broken). Only what our kernels use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rafter::hw::vector4 {

template <typename T>
struct RawOf;
template <>
struct RawOf<float> {
  typedef float type __attribute__((vector_size(16)));
};
template <>
struct RawOf<std::int32_t> {
  typedef std::int32_t type __attribute__((vector_size(16)));
};
template <>
struct RawOf<std::uint32_t> {
  typedef std::uint32_t type __attribute__((vector_size(16)));
};
template <>
struct RawOf<std::uint16_t> {
  typedef std::uint16_t type __attribute__((vector_size(8)));
};

/// A tag that names a vector of 4 lanes of T.
template <typename T>
struct Tag {};
/// All lanes of a mask are 0 or −1.
struct Mask4 {
  RawOf<std::int32_t>::type raw;
};
template <typename T>
struct Vector {
  typename RawOf<T>::type raw;
};

template <typename T, std::size_t kLanes>
using FixedTag = Tag<T>;
template <typename To, typename D>
using Rebind = Tag<To>;
template <typename D>
struct VectorOf;
template <typename T>
struct VectorOf<Tag<T>> {
  using type = Vector<T>;
};
template <typename D>
using Vec = typename VectorOf<D>::type;
template <typename D>
using Mask = Mask4;

using F = Vector<float>;
using I = Vector<std::int32_t>;
using U = Vector<std::uint32_t>;
using U16 = Vector<std::uint16_t>;

template <typename T>
inline Vector<T> LoadU(Tag<T>, const T* from) {
  Vector<T> v;
  std::memcpy(&v.raw, from, sizeof(v.raw));
  return v;
}
template <typename T>
inline Vector<T> Load(Tag<T> d, const T* from) {
  return LoadU(d, static_cast<const T*>(__builtin_assume_aligned(from, sizeof(Vector<T>))));
}
template <typename T>
inline void StoreU(Vector<T> v, Tag<T>, T* to) {
  std::memcpy(to, &v.raw, sizeof(v.raw));
}
template <typename T>
inline void Store(Vector<T> v, Tag<T> d, T* to) {
  StoreU(v, d, static_cast<T*>(__builtin_assume_aligned(to, sizeof(Vector<T>))));
}
template <typename T, typename S>
inline Vector<T> Set(Tag<T>, S value) {
  const T t = static_cast<T>(value);
  return {typename RawOf<T>::type{t, t, t, t}};
}
template <typename T>
inline Vector<T> Zero(Tag<T> d) {
  return Set(d, T{0});
}
template <typename T>
inline Vector<T> Add(Vector<T> a, Vector<T> b) {
  return {a.raw + b.raw};
}
template <typename T>
inline Vector<T> Sub(Vector<T> a, Vector<T> b) {
  return {a.raw - b.raw};
}
inline F Mul(F a, F b) { return {a.raw * b.raw}; }
inline F Div(F a, F b) { return {a.raw / b.raw}; }
inline F MulAdd(F a, F b, F c) { return {a.raw * b.raw + c.raw}; }
/// The second operand where either is NaN, as x86 does.
inline F Max(F a, F b) { return {a.raw > b.raw ? a.raw : b.raw}; }
inline F Min(F a, F b) { return {a.raw < b.raw ? a.raw : b.raw}; }

template <typename To, typename From>
inline Vector<To> BitCast(Tag<To>, Vector<From> v) {
  Vector<To> out;
  static_assert(sizeof(out) == sizeof(v));
  std::memcpy(&out.raw, &v.raw, sizeof(out.raw));
  return out;
}
template <typename T>
inline Vector<T> And(Vector<T> a, Vector<T> b) {
  const I x = BitCast(Tag<std::int32_t>(), a);
  const I y = BitCast(Tag<std::int32_t>(), b);
  return BitCast(Tag<T>(), I{x.raw & y.raw});
}
template <typename T>
inline Vector<T> Or(Vector<T> a, Vector<T> b) {
  const I x = BitCast(Tag<std::int32_t>(), a);
  const I y = BitCast(Tag<std::int32_t>(), b);
  return BitCast(Tag<T>(), I{x.raw | y.raw});
}
template <typename T>
inline Vector<T> Xor(Vector<T> a, Vector<T> b) {
  return {a.raw ^ b.raw};
}
inline F Abs(F v) {
  const Tag<std::int32_t> di;
  return BitCast(Tag<float>(), And(BitCast(di, v), Set(di, 0x7fffffff)));
}
/// Magnitude of a, sign of b.
inline F CopySign(F a, F b) {
  const Tag<std::uint32_t> du;
  const U sign = And(BitCast(du, b), Set(du, 0x80000000u));
  return BitCast(Tag<float>(), Or(BitCast(du, Abs(a)), sign));
}
template <int kBits, typename T>
inline Vector<T> ShiftLeft(Vector<T> v) {
  return {v.raw << kBits};
}
template <int kBits, typename T>
inline Vector<T> ShiftRight(Vector<T> v) {
  return {v.raw >> kBits};
}

template <typename T>
inline Mask4 Gt(Vector<T> a, Vector<T> b) {
  return {a.raw > b.raw};
}
template <typename T>
inline Mask4 Lt(Vector<T> a, Vector<T> b) {
  return {a.raw < b.raw};
}
template <typename T>
inline Mask4 Eq(Vector<T> a, Vector<T> b) {
  return {a.raw == b.raw};
}
template <typename T>
inline Mask4 Ne(Vector<T> a, Vector<T> b) {
  return {a.raw != b.raw};
}
inline Mask4 And(Mask4 a, Mask4 b) { return {a.raw & b.raw}; }
inline Mask4 Not(Mask4 a) { return {~a.raw}; }
template <typename T>
inline Mask4 RebindMask(Tag<T>, Mask4 m) {
  return m;
}
template <typename T>
inline bool AllTrue(Tag<T>, Mask4 m) {
  return (m.raw[0] & m.raw[1] & m.raw[2] & m.raw[3]) != 0;
}
template <typename T>
inline Vector<T> IfThenElse(Mask4 m, Vector<T> yes, Vector<T> no) {
  return {m.raw ? yes.raw : no.raw};
}

inline U PromoteTo(Tag<std::uint32_t>, U16 v) {
  return {__builtin_convertvector(v.raw, RawOf<std::uint32_t>::type)};
}
/// Lanes that are within u16.
inline U16 DemoteTo(Tag<std::uint16_t>, I v) {
  return {__builtin_convertvector(v.raw, RawOf<std::uint16_t>::type)};
}
inline F InterleaveLower(Tag<float>, F a, F b) {
  return {RawOf<float>::type{a.raw[0], b.raw[0], a.raw[1], b.raw[1]}};
}
inline F InterleaveUpper(Tag<float>, F a, F b) {
  return {RawOf<float>::type{a.raw[2], b.raw[2], a.raw[3], b.raw[3]}};
}

}  // namespace rafter::hw::vector4
