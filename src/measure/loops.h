// The inner loops of the probe, compiled for each instruction set and chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rafter::measure {

/// Floats are handled this many at a time; buffer lengths are multiples of it.
inline constexpr std::size_t kLoopFloats = 256;

/// Reads floats[0, count) once; the return value depends on all of them.
float loop_read(const float* floats, std::size_t count);
/// Writes every float with ordinary (allocating) stores.
void loop_write(float* floats, std::size_t count, float value);
/// Copies with ordinary loads and stores.
void loop_copy(float* to, const float* from, std::size_t count);

/// Multiply-adds on registers only. Returns the FLOPs done; *sink depends on all of them.
double loop_fma(std::int64_t rounds, float* sink);
/// Exponentials (range reduction and a polynomial of degree 5, f32) on registers only. Returns how
/// many were computed.
double loop_exp(std::int64_t rounds, float* sink);

/// Name of the instruction set chosen ("AVX2").
const char* loop_target();

}  // namespace rafter::measure
