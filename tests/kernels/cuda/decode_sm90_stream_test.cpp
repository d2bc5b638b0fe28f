// decode_sm90 right behind kernels that write what it reads: both begin early (programmatic
// dependent launch), and see each other's memory all the same.
#include <atomic>
#include <thread>

#include "kernels/cuda/decode_sm90_launch.h"
#include "kernels/cuda/decode_sm90_rig.h"
#include "rafter/cache.h"

namespace rafter::testing {
namespace {

constexpr std::int64_t kSteps = 100;

/// Decoding of so many tokens: each is appended to pages, lengths grow by a kernel too.
class Decoding {
 public:
  explicit Decoding(const AttentionProblem& problem)
      : p_(problem),
        rig_(problem, kSteps),
        k_(Rig::random_bits(kSteps * token(), 21)),
        v_(Rig::random_bits(kSteps * token(), 22)),
        lengths_(all_lengths()),
        zeros_(std::vector<std::int32_t>(index(p_.batch))),
        unread_(index(p_.batch * 4)) {}

  std::vector<std::int32_t> lengths_of(std::int64_t step) const {
    constexpr std::int32_t kFirst[] = {300, 77, 1000, 0};
    std::vector<std::int32_t> lengths;
    for (std::int64_t b = 0; b < p_.batch; ++b) {
      lengths.push_back(kFirst[b] + static_cast<std::int32_t>(step));
    }
    return lengths;
  }
  void begin() {
    rig_.fill_caches();  // tokens of a run before are gone
    rig_.set(lengths_of(0), 5);
    rig_.poison();
  }
  Rig& rig() { return rig_; }

  /// The token of a step, behind the tokens before.
  void append_token(std::int64_t step, cudaStream_t stream) const {
    AppendInputs in{.k = rows(k_, step), .v = rows(v_, step), .seqused_kv = lengths_at(step)};
    in.page_table = rig_.pages();
    expect(append(in, {.k_cache = rig_.k(), .v_cache = rig_.v()}, Device::cuda(), {stream}));
  }
  /// What decode takes for lengths, as rows of a cache of one place: f32 rows are copied bit by
  /// bit.
  void write_lengths(std::int64_t step, cudaStream_t stream) const {
    const auto words = [this](const void* data) {
      return TensorView::contiguous(const_cast<void*>(data), DType::f32, p_.batch, 1, 1, 1);
    };
    const TensorView from = words(lengths_at(step + 1).data);
    const AppendInputs in{
        .k = from, .v = from, .seqused_kv = {zeros_.data(), DType::i32, p_.batch, 0}};
    expect(append(in, {.k_cache = words(rig_.used().data), .v_cache = words(unread_.data())},
                  Device::cuda(), {stream}));
  }
  /// All steps; by turns keys and lengths are what decode's last neighbour wrote.
  void queue(cudaStream_t stream) const {
    for (std::int64_t step = 0; step < kSteps; ++step) {
      if (step % 2 == 0) {
        append_token(step, stream);
        write_lengths(step, stream);
      } else {
        write_lengths(step, stream);
        append_token(step, stream);
      }
      rig_.run(stream, step);
    }
  }
  /// The same with nothing in flight when the next thing begins.
  std::vector<std::uint32_t> one_by_one() {
    begin();
    for (std::int64_t step = 0; step < kSteps; ++step) {
      append_token(step, nullptr);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      rig_.set_lengths(lengths_of(step + 1));
      rig_.run(nullptr, step);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    return rig_.bits();
  }

 private:
  static void expect(const Status& status) { EXPECT_TRUE(status) << status.message(); }
  std::int64_t token() const { return p_.batch * p_.heads_kv * p_.head_dim; }
  TensorView rows(const DeviceBuffer& all, std::int64_t step) const {
    auto* const first = static_cast<std::uint16_t*>(all.data()) + step * token();
    return TensorView::contiguous(first, p_.dtype, p_.batch, 1, p_.heads_kv, p_.head_dim);
  }
  std::vector<std::int32_t> all_lengths() const {
    std::vector<std::int32_t> all;
    for (std::int64_t step = 0; step <= kSteps; ++step) {
      const std::vector<std::int32_t> one = lengths_of(step);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  IndexView lengths_at(std::int64_t step) const {
    return {static_cast<const std::int32_t*>(lengths_.data()) + step * p_.batch, DType::i32,
            p_.batch, 0};
  }

  AttentionProblem p_;
  Rig rig_;
  DeviceBuffer k_, v_, lengths_, zeros_, unread_;
};

void CUDART_CB wait_for(void* released) {
  while (!static_cast<std::atomic<bool>*>(released)->load()) {
    std::this_thread::yield();
  }
}

/// Step of the first difference of results that lie one behind the other; -1: none.
std::int64_t first_difference(const std::vector<std::uint32_t>& a,
                              const std::vector<std::uint32_t>& b, std::int64_t each) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) {
      return static_cast<std::int64_t>(i) / each;
    }
  }
  return -1;
}

/// With clusters (one sequence) and without; with keys and with columns to warps.
TEST(DecodeSm90Stream, SeesWhatTheKernelsRightBeforeItAppended) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t group : {4, 12}) {
    for (const std::int64_t batch : {1, 4}) {
      const AttentionProblem problem = rig_problem(batch, group);
      Decoding decoding(problem);
      const std::vector<std::uint32_t> expected = decoding.one_by_one();
      cudaStream_t stream = nullptr;
      ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      for (const bool in_graph : {false, true}) {
        SCOPED_TRACE(::testing::Message() << batch << " sequences, " << group
                                          << (in_graph ? " heads, a graph" : " heads, a stream"));
        decoding.begin();
        if (in_graph) {
          cudaGraph_t graph = nullptr;
          cudaGraphExec_t ready = nullptr;
          ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
          decoding.queue(stream);
          ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
          ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
          ASSERT_EQ(cudaGraphLaunch(ready, stream), cudaSuccess);
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
          (void)cudaGraphExecDestroy(ready);
          (void)cudaGraphDestroy(graph);
        } else {
          std::atomic<bool> released = false;  // all is queued before anything runs
          ASSERT_EQ(cudaLaunchHostFunc(stream, wait_for, &released), cudaSuccess);
          decoding.queue(stream);
          released = true;
          ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        }
        const std::vector<std::uint32_t> bits = decoding.rig().bits();
        ASSERT_EQ(bits.size(), expected.size());
        EXPECT_EQ(first_difference(bits, expected, batch * problem.heads_q * problem.head_dim), -1)
            << "first step that differs (of o; lse follows)";
      }
      (void)cudaStreamDestroy(stream);
    }
  }
}

/// Where CTAs have whole heads, which ask for keys at once. A token of every sequence is replaced
/// by the kernel right before each: by turns in any of the tiles.
TEST(DecodeSm90Stream, WholeHeadsSeeWhatTheKernelRightBeforeThemReplaced) {
  RAFTER_SKIP_WITHOUT_SM90();
  constexpr std::int64_t kReplaced = 40;
  const AttentionProblem problem = heads_problem();
  EXPECT_EQ(launch_of(problem).way, "heads");
  const std::int64_t token = problem.batch * problem.heads_kv * problem.head_dim;
  Rig rig(problem, kReplaced);
  const DeviceBuffer k(Rig::random_bits(kReplaced * token, 21));
  const DeviceBuffer v(Rig::random_bits(kReplaced * token, 22));
  std::vector<std::int32_t> places;
  for (std::int64_t step = 0; step < kReplaced; ++step) {
    places.insert(places.end(), index(problem.batch), static_cast<std::int32_t>(step * 77 % 600));
  }
  const DeviceBuffer at(places);
  const auto run_step = [&](std::int64_t step, cudaStream_t stream) {
    const auto rows = [&](const DeviceBuffer& all) {
      const auto* const first = static_cast<const std::uint16_t*>(all.data()) + step * token;
      return TensorView::contiguous(first, problem.dtype, problem.batch, 1, problem.heads_kv,
                                    problem.head_dim);
    };
    const IndexView place{static_cast<const std::int32_t*>(at.data()) + step * problem.batch,
                          DType::i32, problem.batch, 0};
    const Status status =
        append({.k = rows(k), .v = rows(v), .seqused_kv = place},
               {.k_cache = rig.k(), .v_cache = rig.v()}, Device::cuda(), {stream});
    EXPECT_TRUE(status) << status.message();
    if (stream == nullptr) {
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    rig.run(stream, step);
  };
  rig.poison();
  for (std::int64_t step = 0; step < kReplaced; ++step) {  // nothing in flight
    run_step(step, nullptr);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  const std::vector<std::uint32_t> expected = rig.bits();
  const std::int64_t each_step = problem.batch * problem.heads_q * problem.head_dim;
  EXPECT_FALSE(std::equal(expected.begin(), expected.begin() + each_step,
                          expected.begin() + each_step));  // a token makes a difference
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  for (int repeat = 0; repeat < 3; ++repeat) {
    rig.fill_caches();
    rig.poison();
    std::atomic<bool> released = false;  // all is queued before anything runs
    ASSERT_EQ(cudaLaunchHostFunc(stream, wait_for, &released), cudaSuccess);
    for (std::int64_t step = 0; step < kReplaced; ++step) {
      run_step(step, stream);
    }
    released = true;
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(first_difference(rig.bits(), expected, each_step), -1)
        << "first step that differs (of o; lse follows)";
  }
  (void)cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace rafter::testing
