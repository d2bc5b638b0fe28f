// Decode beside a loop that only loads the same cache, by turns in one process: what share of what
// the threads can read a kernel takes, whoever else uses the machine. 32 query heads, 8 of keys and
// values, head_dim 128, 8192 keys, one sequence and eight. One JSON line per kernel and cache.
// usage: rafter_decode_reads [THREADS [SECONDS]]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "dispatch/kernel_entry.h"
#include "measure/loops.h"
#include "rafter/attention.h"

namespace rafter {
std::span<const KernelEntry> entries_decode_simd();

namespace {

constexpr std::int64_t kKeys = 8192, kHeads = 8, kHeadsQ = 32, kHeadDim = 128;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/// Floats that begin a page: rows that cross lines take tiles four times as long to load.
class Floats {
 public:
  explicit Floats(std::int64_t count)
      : size_(static_cast<std::size_t>(count)),
        data_(static_cast<float*>(
            std::aligned_alloc(4096, (size_ * sizeof(float) + 4095) / 4096 * 4096))) {}
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
  ~Floats() { std::free(data_); }
  float* data() { return data_; }
  const float* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  float* data_;
};

/// Loads all of k and v with the loop of the probe; returns something that depends on what is
/// there.
float read_all(const Floats& k, const Floats& v, int threads) {
  constexpr std::size_t kBlock = 32768;  // 128 KiB, K and V by turns
  float all = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : all)
  for (std::size_t block = 0; block < 2 * k.size() / kBlock; ++block) {
    const Floats& from = block % 2 == 0 ? k : v;
    all += measure::loop_read(from.data() + block / 2 * kBlock, kBlock);
  }
  return all;
}

struct Turn {
  std::string name;
  std::vector<double> seconds;
};

void run_case(std::int64_t batch, DType kv_dtype, int threads, double seconds) {
  const std::int64_t bytes = kv_dtype == DType::int8 ? 1 : 2;
  const std::int64_t elements = batch * kKeys * kHeads * kHeadDim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](void* data, std::int64_t count, bool int8) {
    float some[4099];
    for (float& x : some) {
      x = normal(random);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const float x = some[i % 4099];
      if (int8) {
        static_cast<std::int8_t*>(data)[i] =
            static_cast<std::int8_t>(std::clamp<long>(std::lround(30 * x), -127, 127));
      } else {
        static_cast<std::uint16_t*>(data)[i] = f32_to_bf16(x);
      }
    }
  };
  Floats k(elements * bytes / 4), v(elements * bytes / 4);
  fill(k.data(), elements, bytes == 1);
  fill(v.data(), elements, bytes == 1);
  std::vector<float> factors(static_cast<std::size_t>(batch * kKeys * kHeads), 0.03f);
  std::vector<std::uint16_t> q(static_cast<std::size_t>(batch * kHeadsQ * kHeadDim)), o(q.size());
  std::vector<float> lse(static_cast<std::size_t>(batch * kHeadsQ));
  fill(q.data(), static_cast<std::int64_t>(q.size()), false);

  KernelProblem problem = {.attention = {.batch = batch,
                                         .heads_q = kHeadsQ,
                                         .heads_kv = kHeads,
                                         .seqlen_q = 1,
                                         .seqlen_kv = kKeys,
                                         .head_dim = kHeadDim,
                                         .head_dim_v = kHeadDim,
                                         .dtype = DType::bf16,
                                         .softmax_scale = 1 / std::sqrt(float{kHeadDim})},
                           .threads = threads};
  problem.attention.kv_dtype = kv_dtype;
  const auto cache = [&](void* data) {
    return TensorView::contiguous(data, kv_dtype, batch, kKeys, kHeads, kHeadDim);
  };
  const auto rows = [&](void* data) {
    return TensorView::contiguous(data, DType::bf16, batch, 1, kHeadsQ, kHeadDim);
  };
  ForwardInputs in = {rows(q.data()), cache(k.data()), cache(v.data())};
  if (bytes == 1) {
    in.k_scale = in.v_scale =
        TensorView::contiguous(factors.data(), DType::f32, batch, kKeys, kHeads, 1);
  }
  const ForwardOutputs out = {rows(o.data()), LseView::contiguous(lse.data(), batch, kHeadsQ, 1)};

  std::vector<const KernelEntry*> kernels;
  std::vector<Turn> turns = {{"read", {}}};
  std::int64_t workspace_bytes = 0;
  for (const KernelEntry& kernel : entries_decode_simd()) {
    if (kernel.machine_has().yes && kernel.accepts(problem).yes &&
        kernel.name != "decode_simd_portable") {
      kernels.push_back(&kernel);
      turns.push_back({std::string(kernel.name), {}});
      workspace_bytes = std::max(workspace_bytes, kernel.workspace(problem));
    }
  }
  std::vector<std::byte> memory(static_cast<std::size_t>(workspace_bytes) + 64);
  void* aligned = memory.data();
  std::size_t space = memory.size();
  std::align(64, static_cast<std::size_t>(workspace_bytes), aligned, space);

  float sink = 0;
  const double end = seconds_now() + seconds;
  while (turns[0].seconds.size() < 7 || seconds_now() < end) {
    double start = seconds_now();
    sink += read_all(k, v, threads);
    turns[0].seconds.push_back(seconds_now() - start);
    for (std::size_t i = 0; i < kernels.size(); ++i) {
      start = seconds_now();
      if (!kernels[i]->forward({problem, in, out, {aligned, workspace_bytes}})) {
        std::abort();
      }
      turns[i + 1].seconds.push_back(seconds_now() - start);
    }
  }
  const double read_s = median(turns[0].seconds);
  for (const Turn& turn : turns) {
    const double s = median(turn.seconds);
    std::printf(
        "{\"record\":\"decode_read\",\"kernel\":\"%s\",\"case\":{\"batch\":%ld,\"seqlen_kv\":%ld,"
        "\"heads_q\":%ld,\"heads_kv\":%ld,\"head_dim\":%ld,\"kv_dtype\":\"%s\",\"threads\":%d},"
        "\"n\":%zu,\"median_s\":%.5g,\"least_s\":%.5g,\"bytes_per_s\":%.5g,"
        "\"share_of_read\":%.4g,\"tokens_per_s\":%.5g,\"sink\":%d}\n",
        turn.name.c_str(), batch, kKeys, kHeadsQ, kHeads, kHeadDim,
        std::string(to_string(kv_dtype)).c_str(), threads, turn.seconds.size(), s,
        *std::min_element(turn.seconds.begin(), turn.seconds.end()),
        static_cast<double>(2 * elements * bytes) / s, read_s / s, static_cast<double>(batch) / s,
        sink > 0 ? 1 : 0);
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace rafter

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1.0;
  if (threads < 1 || !(seconds > 0)) {
    std::fprintf(stderr, "usage: rafter_decode_reads [THREADS [SECONDS]]\n");
    return 2;
  }
  for (const std::int64_t batch : {std::int64_t{1}, std::int64_t{8}}) {
    for (const rafter::DType kv_dtype : {rafter::DType::bf16, rafter::DType::int8}) {
      rafter::run_case(batch, kv_dtype, threads, seconds);
    }
  }
  return 0;
}
