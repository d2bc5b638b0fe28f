// Plain passes over device memory, for ceilings and for what surrounds a measurement.
#pragma once

#include <cstdint>

#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter::cuda {

/// Reads every byte; nothing is written unless memory holds one improbable sum. `bytes` are
/// multiples of 16, as are those of the others.
Status read_pass(const void* memory, std::int64_t bytes, void* stream);
Status write_pass(void* memory, std::int64_t bytes, void* stream);
Status copy_pass(void* to, const void* from, std::int64_t bytes, void* stream);
/// Random values: f32, bf16 and f16 in (−2, 2), near normal; e4m3 and int8 of every magnitude.
Status fill_random(void* memory, std::int64_t elements, DType dtype, std::uint32_t seed,
                   void* stream);
/// Keeps the stream busy for so long and touches no memory.
Status hold(double seconds, void* stream);
/// A kernel of one warp that does nothing.
Status empty_launch(void* stream);
/// exp2 on registers on all SMs: queues it and returns how many are computed.
Result<double> exp_pass(std::int64_t rounds, void* sink, void* stream);
/// The same of multiply-adds in f32.
Result<double> multiply_add_pass(std::int64_t rounds, void* sink, void* stream);

}  // namespace rafter::cuda
