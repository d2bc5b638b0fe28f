#include <cmath>
#include <initializer_list>

#include "api/checks.h"
#include "base/checked.h"

namespace rafter::api {
namespace {

constexpr std::int64_t kMaxHeadDim = 256;
constexpr int kMaxThreads = 4096;

Status check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) {
    return Status::invalid_argument(name, std::to_string(value),
                                    std::to_string(least) + " or more");
  }
  return Status::ok();
}

Status check_head_dim(const char* name, std::int64_t value) {
  if (value < 1 || value > kMaxHeadDim) {
    return Status::invalid_argument(name, std::to_string(value),
                                    "1 to " + std::to_string(kMaxHeadDim));
  }
  return Status::ok();
}

Status check_zero(const char* name, std::int64_t value, const char* layout) {
  if (value != 0) {
    return Status::invalid_argument(name, std::to_string(value),
                                    std::string("0 (the layout is not ") + layout + ")");
  }
  return Status::ok();
}

/// The first error of a list of checks.
Status first_error(std::initializer_list<Status> checks) {
  for (const Status& status : checks) {
    if (!status) {
      return status;
    }
  }
  return Status::ok();
}

Status check_dtype(DType dtype) {
  if (dtype == DType::i32 || dtype == DType::i64) {
    return Status::invalid_argument("dtype", to_string(dtype),
                                    "f32, f16, bf16, e4m3, e5m2, int8, int4");
  }
  return Status::ok();
}

Status check_kv_dtype(DType dtype) {
  if (dtype == DType::i32 || dtype == DType::i64) {
    return Status::invalid_argument("kv_dtype", to_string(dtype), "the dtype of q, int8 or e4m3");
  }
  return Status::ok();
}

Status check_heads(const AttentionProblem& p) {
  if (p.heads_q % p.heads_kv != 0) {
    return Status::invalid_argument("heads_kv", std::to_string(p.heads_kv),
                                    "a divisor of heads_q = " + std::to_string(p.heads_q));
  }
  return Status::ok();
}

Status check_scalars(float scale, float softcap) {
  if (!std::isfinite(scale)) {
    return Status::invalid_argument("softmax_scale", std::to_string(scale), "a finite number");
  }
  if (!std::isfinite(softcap) || softcap < 0) {
    return Status::invalid_argument("softcap", std::to_string(softcap),
                                    "0 (off) or a positive finite number");
  }
  return Status::ok();
}

Status check_tree_mask(const AttentionProblem& p) {
  constexpr std::int64_t kWordBits = 64;
  if (!p.tree_mask) {
    return Status::ok();
  }
  if (p.seqlen_q > kWordBits) {
    return Status::invalid_argument("seqlen_q", std::to_string(p.seqlen_q),
                                    "0 to " + std::to_string(kWordBits) + " with tree_mask");
  }
  if (!p.mask.is_none()) {
    return Status::invalid_argument("mask", "a window", "none with tree_mask");
  }
  if (p.layout == Layout::packed) {
    return Status::unsupported("tree_mask", "the packed layout", "only dense and paged have it");
  }
  return Status::ok();
}

Status check_layout(const AttentionProblem& p) {
  const bool packed = p.layout == Layout::packed;
  const bool paged = p.layout == Layout::paged;
  return first_error({
      packed ? check_at_least("total_q", p.total_q, 0) : check_zero("total_q", p.total_q, "packed"),
      packed ? check_at_least("total_kv", p.total_kv, 0)
             : check_zero("total_kv", p.total_kv, "packed"),
      paged ? check_at_least("page_size", p.page_size, 1)
            : check_zero("page_size", p.page_size, "paged"),
      paged ? check_at_least("num_pages", p.num_pages, 0)
            : check_zero("num_pages", p.num_pages, "paged"),
  });
}

/// Every count that some kernel or cost model computes from the sizes, in bytes of f32.
Status check_sizes(const AttentionProblem& p) {
  using base::checked_product;
  const bool packed = p.layout == Layout::packed;
  const auto sum = base::checked_sum({p.seqlen_q, p.seqlen_kv});
  if (!sum) {
    return Status::invalid_argument(
        "seqlen_q + seqlen_kv", std::to_string(p.seqlen_q) + " + " + std::to_string(p.seqlen_kv),
        "less than 2^63");
  }
  struct Product {
    const char* name;
    std::optional<std::int64_t> bytes;
  };
  const std::int64_t rows_q_batch = packed ? 1 : p.batch;
  const std::int64_t rows_q = packed ? p.total_q : p.seqlen_q;
  const std::int64_t rows_kv_batch = packed ? 1 : p.batch;
  const std::int64_t rows_kv = packed ? p.total_kv : p.seqlen_kv;
  const std::int64_t dim = std::max(p.head_dim, p.head_dim_v);
  const Product products[] = {
      {"the size of q and o", checked_product({rows_q_batch, rows_q, p.heads_q, dim, 4})},
      {"the size of k and v", checked_product({rows_kv_batch, rows_kv, p.heads_kv, dim, 4})},
      {"the number of pages", checked_product({p.num_pages, p.page_size, p.heads_kv, dim, 4})},
  };
  for (const Product& product : products) {
    if (!product.bytes) {
      return Status::invalid_argument(product.name, "2^63 bytes or more", "less than 2^63 bytes");
    }
  }
  return Status::ok();
}

/// A window at least as wide as all rows and keys together is no bound; the limit also keeps sums
/// of window and position within 64 bits.
std::int64_t unbounded_if_wide(std::int64_t window, std::int64_t seqlen_q, std::int64_t seqlen_kv) {
  return window >= seqlen_q + seqlen_kv ? -1 : window;
}

}  // namespace

Result<AttentionProblem> complete_problem(const AttentionProblem& problem) {
  AttentionProblem p = problem;
  Status status = first_error({
      check_at_least("batch", p.batch, 0),
      check_at_least("heads_q", p.heads_q, 1),
      check_at_least("heads_kv", p.heads_kv, 0),
      check_at_least("seqlen_q", p.seqlen_q, 0),
      check_at_least("seqlen_kv", p.seqlen_kv, 0),
      check_head_dim("head_dim", p.head_dim),
      p.head_dim_v == 0 ? Status::ok() : check_head_dim("head_dim_v", p.head_dim_v),
      check_dtype(p.dtype),
      check_kv_dtype(p.kv_dtype.value_or(p.dtype)),
      check_at_least("mask.window_left", p.mask.window_left, -1),
      check_at_least("mask.window_right", p.mask.window_right, -1),
  });
  if (!status) {
    return status;
  }
  p.heads_kv = p.heads_kv == 0 ? p.heads_q : p.heads_kv;
  p.head_dim_v = p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
  p.kv_dtype = p.kv_dtype.value_or(p.dtype);
  if (!p.softmax_scale) {
    p.softmax_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  }
  status = first_error({check_heads(p), check_scalars(*p.softmax_scale, p.softcap), check_layout(p),
                        check_tree_mask(p), check_sizes(p)});
  if (!status) {
    return status;
  }
  p.mask.window_left = unbounded_if_wide(p.mask.window_left, p.seqlen_q, p.seqlen_kv);
  p.mask.window_right = unbounded_if_wide(p.mask.window_right, p.seqlen_q, p.seqlen_kv);
  return p;
}

Status check_options(const PlanOptions& options) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return Status::invalid_argument("threads", std::to_string(options.threads),
                                    "0 (the OpenMP default) to " + std::to_string(kMaxThreads));
  }
  return check_at_least("splits", options.splits, 0);
}

Status check_pass(const AttentionProblem& problem, Pass pass) {
  if (pass == Pass::backward && problem.layout == Layout::paged) {
    return Status::unsupported("layout", "paged with pass = backward",
                               "dense or packed (pages may be shared; a gradient cannot be)");
  }
  if (pass == Pass::backward && problem.tree_mask) {
    return Status::unsupported("tree_mask", "pass = backward", "only the forward pass has it");
  }
  const DType kv_dtype = problem.kv_dtype.value_or(problem.dtype);
  if (pass == Pass::backward && kv_dtype != problem.dtype) {
    return Status::unsupported("kv_dtype",
                               std::string(to_string(kv_dtype)) + " with pass = backward",
                               std::string("only ") + to_string(problem.dtype) + ", as q");
  }
  return Status::ok();
}

}  // namespace rafter::api
