// GEMM and elementwise kernels, the tiled traffic model, online softmax, device figures.
#include "cli/golden_rules.h"

namespace rafter::test {
namespace {

using E = const Entry&;

const Json& gemm(E e) { return ask("explain gemm", e.gemm()); }

/// --flag values of an elementwise kernel of that many elements.
const Json& elementwise(E e, double elements, const Flags& changes) {
  Flags flags = e.counting();
  flags["--elements"] = std::to_string(static_cast<std::int64_t>(elements));
  flags["--dtype"] = Entry::dtype_of_bytes(e.number("bytes_per_element"));
  return ask("explain elementwise", with(flags, changes));
}

const Json& tiles(E e) { return ask("explain tiling", e.tiling()); }
const Json& tiles_with(E e, double fast_memory_bytes) {
  return ask("explain tiling",
             with(e.tiling(), {{"--fast-memory-bytes", Json(fast_memory_bytes).dump()}}));
}

const Json& trace(E e) {
  Flags flags = {{"--blocks", e.blocks("scores")}};
  if (e.has("values")) {
    flags["--values"] = e.blocks("values");
  }
  return ask("explain online-softmax", flags);
}
const Json& step(E e) {
  return trace(e).at("steps").at(static_cast<std::size_t>(e.whole_or("block", 1)) - 1);
}

/// softmax(scores) · values over all blocks at once.
double direct_output(E e) {
  double weights = 0;
  double sum = 0;
  const Json& scores = e.input("scores");
  const Json& values = e.input("values");
  for (std::size_t i = 0; i < scores.size(); ++i) {
    for (std::size_t j = 0; j < scores[i].size(); ++j) {
      weights += std::exp(scores[i][j].get<double>());
      sum += std::exp(scores[i][j].get<double>()) * values[i][j].get<double>();
    }
  }
  return sum / weights;
}

/// One figure of `rafter devices NAME`.
double device_figure(E e, const std::string& key) {
  const std::string name = e.counting().at("--device");
  for (const Json& row : ask("devices " + name, {}).at("figures")) {
    if (row.at("figure") == key) {
      return figure(row, "value");
    }
  }
  throw std::runtime_error("no figure " + key);
}

/// Each block alone, then the union of their states.
const Json& merged(E e) {
  std::string states;
  for (std::size_t i = 0; i < e.input("scores").size(); ++i) {
    const auto join = [](const Json& row) {
      std::string text;
      for (const Json& each : row) {
        text += (text.empty() ? "" : ",") + each.dump();
      }
      return text;
    };
    const Json& part = ask("explain online-softmax", {{"--blocks", join(e.input("scores")[i])},
                                                      {"--values", join(e.input("values")[i])}});
    const Json& last = part.at("steps").back();
    states += (states.empty() ? "" : "/") + last.at("m").dump() + "," + last.at("l").dump() + "," +
              last.at("output").dump();
  }
  return ask("explain merge", {{"--states", states}});
}

std::vector<GoldenRule> kernels_and_tiles() {
  return {
      number_of("l-9-2-qk-flops-coefficient|s-a1-(qk|pv)", gemm, "matmul_flops"),
      number_of("l-9-1-decode-intensity|s-f3-batch-gemm", gemm, "intensity_flop_per_byte"),
      number_of("l-9-1-prefill-ridge-multiple|l-9-1-decode-peak-fraction", gemm, "ridge_multiple"),
      {"l-9-1-(prefill|decode)-verdict",
       [](E e) -> Answer { return gemm(e).at("verdict").get<std::string>(); }},
      {"l-9-1-launch-saving-larger",
       [](E e) -> Answer {
         const Json& norm = elementwise(e, e.number("batch") * e.number("d_model"),
                                        {{"--kind", "rmsnorm"}, {"--count-dispatch", "true"}});
         return figure(norm, "time_bandwidth_s") < figure(norm, "time_dispatch_s");
       }},
      {"l-9-1-intensity-size-invariant-elementwise",
       [](E e) -> Answer {
         const auto at = [&](double n) {
           return figure(elementwise(e, n, {{"--kind", "swiglu"}}), "intensity_flop_per_byte");
         };
         return at(e.number("tokens")) == at(2 * e.number("tokens"));
       }},
      {"l-9-3-elementwise-intensity",
       [](E e) -> Answer {
         const Json& kernel = elementwise(e, e.number("tokens") * e.number("d_model"),
                                          {{"--flops-per-element", e.input("values")[0].dump()},
                                           {"--reads", e.input("values")[1].dump()},
                                           {"--writes", e.input("values")[2].dump()}});
         return figure(kernel, "intensity_flop_per_byte");
       }},
      {"l-9-3-score-does-not-fit",
       [](E e) -> Answer {
         const double all = e.number("sm_count") * e.number("smem_bytes");
         return !tiles(e).at("score_matrix_fits").get<bool>() &&
                !tiles_with(e, all).at("score_matrix_fits").get<bool>();
       }},
      number_of("l-9-4-block-rows", tiles, "tile_rows"),
      number_of("l-9-4-kv-passes-4k", tiles, "kv_passes"),
      number_of("l-9-4-io-accesses-4k", tiles, "io_elements"),
      number_of("l-9-4-io-reduction", tiles, "reduction_vs_unfused"),
      {"l-9-4-io-form",
       [](E e) -> Answer {
         const double s = e.number("seq_len");
         const double d = e.number("head_dim");
         return close(figure(tiles(e), "io_elements"), s * d * figure(tiles(e), "kv_passes")) &&
                close(figure(tiles(e), "io_elements"),
                      s * s * d * d / figure(tiles(e), "fast_memory_elements"));
       }},
      {"l-9-4-io-improves-with-m",
       [](E e) -> Answer {
         const Json& twice = tiles_with(e, 2 * e.number("smem_bytes"));
         return close(figure(twice, "io_elements"), figure(tiles(e), "io_elements") / 2) &&
                figure(twice, "unfused_elements") == figure(tiles(e), "unfused_elements");
       }},
      {"l-ds3-smem-ratio",
       [](E e) -> Answer {
         return figure(tiles_with(e, e.values()[1] * 1024), "io_elements") /
                figure(tiles_with(e, e.values()[0] * 1024), "io_elements");
       }},
  };
}

std::vector<GoldenRule> figures_and_softmax() {
  return {
      {"l-ds3-smem-a100|l-key-08-io-m",
       [](E e) -> Answer { return device_figure(e, "fast_memory_bytes"); }},
      {"s-device-hbm", [](E e) -> Answer { return device_figure(e, "capacity_bytes"); }},
      {"l-9-7-non-tensor-flop",
       [](E e) -> Answer {
         return figure(ask("explain ridge", e.counting()), "matrix_over_vector");
       }},
      {"l-ex3-within",  // of two printed lengths; both are stated
       [](E e) -> Answer { return e.values()[0] / e.values()[1] - 1; }},
      number_of("l-9-4-example-exp-sum", trace, "sum_exp"),
      number_of("l-9-4-online-m[12]-.*", step, "m"),
      number_of("l-9-4-online-l[12]-.*", step, "l"),
      number_of("l-9-4-online-rescale-.*", step, "rescale"),
      number_of("l-9-4-online-output", trace, "output"),
      {"l-9-4-online-exact",
       [](E e) -> Answer { return close(figure(trace(e), "output"), direct_output(e)); }},
      {"l-9-4-overflow",
       [](E e) -> Answer {
         const Json& t = trace(e);
         return t.at("sum_exp").is_null() && t.at("steps").back().at("l").is_number() &&
                t.at("lse").is_number();
       }},
      {"l-9-8-splitk-combine",
       [](E e) -> Answer {
         return close(figure(merged(e), "output"), direct_output(e)) &&
                close(figure(merged(e), "lse"), figure(trace(e), "lse"));
       }},
  };
}

}  // namespace

std::vector<GoldenRule> other_rules() {
  std::vector<GoldenRule> all = kernels_and_tiles();
  const std::vector<GoldenRule> more = figures_and_softmax();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace rafter::test
