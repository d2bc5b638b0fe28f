// What attention is, in float64, written apart from the library: it shares no code with
// forward_reference, its masks or its conversions.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace rafter::testing {

/// Options that change the result.
struct OracleOptions {
  double scale = 1;
  double softcap = 0;
  bool has_left = false, has_right = false;  // window bounds
  std::int64_t left = 0, right = 0;
  bool top_left = false;
  const std::uint64_t* tree = nullptr;  // a word of each row: which of the last keys it sees
};

/// One head of one sequence: q [rows, dim], k [keys, dim], v [keys, dim_v], row-major.
struct OracleHead {
  std::int64_t rows = 0, keys = 0, dim = 0, dim_v = 0;
  const double* q = nullptr;
  const double* k = nullptr;
  const double* v = nullptr;
};

/// The mask by its definition: position of the query among the keys, then two comparisons.
inline bool oracle_sees(const OracleOptions& options, std::int64_t row, std::int64_t key,
                        std::int64_t rows, std::int64_t keys) {
  if (options.tree != nullptr && key >= keys - rows) {
    return ((options.tree[row] >> (key - keys + rows)) & 1) == 1;
  }
  const std::int64_t position = options.top_left ? row : row + (keys - rows);
  if (options.has_left && key < position - options.left) {
    return false;
  }
  return !(options.has_right && key > position + options.right);
}

inline double oracle_dot(const OracleHead& head, std::int64_t row, std::int64_t key) {
  double dot = 0;
  for (std::int64_t d = 0; d < head.dim; ++d) {
    dot += head.q[row * head.dim + d] * head.k[key * head.dim + d];
  }
  return dot;
}

/// The keys that one row sees, their logits, and each logit's derivative by q · k.
struct OracleRow {
  std::vector<std::int64_t> seen;
  std::vector<double> logits, slopes;
};

inline OracleRow oracle_logits(const OracleHead& head, const OracleOptions& options,
                               std::int64_t row) {
  OracleRow out;
  for (std::int64_t j = 0; j < head.keys; ++j) {
    if (!oracle_sees(options, row, j, head.rows, head.keys)) {
      continue;
    }
    double logit = oracle_dot(head, row, j) * options.scale;
    double slope = options.scale;
    if (options.softcap != 0) {
      const double ratio = std::tanh(logit / options.softcap);
      logit = options.softcap * ratio;
      slope *= 1 - ratio * ratio;
    }
    out.seen.push_back(j);
    out.logits.push_back(logit);
    out.slopes.push_back(slope);
  }
  return out;
}

/// o [dim_v] and lse of one row. Two passes over the keys, the output summed per key.
inline double oracle_row(const OracleHead& head, const OracleOptions& options, std::int64_t row,
                         double* o) {
  const auto [seen, logits, slopes] = oracle_logits(head, options, row);
  for (std::int64_t d = 0; d < head.dim_v; ++d) {
    o[d] = 0;
  }
  if (seen.empty()) {
    return -std::numeric_limits<double>::infinity();
  }
  double top = logits[0];
  for (const double logit : logits) {
    top = std::fmax(top, logit);
  }
  double denominator = 0;
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const double weight = std::exp(logits[i] - top);
    denominator += weight;
    for (std::int64_t d = 0; d < head.dim_v; ++d) {
      o[d] += weight * head.v[seen[i] * head.dim_v + d];
    }
  }
  for (std::int64_t d = 0; d < head.dim_v; ++d) {
    o[d] /= denominator;
  }
  return top + std::log(denominator);
}

/// The largest |logit| that a row sees, before softcap; infinities and NaN apart.
inline double oracle_largest_logit(const OracleHead& head, const OracleOptions& options,
                                   std::int64_t row) {
  double largest = 0;
  for (std::int64_t j = 0; j < head.keys; ++j) {
    const double logit = std::fabs(oracle_dot(head, row, j) * options.scale);
    if (std::isfinite(logit) && oracle_sees(options, row, j, head.rows, head.keys)) {
      largest = std::fmax(largest, logit);
    }
  }
  return options.softcap != 0 ? std::fmin(largest, options.softcap) : largest;
}

/// The naive three-step computation in the same dtype with f32 softmax, whose error the accuracy
/// contract is a multiple of: scores rounded, probabilities rounded, sums in f32, in ascending or
/// descending order. `round` rounds a float to the dtype.
template <typename Round>
double naive_row(const OracleHead& head, const OracleOptions& options, std::int64_t row,
                 bool backwards, Round round, double* o) {
  std::vector<float> scores(static_cast<std::size_t>(head.keys));
  std::vector<char> visible(static_cast<std::size_t>(head.keys));
  float top = -std::numeric_limits<float>::infinity();
  bool any = false;
  for (std::int64_t j = 0; j < head.keys; ++j) {
    const auto at = static_cast<std::size_t>(j);
    visible[at] = oracle_sees(options, row, j, head.rows, head.keys) ? 1 : 0;
    if (visible[at] == 0) {
      continue;
    }
    float dot = 0;
    for (std::int64_t n = 0; n < head.dim; ++n) {
      const std::int64_t d = backwards ? head.dim - 1 - n : n;
      dot += static_cast<float>(head.q[row * head.dim + d]) *
             static_cast<float>(head.k[j * head.dim + d]);
    }
    float score = round(dot * static_cast<float>(options.scale));
    if (options.softcap != 0) {
      const auto cap = static_cast<float>(options.softcap);
      score = cap * std::tanh(score / cap);
    }
    scores[at] = score;
    top = std::fmax(top, score);
    any = true;
  }
  float sum = 0;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    scores[j] = visible[j] != 0 ? std::exp(scores[j] - top) : 0.0f;
    sum += scores[j];
  }
  std::vector<float> total(static_cast<std::size_t>(head.dim_v), 0.0f);
  for (std::size_t n = 0; any && n < scores.size(); ++n) {
    const std::size_t j = backwards ? scores.size() - 1 - n : n;
    if (visible[j] != 0) {
      const float p = round(scores[j] / sum);
      for (std::size_t d = 0; d < total.size(); ++d) {
        total[d] +=
            p *
            static_cast<float>(
                head.v[static_cast<std::int64_t>(j) * head.dim_v + static_cast<std::int64_t>(d)]);
      }
    }
  }
  for (std::size_t d = 0; d < total.size(); ++d) {
    o[d] = static_cast<double>(round(total[d]));
  }
  return any ? static_cast<double>(top) + static_cast<double>(std::log(sum))
             : -std::numeric_limits<double>::infinity();
}

}  // namespace rafter::testing
