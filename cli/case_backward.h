// Runs the backward pass of one attention case by one kernel, in any layout, and says how it
// compares with the float64 reference.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/case_run.h"
#include "rafter/status.h"

namespace rafter::cli {

/// The cases that the self-test runs backward: those of the layouts with a backward pass, small
/// enough for the float64 reference to be quick.
bool runs_backward(const AttentionCase& c);

/// What the backward pass takes: o and lse of the float64 reference, o and d_o rounded to the
/// dtype. o, d_o [Σ seqlen_q, heads_q, head_dim_v], lse, dlse [Σ seqlen_q, heads_q].
struct BackwardValues {
  CaseValues in;
  std::vector<float> o, d_o, lse, dlse;
};
Result<BackwardValues> make_backward_values(const AttentionCase& c, DType dtype);

/// dq [Σ seqlen_q, heads_q, head_dim], dk [Σ seqlen_kv, heads_kv, head_dim], dv likewise.
struct CaseGradients {
  std::vector<float> dq, dk, dv;
};

/// What is expected and how far a kernel may be from it: 1.5 times the error of the unfused
/// computation in the same dtype (the worse of two orders of its sums), plus a few ulp of f32 of
/// the sums of absolute terms.
struct GradientExpectation {
  CaseGradients reference;  // backward_reference, sequence by sequence, dense and contiguous
  double dq_bound = 0, dk_bound = 0, dv_bound = 0;
};
Result<GradientExpectation> expectation_of(const AttentionCase& c, DType dtype,
                                           const BackwardValues& values);

/// Errors: as run_case().
Result<CaseGradients> run_backward(const AttentionCase& c, DType dtype,
                                   const BackwardValues& values, const CaseRun& run);

/// Empty when within the bounds; else the worst element, both values and the bound.
std::string difference(const AttentionCase& c, const CaseGradients& gradients,
                       const GradientExpectation& expected);
/// Empty when equal to the bit; else the first element that is not.
std::string bit_difference(const AttentionCase& c, const CaseGradients& a, const CaseGradients& b);

}  // namespace rafter::cli
