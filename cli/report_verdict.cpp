// One plain sentence per pipeline: which wall, by the model and by measurement, and what would move
// it.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cli/report_data.h"

namespace rafter::cli {
namespace {

std::string with_commas(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (std::size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

// Three digits: 0.0123, 16.4, 1,060.
std::string three(double value) {
  if (!std::isfinite(value) || std::abs(value) < 1000) {
    return fmt::format("{:.3g}", value);
  }
  const double unit = std::pow(10, std::floor(std::log10(std::abs(value))) - 2);
  return with_commas(std::llround(std::round(value / unit) * unit));
}

// The longest point of the pipeline in the first dtype that it has.
const ReportPoint* representative(Pipeline pipeline, const std::vector<ReportPoint>& points) {
  const ReportPoint* best = nullptr;
  for (const ReportPoint& point : points) {
    const bool same_dtype = best == nullptr || point.problem.dtype == best->problem.dtype;
    if (point.result.refusal.empty() && point.result.pipeline == pipeline && same_dtype &&
        (best == nullptr || point.problem.seqlen_q > best->problem.seqlen_q)) {
      best = &point;
    }
  }
  return best;
}

const ReportPoint* beside(const ReportPoint& point, Pipeline pipeline,
                          const std::vector<ReportPoint>& points) {
  const auto found = std::find_if(points.begin(), points.end(), [&](const ReportPoint& other) {
    return other.result.refusal.empty() && other.result.pipeline == pipeline &&
           other.problem.seqlen_q == point.problem.seqlen_q &&
           other.problem.dtype == point.problem.dtype;
  });
  return found == points.end() ? nullptr : &*found;
}

// "l3" → "L3".
std::string level_text(std::string name) {
  if (name.starts_with('l')) {
    name[0] = 'L';
  }
  return name;
}

std::string model_clause(const CaseResult& r) {
  const Prediction& p = r.at_level;
  const std::string work = fmt::format("{} for {}", with_si_prefix(r.cost.bytes, "B"),
                                       with_si_prefix(r.cost.flops, "FLOP"));
  const std::string where =
      r.cache_resident ? fmt::format(" of the {}", level_text(r.level.name)) : "";
  if (p.ambiguous) {
    return fmt::format(
        "the model cannot tell bandwidth from arithmetic, since {} FLOP/B lies within "
        "the error bar of the ridge, {} to {}",
        three(p.intensity_flop_per_byte), three(p.ridge_low_flop_per_byte),
        three(p.ridge_high_flop_per_byte));
  }
  switch (p.wall) {
    case Wall::bandwidth:
      return fmt::format(
          "the model sets it against bandwidth{}, since it moves {}, {} FLOP/B where "
          "the ridge is {}",
          where, work, three(p.intensity_flop_per_byte), three(p.ridge_flop_per_byte));
    case Wall::compute:
      return fmt::format(
          "the model sets it against arithmetic, since {} FLOP/B is {} times the "
          "ridge{}",
          three(p.intensity_flop_per_byte), three(p.ridge_multiple), where);
    case Wall::dispatch:
      return fmt::format("the model sets it against dispatch, since {} launches take {}",
                         three(r.cost.launches), with_si_prefix(p.time_dispatch_s, "s"));
  }
  return {};
}

std::string measured_clause(const CaseResult& r) {
  const std::string took = fmt::format("it takes {}, {:.0f}% of the bound's speed",
                                       with_si_prefix(r.median_s(), "s"), 100 * r.share_of_bound());
  const std::string model = r.at_level.ambiguous ? "ambiguous" : to_string(r.at_level.wall);
  if (r.measured.wall == MeasuredWall::ambiguous) {
    return fmt::format("{}, too noisy or too little measured to name the wall ({})", took,
                       r.measured.reason);
  }
  if (to_string(r.measured.wall) == model) {
    return fmt::format("{}, and the measurement agrees", took);
  }
  return fmt::format("{}, {} the measurement says {} ({})", took,
                     r.at_level.ambiguous ? "and" : "but", to_string(r.measured.wall),
                     r.measured.reason);
}

std::string remedy(const ReportPoint& point, const std::vector<ReportPoint>& points) {
  const CaseResult& r = point.result;
  const bool lands = r.pipeline == Pipeline::unfused || r.pipeline == Pipeline::half_fused;
  if (r.at_level.wall == Wall::dispatch) {
    return "fewer launches or more work in each would move it";
  }
  const ReportPoint* fused = lands ? beside(point, Pipeline::fused, points) : nullptr;
  if (fused != nullptr) {
    const double fewer = r.cost.bytes / fused->result.cost.bytes;
    const double quicker = r.median_s() / fused->result.median_s();
    return quicker > 1 ? fmt::format(
                             "keeping the scores on chip would move it: the fused pipeline "
                             "moves {} times fewer bytes and is {} times as quick here",
                             three(fewer), fmt::format("{:.1f}", quicker))
                       : fmt::format(
                             "fusing would cut its bytes {} times, yet the fused kernel is "
                             "not the quicker one here",
                             three(fewer));
  }
  if (r.at_level.wall == Wall::bandwidth) {
    return "longer sequences or fewer KV heads would move it";
  }
  return r.share_of_bound() < 0.6
             ? "a kernel nearer the peak would move it, more bandwidth would not"
             : "only a higher peak would move it: more cores, or units for a narrower dtype";
}

}  // namespace

Sentence verdict_sentence(Pipeline pipeline, const std::vector<ReportPoint>& points) {
  const ReportPoint* point = representative(pipeline, points);
  if (point == nullptr) {
    const auto refused = std::find_if(points.begin(), points.end(), [&](const ReportPoint& p) {
      return p.result.pipeline == pipeline;
    });
    return {"not run", refused == points.end() ? "It was not asked for."
                                               : "No kernel took it: " + refused->result.refusal};
  }
  const CaseResult& r = point->result;
  Sentence sentence;
  sentence.headline =
      fmt::format("{} · {} · {}", r.at_level.ambiguous ? "ambiguous" : to_string(r.at_level.wall),
                  to_string(point->problem.dtype), with_commas(point->problem.seqlen_q));
  sentence.text = fmt::format("At length {} {}; {}; {}.", with_commas(point->problem.seqlen_q),
                              model_clause(r), measured_clause(r), remedy(*point, points));
  return sentence;
}

}  // namespace rafter::cli
