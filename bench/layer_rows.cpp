// The elementwise operations of a model's layers beside copies of as many bytes, by turns in one
// process on CUDA device 0: S tokens of 4096 elements (SwiGLU and its parts: 11008), call behind
// call in a graph, each on operands of its own, so that none is in the L2. Appends one record a row
// to FILE.jsonl, for tools/bench_tables.
// usage: rafter_layer_rows FILE.jsonl [SECONDS a row]
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "hw/cuda/passes.h"
#include "hw/cuda/runtime.h"
#include "rafter/layers.h"
#include "rafter/measure.h"

namespace {

using namespace rafter;

constexpr std::int64_t kHidden = 4096, kIntermediate = 11008, kHeads = 32, kHeadDim = 128;

void must(const Status& status) {
  if (!status) {
    fmt::print(stderr, "rafter_layer_rows: {}\n", status.message());
    std::exit(1);
  }
}
template <typename T>
T must(Result<T> result) {
  must(result.status());
  return *std::move(result);
}

/// So many operands of one shape that a graph's calls do not find theirs in the L2.
class Operands {
 public:
  Operands(std::int64_t rows, std::int64_t cols, std::int64_t calls)
      : rows_(rows),
        cols_(cols),
        memory_(must(DeviceMemory::allocate(Device::cuda(), calls * bytes()))) {
    must(memory_.fill_random(DType::bf16, 1));
  }
  std::int64_t bytes() const { return rows_ * cols_ * 2; }
  void* data(std::int64_t call) const {
    return static_cast<std::byte*>(memory_.data()) + call * bytes();
  }
  TensorView view(std::int64_t call) const { return matrix(data(call), DType::bf16, rows_, cols_); }

 private:
  std::int64_t rows_, cols_;
  DeviceMemory memory_;
};

struct Operation {
  std::string name;
  double passes;  // of one operand
  const Operands* shape;
  std::function<Status(std::int64_t call, Stream)> queue;
};

/// `calls` of them, one behind the other in a graph.
TimedWork in_graph(const DeviceClock& clock, std::int64_t calls,
                   const std::function<Status(std::int64_t, Stream)>& queue) {
  return clock.timed(
      [&clock, calls, queue]() -> Status {
        for (std::int64_t i = 0; i < calls; ++i) {
          if (Status s = queue(i, clock.stream()); !s) {
            return s;
          }
        }
        return Status::ok();
      },
      Queueing::graph);
}

nlohmann::json record_of(const Operation& operation, std::int64_t tokens, const Statistics& one,
                         const Statistics& copy, double calls, const std::string& gpu) {
  std::map<std::string, std::string> now;
  for (auto& [key, value] : describe_this_machine()) {
    now[key] = value;
  }
  const double bytes = operation.passes * static_cast<double>(operation.shape->bytes());
  nlohmann::json json;
  for (const char* key : {"date", "commit", "compiler", "driver"}) {
    json[key] = now[key];
  }
  json["gpu"] = gpu;
  json["name"] = fmt::format("layer_rows/operation:{}/tokens:{}", operation.name, tokens);
  json["kind"] = "layer_rows";
  json["kernel"] = "layers";
  json["case"] = {{"operation", operation.name}, {"tokens", tokens}, {"dtype", "bf16"}};
  json["repeats"] = one.n;
  json["median_s"] = one.median / calls;
  json["p10_s"] = one.p10 / calls;
  json["p90_s"] = one.p90 / calls;
  json["bytes"] = bytes;
  json["bytes_per_s"] = bytes / (one.median / calls);
  json["copy_s"] = copy.median / calls;
  json["share_of_copy"] = copy.median / one.median;
  return json;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    fmt::print(stderr, "usage: rafter_layer_rows FILE.jsonl [SECONDS a row]\n");
    return 2;
  }
  const Device device = Device::cuda();
  const DeviceClock clock = must(DeviceClock::make(device));
  const std::string gpu = must(cuda::properties()).name;
  StopRule rule;
  rule.min_time_s = argc > 2 ? std::atof(argv[2]) : 0.1;
  rule.max_time_s = 10 * rule.min_time_s;
  rule.min_sample_s = 0;
  std::ofstream out(argv[1], std::ios::app);
  for (const std::int64_t tokens : {1024, 4096, 16384}) {
    const std::int64_t calls = std::max<std::int64_t>(4, 65536 / tokens);
    const Operands x(tokens, kHidden, calls), y(tokens, kHidden, calls), z(tokens, kHidden, calls),
        q(tokens, 3 * kHidden, calls), gate(tokens, kIntermediate, calls),
        up(tokens, kIntermediate, calls), act(tokens, kIntermediate, calls),
        from(2 * tokens, kIntermediate, calls), to(2 * tokens, kIntermediate, calls),
        weight(1, kHidden, 1);
    std::vector<std::int32_t> order(static_cast<std::size_t>(tokens));
    std::iota(order.begin(), order.end(), 0);
    const DeviceMemory indices = must(DeviceMemory::allocate(device, tokens * 4));
    must(indices.upload(order.data(), tokens * 4));
    std::vector<float> angles(static_cast<std::size_t>(tokens * kHeadDim / 2), 0.6f);
    const auto table_bytes = static_cast<std::int64_t>(angles.size() * sizeof(float));
    const DeviceMemory table = must(DeviceMemory::allocate(device, table_bytes));
    must(table.upload(angles.data(), table_bytes));
    const Rope turn{.cos = static_cast<const float*>(table.data()),
                    .sin = static_cast<const float*>(table.data()),
                    .max_position = tokens,
                    .rotary_dim = kHeadDim};
    const IndexView rows{indices.data(), DType::i32, tokens};
    const TensorView w = weight.view(0);
    const auto apart = [&](Pointwise f, const Operands& a, const Operands* b, const Operands& c) {
      return [&, f, b](std::int64_t i, Stream s) {
        return pointwise(f, a.view(i), b != nullptr ? b->view(i) : TensorView{}, c.view(i), device,
                         s);
      };
    };
    const Operation operations[] = {
        {"add_rmsnorm", 4, &x,
         [&](std::int64_t i, Stream s) {
           return rmsnorm({.x = x.view(i), .residual = y.view(i), .weight = w},
                          {.y = z.view(i), .sum = y.view(i)}, device, s);
         }},
        {"rmsnorm", 2, &x,
         [&](std::int64_t i, Stream s) {
           return rmsnorm({.x = x.view(i), .weight = w}, {.y = z.view(i)}, device, s);
         }},
        {"add", 3, &x, apart(Pointwise::add, x, &y, z)},
        {"swiglu", 3, &gate, apart(Pointwise::swiglu, gate, &up, act)},
        {"silu", 2, &gate, apart(Pointwise::silu, gate, nullptr, act)},
        {"multiply", 3, &gate, apart(Pointwise::multiply, gate, &up, act)},
        {"rope", 4, &x,  // q and k, of a row of q, k and v
         [&](std::int64_t i, Stream s) {
           const TensorView heads =
               heads_of(columns(q.view(i), 0, 2 * kHidden), 2 * kHeads, kHeadDim);
           return rope(heads, rows, turn, heads, device, s);
         }},
        {"gather", 2, &x,
         [&](std::int64_t i, Stream s) { return gather(x.view(i), rows, z.view(i), device, s); }}};
    for (const Operation& operation : operations) {
      const double half = operation.passes / 2 * static_cast<double>(operation.shape->bytes());
      const std::int64_t copied = static_cast<std::int64_t>(half) / 16 * 16;
      const auto copy = [&](std::int64_t i, Stream s) {
        return cuda::copy_pass(to.data(i), from.data(i), copied, s.handle);
      };
      const TimedWork work[] = {in_graph(clock, calls, operation.queue),
                                in_graph(clock, calls, copy)};
      const std::vector<Timing> timings =
          must(time_alternating(std::span<const TimedWork>(work), rule));
      const nlohmann::json record = record_of(operation, tokens, timings[0].seconds,
                                              timings[1].seconds, static_cast<double>(calls), gpu);
      out << record.dump() << '\n';
      fmt::print("{:6} tokens {:12}: {:8.2f} us, {:.0f}% of copy\n", tokens, operation.name,
                 1e6 * record["median_s"].get<double>(),
                 100 * record["share_of_copy"].get<double>());
    }
  }
  return out ? 0 : 1;
}
