// rafter bench append: rows of new tokens into a cache, with and without RoPE and quantisation.
#include <algorithm>
#include <cmath>
#include <memory>

#include "cli/bench_common.h"
#include "rafter/cache.h"

namespace rafter::cli {
namespace {

struct AppendAxes {
  std::vector<std::int64_t> seqlens = {1, 512};
  std::vector<std::int64_t> batches = {8};
  std::vector<std::int64_t> heads_q = {32};
  std::vector<std::int64_t> heads_kv = {8};
  std::vector<std::int64_t> head_dims = {128};
  std::vector<std::int64_t> page_sizes = {16};
  std::vector<DType> kv_dtypes = {};  // default: as the dtype
  std::vector<bool> rope = {false, true};
  std::int64_t seqlen_kv = 1024;
};

/// One point: `before` tokens of each sequence are there.
struct AppendPoint {
  std::int64_t batch = 1, seqlen = 1, before = 0, heads_q = 1, heads_kv = 1, head_dim = 1;
  std::int64_t page_size = 0;
  DType dtype = DType::bf16, kv_dtype = DType::bf16;
  bool rope = false;

  std::int64_t capacity() const { return before + seqlen; }
  bool quantised() const { return kv_dtype != dtype; }
  double rows() const { return static_cast<double>(batch * seqlen); }
  /// Read and written: k and v as they come and as they are kept, factors; with RoPE q twice, and
  /// of the tables one row a position.
  double bytes() const {
    const auto kv = static_cast<double>(2 * heads_kv * head_dim);
    const auto q = static_cast<double>(heads_q * head_dim);
    double of_row = kv * (bytes_of(dtype) + bytes_of(kv_dtype));
    of_row += quantised() ? static_cast<double>(2 * heads_kv * 4) : 0;
    of_row += rope ? 2 * q * bytes_of(dtype) : 0;
    return rows() * of_row +
           (rope ? static_cast<double>(seqlen * head_dim) * bytes_of(DType::f32) : 0);
  }
  /// Three for each element that turns.
  double flops() const {
    return rope ? 3 * rows() * static_cast<double>((heads_q + heads_kv) * head_dim) : 0;
  }
};

/// A point's tensors where the device reaches them.
class Prepared {
 public:
  static Result<Prepared> make(const AppendPoint& p, const Device& device) {
    const std::int64_t columns =
        p.page_size > 0 ? (p.capacity() + p.page_size - 1) / p.page_size : 0;
    const std::int64_t places = p.page_size > 0 ? p.batch * columns : p.batch;
    const std::int64_t rows = p.page_size > 0 ? p.page_size : p.capacity();
    const auto random = [&device](DType dtype, std::vector<std::int64_t> shape, unsigned seed) {
      const Result<Array> array = random_array(dtype, std::move(shape), seed);
      return array ? Resident::copy_of(device, *array) : Result<Resident>(array.status());
    };
    const std::vector<std::int64_t> cache = {places, rows, p.heads_kv, p.head_dim};
    const std::vector<std::int64_t> factors = {places, rows, p.heads_kv, 1};
    Result<Resident> parts[] = {random(p.dtype, {p.batch, p.seqlen, p.heads_kv, p.head_dim}, 1),
                                random(p.dtype, {p.batch, p.seqlen, p.heads_kv, p.head_dim}, 2),
                                random(p.dtype, {p.batch, p.seqlen, p.heads_q, p.head_dim}, 3),
                                Resident::empty(device, p.kv_dtype, cache, "k cache"),
                                Resident::empty(device, p.kv_dtype, cache, "v cache"),
                                Resident::empty(device, DType::f32, factors, "k factors"),
                                Resident::empty(device, DType::f32, factors, "v factors"),
                                table(p, device, 0),
                                table(p, device, 1),
                                lengths(p, device),
                                pages(p, columns, device)};
    Prepared made;
    made.point_ = p;
    for (std::size_t i = 0; i < std::size(parts); ++i) {
      if (!parts[i]) {
        return parts[i].status();
      }
      made.parts_.push_back(*std::move(parts[i]));
    }
    return made;
  }

  Status run(const Device& device, Stream stream = {}) const {
    AppendInputs in{
        .k = parts_[0].view(), .v = parts_[1].view(), .seqused_kv = parts_[9].indices()};
    AppendOutputs out{.k_cache = parts_[3].view(), .v_cache = parts_[4].view()};
    if (point_.page_size > 0) {
      in.page_table = parts_[10].indices();
    }
    if (point_.rope) {
      in.rope = {.cos = static_cast<const float*>(parts_[7].data()),
                 .sin = static_cast<const float*>(parts_[8].data()),
                 .max_position = point_.capacity(),
                 .rotary_dim = point_.head_dim / 2 * 2};
      in.q = out.q = parts_[2].view();
    }
    if (point_.quantised()) {
      out.k_scale = parts_[5].view();
      out.v_scale = parts_[6].view();
    }
    return append(in, out, device, stream);
  }

 private:
  static Result<Resident> table(const AppendPoint& p, const Device& device, int which) {
    const std::int64_t half = p.head_dim / 2;
    Result<Array> array = allocate_array(DType::f32, {p.capacity(), half}, "RoPE table");
    if (!array) {
      return array.status();
    }
    auto* const values = reinterpret_cast<float*>(array->data.get());
    for (std::int64_t i = 0; i < array->elements(); ++i) {
      const double angle =
          static_cast<double>(i / half) *
          std::pow(10000.0, -static_cast<double>(i % half) / static_cast<double>(half));
      values[i] = static_cast<float>(which == 0 ? std::cos(angle) : std::sin(angle));
    }
    return Resident::copy_of(device, *array);
  }
  static Result<Resident> lengths(const AppendPoint& p, const Device& device) {
    Result<Array> array = allocate_array(DType::i32, {p.batch}, "lengths");
    if (!array) {
      return array.status();
    }
    std::fill_n(reinterpret_cast<std::int32_t*>(array->data.get()), p.batch,
                static_cast<std::int32_t>(p.before));
    return Resident::copy_of(device, *array);
  }
  static Result<Resident> pages(const AppendPoint& p, std::int64_t columns, const Device& device) {
    AttentionProblem paged;
    paged.batch = p.batch;
    paged.seqlen_kv = p.page_size > 0 ? p.capacity() : 0;
    paged.page_size = std::max<std::int64_t>(1, p.page_size);
    paged.num_pages = p.batch * columns;
    const Result<Array> array = shuffled_pages(paged, {});
    return array ? Resident::copy_of(device, *array) : Result<Resident>(array.status());
  }

  AppendPoint point_;
  std::vector<Resident> parts_;  // k, v, q, caches, factors, cos, sin, lengths, pages
};

Result<Timing> time_point(const Prepared& made, const ThisMachine& machine, StopRule rule) {
  if (machine.device.kind == Device::Kind::cpu) {
    const Work work[] = {[&] { return made.run(machine.device); }};
    const Result<std::vector<Timing>> timings = time_alternating(std::span<const Work>(work), rule);
    return timings ? Result<Timing>((*timings)[0]) : timings.status();
  }
  const Result<DeviceClock> clock = DeviceClock::make(machine.device);
  if (!clock) {
    return clock.status();
  }
  rule.flush_bytes = flush_bytes(machine.spec);
  const TimedWork work[] = {clock->timed([&] { return made.run(machine.device, clock->stream()); },
                                         Queueing::stream, rule.flush_bytes)};
  const Result<std::vector<Timing>> timings =
      time_alternating(std::span<const TimedWork>(work), rule);
  return timings ? Result<Timing>((*timings)[0]) : timings.status();
}

BenchRow row_of(const AppendPoint& p, const Timing& timing, const ThisMachine& machine,
                std::int64_t threads) {
  BenchRow row;
  row.kind = "append";
  row.shape = Json{{"seqlen", p.seqlen},          {"seqlen_kv", p.before},
                   {"head_dim", p.head_dim},      {"heads_q", p.heads_q},
                   {"heads_kv", p.heads_kv},      {"batch", p.batch},
                   {"dtype", to_string(p.dtype)}, {"kv_dtype", to_string(p.kv_dtype)},
                   {"page_size", p.page_size},    {"rope", p.rope},
                   {"threads", threads}};
  row.kernel = "append";
  row.cost.bytes = p.bytes();
  row.cost.flops = p.flops();
  row.cost.launches = 1;
  row.cost.dtype = DType::f32;
  row.timing = timing;
  predict_row(row, machine.spec);
  row.more["bytes_per_s"] = number(row.cost.bytes / timing.seconds.median);
  row.more["tokens_per_s"] = number(p.rows() / timing.seconds.median);
  return row;
}

std::vector<AppendPoint> grid_of(const AppendAxes& axes, const std::vector<DType>& dtypes) {
  check_dtypes(dtypes);
  std::vector<AppendPoint> grid;
  for (const DType dtype : dtypes) {
    for (const DType kv : axes.kv_dtypes.empty() ? std::vector{dtype} : axes.kv_dtypes) {
      if (kv != dtype && kv != DType::int8 && kv != DType::e4m3) {
        fail_flag("--kv-dtype", to_string(kv),
                  fmt::format("{} (the dtype), int8, e4m3", to_string(dtype)));
      }
      for (const std::int64_t batch : axes.batches) {
        for (const std::int64_t heads_q : axes.heads_q) {
          for (const std::int64_t heads_kv : axes.heads_kv) {
            for (const std::int64_t head_dim : axes.head_dims) {
              for (const std::int64_t page_size : axes.page_sizes) {
                for (const std::int64_t seqlen : axes.seqlens) {
                  for (const bool rope : axes.rope) {
                    grid.push_back({batch, seqlen, axes.seqlen_kv, heads_q, heads_kv, head_dim,
                                    page_size, dtype, kv, rope});
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  return grid;
}

void bench_append(const AppendAxes& axes, const Common& common, Context& context) {
  if (common.threads != 0) {
    fail_flag("--threads", std::to_string(common.threads), "0 (append takes all cores)");
  }
  const auto run_point = [&common](const AppendPoint& point, const ThisMachine& machine,
                                   BenchResults& results) {
    const Prepared made = value_or_fail(Prepared::make(point, machine.device));
    const Timing timing = value_or_fail(time_point(made, machine, rule_of(common)));
    results.rows.push_back(row_of(point, timing, machine, common.threads));
  };
  bench_points("append", axes, common, run_point, context);
}

}  // namespace

void add_bench_append(CLI::App& bench, Context& context) {
  auto axes = std::make_shared<AppendAxes>();
  auto common = std::make_shared<Common>();
  common->dtypes = {DType::bf16};
  CLI::App* command = bench.add_subcommand("append", "new rows into a cache");
  command->footer(
      examples({{"rafter bench append", "one new token and 512, with RoPE and without"},
                {"rafter bench append --device cuda --kv-dtype bf16,int8,e4m3 --page-size 0,1,16",
                 "on the GPU, each call alone on a cold L2"},
                {"rafter bench append --baseline r.jsonl", "exit 1 when a row became slower"}}));
  add_lengths(*command, "--seqlen", axes->seqlens, "new tokens of each sequence", {1, 1 << 20});
  add_length(*command, "--seqlen-kv", axes->seqlen_kv, "tokens that are there before",
             {0, 1 << 22});
  add_lengths(*command, "--head-dim", axes->head_dims, "head_dim", {1, 256});
  add_lengths(*command, "--heads-q", axes->heads_q, "query heads, turned with RoPE", {1, 4096});
  add_lengths(*command, "--heads-kv", axes->heads_kv, "key and value heads", {1, 4096});
  add_lengths(*command, "--batch", axes->batches, "sequences", {1, 65536});
  add_dtypes(*command, "--kv-dtype", axes->kv_dtypes, "of the cache (default: as --dtype)");
  add_lengths(*command, "--page-size", axes->page_sizes, "tokens per page; 0: not paged",
              {0, 1 << 22});
  add_switches(*command, "--rope", axes->rope, "turn k and q by their positions");
  add_common(*command, *common, context);
  command->callback([axes, common, &context] { bench_append(*axes, *common, context); });
}

}  // namespace rafter::cli
