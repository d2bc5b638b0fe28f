#include "tiles/divisor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace rafter::tiles {
namespace {

constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;

TEST(Divisor, IsDivisionAroundMultiplesAndAtTheEnds) {
  std::mt19937_64 random(1);
  std::vector<std::int64_t> divisors = {1, 2, 3, 5, 7, 16, 17, 100, 256, 641, kMost - 1, kMost};
  for (int bits = 1; bits < 31; ++bits) {
    for (const std::int64_t near : {-1, 0, 1}) {
      divisors.push_back(std::max<std::int64_t>(1, (std::int64_t{1} << bits) + near));
    }
    divisors.push_back(1 + static_cast<std::int64_t>(random() % (std::uint64_t{1} << bits)));
  }
  for (const std::int64_t d : divisors) {
    const Divisor divisor = divisor_of(d);
    for (int i = 0; i < 1000; ++i) {
      const std::int64_t multiple = i == 0   ? 0
                                    : i == 1 ? kMost / d * d
                                             : static_cast<std::int64_t>(random() >> 33) / d * d;
      for (const std::int64_t n : {multiple - 1, multiple, multiple + d - 1, kMost}) {
        if (n >= 0 && n <= kMost) {
          ASSERT_EQ(divisor.quotient(static_cast<int>(n)), n / d) << n << " / " << d;
        }
      }
    }
  }
}

}  // namespace
}  // namespace rafter::tiles
