// What a step of a model moves between its products and its attention, and how many kernels it is.
#pragma once

#include <optional>

#include "rafter/model.h"

namespace rafter::model {

/// ModelStep's fields of these names.
struct Elementwise {
  std::optional<bool> fuse;
  bool chain = false;
};

struct ElementwiseTerms {
  double flops = 0, bytes = 0;
  double kernels = 0;  // of the whole step, that of experts left out; not to be used with `fuse`
                       // unset, where the append is not among them
};

/// Norms, RoPE, appending K and V to the cache, SwiGLU, residual adds and the embedding's rows of
/// `tokens` tokens, `logits` of which have logits; no parameters. Sequences are of one length.
ElementwiseTerms elementwise_terms(const ModelStep& step, double tokens, double logits,
                                   DType kv_dtype, Elementwise how);

}  // namespace rafter::model
