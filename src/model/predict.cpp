// A cost on a device: three walls, the ridge with its error bar, and the ceilings below the roof.
#include "model/predict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/check.h"

namespace rafter {
namespace model {

std::string verdict_words(VerdictWords words, Wall wall, bool near_ridge, bool ambiguous) {
  if (wall == Wall::dispatch) {
    return words == VerdictWords::exact ? "dispatch-bound" : "overhead-bound";
  }
  if (ambiguous) {
    return "ambiguous";
  }
  if (near_ridge) {
    return "near-ridge";
  }
  if (wall == Wall::compute) {
    return "compute-bound";
  }
  return words == VerdictWords::solution ? "memory-bound" : "bandwidth-bound";
}

bool within_band(double intensity, double ridge, double dead_band) {
  return dead_band > 1 && intensity >= ridge / dead_band && intensity <= ridge * dead_band;
}

Dispatch dispatch_cost(double launches, const DeviceSpec& device, const Convention& convention) {
  if (!convention.count_dispatch) {
    return {0, "launches are not counted by this convention"};
  }
  const Figure* figure = device.find("launch_s");
  if (!convention.launch_s && figure == nullptr) {
    return {std::numeric_limits<double>::quiet_NaN(),
            fmt::format("{} has no launch_s; give launch_s", device.name)};
  }
  return {launches * convention.launch_s.value_or(figure != nullptr ? figure->value : 0), ""};
}

double landing_seconds(const Cost& cost, const DeviceSpec& device, double bytes_per_s) {
  const Figure* const landing = device.find("bandwidth_scores_bytes_per_s");
  double seconds = 0;
  for (const KernelCost& kernel : cost.kernels) {
    if (kernel.name == "qk" && landing != nullptr) {
      seconds += std::max(0.0, kernel.bytes / landing->value - kernel.bytes / bytes_per_s);
    }
  }
  return seconds;
}

double fused_seconds(const Cost& cost, const DeviceSpec& device, double peak_flop_per_s) {
  // The rate is one of head_dim 128: with more FLOPs for an exponential kernels are quicker.
  constexpr double kMeasuredFlops = 4 * 128;
  const bool fused = cost.kernels.size() == 1 && cost.kernels[0].name == "attention" &&
                     cost.matmul_flops <= kMeasuredFlops * cost.exponentials;
  const Figure* const rate =
      device.find(fmt::format("attention_{}_flop_per_s", to_string(cost.dtype)));
  return fused && rate != nullptr ? cost.tile_flops / std::min(rate->value, peak_flop_per_s) : 0;
}

}  // namespace model

std::string Prediction::verdict() const {
  return model::verdict_words(words, wall, near_ridge, ambiguous);
}

namespace {

/// Low and high of a figure: the measured spread, or the value itself.
double low_of(const Figure& figure) { return figure.low > 0 ? figure.low : figure.value; }
double high_of(const Figure& figure) { return figure.high > 0 ? figure.high : figure.value; }

std::string peak_key(DType dtype) { return fmt::format("peak_{}_flop_per_s", to_string(dtype)); }

DType peak_dtype(DType dtype, const Convention& convention) {
  return convention.peak_per_precision ? dtype : DType::bf16;
}

struct Roof {
  const Figure* peak;
  const Figure* bandwidth;
};

Result<Roof> roof_of(const DeviceSpec& device, DType dtype, const Convention& convention) {
  const DType used = peak_dtype(dtype, convention);
  if (Result<double> peak = device.peak(used); !peak) {
    return peak.status();
  }
  if (Result<double> bandwidth = device.value("bandwidth_bytes_per_s"); !bandwidth) {
    return bandwidth.status();
  }
  return Roof{device.find(peak_key(used)), device.find("bandwidth_bytes_per_s")};
}

void add_ceiling(std::vector<Ceiling>& list, const char* name, double rate, std::string advice) {
  if (rate > 0 && std::isfinite(rate)) {
    list.push_back({name, rate, std::move(advice)});
  }
}

/// Rates that the work cannot pass while it lacks something; those that do not apply are left out.
std::vector<Ceiling> ceilings_of(const Cost& cost, const DeviceSpec& device, const Prediction& p) {
  std::vector<Ceiling> list;
  const double bandwidth = p.bandwidth_bytes_per_s;
  add_ceiling(list, "compute peak", p.peak_flop_per_s,
              fmt::format("a narrower dtype than {} or a wider machine", to_string(cost.dtype)));
  add_ceiling(list, "bandwidth roof", p.bandwidth_roof_flop_per_s,
              "move fewer bytes per FLOP: fuse, batch, share KV heads, narrow the dtype");
  if (const Figure* exp = device.find("exp_per_s"); exp != nullptr && cost.exponentials > 0) {
    add_ceiling(list, "exp unit", cost.flops * exp->value / cost.exponentials,
                "overlap exponentials with products; part of them by polynomial on the FMA units");
  }
  const Figure* vector = device.find("peak_vector_f32_flop_per_s");
  if (vector != nullptr && cost.matmul_flops > 0 && vector->value < p.peak_flop_per_s) {
    add_ceiling(list, "no tensor cores", vector->value, "use the matrix units");
  }
  if (cost.unfused_bytes > cost.bytes) {
    add_ceiling(list, "no fusion", cost.flops / cost.unfused_bytes * bandwidth,
                "fuse softmax with both products so that the scores never land");
  }
  if (cost.untiled_bytes > cost.bytes) {
    add_ceiling(list, "no tiling", cost.flops / cost.untiled_bytes * bandwidth,
                "tile: hold blocks of the operands on chip and use each many times");
  }
  if (p.time_dispatch_s > 0) {
    add_ceiling(list, "launch", cost.flops / p.time_dispatch_s,
                "fewer launches: fuse kernels, capture a graph, batch more work per launch");
  }
  std::ranges::stable_sort(list, {}, &Ceiling::flop_per_s);
  return list;
}

double largest(double a, double b, double c_or_nan) {
  return std::max(std::max(a, b), std::isnan(c_or_nan) ? 0 : c_or_nan);
}

}  // namespace

Result<Ridge> ridge(const DeviceSpec& device, DType dtype, const Convention& convention) {
  if (Status s = convention.validate(); !s) {
    return s;
  }
  const Result<Roof> roof = roof_of(device, dtype, convention);
  if (!roof) {
    return roof.status();
  }
  Ridge r;
  r.peak_flop_per_s = roof->peak->value;
  r.bandwidth_bytes_per_s = roof->bandwidth->value;
  r.flop_per_byte = r.peak_flop_per_s / r.bandwidth_bytes_per_s;
  r.rounded_flop_per_byte = convention.ridge_rounding == RidgeRounding::nearest
                                ? std::round(r.flop_per_byte)
                                : r.flop_per_byte;
  r.low_flop_per_byte = low_of(*roof->peak) / high_of(*roof->bandwidth);
  r.high_flop_per_byte = high_of(*roof->peak) / low_of(*roof->bandwidth);
  r.achieved_flop_per_s = convention.compute_efficiency * r.peak_flop_per_s;
  return r;
}

Result<Prediction> predict(const Cost& cost, const DeviceSpec& device,
                           const Convention& convention) {
  const Result<Ridge> r = ridge(device, cost.dtype, convention);
  if (!r) {
    return r.status();
  }
  const Roof roof = *roof_of(device, cost.dtype, convention);
  const model::Dispatch dispatch = model::dispatch_cost(cost.launches, device, convention);

  Prediction p;
  p.device = device.name;
  p.convention = convention.name;
  p.words = convention.verdict_words;
  p.peak_flop_per_s = r->peak_flop_per_s;
  p.bandwidth_bytes_per_s = r->bandwidth_bytes_per_s;
  p.time_dispatch_s = dispatch.seconds;
  p.dispatch_reason = dispatch.reason;

  const auto times = [&](double peak, double bandwidth) {
    p.time_compute_s = cost.flops / (convention.compute_efficiency * peak);
    const double reached = convention.bandwidth_efficiency * bandwidth;
    p.time_bandwidth_s = cost.bytes / reached + model::landing_seconds(cost, device, reached);
    const double kernel = std::max(p.time_compute_s, p.time_bandwidth_s);
    const double launch = std::isnan(dispatch.seconds) ? 0 : dispatch.seconds;
    return convention.time_model == TimeModel::sum ? kernel + launch : std::max(kernel, launch);
  };
  p.time_low_s = times(high_of(*roof.peak), high_of(*roof.bandwidth));
  p.time_high_s = times(low_of(*roof.peak), low_of(*roof.bandwidth));
  p.time_s = times(r->peak_flop_per_s, r->bandwidth_bytes_per_s);  // last: leaves its terms in p
  p.time_fused_s =
      model::fused_seconds(cost, device, convention.compute_efficiency * r->peak_flop_per_s);
  p.time_sum_s =
      p.time_compute_s + p.time_bandwidth_s + (std::isnan(dispatch.seconds) ? 0 : dispatch.seconds);

  p.intensity_flop_per_byte = cost.intensity();
  p.ridge_flop_per_byte = r->flop_per_byte;
  p.ridge_low_flop_per_byte = r->low_flop_per_byte;
  p.ridge_high_flop_per_byte = r->high_flop_per_byte;
  p.ridge_rounded_flop_per_byte = r->rounded_flop_per_byte;
  p.ridge_multiple = p.intensity_flop_per_byte / p.ridge_flop_per_byte;
  p.bandwidth_roof_flop_per_s = p.intensity_flop_per_byte * p.bandwidth_bytes_per_s;
  p.attainable_flop_per_s = std::min(p.peak_flop_per_s, p.bandwidth_roof_flop_per_s);
  p.peak_fraction = p.attainable_flop_per_s / p.peak_flop_per_s;
  p.achieved_flop_per_s = p.time_s > 0 ? cost.flops / p.time_s : 0;

  const double compute_roof_s = cost.flops / p.peak_flop_per_s;
  const double bandwidth_roof_s = cost.bytes / p.bandwidth_bytes_per_s;
  p.wall = p.intensity_flop_per_byte >= p.ridge_flop_per_byte ? Wall::compute : Wall::bandwidth;
  if (dispatch.seconds > std::max(compute_roof_s, bandwidth_roof_s)) {
    p.wall = Wall::dispatch;
  }
  const double most = largest(p.time_compute_s, p.time_bandwidth_s, p.time_dispatch_s);
  p.largest_term = p.time_compute_s == most     ? Wall::compute
                   : p.time_bandwidth_s == most ? Wall::bandwidth
                                                : Wall::dispatch;
  p.near_ridge =
      model::within_band(p.intensity_flop_per_byte, p.ridge_flop_per_byte, convention.dead_band);
  p.ambiguous = p.ridge_low_flop_per_byte < p.ridge_high_flop_per_byte &&
                p.intensity_flop_per_byte >= p.ridge_low_flop_per_byte &&
                p.intensity_flop_per_byte <= p.ridge_high_flop_per_byte;
  p.ceilings = ceilings_of(cost, device, p);
  return p;
}

Result<FusionGain> fusion_gain(const AttentionProblem& problem, Pipeline pipeline,
                               const DeviceSpec& device, const Convention& convention) {
  const Result<Cost> unfused =
      attention_cost(problem, Pipeline::unfused, Pass::forward, convention);
  Convention own_passes = convention;
  own_passes.score_passes = pipeline == Pipeline::unfused ? convention.score_passes : std::nullopt;
  const Result<Cost> other = attention_cost(problem, pipeline, Pass::forward, own_passes);
  if (Status s = model::first_error(unfused.status(), other.status()); !s) {
    return s;
  }
  Result<Prediction> slow = predict(*unfused, device, convention);
  Result<Prediction> quick = predict(*other, device, convention);
  if (Status s = model::first_error(slow.status(), quick.status()); !s) {
    return s;
  }
  if (!(unfused->bytes > 0) || !(unfused->flops > 0)) {
    return Status::invalid_argument("seqlen_q, seqlen_kv", "a problem without work", "1 and up");
  }
  FusionGain gain;
  const double peak = slow->peak_flop_per_s;
  gain.ceiling = peak / slow->attainable_flop_per_s;
  gain.achieved = convention.compute_efficiency * peak /
                  std::min(convention.compute_efficiency * peak,
                           convention.bandwidth_efficiency * slow->bandwidth_roof_flop_per_s);
  gain.gain = convention.kernel_gain == KernelGain::ceiling ? gain.ceiling : gain.achieved;
  gain.by_times = slow->time_s / quick->time_s;
  gain.bytes_ratio = unfused->bytes / other->bytes;
  gain.unfused = std::move(*slow);
  gain.pipeline = std::move(*quick);
  return gain;
}

}  // namespace rafter
