// What a Hopper GPU's tensor cores reach of the two products of attention with the softmax between
// them, on operands that are where the tensor cores read them.
#pragma once

#include <cstdint>

#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter::cuda {

/// Every SM takes 128 queries of a head_dim of 128 over the same 128 keys, `rounds` times; bf16 or
/// f16. Queues it and returns how many scores are computed. Needs compute capability 9.0.
Result<double> attention_pass(DType dtype, int rounds, void* sink, void* stream);

}  // namespace rafter::cuda
