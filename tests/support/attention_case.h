// One attention case, laid out in memory in any of the ways the API allows, run by a kernel, and
// compared with the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rafter/attention.h"
#include "support/guarded_buffer.h"
#include "support/oracle.h"

namespace rafter::testing {

/// How tensors lie in memory.
enum class Style : std::uint8_t {
  contiguous,       // [batch, seqlen, heads, head_dim]
  heads_first,      // [batch, heads, seqlen, head_dim]
  gaps,             // odd padding between rows, heads and sequences, off the 64-byte alignment
  every_other,      // every second row of a larger tensor
  backwards,        // rows in descending addresses
  mixed,            // another of these for each of q, k, v and o
  strided_head_dim  // head_dim stride 2
};

/// Factors of k and v in int8 or e4m3.
enum class Scales : std::uint8_t { per_token, per_head, none };

/// What to compute, in values: sequences of their own lengths whatever the layout.
struct Case {
  AttentionProblem problem;  // batch, seqlens, totals and pages are filled from the lengths
  std::vector<std::int64_t> lengths_q = {0};  // one per sequence
  std::vector<std::int64_t> lengths_kv = {0};
  Style style = Style::contiguous;
  std::uint32_t seed = 1;
  double sigma_q = 1, sigma_k = 1;
  Scales scales = Scales::per_token;  // none: e4m3 alone
  std::int64_t spare_pages = 0;       // paged: so many more that nobody has

  Case& lengths(std::vector<std::int64_t> q, std::vector<std::int64_t> kv) {
    lengths_q = std::move(q);
    lengths_kv = std::move(kv);
    return *this;
  }
};

/// Values of all sequences, rounded to the dtype: q [Σ seqlen_q, heads_q, head_dim] and so on.
struct Values {
  std::vector<float> q, k, v;
  // kv_dtype int8: what k and v are whole multiples of (−127 to 127), e4m3: what they are e4m3
  // multiples of, [Σ seqlen_kv, heads_kv].
  std::vector<float> k_scale = {}, v_scale = {};
  std::vector<std::uint64_t> tree_mask = {};  // problems with one: [Σ seqlen_q]
};
Values make_values(const Case& c);

/// Results in the same order: o [Σ seqlen_q, heads_q, head_dim_v], lse [Σ seqlen_q, heads_q].
struct Output {
  std::vector<float> o, lse;
  std::vector<std::int32_t> bad_pages = {};  // paged: [batch]
};

/// An entry of the page table that is not what it should be.
struct WrongPage {
  std::int64_t sequence = 0, column = 0, page = -1;
};

/// Runs a plan on memory of the host: `regions` has all that the views point to, and what surrounds
/// it. Another device's works on copies, and brings back what was written.
using Forward = std::function<Status(const Plan&, const ForwardInputs&, const ForwardOutputs&,
                                     Workspace, std::span<const Region> regions)>;

struct RunOptions {
  std::string kernel;
  int threads = 1;
  Fill fill = Fill::nan;  // of everything outside the valid region, workspace included
  DType index_dtype = DType::i32;
  bool problem_dtype_out = false;  // o in the problem's dtype; else f32
  bool with_lse = true;
  std::int64_t splits = 0;
  Device device = {};
  Forward forward = {};  // on the CPU: Plan::forward
  std::vector<WrongPage> wrong_pages = {};
  // run_backward() only:
  std::optional<Style> style_besides_qkv = {};  // of o, d_o and the gradients; default: the case's
  bool f32_o = false;                           // o and d_o in f32, else in the problem's dtype
};

/// Runs a case through plan and forward; fails the test on any error or a broken guard band.
Output run_case(const Case& c, const Values& values, const RunOptions& options);
/// The same, with the error instead of a failure.
Status try_case(const Case& c, const Values& values, const RunOptions& options, Output& output);

/// The oracle's results and the errors of the naive computation in the dtype against it.
struct Expected {
  std::vector<double> o, lse;
  double naive_error_o = 0, naive_error_lse = 0;
  double largest_logit = 0;
};
Expected expect_values(const Case& c, const Values& values);

/// Places of inf and nan, then the largest error against 1.5 × the naive error plus a few ulp.
::testing::AssertionResult close_to(const Output& output, const Expected& expected, const Case& c);
/// Equal to the bit, NaN included.
::testing::AssertionResult same_bits(const Output& a, const Output& b);

/// run_case, expect_values and close_to in one.
void check_case(const Case& c, const RunOptions& options);

/// Names of the CPU kernels of a pass that this machine has.
std::vector<std::string> cpu_kernels(Pass pass = Pass::forward);
/// The kernel's refusal of a case, empty when it takes it.
std::string refusal_of(const Case& c, const std::string& kernel, const Device& device = {});

float round_to(DType dtype, float value);
/// k and v of this dtype may have factors.
bool is_scaled(DType kv_dtype);

/// The case's problem with batch, capacities, totals and pages set from the lengths.
AttentionProblem sized_problem(const Case& c);
OracleOptions oracle_options(const AttentionProblem& problem);
/// heads_kv and head_dim_v with their defaults filled in.
struct Dims {
  std::int64_t heads_kv, dim_v;
};
Dims dims_of(const AttentionProblem& problem);

/// One head of one sequence: where its rows and keys lie.
struct CaseHead {
  std::int64_t q_first = 0, rows = 0, kv_first = 0, keys = 0, h = 0, h_kv = 0;
};
/// Calls body(place, inputs in float64) for every head of every sequence.
void for_each_head(const Case& c, const Values& values,
                   const std::function<void(const CaseHead&, const OracleHead&)>& body);

/// Rows of one head of one sequence out of [Σ rows, heads, dim].
std::vector<double> head_of(const std::vector<float>& values, std::int64_t first, std::int64_t rows,
                            std::int64_t heads, std::int64_t head, std::int64_t dim);

}  // namespace rafter::testing
