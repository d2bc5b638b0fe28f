// The softmax over landed scores beside copies of the same bytes, by turns in one process on CUDA
// device 0: 16 heads of S rows of S keys, as much of them as a wave of 4 GiB holds, each call alone
// on a cold L2. Appends one record a row to FILE.jsonl, for tools/bench_tables.
// usage: rafter_softmax_rows FILE.jsonl [SECONDS a row]
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "hw/cuda/passes.h"
#include "hw/cuda/runtime.h"
#include "kernels/cuda/scores.h"
#include "rafter/measure.h"

namespace {

using namespace rafter;

constexpr std::int64_t kHeads = 16, kWaveBytes = std::int64_t{4} << 30;

template <typename T>
T must(Result<T> result) {
  if (!result) {
    fmt::print(stderr, "rafter_softmax_rows: {}\n", result.status().message());
    std::exit(1);
  }
  return *std::move(result);
}

/// Scores of 16 heads, and the lse of their rows.
struct Scores {
  DType dtype;
  std::int64_t seqlen;
  DeviceMemory matrix, other, lse;

  std::int64_t rows() const {  // of each head
    return std::min(seqlen, kWaveBytes / 2 / seqlen / kHeads);
  }
  std::int64_t bytes() const { return kHeads * rows() * seqlen * 2; }

  Status softmax(Stream stream) const {
    cuda::ScoreProblem problem;
    problem.heads_q = kHeads;
    problem.seqlen_q = static_cast<int>(rows());
    problem.seqlen_kv = static_cast<int>(seqlen);
    const cuda::ScoreWave wave{.scores = matrix.data(),
                               .row_stride = seqlen,
                               .pair_stride = rows() * seqlen,
                               .pairs = kHeads,
                               .rows = static_cast<int>(rows())};
    const cuda::LseTarget target{static_cast<float*>(lse.data()), 0, rows(), 1};
    const auto launch =
        dtype == DType::f16 ? cuda::launch_softmax<DType::f16> : cuda::launch_softmax<DType::bf16>;
    return launch(problem, wave, target, static_cast<int>(rows()), false, seqlen, stream.handle);
  }
  Status copy(Stream stream) const {
    return cuda::copy_pass(other.data(), matrix.data(), bytes(), stream.handle);
  }
};

nlohmann::json record_of(const Scores& scores, const Timing& softmax, const Timing& copy,
                         const std::string& gpu) {
  std::map<std::string, std::string> now;
  for (auto& [key, value] : describe_this_machine()) {
    now[key] = value;
  }
  const double bytes = 2.0 * static_cast<double>(scores.bytes());
  nlohmann::json json;
  for (const char* key : {"date", "commit", "compiler", "driver"}) {
    json[key] = now[key];
  }
  json["gpu"] = gpu;
  json["name"] =
      fmt::format("softmax_rows/keys:{}/dtype:{}", scores.seqlen, to_string(scores.dtype));
  json["kind"] = "softmax_rows";
  json["kernel"] = "softmax_rows";
  json["case"] = {{"keys", scores.seqlen},
                  {"rows", kHeads * scores.rows()},
                  {"dtype", to_string(scores.dtype)}};
  json["repeats"] = softmax.seconds.n;
  json["median_s"] = softmax.seconds.median;
  json["p10_s"] = softmax.seconds.p10;
  json["p90_s"] = softmax.seconds.p90;
  json["bytes"] = bytes;
  json["bytes_per_s"] = bytes / softmax.seconds.median;
  json["copy_s"] = copy.seconds.median;
  json["copy_bytes_per_s"] = bytes / copy.seconds.median;
  json["share_of_copy"] = copy.seconds.median / softmax.seconds.median;
  return json;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    fmt::print(stderr, "usage: rafter_softmax_rows FILE.jsonl [SECONDS a row]\n");
    return 2;
  }
  const Device device = Device::cuda();
  const DeviceClock clock = must(DeviceClock::make(device));
  const cuda::DeviceProperties properties = must(cuda::properties());
  StopRule rule;
  rule.min_time_s = argc > 2 ? std::atof(argv[2]) : 0.1;
  rule.max_time_s = 10 * rule.min_time_s;
  rule.flush_bytes = 2 * static_cast<double>(properties.l2_bytes);
  std::ofstream out(argv[1], std::ios::app);
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const std::int64_t seqlen : {1024, 2048, 4096, 8192, 16384, 32768}) {
      Scores scores{dtype, seqlen, {}, {}, {}};
      scores.matrix = must(DeviceMemory::allocate(device, scores.bytes()));
      scores.other = must(DeviceMemory::allocate(device, scores.bytes()));
      scores.lse = must(DeviceMemory::allocate(device, kHeads * scores.rows() * 4));
      const Status filled = scores.matrix.fill_random(dtype, 1);
      if (!filled) {
        fmt::print(stderr, "rafter_softmax_rows: {}\n", filled.message());
        return 1;
      }
      const TimedWork work[] = {clock.timed([&] { return scores.softmax(clock.stream()); },
                                            Queueing::stream, rule.flush_bytes),
                                clock.timed([&] { return scores.copy(clock.stream()); },
                                            Queueing::stream, rule.flush_bytes)};
      const std::vector<Timing> timings =
          must(time_alternating(std::span<const TimedWork>(work), rule));
      const nlohmann::json record = record_of(scores, timings[0], timings[1], properties.name);
      out << record.dump() << '\n';
      fmt::print("{:5} keys {}: {:8.1f} us, {:.0f}% of copy\n", seqlen, to_string(dtype),
                 1e6 * timings[0].seconds.median, 100 * record["share_of_copy"].get<double>());
    }
  }
  return out ? 0 : 1;
}
