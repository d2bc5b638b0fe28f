// decode_sm90 in clusters over pages: a CTA copies what the page table says of its tiles a few
// tiles ahead, of the first ones before it knows the length. One graph runs while lengths grow over
// what is asked for at once and pages move; the same sequence in a batch, which goes by units and
// looks pages up otherwise, has the bits.
#include "kernels/cuda/decode_sm90_launch.h"
#include "kernels/cuda/decode_sm90_rig.h"

namespace rafter::testing {
namespace {

struct Cut {
  std::int64_t heads_kv, capacity, splits;
  Mask mask;
};
/// A head's tiles on two CTAs; as many parts as the length asks for; tiles that begin later than
/// the first.
const std::vector<Cut> kCuts = {{1, 5000, 2, Mask::none()},
                                {8, 9000, 0, Mask::none()},
                                {2, 5000, 0, Mask::none()},
                                {1, 5000, 2, Mask::window(2500, 0)}};

AttentionProblem problem_of(const Cut& cut, std::int64_t page_size, std::int64_t head_dim) {
  AttentionProblem p = rig_problem(1, 4);
  p.heads_q = 4 * cut.heads_kv;
  p.heads_kv = cut.heads_kv;
  p.head_dim = head_dim;
  // Two CTAs are not asked to read many bytes: rows of V, or of K, are narrow.
  if (cut.splits == 2 && head_dim > 64) {
    p.head_dim_v = 8;
    if (!cut.mask.is_none()) {
      std::swap(p.head_dim, p.head_dim_v);
    }
  }
  p.seqlen_kv = cut.capacity;
  p.mask = cut.mask;
  p.page_size = page_size;
  p.num_pages = (cut.capacity + page_size - 1) / page_size + 40;
  return p;
}

/// A table of pages in any order: some that do not exist among those of `length` keys, and nothing
/// that could be one behind.
template <typename Id>
std::vector<Id> table_of(const AttentionProblem& p, std::int64_t length, std::mt19937& random) {
  std::vector<Id> ids(index(p.num_pages));
  std::iota(ids.begin(), ids.end(), Id{0});
  std::shuffle(ids.begin(), ids.end(), random);
  const Id beyond = sizeof(Id) == 8 ? static_cast<Id>((std::int64_t{1} << 32) + 1) : Id{1} << 30;
  const std::int64_t used = (length + p.page_size - 1) / p.page_size;
  for (std::int64_t i = used; i < p.num_pages; ++i) {
    ids[index(i)] = i % 2 == 0 ? Id{-1} : beyond;
  }
  for (std::int64_t i = 5; i < used; i += 41) {
    ids[index(i)] = i % 2 == 0 ? Id{-1} : beyond;
  }
  return ids;
}

/// Around 1, 4, 5, 8, 9, 12, 16 and 17 tiles of two CTAs.
const std::vector<std::int32_t> kLengths = {1,    129,  1024, 1025, 0,    1281, 2048, 2049,
                                            2304, 3072, 4096, 4225, 5000, 9000, 640};

template <typename Id>
void expect_bits_of_a_batch(const Cut& cut, std::int64_t page_size, std::int64_t head_dim,
                            const std::vector<std::int32_t>& lengths = kLengths) {
  const AttentionProblem problem = problem_of(cut, page_size, head_dim);
  AttentionProblem two = problem;
  two.batch = 2;
  EXPECT_EQ(launch_of(problem, cut.splits).way, "clusters");
  EXPECT_EQ(launch_of(two, cut.splits).way, "units");
  Rig alone(problem, 1, cut.splits), batch(two, 1, cut.splits);
  std::mt19937 random(7);
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  alone.set_pages(table_of<Id>(problem, 1, random));
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  alone.run(stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  for (const std::int32_t length : lengths) {
    if (length > cut.capacity) {
      continue;
    }
    std::vector<Id> ids = table_of<Id>(problem, length, random);
    ids.resize(index(2 * problem.num_pages), Id{-1});
    alone.set_lengths({length});
    alone.set_pages(ids);
    batch.set_lengths({length, 0});
    batch.set_pages(ids);
    alone.poison();
    ASSERT_EQ(cudaGraphLaunch(ready, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    batch.poison();
    batch.run();
    const std::vector<std::uint32_t> all = batch.bits(), mine = alone.bits();
    const std::int64_t dim_v = problem.head_dim_v > 0 ? problem.head_dim_v : problem.head_dim;
    const std::size_t o = index(problem.heads_q * dim_v), lse = index(problem.heads_q);
    std::vector<std::uint32_t> expected(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(o));
    expected.insert(expected.end(), all.begin() + static_cast<std::ptrdiff_t>(2 * o),
                    all.begin() + static_cast<std::ptrdiff_t>(2 * o + lse));
    EXPECT_EQ(mine, expected) << length << " keys of " << cut.capacity << " in pages of "
                              << page_size << ", head_dim " << head_dim << ", splits " << cut.splits
                              << ", " << sizeof(Id) << " bytes an id";
  }
  (void)cudaGraphExecDestroy(ready);
  (void)cudaGraphDestroy(graph);
  (void)cudaStreamDestroy(stream);
}

TEST(DecodeSm90Pages, BitsAreThoseOfABatchWhileLengthsGrowAndPagesMove) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t page_size : {1, 8, 16, 24, 48, 64, 256}) {
    for (const Cut& cut : kCuts) {
      expect_bits_of_a_batch<std::int32_t>(cut, page_size, 72);
    }
  }
}

TEST(DecodeSm90Pages, OfSixtyFourBitIdsAndNarrowRowsToo) {
  RAFTER_SKIP_WITHOUT_SM90();
  for (const std::int64_t page_size : {1, 48}) {
    for (const Cut& cut : kCuts) {
      expect_bits_of_a_batch<std::int64_t>(cut, page_size, 72);
      expect_bits_of_a_batch<std::int32_t>(cut, page_size, 16);
    }
  }
}

/// Where pages hold whole blocks a table in shared memory has 32 tiles of a part: here a CTA goes
/// from one such chunk to the next within a part, several times, and from part to part. Lengths end
/// with a chunk, one tile behind it, and in the midst.
TEST(DecodeSm90Pages, BitsOverManyChunksOfTilesAreThoseOfABatch) {
  RAFTER_SKIP_WITHOUT_SM90();
  constexpr std::int32_t kTile = 128;
  // All tiles are of one part, which one CTA has: up to seven chunks.
  const std::vector<std::int32_t> of_one = {28000,       96 * kTile, 96 * kTile + 1,
                                            97 * kTile,  65 * kTile, 64 * kTile - 1,
                                            128 * kTile, 5,          33 * kTile};
  for (const std::int64_t page_size : {16, 48, 64}) {
    expect_bits_of_a_batch<std::int32_t>({1, 28000, 1, Mask::none()}, page_size, 8, of_one);
  }
  expect_bits_of_a_batch<std::int64_t>({1, 28000, 1, Mask::none()}, 16, 8, of_one);
  expect_bits_of_a_batch<std::int32_t>({1, 28000, 1, Mask::window(20000, 0)}, 16, 8, of_one);
  // Two CTAs have a part each of up to four chunks, or one has two of three parts.
  expect_bits_of_a_batch<std::int32_t>(
      {1, 25000, 2, Mask::none()}, 16, 8,
      {25000, 192 * kTile, 192 * kTile + 1, 128 * kTile, 128 * kTile + 1, 700});
  expect_bits_of_a_batch<std::int32_t>(
      {1, 20000, 3, Mask::none()}, 32, 8,
      {20000, 96 * kTile, 96 * kTile + 1, 97 * kTile + 1, 98 * kTile + 1, 3 * kTile});
  // Of eight CTAs each has a part.
  expect_bits_of_a_batch<std::int32_t>({8, 70000, 8, Mask::none()}, 16, 8,
                                       {70000, 8 * 64 * kTile + 1, 8 * 32 * kTile});
}

}  // namespace
}  // namespace rafter::testing
