#include <algorithm>

#include "api/checks.h"
#include "base/checked.h"

namespace rafter::api {
namespace {

std::string at(const char* name, std::int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

/// Present exactly when the problem has it, and then of the right size.
Status check_vector(const char* name, const IndexView& view, bool wanted, std::int64_t size,
                    const char* when) {
  if (!wanted) {
    return view.empty() ? Status::ok()
                        : Status::invalid_argument(
                              name, "an array", std::string("none (it belongs to ") + when + ")");
  }
  return check_index(name, view, size);
}

Status check_cu_seqlens(const char* name, const IndexView& view, std::int64_t batch,
                        std::int64_t total, const char* total_name, std::int64_t capacity,
                        const char* capacity_name) {
  if (view[0] != 0) {
    return Status::invalid_argument(at(name, 0), std::to_string(view[0]), "0");
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    // Compared before subtracting: hostile values must not overflow.
    if (view[b + 1] < view[b]) {
      return Status::invalid_argument(at(name, b + 1), std::to_string(view[b + 1]),
                                      std::to_string(view[b]) + " (the entry before) or more");
    }
    if (view[b + 1] > total) {
      return Status::invalid_argument(
          at(name, b + 1), std::to_string(view[b + 1]),
          "at most " + std::string(total_name) + " = " + std::to_string(total));
    }
    if (view[b + 1] - view[b] > capacity) {
      return Status::invalid_argument(
          at(name, b + 1),
          std::to_string(view[b + 1]) + ", a length of " + std::to_string(view[b + 1] - view[b]),
          "lengths up to " + std::string(capacity_name) + " = " + std::to_string(capacity));
    }
  }
  return Status::ok();
}

Status check_seqused(const AttentionProblem& p, const ForwardInputs& in) {
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t capacity =
        p.layout == Layout::packed ? in.cu_seqlens_kv[b + 1] - in.cu_seqlens_kv[b] : p.seqlen_kv;
    if (in.seqused_kv[b] < 0 || in.seqused_kv[b] > capacity) {
      return Status::invalid_argument(at("seqused_kv", b), std::to_string(in.seqused_kv[b]),
                                      "0 to " + std::to_string(capacity));
    }
  }
  return Status::ok();
}

Status check_page_table(const AttentionProblem& p, const ForwardInputs& in) {
  const std::int64_t cols = in.page_table.cols;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t used = p.seqused_kv ? in.seqused_kv[b] : p.seqlen_kv;
    for (std::int64_t i = 0; i < base::div_up(used, p.page_size); ++i) {
      const std::int64_t page = in.page_table[b * cols + i];
      if (page < 0 || page >= p.num_pages) {
        return Status::invalid_argument(at("page_table", b) + "[" + std::to_string(i) + "]",
                                        std::to_string(page),
                                        "0 to num_pages − 1 = " + std::to_string(p.num_pages - 1));
      }
    }
  }
  return Status::ok();
}

Status check_page_table_shape(const AttentionProblem& p, const IndexView& table) {
  const std::int64_t needed = base::div_up(p.seqlen_kv, p.page_size);
  if (table.cols < needed) {
    return Status::invalid_argument("page_table.cols", std::to_string(table.cols),
                                    std::to_string(needed) + " (seqlen_kv / page_size) or more");
  }
  const auto size = base::checked_product({p.batch, table.cols});
  if (!size) {
    return Status::invalid_argument("page_table.cols", std::to_string(table.cols),
                                    "less than 2^63 / batch");
  }
  return check_vector("page_table", table, true, *size, "the paged layout");
}

}  // namespace

Status check_index(const char* name, const IndexView& view, std::int64_t size) {
  if (view.dtype != DType::i32 && view.dtype != DType::i64) {
    return Status::invalid_argument(std::string(name) + ".dtype", to_string(view.dtype),
                                    "i32 or i64");
  }
  if (view.size != size) {
    return Status::invalid_argument(std::string(name) + ".size", std::to_string(view.size),
                                    std::to_string(size));
  }
  if (view.empty() && size > 0) {
    return Status::invalid_argument(name, "null", "an array of " + std::to_string(size));
  }
  return Status::ok();
}

Status check_indices(const AttentionProblem& p, const ForwardInputs& in, bool host_indices) {
  const bool packed = p.layout == Layout::packed;
  const bool paged = p.layout == Layout::paged;
  const std::pair<const char*, const IndexView*> cu[] = {{"cu_seqlens_q", &in.cu_seqlens_q},
                                                         {"cu_seqlens_kv", &in.cu_seqlens_kv}};
  for (const auto& [name, view] : cu) {
    if (Status s = check_vector(name, *view, packed, p.batch + 1, "the packed layout"); !s) {
      return s;
    }
  }
  if (Status s = check_vector("seqused_kv", in.seqused_kv, p.seqused_kv, p.batch,
                              "problems with seqused_kv set");
      !s) {
    return s;
  }
  if (Status s = paged ? check_page_table_shape(p, in.page_table)
                       : check_vector("page_table", in.page_table, false, 0, "the paged layout");
      !s) {
    return s;
  }
  if (!host_indices) {
    return Status::ok();
  }
  if (packed) {
    if (Status s = check_cu_seqlens("cu_seqlens_q", in.cu_seqlens_q, p.batch, p.total_q, "total_q",
                                    p.seqlen_q, "seqlen_q");
        !s) {
      return s;
    }
    if (Status s = check_cu_seqlens("cu_seqlens_kv", in.cu_seqlens_kv, p.batch, p.total_kv,
                                    "total_kv", p.seqlen_kv, "seqlen_kv");
        !s) {
      return s;
    }
  }
  if (p.seqused_kv) {
    if (Status s = check_seqused(p, in); !s) {
      return s;
    }
  }
  return paged ? check_page_table(p, in) : Status::ok();
}

}  // namespace rafter::api
