#include "cli/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace rafter::cli {
namespace {

struct Heads {
  std::int64_t q = 1, kv = 1, dim = 64, dim_v = 0;
};

AttentionCase one(std::string name, std::int64_t seqlen_q, std::int64_t seqlen_kv, Heads heads = {},
                  Mask mask = {}) {
  AttentionCase c;
  c.name = std::move(name);
  c.problem.heads_q = heads.q;
  c.problem.heads_kv = heads.kv;
  c.problem.head_dim = heads.dim;
  c.problem.head_dim_v = heads.dim_v;
  c.problem.mask = mask;
  c.lengths_q = {seqlen_q};
  c.lengths_kv = {seqlen_kv};
  return c;
}

template <typename Change>
AttentionCase with(AttentionCase c, Change change) {
  change(c);
  return c;
}

/// Nothing to do, one of each, and lengths around every power of two that a tile may have.
void add_sizes(std::vector<AttentionCase>& cases) {
  cases.push_back(with(one("no_sequence", 16, 16), [](AttentionCase& c) {
    c.lengths_q.clear();
    c.lengths_kv.clear();
  }));
  cases.push_back(one("no_query", 0, 33));
  cases.push_back(one("no_key", 33, 0));
  cases.push_back(one("one_by_one", 1, 1));
  for (const std::int64_t tile : {16, 32, 64, 128, 256}) {
    for (const std::int64_t length : {tile - 1, tile, tile + 1}) {
      const std::string name = std::to_string(length);
      cases.push_back(one("square_" + name, length, length));
      cases.push_back(one("causal_" + name, length, length, {.dim = 32}, Mask::causal()));
    }
  }
  cases.push_back(one("tall", 300, 20));
  cases.push_back(one("wide", 20, 1030));
  cases.push_back(one("decode", 1, 1025, {.q = 8, .kv = 2, .dim = 128}));
  cases.push_back(one("decode_one_key", 1, 1, {.q = 8, .kv = 2, .dim = 128}));
}

void add_head_dims(std::vector<AttentionCase>& cases) {
  for (const std::int64_t dim : {1, 7, 8, 24, 33, 40, 72, 80, 96, 104, 128, 160, 192, 255, 256}) {
    cases.push_back(one("head_dim_" + std::to_string(dim), 37, 70, {.q = 2, .kv = 2, .dim = dim}));
  }
  cases.push_back(one("head_dim_v_wider", 37, 70, {.dim = 40, .dim_v = 136}));
  cases.push_back(one("head_dim_v_narrower", 37, 70, {.dim = 192, .dim_v = 128}));
  cases.push_back(one("head_dim_v_one", 37, 70, {.dim = 64, .dim_v = 1}));
}

void add_groups(std::vector<AttentionCase>& cases) {
  for (const std::int64_t group : {2, 3, 5, 7, 16, 71}) {
    cases.push_back(one("group_" + std::to_string(group), 9, 130, {.q = group, .kv = 1, .dim = 32},
                        Mask::causal()));
  }
  cases.push_back(one("group_4_of_2", 40, 40, {.q = 8, .kv = 2}));
}

void add_masks(std::vector<AttentionCase>& cases) {
  const MaskAlign top_left = MaskAlign::top_left;
  const Mask causal = Mask::causal();
  cases.push_back(one("causal_more_keys", 70, 333, {}, causal));
  cases.push_back(one("causal_more_queries", 65, 32, {}, causal));  // 33 rows see nothing
  cases.push_back(one("causal_one_more_query", 65, 64, {}, causal));
  cases.push_back(one("causal_no_key", 65, 0, {}, causal));
  cases.push_back(one("top_left_more_keys", 65, 130, {}, Mask::causal(top_left)));
  cases.push_back(one("top_left_more_queries", 130, 65, {}, Mask::causal(top_left)));
  cases.push_back(one("window_both", 300, 320, {}, Mask::window(100, 20)));
  cases.push_back(one("window_left", 140, 150, {}, Mask::window(33, -1)));
  cases.push_back(one("window_right", 140, 150, {}, Mask::window(-1, 33)));
  cases.push_back(one("window_diagonal", 140, 150, {}, Mask::window(0, 0)));
  cases.push_back(one("window_wider_than_keys", 70, 90, {}, Mask::window(1000, 0)));
  cases.push_back(one("window_empty_rows", 129, 17, {}, Mask::window(32, 64)));  // 48 of them
  cases.push_back(one("window_top_left", 90, 70, {}, Mask::window(20, 5, top_left)));
}

void add_scores(std::vector<AttentionCase>& cases) {
  const auto filled = [](std::string name, Fill fill, Mask mask) {
    return with(one(std::move(name), 65, 192, {}, mask),
                [fill](AttentionCase& c) { c.fill = fill; });
  };
  cases.push_back(
      with(one("scale", 31, 200), [](AttentionCase& c) { c.problem.softmax_scale = 0.5F; }));
  cases.push_back(
      with(one("scale_zero", 31, 200), [](AttentionCase& c) { c.problem.softmax_scale = 0.0F; }));
  cases.push_back(with(one("scale_negative", 31, 200),
                       [](AttentionCase& c) { c.problem.softmax_scale = -0.125F; }));
  cases.push_back(with(filled("softcap_5", Fill::peaked, Mask::causal()),
                       [](AttentionCase& c) { c.problem.softcap = 5; }));
  cases.push_back(with(filled("softcap_50", Fill::peaked, {}),
                       [](AttentionCase& c) { c.problem.softcap = 50; }));
  cases.push_back(filled("peaked", Fill::peaked, {}));
  cases.push_back(filled("very_negative", Fill::very_negative, Mask::causal()));
  cases.push_back(filled("late_maximum", Fill::late_maximum, {}));
  cases.push_back(filled("nan_in_one_row", Fill::nan_row, {}));
}

void add_layouts(std::vector<AttentionCase>& cases) {
  const auto batched = [](std::string name, Layout layout, bool seqused, std::int64_t page_size) {
    AttentionCase c = one(std::move(name), 0, 0, {.q = 4, .kv = 2}, Mask::causal());
    c.problem.layout = layout;
    c.problem.seqused_kv = seqused;
    c.problem.page_size = page_size;
    return c;
  };
  const auto lengths = [](AttentionCase c, std::vector<std::int64_t> q,
                          std::vector<std::int64_t> kv) {
    c.lengths_q = std::move(q);
    c.lengths_kv = std::move(kv);
    return c;
  };
  cases.push_back(lengths(batched("batch", Layout::dense, false, 0), {65, 65, 65}, {80, 80, 80}));
  cases.push_back(
      with(lengths(batched("batch_heads_first", Layout::dense, false, 0), {65, 65}, {80, 80}),
           [](AttentionCase& c) { c.strides = Strides::heads_first; }));
  cases.push_back(
      with(lengths(batched("batch_padded", Layout::dense, false, 0), {65, 65}, {80, 80}),
           [](AttentionCase& c) { c.strides = Strides::padded; }));
  cases.push_back(
      lengths(batched("seqused", Layout::dense, true, 0), {33, 33, 33, 33}, {130, 0, 33, 1}));
  cases.push_back(lengths(batched("packed", Layout::packed, false, 0), {5, 0, 129, 1, 64},
                          {70, 33, 128, 0, 63}));
  cases.push_back(
      with(lengths(batched("packed_padded", Layout::packed, false, 0), {5, 129, 1}, {70, 128, 3}),
           [](AttentionCase& c) { c.strides = Strides::padded; }));
  cases.push_back(
      lengths(batched("packed_seqused", Layout::packed, true, 0), {5, 33, 1, 0}, {70, 12, 0, 9}));
  cases.push_back(lengths(batched("packed_all_empty", Layout::packed, false, 0), {0, 0}, {0, 0}));
  for (const std::int64_t page_size : {1, 16, 64, 256}) {
    cases.push_back(
        lengths(batched("paged_" + std::to_string(page_size), Layout::paged, true, page_size),
                {17, 17, 17}, {200, 13, 0}));
  }
}

/// Few queries against many keys: parts that are full, that hold one key, that a mask hides.
void add_decode(std::vector<AttentionCase>& cases) {
  const Heads heads{.q = 8, .kv = 2, .dim = 64};
  const auto cache = [&](std::string name, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                         Heads shape, Mask mask, DType kv_dtype) {
    return with(one(std::move(name), seqlen_q, seqlen_kv, shape, mask),
                [kv_dtype](AttentionCase& c) { c.problem.kv_dtype = kv_dtype; });
  };
  for (const std::int64_t length : {511, 512, 513, 2000}) {
    cases.push_back(one("decode_" + std::to_string(length), 1, length, heads));
  }
  cases.push_back(one("decode_group_6", 1, 700, {.q = 6, .kv = 1, .dim = 80}));
  cases.push_back(one("decode_draft_causal", 5, 1030, heads, Mask::causal()));
  cases.push_back(one("decode_window", 3, 1500, heads, Mask::window(600, 0)));
  cases.push_back(
      with(one("decode_splits_7", 1, 700, heads), [](AttentionCase& c) { c.splits = 7; }));
  cases.push_back(cache("decode_int8", 1, 1100, heads, {}, DType::int8));
  cases.push_back(cache("decode_int8_head_dim_40", 4, 70, {.q = 3, .kv = 1, .dim = 40},
                        Mask::causal(), DType::int8));
  cases.push_back(cache("decode_e4m3", 1, 1100, heads, {}, DType::e4m3));
  cases.push_back(cache("decode_e4m3_head_dim_72", 4, 70, {.q = 5, .kv = 1, .dim = 72},
                        Mask::causal(), DType::e4m3));
  cases.push_back(with(one("decode_tree", 7, 600, heads),
                       [](AttentionCase& c) { c.problem.tree_mask = true; }));
  cases.push_back(with(cache("decode_tree_e4m3_paged_16", 16, 70, heads, {}, DType::e4m3),
                       [](AttentionCase& c) {
                         c.problem.tree_mask = true;
                         c.problem.layout = Layout::paged;
                         c.problem.page_size = 16;
                       }));
  for (const std::int64_t page_size : {1, 3, 16}) {
    for (const bool int8 : {false, true}) {
      AttentionCase c = one(fmt::format("decode_paged_{}{}", page_size, int8 ? "_int8" : ""), 0, 0,
                            {.q = 4, .kv = 2, .dim = 32}, Mask::causal());
      c.problem.layout = Layout::paged;
      c.problem.seqused_kv = true;
      c.problem.page_size = page_size;
      if (int8) {
        c.problem.kv_dtype = DType::int8;
      }
      c.lengths_q = {1, 1, 1};
      c.lengths_kv = {600, 13, 0};
      cases.push_back(std::move(c));
    }
  }
}

}  // namespace

std::span<const AttentionCase> attention_cases() {
  static const std::vector<AttentionCase> kCases = [] {
    std::vector<AttentionCase> cases;
    add_sizes(cases);
    add_head_dims(cases);
    add_groups(cases);
    add_masks(cases);
    add_scores(cases);
    add_layouts(cases);
    add_decode(cases);
    return cases;
  }();
  return kCases;
}

AttentionProblem sized_problem(const AttentionCase& c, DType dtype) {
  const auto longest = [](const std::vector<std::int64_t>& lengths) {
    return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  };
  const auto total = [](const std::vector<std::int64_t>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  };
  AttentionProblem p = c.problem;
  p.dtype = dtype;
  p.batch = static_cast<std::int64_t>(c.lengths_q.size());
  p.seqlen_q = longest(c.lengths_q);
  p.seqlen_kv = longest(c.lengths_kv);
  if (p.head_dim_v == 0) {
    p.head_dim_v = p.head_dim;
  }
  if (p.layout == Layout::packed) {
    p.total_q = total(c.lengths_q) + kSpareRows;
    const std::int64_t room = p.seqused_kv ? kSpareRows * p.batch : 0;
    p.seqlen_kv += p.seqused_kv ? kSpareRows : 0;
    p.total_kv = total(c.lengths_kv) + room + kSpareRows;
  }
  if (p.layout == Layout::paged) {
    const std::int64_t per_sequence = (p.seqlen_kv + p.page_size - 1) / p.page_size;
    p.num_pages = p.batch * per_sequence + 1;  // page 0 belongs to nobody
  }
  return p;
}

}  // namespace rafter::cli
