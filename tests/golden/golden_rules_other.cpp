// GEMM and elementwise kernels, the tiled traffic model, online softmax, device figures.
#include <algorithm>
#include <cmath>

#include "golden/golden_rules.h"

namespace rafter::golden {
namespace {

constexpr double kKiB = 1024;

Cost gemm(const Entry& e) {
  GemmProblem p;
  p.m = e.whole_or("m", e.whole_or("tokens", 1));
  p.n = e.whole_or("n", 4096);
  p.k = e.whole_or("k", 4096);
  p.weight_dtype = Entry::dtype_of_bytes(e.number_or("weight_bytes_per_param", 2));
  return must(gemm_cost(p, e.convention()));
}
Prediction gemm_prediction(const Entry& e) {
  return must(predict(gemm(e), e.device(), e.convention()));
}

Tiling tiles_with(const Entry& e, double fast_memory_bytes) {
  return must(tiling(e.whole_or("seq_len", 4096), e.whole_or("head_dim", 128), e.dtype(),
                     fast_memory_bytes, e.convention()));
}
Tiling tiles(const Entry& e) { return tiles_with(e, e.number("smem_bytes")); }

SoftmaxTrace trace(const Entry& e) {
  return must(online_softmax(e.blocks("scores"), e.has("values")
                                                     ? e.blocks("values")
                                                     : std::vector<std::vector<double>>{}));
}
const SoftmaxStep step(const Entry& e) {
  return trace(e).steps[static_cast<std::size_t>(e.whole_or("block", 1)) - 1];
}

/// softmax(scores) · values over all blocks at once.
double direct_output(const Entry& e) {
  double weights = 0, sum = 0;
  const auto scores = e.blocks("scores"), values = e.blocks("values");
  for (std::size_t i = 0; i < scores.size(); ++i) {
    for (std::size_t j = 0; j < scores[i].size(); ++j) {
      weights += std::exp(scores[i][j]);
      sum += std::exp(scores[i][j]) * values[i][j];
    }
  }
  return sum / weights;
}

bool close(double a, double b) { return std::abs(a - b) <= 1e-13 * std::abs(b); }

}  // namespace

std::vector<Rule> other_rules() {
  using E = const Entry&;
  return {
      {"l-9-2-qk-flops-coefficient|s-a1-(qk|pv)",
       [](E e) -> Answer { return gemm(e).matmul_flops; }},
      {"l-9-1-decode-intensity|s-f3-batch-gemm", [](E e) -> Answer { return gemm(e).intensity(); }},
      {"l-9-1-prefill-ridge-multiple|l-9-1-decode-peak-fraction",
       [](E e) -> Answer { return gemm_prediction(e).ridge_multiple; }},
      {"l-9-1-(prefill|decode)-verdict",
       [](E e) -> Answer { return gemm_prediction(e).verdict(); }},
      {"l-9-1-launch-saving-larger",
       [](E e) -> Answer {
         Convention c = e.convention();
         c.count_dispatch = true;
         const Cost norm = must(elementwise_cost(
             ElementwiseProblem::rmsnorm(e.number("batch") * e.number("d_model"), e.dtype()), c));
         const Prediction p = must(predict(norm, e.device(), c));
         return p.time_bandwidth_s < p.time_dispatch_s;
       }},
      {"l-9-1-intensity-size-invariant-elementwise",
       [](E e) -> Answer {
         const auto at = [&](double elements) {
           return must(elementwise_cost(ElementwiseProblem::swiglu(elements, e.dtype())))
               .intensity();
         };
         return at(e.number("tokens")) == at(2 * e.number("tokens"));
       }},
      {"l-9-3-elementwise-intensity",
       [](E e) -> Answer {
         return must(elementwise_cost({.elements = e.number("tokens") * e.number("d_model"),
                                       .reads = e.values()[1],
                                       .writes = e.values()[2],
                                       .flops_per_element = e.values()[0],
                                       .dtype = e.dtype()}))
             .intensity();
       }},

      // Tiling.
      {"l-9-3-score-does-not-fit",
       [](E e) -> Answer {
         return !tiles(e).score_matrix_fits &&
                !tiles_with(e, e.number("sm_count") * e.number("smem_bytes")).score_matrix_fits;
       }},
      {"l-9-4-block-rows", [](E e) -> Answer { return tiles(e).tile_rows; }},
      {"l-9-4-kv-passes-4k", [](E e) -> Answer { return tiles(e).kv_passes; }},
      {"l-9-4-io-accesses-4k", [](E e) -> Answer { return tiles(e).io_elements; }},
      {"l-9-4-io-reduction", [](E e) -> Answer { return tiles(e).reduction_vs_unfused; }},
      {"l-9-4-io-form",
       [](E e) -> Answer {
         const double s = e.number("seq_len"), d = e.number("head_dim");
         return close(tiles(e).io_elements, s * d * tiles(e).kv_passes) &&
                close(tiles(e).io_elements, s * s * d * d / tiles(e).fast_memory_elements);
       }},
      {"l-9-4-io-improves-with-m",
       [](E e) -> Answer {
         const Tiling twice = tiles_with(e, 2 * e.number("smem_bytes"));
         return close(twice.io_elements, tiles(e).io_elements / 2) &&
                twice.unfused_elements == tiles(e).unfused_elements;
       }},
      {"l-ds3-smem-ratio",
       [](E e) -> Answer {
         return tiles_with(e, e.values()[1] * kKiB).io_elements /
                tiles_with(e, e.values()[0] * kKiB).io_elements;
       }},

      // Device figures.
      {"l-ds3-smem-a100|l-key-08-io-m",
       [](E e) -> Answer { return must(e.device().value("fast_memory_bytes")); }},
      {"s-device-hbm", [](E e) -> Answer { return must(e.device().value("capacity_bytes")); }},
      {"l-9-7-non-tensor-flop",
       [](E e) -> Answer {
         return must(e.device().peak(DType::bf16)) /
                must(e.device().value("peak_vector_f32_flop_per_s"));
       }},
      {"l-ex3-within",  // of two printed lengths; both are stated
       [](E e) -> Answer { return e.values()[0] / e.values()[1] - 1; }},

      // Online softmax.
      {"l-9-4-example-exp-sum", [](E e) -> Answer { return trace(e).sum_exp; }},
      {"l-9-4-online-m[12]-.*", [](E e) -> Answer { return step(e).m; }},
      {"l-9-4-online-l[12]-.*", [](E e) -> Answer { return step(e).l; }},
      {"l-9-4-online-rescale-.*", [](E e) -> Answer { return step(e).rescale; }},
      {"l-9-4-online-output", [](E e) -> Answer { return *trace(e).output; }},
      {"l-9-4-online-exact",
       [](E e) -> Answer { return close(*trace(e).output, direct_output(e)); }},
      {"l-9-4-overflow",
       [](E e) -> Answer {
         const SoftmaxTrace t = trace(e);
         return std::isinf(std::exp(t.steps.back().m)) && std::isfinite(t.steps.back().l) &&
                std::isfinite(t.lse);
       }},
      {"l-9-8-splitk-combine",
       [](E e) -> Answer {
         SoftmaxState merged;
         const auto scores = e.blocks("scores"), values = e.blocks("values");
         for (std::size_t i = 0; i < scores.size(); ++i) {
           const SoftmaxTrace part = must(online_softmax({scores[i]}, {values[i]}));
           merged = merge_states(merged, {part.steps[0].m, part.steps[0].l, part.steps[0].output});
         }
         return close(merged.output, direct_output(e)) && close(merged.lse(), trace(e).lse);
       }},
  };
}

}  // namespace rafter::golden
