// Many graphs at once: decode of batches of several sizes that share one workspace, captured from
// the largest to the smallest (a workspace of the last one would be too small), replayed in any
// order.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/decode_sm90_rig.h"

namespace rafter::testing {
namespace {

constexpr std::int64_t kMostSequences = 5;

/// Decode of the first 1 to 5 of the same sequences, each number with results of its own.
class Batches {
 public:
  Batches()
      : p_(problem_of(kMostSequences)),
        q_(Rig::random_bits(p_.batch * p_.heads_q * p_.head_dim, 1)),
        k_(Rig::random_bits(p_.num_pages * p_.page_size * p_.heads_kv * p_.head_dim, 2)),
        v_(Rig::random_bits(p_.num_pages * p_.page_size * p_.heads_kv * p_.head_dim, 3)),
        used_(std::vector<std::int32_t>{1500, 2048, 17, 0, 900}),
        pages_(shuffled_pages()) {
    for (std::int64_t b = 1; b <= kMostSequences; ++b) {
      plans_.push_back(must(plan(problem_of(b), Device::cuda(), {.kernel = "decode_sm90"})));
      workspace_bytes_ = std::max(workspace_bytes_, plans_.back().workspace_bytes());
      o_.emplace_back(index(b * p_.heads_q * p_.head_dim * 4));
      lse_.emplace_back(index(b * p_.heads_q * 4));
    }
    workspace_.emplace_back(index(workspace_bytes_));
  }

  void run(std::int64_t b, cudaStream_t stream = nullptr) const {
    const auto pages = [this](const DeviceBuffer& memory) {
      return TensorView::contiguous(memory.data(), DType::bf16, p_.num_pages, p_.page_size,
                                    p_.heads_kv, p_.head_dim);
    };
    const DeviceBuffer &o = o_[index(b - 1)], &lse = lse_[index(b - 1)];
    ForwardInputs in{
        .q = TensorView::contiguous(q_.data(), DType::bf16, b, 1, p_.heads_q, p_.head_dim),
        .k = pages(k_),
        .v = pages(v_)};
    in.seqused_kv = {used_.data(), DType::i32, b, 0};
    in.page_table = {pages_.data(), DType::i32, b * cols(), cols()};
    const Status status = plans_[index(b - 1)].forward(
        in,
        {.o = TensorView::contiguous(o.data(), DType::f32, b, 1, p_.heads_q, p_.head_dim),
         .lse = LseView::contiguous(static_cast<float*>(lse.data()), b, p_.heads_q, 1)},
        {workspace_[0].data(), workspace_bytes_}, {stream});
    EXPECT_TRUE(status) << status.message();
  }
  void poison_results(std::int64_t b) {
    o_[index(b - 1)].poison();
    lse_[index(b - 1)].poison();
  }
  std::vector<std::uint32_t> bits(std::int64_t b) const {
    std::vector<std::uint32_t> all = o_[index(b - 1)].download<std::uint32_t>();
    const std::vector<std::uint32_t> lse = lse_[index(b - 1)].download<std::uint32_t>();
    all.insert(all.end(), lse.begin(), lse.end());
    return all;
  }
  /// Of each number of sequences, one run after the other.
  std::vector<std::vector<std::uint32_t>> bits_one_by_one() {
    std::vector<std::vector<std::uint32_t>> all;
    for (std::int64_t b = 1; b <= kMostSequences; ++b) {
      workspace_[0].poison();
      run(b);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      all.push_back(bits(b));
    }
    workspace_[0].poison();
    return all;
  }

 private:
  static AttentionProblem problem_of(std::int64_t batch) {
    AttentionProblem p = rig_problem(batch);
    p.num_pages = kMostSequences * p.seqlen_kv / p.page_size;
    return p;
  }
  std::int64_t cols() const { return p_.seqlen_kv / p_.page_size; }
  std::vector<std::int32_t> shuffled_pages() const {
    std::vector<std::int32_t> ids(index(p_.num_pages));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(4));
    return ids;
  }

  AttentionProblem p_;
  DeviceBuffer q_, k_, v_, used_, pages_;
  std::vector<Plan> plans_;
  std::vector<DeviceBuffer> o_, lse_, workspace_;
  std::int64_t workspace_bytes_ = 0;
};

/// A stream and graphs of so many runs each.
class Graphs {
 public:
  Graphs() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~Graphs() {
    for (cudaGraphExec_t graph : ready_) {
      (void)cudaGraphExecDestroy(graph);
    }
    (void)cudaStreamDestroy(stream_);
  }
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  void capture(const Batches& batches, std::int64_t b, int runs) {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (int i = 0; i < runs; ++i) {
      batches.run(b, stream_);
    }
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    ready_.push_back(nullptr);
    ASSERT_EQ(cudaGraphInstantiate(&ready_.back(), graph, 0), cudaSuccess);
    (void)cudaGraphDestroy(graph);
  }
  void launch(std::size_t i) const { ASSERT_EQ(cudaGraphLaunch(ready_[i], stream_), cudaSuccess); }
  void wait() const { ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<cudaGraphExec_t> ready_;
};

// G2, G4
TEST(GraphsCuda, ReplayInAnyOrderOverOneWorkspace) {
  RAFTER_SKIP_WITHOUT_SM90();
  Batches batches;
  const std::vector<std::vector<std::uint32_t>> expected = batches.bits_one_by_one();
  Graphs graphs;
  for (std::int64_t b = kMostSequences; b > 0; --b) {
    graphs.capture(batches, b, 1);
  }
  std::mt19937 random(5);
  for (int i = 0; i < 40; ++i) {
    const auto b = static_cast<std::int64_t>(random() % kMostSequences) + 1;
    batches.poison_results(b);
    graphs.launch(index(kMostSequences - b));
    graphs.wait();
    EXPECT_EQ(batches.bits(b), expected[index(b - 1)]) << "replay " << i << ", batch of " << b;
  }
}

// G7
TEST(GraphsCuda, SixtyFourOfSixtyOneLayersEndAndHaveTheBits) {
  RAFTER_SKIP_WITHOUT_SM90();
  Batches batches;
  const std::vector<std::vector<std::uint32_t>> expected = batches.bits_one_by_one();
  Graphs graphs;
  std::vector<std::size_t> order(64);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (const std::size_t i : order) {
    graphs.capture(batches, static_cast<std::int64_t>(i) % kMostSequences + 1, 61);
  }
  std::shuffle(order.begin(), order.end(), std::mt19937(6));
  for (std::int64_t b = 1; b <= kMostSequences; ++b) {
    batches.poison_results(b);
  }
  for (const std::size_t i : order) {
    graphs.launch(i);
  }
  graphs.wait();
  for (std::int64_t b = 1; b <= kMostSequences; ++b) {
    EXPECT_EQ(batches.bits(b), expected[index(b - 1)]) << "batch of " << b;
  }
}

}  // namespace
}  // namespace rafter::testing
