// A minimal decode loop over a paged cache, on a CPU or a GPU: sequences of different lengths take
// a page from a common pool whenever their last one is full.
//   decode [cpu|cuda] [STEPS]
// The "model" is a hash: a token and its position give its query, key and value, and the largest
// element of the attention's output names the next token. At the end the last step is computed
// again over keys and values that lie one after the other.
#include <rafter/attention.h>
#include <rafter/cache.h>
#include <rafter/measure.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr std::int64_t kBatch = 4, kHeadsQ = 8, kHeadsKv = 2, kHeadDim = 64;
constexpr std::int64_t kPageSize = 32, kMaxTokens = 512;
constexpr std::int64_t kPagesPerSequence = kMaxTokens / kPageSize;
constexpr std::int64_t kPages = kBatch * kPagesPerSequence;
constexpr rafter::DType kDType = rafter::DType::bf16;

/// Ends the program with the one line of an error.
void check(const rafter::Status& status) {
  if (!status) {
    std::cerr << status.message() << "\n";
    std::exit(1);
  }
}
template <typename T>
T checked(rafter::Result<T> result) {
  check(result.status());
  return *std::move(result);
}

/// Memory of the device that computes.
class Buffer {
 public:
  Buffer(const rafter::Device& device, std::int64_t bytes)
      : host_(rafter::Device::Kind::cpu == device.kind) {
    bytes = std::max<std::int64_t>(bytes, 64);
    if (host_) {
      lines_.resize(static_cast<std::size_t>(bytes + 63) / 64);
    } else {
      device_memory_ = checked(rafter::DeviceMemory::allocate(device, bytes));
    }
  }
  void* data() { return host_ ? static_cast<void*>(lines_.data()) : device_memory_.data(); }
  template <typename T>
  void put(const std::vector<T>& values) {
    const std::size_t bytes = values.size() * sizeof(T);
    if (host_) {
      std::memcpy(data(), values.data(), bytes);
    } else {
      check(device_memory_.upload(values.data(), static_cast<std::int64_t>(bytes)));
    }
  }
  template <typename T>
  void get(std::vector<T>& values) {
    const std::size_t bytes = values.size() * sizeof(T);
    if (host_) {
      std::memcpy(values.data(), data(), bytes);
    } else {
      check(device_memory_.download(values.data(), static_cast<std::int64_t>(bytes)));
    }
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  bool host_;
  std::vector<Line> lines_;
  rafter::DeviceMemory device_memory_;
};

/// One row of the model: heads × head_dim values between -1 and 1, in bf16.
void add_row(std::vector<std::uint16_t>& rows, std::int64_t heads, std::int64_t token,
             std::int64_t position, double kind) {
  for (std::int64_t i = 0; i < heads * kHeadDim; ++i) {
    const double phase =
        static_cast<double>(token * 31 + position) * (0.11 + kind) + static_cast<double>(i) * 0.7;
    rows.push_back(rafter::f32_to_bf16(static_cast<float>(std::sin(phase))));
  }
}

/// Pages that no sequence has.
class PagePool {
 public:
  PagePool() {
    for (std::int64_t page = kPages; page-- > 0;) {
      free_.push_back(static_cast<std::int32_t>(page));
    }
  }
  std::int32_t take() {
    const std::int32_t page = free_.back();
    free_.pop_back();
    return page;
  }

 private:
  std::vector<std::int32_t> free_;
};

struct Sequence {
  std::int64_t token = 0;
  std::vector<std::uint16_t> keys, values;  // all of them, for the check at the end
};

rafter::TensorView view(void* data, std::int64_t batch, std::int64_t seqlen, std::int64_t heads) {
  return rafter::TensorView::contiguous(data, kDType, batch, seqlen, heads, kHeadDim);
}

/// The output of one query over keys and values that lie one after the other, in f32 on the CPU.
std::vector<float> attend_again(const std::vector<std::uint16_t>& query, const Sequence& sequence,
                                std::int64_t tokens) {
  const rafter::Device cpu = rafter::Device::cpu();
  const rafter::Plan plan = checked(rafter::plan({.heads_q = kHeadsQ,
                                                  .heads_kv = kHeadsKv,
                                                  .seqlen_q = 1,
                                                  .seqlen_kv = tokens,
                                                  .head_dim = kHeadDim,
                                                  .dtype = kDType},
                                                 cpu, {.kernel = "forward_reference"}));
  std::vector<float> o(kHeadsQ * kHeadDim);
  Buffer q(cpu, kHeadsQ * kHeadDim * 2), workspace(cpu, plan.workspace_bytes());
  Buffer k(cpu, tokens * kHeadsKv * kHeadDim * 2), v(cpu, tokens * kHeadsKv * kHeadDim * 2);
  q.put(query);
  k.put(sequence.keys);
  v.put(sequence.values);
  check(plan.forward(
      {.q = view(q.data(), 1, 1, kHeadsQ),
       .k = view(k.data(), 1, tokens, kHeadsKv),
       .v = view(v.data(), 1, tokens, kHeadsKv)},
      {.o = rafter::TensorView::contiguous(o.data(), rafter::DType::f32, 1, 1, kHeadsQ, kHeadDim)},
      {workspace.data(), plan.workspace_bytes()}));
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string where = argc > 1 ? argv[1] : "cpu";
  const std::int64_t steps = argc > 2 ? std::atoll(argv[2]) : 100;
  if ((where != "cpu" && where != "cuda") || steps < 1 || steps > kMaxTokens) {
    std::cerr << "usage: decode [cpu|cuda] [STEPS], 1 to " << kMaxTokens << " steps\n";
    return 2;
  }
  const rafter::Device device = where == "cpu" ? rafter::Device::cpu() : rafter::Device::cuda();

  // Planned once, for the capacity: lengths and pages are data.
  const rafter::Plan plan = checked(rafter::plan({.batch = kBatch,
                                                  .heads_q = kHeadsQ,
                                                  .heads_kv = kHeadsKv,
                                                  .seqlen_q = 1,
                                                  .seqlen_kv = kMaxTokens,
                                                  .head_dim = kHeadDim,
                                                  .dtype = kDType,
                                                  .layout = rafter::Layout::paged,
                                                  .page_size = kPageSize,
                                                  .num_pages = kPages,
                                                  .seqused_kv = true},
                                                 device));
  std::cout << "kernel " << plan.kernel() << "\n";

  constexpr std::int64_t kRow = kHeadsKv * kHeadDim * 2;  // bytes of one token's key
  Buffer k_cache(device, kPages * kPageSize * kRow), v_cache(device, kPages * kPageSize * kRow);
  Buffer q(device, kBatch * kHeadsQ * kHeadDim * 2), o(device, kBatch * kHeadsQ * kHeadDim * 2);
  Buffer k(device, kBatch * kRow), v(device, kBatch * kRow);
  Buffer table(device, kPages * 4), before(device, kBatch * 4), after(device, kBatch * 4);
  Buffer workspace(device, plan.workspace_bytes());
  const auto pages = [](Buffer& cache) { return view(cache.data(), kPages, kPageSize, kHeadsKv); };
  const auto lengths = [](Buffer& buffer) {
    return rafter::IndexView{.data = buffer.data(), .dtype = rafter::DType::i32, .size = kBatch};
  };
  const rafter::IndexView page_table{
      .data = table.data(), .dtype = rafter::DType::i32, .size = kPages, .cols = kPagesPerSequence};

  PagePool pool;
  std::vector<Sequence> sequences(kBatch);
  std::vector<std::int32_t> table_rows(kPages, -1), old_lengths(kBatch), new_lengths(kBatch);
  std::vector<std::uint16_t> queries, outputs(kBatch * kHeadsQ * kHeadDim);
  const auto started = std::chrono::steady_clock::now();
  for (std::int64_t step = 0; step < steps; ++step) {
    std::vector<std::uint16_t> keys, values;
    queries.clear();
    for (std::int64_t b = 0; b < kBatch; ++b) {
      // Sequence b starts b steps late: until then it has no token, and its output is 0.
      const std::int64_t length = std::max<std::int64_t>(step - b, 0);
      const auto at = static_cast<std::size_t>(b);
      old_lengths[at] = static_cast<std::int32_t>(length);
      new_lengths[at] = static_cast<std::int32_t>(step < b ? 0 : length + 1);
      if (step >= b && length % kPageSize == 0) {
        table_rows[static_cast<std::size_t>(b * kPagesPerSequence + length / kPageSize)] =
            pool.take();
      }
      Sequence& sequence = sequences[at];
      add_row(queries, kHeadsQ, sequence.token, length, 0.0);
      const auto first = static_cast<std::ptrdiff_t>(keys.size());
      add_row(keys, kHeadsKv, sequence.token, length, 0.1);
      add_row(values, kHeadsKv, sequence.token, length, 0.2);
      if (step >= b) {
        sequence.keys.insert(sequence.keys.end(), keys.begin() + first, keys.end());
        sequence.values.insert(sequence.values.end(), values.begin() + first, values.end());
      }
    }
    q.put(queries);
    k.put(keys);
    v.put(values);
    table.put(table_rows);
    before.put(old_lengths);
    after.put(new_lengths);
    // A sequence without a page yet has page -1: its token is not written, and it sees no key.
    check(rafter::append({.k = view(k.data(), kBatch, 1, kHeadsKv),
                          .v = view(v.data(), kBatch, 1, kHeadsKv),
                          .seqused_kv = lengths(before),
                          .page_table = page_table},
                         {.k_cache = pages(k_cache), .v_cache = pages(v_cache)}, device));
    check(plan.forward({.q = view(q.data(), kBatch, 1, kHeadsQ),
                        .k = pages(k_cache),
                        .v = pages(v_cache),
                        .seqused_kv = lengths(after),
                        .page_table = page_table},
                       {.o = view(o.data(), kBatch, 1, kHeadsQ)},
                       {workspace.data(), plan.workspace_bytes()}));
    if (device.kind == rafter::Device::Kind::cuda) {
      check(rafter::synchronize(device, {}));
    }
    o.get(outputs);
    for (std::int64_t b = 0; b < kBatch; ++b) {
      const auto row = outputs.begin() + b * kHeadsQ * kHeadDim;
      const auto largest =
          std::max_element(row, row + kHeadsQ * kHeadDim, [](std::uint16_t x, std::uint16_t y) {
            return rafter::bf16_to_f32(x) < rafter::bf16_to_f32(y);
          });
      sequences[static_cast<std::size_t>(b)].token = largest - row;
    }
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - started;
  std::cout << steps << " steps of " << kBatch << " sequences, "
            << static_cast<double>(steps) / took.count() << " steps/s\n";

  float worst = 0;
  for (std::int64_t b = 0; b < std::min(kBatch, steps); ++b) {
    const std::int64_t row = b * kHeadsQ * kHeadDim;
    const std::vector<std::uint16_t> query(queries.begin() + row,
                                           queries.begin() + row + kHeadsQ * kHeadDim);
    const std::vector<float> expected =
        attend_again(query, sequences[static_cast<std::size_t>(b)], steps - b);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const float found = rafter::bf16_to_f32(outputs[static_cast<std::size_t>(row) + i]);
      worst = std::max(worst, std::abs(found - expected[i]));
    }
  }
  std::cout << "largest difference from attention without pages: " << worst << "\n";
  return worst < 0.01f ? 0 : 1;
}
