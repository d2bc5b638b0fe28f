// The backward pass of an attention case, laid out in memory in any of the ways the API allows, run
// by a kernel, and compared with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "dispatch/kernel_entry.h"
#include "support/attention_case.h"

namespace rafter::testing {

/// What the backward pass takes besides q, k and v: in the order of Values, o and d_o rounded to
/// the dtype. o and lse are the oracle's.
struct BackwardValues {
  Values in;
  std::vector<float> o, d_o;     // [Σ seqlen_q, heads_q, head_dim_v]
  std::vector<float> lse, dlse;  // [Σ seqlen_q, heads_q]; dlse may be empty
};
BackwardValues make_backward_values(const Case& c, bool with_dlse);
/// o and lse of values.in, again: after a test has changed them.
void set_output(const Case& c, BackwardValues& values);

/// dq [Σ seqlen_q, heads_q, head_dim]; dk, dv [Σ seqlen_kv, heads_kv, head_dim or head_dim_v].
struct Gradients {
  std::vector<float> dq, dk, dv;
};

/// RunOptions::with_lse has no meaning here.
Gradients run_backward(const Case& c, const BackwardValues& values, const RunOptions& options);
/// The same on tensors of the test's own.
Status call_backward(const AttentionProblem& problem, const std::string& kernel,
                     const BackwardInputs& in, const BackwardOutputs& out);
Status try_backward(const Case& c, const BackwardValues& values, const RunOptions& options,
                    Gradients& gradients);

/// One tensor's gradient by the oracle, the error of the naive computation in the dtype, and the
/// largest sum of absolute values of terms.
struct ExpectedGradient {
  std::vector<double> values;
  double naive_error = 0;
  double size = 0;
};
struct ExpectedGradients {
  ExpectedGradient dq, dk, dv;
  double largest_logit = 0;
};
ExpectedGradients expect_gradients(const Case& c, const BackwardValues& values);

/// Places of inf and nan, then the largest error against 1.5 × the naive error plus a few ulp.
::testing::AssertionResult close_to(const Gradients& gradients, const ExpectedGradients& expected,
                                    const Case& c);
/// Equal to the bit, NaN included.
::testing::AssertionResult same_bits(const Gradients& a, const Gradients& b);

/// Kernels of matrix units on machines of plain loops (tests/kernels/backward_emulated.cpp), run by
/// run_backward() under their names as any kernel.
std::span<const KernelEntry> emulated_backwards();
/// Names of the CPU kernels that this machine has, and of those.
std::vector<std::string> backward_kernels();
/// Of these dtypes, those that the kernel is for.
std::vector<DType> backward_dtypes(const std::string& kernel, std::initializer_list<DType> of);

/// Bytes of workspace that the kernel asks for, with two threads.
std::int64_t workspace_of(const AttentionProblem& problem, const std::string& kernel);

/// The kernel's refusal of a case, empty when it takes it.
std::string backward_refusal_of(const Case& c, const std::string& kernel);

}  // namespace rafter::testing
