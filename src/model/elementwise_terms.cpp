#include "model/elementwise_terms.h"

#include "model/model_shape.h"

namespace rafter::model {
namespace {

class Sum {
 public:
  explicit Sum(DType dtype) : element_(bytes_of(dtype)) {}
  /// `count` kernels over so many elements each, read and written so many times.
  void add(double count, double elements, double passes, double flops) {
    terms.kernels += count;
    terms.flops += count * elements * flops;
    terms.bytes += count * elements * passes * element_;
  }
  ElementwiseTerms terms;

 private:
  double element_;
};

/// A kernel for each function, or one for those that follow each other, as TransformerSession
/// queues them; `turned_before`: rows turn before the append whatever is fused. In a chain a
/// product takes the norm of its x with it, and adds its columns to what it reads of the residual
/// stream.
void add_session(const ModelStep& step, double tokens, double logits, Elementwise how,
                 bool turned_before, Sum& sum) {
  const bool fuse = how.fuse.value_or(false);
  const ModelConfig& m = step.model;
  const auto layers = static_cast<double>(m.num_layers);
  const double h = tokens * static_cast<double>(m.hidden_size);
  const double q = tokens * static_cast<double>(m.heads_q * m.head_dim);
  const double kv = tokens * static_cast<double>(m.heads_kv * m.head_dim);
  const double mlps = m.has_experts() ? static_cast<double>(m.experts_per_token) : 1;
  const double f = tokens * static_cast<double>(m.intermediate_size) * mlps;
  if (how.chain) {
    sum.add(1, h, 2, 4);  // the last norm is behind the last chain
    sum.add(2 * layers, h, 1, 5);
    sum.terms.flops += layers * f * 5;
    sum.terms.kernels -= 2 * layers;
  } else if (fuse) {
    sum.add(1, h, 2, 4);  // before the first layer there is nothing to add
    sum.add(2 * layers, h, 4, 5);
    sum.add(layers, f, 3, 5);
  } else {
    sum.add(2 * layers + 1, h, 2, 4);
    sum.add(2 * layers, h, 3, 1);
    sum.add(layers, f, 2, 4);
    sum.add(layers, f, 3, 1);
  }
  if (m.qk_norm) {
    sum.add(layers, q, 2, 4);
    sum.add(layers, kv, 2, 4);
  }
  // q moves with the append where that turns it; what the cache takes is added by the caller.
  if (fuse && !turned_before) {
    sum.add(layers, q, 2, 3);
    sum.terms.flops += layers * kv * 3;
  } else {
    sum.add(layers, q + kv, 2, 3);
    sum.terms.kernels += layers;  // the append
  }
  sum.add(1, h, 2, 0);  // rows of the embedding
  if (step.phase == Phase::decode) {
    sum.terms.kernels += 1;  // lengths before and after each step, 4 bytes each
    sum.terms.bytes += 16 * tokens;
  } else if (step.batch > 1 && !step.all_logits) {
    sum.add(1, logits * static_cast<double>(m.hidden_size), 2, 0);
  }
}

/// The textbook's list: SwiGLU in one kernel, every other function in one of its own.
void add_textbook(const ModelConfig& m, double tokens, double logits, Sum& sum) {
  const auto layers = static_cast<double>(m.num_layers), h = static_cast<double>(m.hidden_size);
  const auto heads = static_cast<double>((m.heads_q + m.heads_kv) * m.head_dim);
  const double mlps = m.has_experts() ? static_cast<double>(m.experts_per_token) : 1;
  const auto add = [&](const ElementwiseProblem& e, double count) {
    sum.add(count, e.elements, e.reads + e.writes, e.flops_per_element);
  };
  add(ElementwiseProblem::rmsnorm(tokens * h, m.dtype), 2 * layers);
  add(ElementwiseProblem::rmsnorm(logits * h, m.dtype), 1);
  add(ElementwiseProblem::rope(tokens * heads, m.dtype), layers);
  add(ElementwiseProblem::residual_add(tokens * h, m.dtype), 2 * layers);
  add(ElementwiseProblem::swiglu(tokens * static_cast<double>(m.intermediate_size) * mlps, m.dtype),
      layers);
  sum.add(1, tokens * h, 2, 0);
}

}  // namespace

ElementwiseTerms elementwise_terms(const ModelStep& step, double tokens, double logits,
                                   DType kv_dtype, Elementwise how) {
  const ModelConfig& m = step.model;
  const auto layers = static_cast<double>(m.num_layers);
  Sum sum(m.dtype);
  if (how.fuse) {
    // A prefill attends to its own rows where those of the cache are rounded: they turn first.
    const bool turned_before = step.phase == Phase::prefill && kv_dtype != m.dtype;
    add_session(step, tokens, logits, how, turned_before, sum);
  } else {
    add_textbook(m, tokens, logits, sum);
  }
  const auto kv = static_cast<double>(m.heads_kv * m.head_dim);
  sum.terms.bytes += tokens * (layers * 2 * kv * bytes_of(m.dtype) +  // new K and V read, and kept
                               kv_bytes_per_token(m, kv_dtype));
  if (m.has_experts()) {  // a token's experts, weighted and added
    const auto each = static_cast<double>(m.experts_per_token);
    const double h = tokens * static_cast<double>(m.hidden_size);
    sum.terms.flops += layers * h * 2 * each;
    sum.terms.bytes += layers * h * (each + 1) * bytes_of(m.dtype);
  }
  return sum.terms;
}

}  // namespace rafter::model
