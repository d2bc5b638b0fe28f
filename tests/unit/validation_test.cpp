// What a run refuses: every tensor, stride, index and workspace that does not fit, by name; and on
// an error nothing is written.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "rafter/attention.h"

namespace rafter {
namespace {

constexpr float kUntouched = 12345.0F;

/// A correct call of two sequences: dense, packed or paged; tests spoil one thing of it.
struct Call {
  static constexpr std::int64_t kBatch = 2, kHeads = 2, kDim = 4, kRows = 3, kKeys = 5, kPage = 2,
                                kPages = 7;
  AttentionProblem problem;
  std::vector<float> q, k, v, o, lse;
  std::vector<std::int32_t> cu_q = {0, 2, 5}, cu_kv = {0, 4, 9}, used = {5, 0};
  std::vector<std::int64_t> pages = {1, 6, 3, -1, 2, 0, 5, -1};  // [2, 4]
  alignas(64) std::byte scratch[1 << 20];
  ForwardInputs in;
  ForwardOutputs out;
  Workspace workspace;

  explicit Call(Layout layout, bool seqused = false) {
    problem = {.batch = kBatch,
               .heads_q = kHeads,
               .seqlen_q = kRows,
               .seqlen_kv = kKeys,
               .head_dim = kDim,
               .layout = layout,
               .seqused_kv = seqused};
    const bool packed = layout == Layout::packed;
    const bool paged = layout == Layout::paged;
    if (packed) {
      problem.total_q = 6;
      problem.total_kv = 9;
    }
    if (paged) {
      problem.page_size = kPage;
      problem.num_pages = kPages;
    }
    const std::int64_t q_batch = packed ? 1 : kBatch;
    const std::int64_t q_rows = packed ? 6 : kRows;
    const std::int64_t kv_batch = packed ? 1 : (paged ? kPages : kBatch);
    const std::int64_t kv_rows = packed ? 9 : (paged ? kPage : kKeys);
    q.assign(static_cast<std::size_t>(q_batch * q_rows * kHeads * kDim), 0.5F);
    k.assign(static_cast<std::size_t>(kv_batch * kv_rows * kHeads * kDim), 0.25F);
    v = k;
    o.assign(q.size(), kUntouched);
    lse.assign(static_cast<std::size_t>(q_batch * q_rows * kHeads), kUntouched);
    const auto view = [](std::vector<float>& data, std::int64_t b, std::int64_t s) {
      return TensorView::contiguous(data.data(), DType::f32, b, s, kHeads, kDim);
    };
    in = {view(q, q_batch, q_rows), view(k, kv_batch, kv_rows), view(v, kv_batch, kv_rows)};
    out = {view(o, q_batch, q_rows), LseView::contiguous(lse.data(), q_batch, kHeads, q_rows)};
    if (packed) {
      in.cu_seqlens_q = {cu_q.data(), DType::i32, 3};
      in.cu_seqlens_kv = {cu_kv.data(), DType::i32, 3};
      used = {4, 0};
    }
    if (seqused) {
      in.seqused_kv = {used.data(), DType::i32, 2};
    }
    if (paged) {
      in.page_table = {pages.data(), DType::i64, 8, 4};
    }
    workspace = {scratch, sizeof(scratch)};
  }

  Status run(const char* kernel = "forward_reference") {
    const Result<Plan> planned = plan(problem, Device::cpu(), {.kernel = kernel, .threads = 1});
    return planned ? planned->forward(in, out, workspace) : planned.status();
  }
  bool untouched() const {
    for (const std::vector<float>* values : {&o, &lse}) {
      for (const float value : *values) {
        if (value != kUntouched) {
          return false;
        }
      }
    }
    return true;
  }
};

struct Spoiled {
  const char* name;
  Layout layout;
  bool seqused;
  std::function<void(Call&)> spoil;
  const char* message;
};

const Spoiled kSpoiled[] = {
    {"q_null", Layout::dense, false, [](Call& c) { c.in.q.data = nullptr; },
     "q: null given; a pointer to its elements allowed"},
    {"v_null", Layout::dense, false, [](Call& c) { c.in.v.data = nullptr; },
     "v: null given; a pointer to its elements allowed"},
    {"o_null", Layout::dense, false, [](Call& c) { c.out.o.data = nullptr; },
     "o: null given; a pointer to its elements allowed"},
    {"q_dtype", Layout::dense, false, [](Call& c) { c.in.q.dtype = DType::f16; },
     "q.dtype: f16 given; f32 (the problem's dtype) allowed"},
    {"o_dtype", Layout::dense, false, [](Call& c) { c.out.o.dtype = DType::bf16; },
     "o.dtype: bf16 given; f32 allowed"},
    {"q_batch", Layout::dense, false, [](Call& c) { c.in.q.batch = 3; },
     "q.batch: 3 given; 2 allowed"},
    {"k_seqlen", Layout::dense, false, [](Call& c) { c.in.k.seqlen = 4; },
     "k.seqlen: 4 given; 5 allowed"},
    {"v_heads", Layout::dense, false, [](Call& c) { c.in.v.heads = 1; },
     "v.heads: 1 given; 2 allowed"},
    {"o_head_dim", Layout::dense, false, [](Call& c) { c.out.o.head_dim = 8; },
     "o.head_dim: 8 given; 4 allowed"},
    {"lse_seqlen", Layout::dense, false, [](Call& c) { c.out.lse.seqlen = 2; },
     "lse.seqlen: 2 given; 3 allowed"},
    {"packed_rows", Layout::packed, false, [](Call& c) { c.in.q.seqlen = 5; },
     "q.seqlen: 5 given; 6 allowed"},
    {"paged_pages", Layout::paged, true, [](Call& c) { c.in.k.batch = 6; },
     "k.batch: 6 given; 7 allowed"},
    {"misaligned", Layout::dense, false,
     [](Call& c) { c.in.k.data = reinterpret_cast<std::byte*>(c.k.data()) + 2; },
     "k.data: an address that is not a multiple of 4 given; addresses aligned to the element "
     "allowed"},
    {"huge_stride", Layout::dense, false,
     [](Call& c) { c.in.k.stride_batch = std::int64_t{1} << 60; },
     "k strides: an extent beyond 2^59 elements given; extents below 2^59 elements allowed"},
    {"overflowing_stride", Layout::dense, false,
     [](Call& c) { c.in.k.stride_seqlen = std::numeric_limits<std::int64_t>::max() - 1; },
     "k strides: an extent beyond 2^59 elements given; extents below 2^59 elements allowed"},
    {"o_broadcast", Layout::dense, false, [](Call& c) { c.out.o.stride_batch = 0; },
     "o.stride_batch: 0 given; strides of an output that keep its elements apart: here more than 0 "
     "allowed"},
    {"o_rows_overlap", Layout::dense, false, [](Call& c) { c.out.o.stride_seqlen = 6; },
     "o.stride_seqlen: 6 given; strides of an output that keep its elements apart: here more than "
     "7 allowed"},
    {"lse_broadcast", Layout::dense, false, [](Call& c) { c.out.lse.stride_seqlen = 0; },
     "lse.stride_seqlen: 0 given; strides of an output that keep its elements apart: here more "
     "than 0 allowed"},
    {"o_is_q", Layout::dense, false, [](Call& c) { c.out.o = c.in.q; },
     "o: memory that overlaps q given; an output apart from all other tensors allowed"},
    {"o_meets_v", Layout::dense, false, [](Call& c) { c.out.o.data = c.v.data() + 30; },
     "o: memory that overlaps v given; an output apart from all other tensors allowed"},
    {"lse_in_o", Layout::dense, false, [](Call& c) { c.out.lse.data = c.o.data() + 8; },
     "o: memory that overlaps lse given; an output apart from all other tensors allowed"},
    {"o_in_workspace", Layout::dense, false, [](Call& c) { c.out.o.data = c.scratch; },
     "o: memory that overlaps workspace given; an output apart from all other tensors allowed"},
    {"k_in_workspace", Layout::dense, false, [](Call& c) { c.in.k.data = c.scratch; },
     "workspace: memory that overlaps k given; an output apart from all other tensors allowed"},
    {"workspace_small", Layout::dense, false, [](Call& c) { c.workspace.bytes = 63; },
     "workspace.bytes: 63 given; 64 (workspace_bytes()) or more allowed"},
    {"workspace_null", Layout::dense, false, [](Call& c) { c.workspace.data = nullptr; },
     "workspace: null given; 64 bytes allowed"},
    {"workspace_misaligned", Layout::dense, false,
     [](Call& c) { c.workspace.data = c.scratch + 8; },
     "workspace.data: an address that is not a multiple of 64 given; addresses aligned to 64 bytes "
     "allowed"},
    // I27: lengths that are negative, decreasing or too long
    {"cu_first", Layout::packed, false, [](Call& c) { c.cu_q[0] = 1; },
     "cu_seqlens_q[0]: 1 given; 0 allowed"},
    {"cu_decreasing", Layout::packed, false, [](Call& c) { c.cu_kv[2] = 3; },
     "cu_seqlens_kv[2]: 3 given; 4 (the entry before) or more allowed"},
    {"cu_negative", Layout::packed, false, [](Call& c) { c.cu_kv[1] = -1; },
     "cu_seqlens_kv[1]: -1 given; 0 (the entry before) or more allowed"},
    {"cu_beyond_total", Layout::packed, false, [](Call& c) { c.cu_kv[2] = 10; },
     "cu_seqlens_kv[2]: 10 given; at most total_kv = 9 allowed"},
    // I13: a sequence longer than the declared capacity
    {"cu_beyond_capacity", Layout::packed, false, [](Call& c) { c.cu_q[1] = 1; },
     "cu_seqlens_q[2]: 5, a length of 4 given; lengths up to seqlen_q = 3 allowed"},
    {"cu_missing", Layout::packed, false, [](Call& c) { c.in.cu_seqlens_q = {}; },
     "cu_seqlens_q.size: 0 given; 3 allowed"},
    {"cu_null", Layout::packed, false, [](Call& c) { c.in.cu_seqlens_q.data = nullptr; },
     "cu_seqlens_q: null given; an array of 3 allowed"},
    {"cu_not_wanted", Layout::dense, false,
     [](Call& c) {
       c.in.cu_seqlens_q = {c.cu_q.data(), DType::i32, 3};
     },
     "cu_seqlens_q: an array given; none (it belongs to the packed layout) allowed"},
    // I26: an index array of another type is refused, never reinterpreted
    {"cu_dtype", Layout::packed, false, [](Call& c) { c.in.cu_seqlens_kv.dtype = DType::f32; },
     "cu_seqlens_kv.dtype: f32 given; i32 or i64 allowed"},
    {"used_long", Layout::dense, true, [](Call& c) { c.used[1] = 6; },
     "seqused_kv[1]: 6 given; 0 to 5 allowed"},
    {"used_negative", Layout::dense, true, [](Call& c) { c.used[0] = -1; },
     "seqused_kv[0]: -1 given; 0 to 5 allowed"},
    {"used_packed_long", Layout::packed, true, [](Call& c) { c.used[0] = 5; },
     "seqused_kv[0]: 5 given; 0 to 4 allowed"},
    {"used_missing", Layout::dense, true, [](Call& c) { c.in.seqused_kv = {}; },
     "seqused_kv.size: 0 given; 2 allowed"},
    {"used_not_wanted", Layout::dense, false,
     [](Call& c) {
       c.in.seqused_kv = {c.used.data(), DType::i32, 2};
     },
     "seqused_kv: an array given; none (it belongs to problems with seqused_kv set) allowed"},
    {"page_negative", Layout::paged, true, [](Call& c) { c.pages[2] = -1; },
     "page_table[0][2]: -1 given; 0 to num_pages − 1 = 6 allowed"},
    {"page_beyond", Layout::paged, true, [](Call& c) { c.pages[0] = 7; },
     "page_table[0][0]: 7 given; 0 to num_pages − 1 = 6 allowed"},
    {"page_table_narrow", Layout::paged, true,
     [](Call& c) {
       c.in.page_table = {c.pages.data(), DType::i64, 4, 2};
     },
     "page_table.cols: 2 given; 3 (seqlen_kv / page_size) or more allowed"},
    {"page_table_size", Layout::paged, true, [](Call& c) { c.in.page_table.size = 7; },
     "page_table.size: 7 given; 8 allowed"},
};

class ForwardRefuses : public ::testing::TestWithParam<Spoiled> {};
TEST_P(ForwardRefuses, ByNameAndWritesNothing) {
  Call call(GetParam().layout, GetParam().seqused);
  ASSERT_TRUE(call.run()) << call.run().message() << ": the call is right before it is spoiled";
  Call spoiled(GetParam().layout, GetParam().seqused);
  GetParam().spoil(spoiled);
  const Status status = spoiled.run();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), GetParam().message);
  EXPECT_TRUE(spoiled.untouched());
}
INSTANTIATE_TEST_SUITE_P(Argument, ForwardRefuses, ::testing::ValuesIn(kSpoiled),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Forward, AStreamIsRefusedOnACpu) {
  Call call(Layout::dense);
  const Result<Plan> planned = plan(call.problem, Device::cpu(), {.threads = 1});
  ASSERT_TRUE(planned);
  const Status status = planned->forward(call.in, call.out, call.workspace, {&call});
  EXPECT_EQ(status.parameter(), "stream");
  EXPECT_TRUE(call.untouched());
}

// Page numbers past a sequence's length are not read: −1 there is fine (I27); a page table and
// lengths of either index type give the same result (I26).
TEST(Forward, IndicesOfEitherTypeAreTheSame) {
  Call wide(Layout::paged, true);
  ASSERT_TRUE(wide.run());
  Call narrow(Layout::paged, true);
  std::vector<std::int32_t> pages(narrow.pages.begin(), narrow.pages.end());
  std::vector<std::int64_t> used(narrow.used.begin(), narrow.used.end());
  narrow.in.page_table = {pages.data(), DType::i32, 8, 4};
  narrow.in.seqused_kv = {used.data(), DType::i64, 2};
  ASSERT_TRUE(narrow.run());
  EXPECT_EQ(wide.o, narrow.o);
  EXPECT_FALSE(wide.untouched());
}

// Inputs may repeat rows by strides of 0, and share memory with each other.
TEST(Forward, BroadcastAndSharedInputsAreRead) {
  Call call(Layout::dense);
  call.in.v = call.in.k;
  call.in.k.stride_batch = call.in.v.stride_batch = 0;
  call.in.q.stride_heads = 0;
  EXPECT_TRUE(call.run()) << call.run().message();
  for (const float value : call.o) {
    EXPECT_FLOAT_EQ(value, 0.25F);
  }
}

// An output may lie between the rows of its inputs: slices of one buffer [rows, q | k | v | o].
TEST(Forward, OutputsInterleavedWithInputsAreApart) {
  Call call(Layout::dense);
  call.problem.seqlen_kv = Call::kRows;
  constexpr std::int64_t kWidth = Call::kHeads * Call::kDim;
  std::vector<float> buffer(static_cast<std::size_t>(Call::kBatch * Call::kRows * 4 * kWidth), 1);
  const auto part = [&buffer](std::int64_t n) {
    TensorView t = TensorView::contiguous(buffer.data() + n * kWidth, DType::f32, Call::kBatch,
                                          Call::kRows, Call::kHeads, Call::kDim);
    t.stride_seqlen = 4 * kWidth;
    t.stride_batch = Call::kRows * 4 * kWidth;
    return t;
  };
  call.in.q = part(0);
  call.in.k = part(1);
  call.in.v = part(2);
  call.out.o = part(3);
  EXPECT_TRUE(call.run()) << call.run().message();
  call.out.o.data = static_cast<float*>(call.out.o.data) - 1;  // one element into v
  EXPECT_EQ(call.run().message(),
            "o: memory that overlaps v given; an output apart from all other tensors allowed");
}

// Zero elements need no memory.
TEST(Forward, NothingNeedsNoPointers) {
  AttentionProblem problem{.batch = 0, .seqlen_q = 4, .seqlen_kv = 4, .head_dim = 8};
  const Result<Plan> none = plan(problem, Device::cpu());
  ASSERT_TRUE(none) << none.status().message();
  std::vector<std::byte> memory(static_cast<std::size_t>(none->workspace_bytes()) + 64);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  const Workspace workspace{memory.data() + (64 - address % 64) % 64, none->workspace_bytes()};
  const TensorView q = TensorView::contiguous(nullptr, DType::f32, 0, 4, 1, 8);
  EXPECT_TRUE(none->forward({q, q, q}, {q, {}}, workspace));
}

}  // namespace
}  // namespace rafter
