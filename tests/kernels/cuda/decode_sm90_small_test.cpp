// Every way decode_sm90 hands tiles and results over, in the fewest keys that take it: small enough
// for compute-sanitizer, which the page of the kernel says the reports of.
#include "kernels/cuda/decode_sm90_case.h"

namespace rafter::testing {
namespace {

struct Way {
  const char* name;
  std::size_t batch;
  std::int64_t group, page_size, keys, splits;
  DType kv = DType::bf16;
  bool lengths_are_data = true;
};
// A tile is 128 keys; 20 parts of 2 heads are more than clusters of 8 have CTAs, so that two or
// three follow each other in each.
constexpr Way kWays[] = {
    {"ClusterDense", 1, 4, 0, 2650, 20, DType::bf16, false},
    {"ClusterPages", 1, 4, 16, 2650, 20},
    {"ClusterSinglePages", 1, 4, 1, 2650, 20},
    {"ClusterColumns", 1, 12, 0, 2650, 20},
    {"ClusterColumnsPages", 1, 12, 3, 2650, 20},
    {"ClusterInt8", 1, 4, 0, 2650, 20, DType::int8},
    {"ClusterE4m3Pages", 1, 4, 16, 2650, 20, DType::e4m3},
    // 80 heads of 3 parts, one CTA each; by units 132 CTAs share 240 parts
    {"ClusterOfOne", 40, 2, 0, 300, 3, DType::bf16, false},
    {"HeadsInTurn", 128, 4, 0, 600, 3, DType::bf16, false},
    {"UnitsDense", 40, 2, 0, 300, 3},
    {"UnitsPages", 40, 2, 16, 300, 3},
    {"UnitsSinglePages", 40, 2, 1, 300, 3},
    {"UnitsColumns", 40, 12, 0, 300, 3},
    {"UnitsInt8Pages", 40, 2, 8, 300, 3, DType::int8},
};

class DecodeSm90Small : public ::testing::TestWithParam<Way> {};

TEST_P(DecodeSm90Small, MatchesFloat64) {
  RAFTER_SKIP_WITHOUT_SM90();
  const Way& way = GetParam();
  Case c = decode_sm90_case(DType::bf16, way.kv, way.group, 64);
  c = way.page_size > 0 ? paged(c, way.page_size) : c;
  c.problem.seqused_kv = way.lengths_are_data;
  c.lengths(each(way.batch, 1), std::vector<std::int64_t>(way.batch, way.keys));
  check_case(c, on_sm90(way.splits));
}

INSTANTIATE_TEST_SUITE_P(Ways, DecodeSm90Small, ::testing::ValuesIn(kWays),
                         [](const ::testing::TestParamInfo<Way>& info) {
                           return std::string(info.param.name);
                         });

}  // namespace
}  // namespace rafter::testing
