// Runs one attention case by one kernel, in any layout, and says how it compares with the float64
// reference.
#pragma once

#include <string>
#include <vector>

#include "cli/cases.h"
#include "rafter/status.h"

namespace rafter::cli {

/// Values of all sequences one behind the other, already rounded to the dtype:
/// q [Σ seqlen_q, heads_q, head_dim], k, v likewise.
struct CaseValues {
  std::vector<float> q, k, v;
  // kv_dtype int8 or e4m3: what the rows of k and v are multiples of, [Σ seqlen_kv, heads_kv].
  std::vector<float> k_scale = {}, v_scale = {};
};
CaseValues make_values(const AttentionCase& c, DType dtype);

/// o [Σ seqlen_q, heads_q, head_dim_v], lse [Σ seqlen_q, heads_q].
struct CaseOutput {
  std::vector<float> o, lse;
};

/// forward_reference, sequence by sequence, dense and contiguous.
Result<CaseOutput> reference_output(const AttentionCase& c, DType dtype, const CaseValues& values);

/// What is expected and how far a kernel may be from it: 1.5 times the error of the three-step
/// computation in the same dtype with softmax in f32 (the worst of its orders of operations), plus
/// 4 ulp of f32 of the largest value.
struct Expectation {
  CaseOutput reference;
  double o_bound = 0, lse_bound = 0;
};
Result<Expectation> expectation_of(const AttentionCase& c, DType dtype, const CaseValues& values);

struct CaseRun {
  std::string kernel;
  int threads = 0;  // 0: the default
  unsigned char poison =
      0xFF;  // every byte outside the valid region; 0xFF is NaN in f32, f16, bf16
  Device device = {};
};
/// Errors: unsupported when the kernel refuses the case, invalid_argument when it refuses its
/// strides. An element outside the valid region of o or lse that was written is a device_error.
Result<CaseOutput> run_case(const AttentionCase& c, DType dtype, const CaseValues& values,
                            const CaseRun& run);

/// Empty when the output is within its bounds; else the worst element, both values and the bound.
std::string difference(const AttentionCase& c, const CaseOutput& output,
                       const Expectation& expected);
/// Empty when equal to the bit; else the first element that is not.
std::string bit_difference(const AttentionCase& c, const CaseOutput& a, const CaseOutput& b);

}  // namespace rafter::cli
