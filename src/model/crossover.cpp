// Where attention crosses the ridge: I(S) = FLOPs(S) / bytes(S), both polynomials of the length.
#include <algorithm>
#include <cmath>

#include "model/attention_terms.h"
#include "model/check.h"
#include "model/solve.h"

namespace rafter {

using model::AttentionShape;
using model::AttentionTotals;

namespace {

/// Attention at a real length, per query head.
class Curve {
 public:
  Curve(const AttentionShape& shape, const Mask& mask, Pipeline pipeline, Pass pass,
        const Convention& convention)
      : shape_(shape), mask_(mask), pipeline_(pipeline), pass_(pass), convention_(convention) {}

  Cost at(const AttentionTotals& totals) const {
    const model::Counted counted = model::counted_of(convention_, pipeline_);
    return pass_ == Pass::forward
               ? model::forward_terms(shape_, totals, pipeline_, counted, convention_)
               : model::backward_terms(shape_, totals, pipeline_, counted, convention_);
  }
  double intensity(double s) const {
    return at(model::totals_of(shape_, s, s, mask_, convention_)).intensity();
  }
  /// True when FLOPs and bytes are f2·S² + f1·S and b2·S² + b1·S: compulsory traffic and a mask
  /// that is none, or causal without blocks that land whole.
  bool is_polynomial() const {
    const bool causal = mask_.window_left < 0 && mask_.window_right == 0;
    const bool plain = mask_.is_none() || (causal && convention_.score_block_rows == 0);
    return convention_.traffic_model == TrafficModel::compulsory && plain;
  }

  /// Rows of a block of scores that lands whole; 0: there are none.
  double block_rows() const { return mask_.is_none() ? 0 : convention_.score_block_rows; }

  struct Coefficients {
    double f2, f1, b2, b1;
  };
  Coefficients coefficients() const {
    // Everything is linear in (pairs, rows, keys): one pair alone, then one row and one key alone.
    const Cost pair = at({.pairs = 1, .landed_pairs = 1, .all_pairs = 1});
    const Cost row = at({.rows = 1, .keys = 1, .key_reads = 1, .landed_key_reads = 1});
    // Pairs are S² without a mask, S²/2 + S/2 summed per row of a causal one, S²/2 as half.
    const bool causal = !mask_.is_none();
    const double p2 = causal ? 0.5 : 1;
    const double p1 = causal && convention_.causal_pairs == CausalPairs::exact ? 0.5 : 0;
    const double heads = shape_.heads_q;
    return {p2 * pair.flops / heads, (p1 * pair.flops + row.flops) / heads, p2 * pair.bytes / heads,
            (p1 * pair.bytes + row.bytes) / heads};
  }

 private:
  AttentionShape shape_;
  Mask mask_;
  Pipeline pipeline_;
  Pass pass_;
  Convention convention_;
};

void solve_closed(const Curve& curve, Crossover& x) {
  const auto [f2, f1, b2, b1] = curve.coefficients();
  const double r = x.ridge_flop_per_byte;
  x.numerator = r * b1 - f1;
  x.coefficient = f2 - r * b2;
  if (x.coefficient != 0) {
    x.root = x.numerator / x.coefficient;
  }
  if (b2 > 0) {
    x.intensity_limit_flop_per_byte = f2 / b2;
  }
  // (f2·S + f1) / (b2·S + b1) ≥ r from the root on when the coefficient is positive; when it is
  // not, the intensity tends to f2/b2 ≤ r from below (at f1 ≤ r·b1) and never arrives.
  if (x.coefficient > 0 || (x.coefficient == 0 && x.numerator <= 0)) {
    x.seqlen = std::max(0.0, x.root.value_or(0));
  }
}

/// Beyond this length a window's edge and a tile's rounding no longer show in the intensity.
constexpr double kFar = 0x1p50;
/// Beyond so many blocks of scores one more does not either.
constexpr double kManyBlocks = 4096;

void solve_by_bisection(const Curve& curve, Crossover& x) {
  x.closed_form = false;
  const double far = curve.intensity(kFar);
  if (far / curve.intensity(kFar / 2) < 1.5) {
    x.intensity_limit_flop_per_byte = far;
  }
  const auto reached = [&](double s) { return curve.intensity(s) >= x.ridge_flop_per_byte; };
  // A block of scores more reads K and V once more: the intensity falls there, and rises to the
  // block's end. So the first block at whose end it is reached has the length.
  double low = 1;
  for (double end = curve.block_rows(); low < kManyBlocks * curve.block_rows();
       end += curve.block_rows()) {
    if (reached(end)) {
      x.seqlen = model::smallest_real(reached, low, end);
      return;
    }
    low = end;
  }
  x.seqlen = model::smallest_real(reached, low, kFar);
}

}  // namespace

Result<Crossover> crossover(const AttentionProblem& problem, Pipeline pipeline,
                            const DeviceSpec& device, const Convention& convention, Pass pass) {
  const Result<AttentionShape> shape = model::shape_of(problem, 1);
  const Status checked = model::first_error(shape.status(), convention.validate(),
                                            model::check_mask(problem.mask, convention));
  if (!checked) {
    return checked;
  }
  if (problem.layout != Layout::dense) {
    return Status::invalid_argument("layout", "packed or paged", "dense");
  }
  if (pass == Pass::backward && pipeline == Pipeline::split_kv) {
    return Status::unsupported("pipeline", "split-kv for the backward pass",
                               "unfused, half-fused, fused");
  }
  const Result<Ridge> roof = ridge(device, problem.dtype, convention);
  if (!roof) {
    return roof.status();
  }
  Crossover x;
  x.device = device.name;
  x.convention = convention.name;
  x.ridge_flop_per_byte = roof->flop_per_byte;
  const Curve curve(*shape, problem.mask, pipeline, pass, convention);
  if (curve.is_polynomial()) {
    solve_closed(curve, x);
  } else {
    solve_by_bisection(curve, x);
  }
  x.reachable = x.seqlen.has_value();
  if (x.intensity_limit_flop_per_byte) {
    x.shortfall = x.ridge_flop_per_byte / *x.intensity_limit_flop_per_byte;
  }
  if (x.seqlen) {
    x.seqlen_ceil = std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(*x.seqlen)));
    x.seqlen_rounded = *x.seqlen;
    if (convention.crossover_rounding == CrossoverRounding::ceil) {
      x.seqlen_rounded = static_cast<double>(*x.seqlen_ceil);
    } else if (convention.crossover_rounding == CrossoverRounding::rounded_ridge) {
      // The length is proportional to the ridge where f1 and b2 vanish (b · ridge, fused and full).
      x.seqlen_rounded =
          std::round(*x.seqlen / x.ridge_flop_per_byte * std::round(x.ridge_flop_per_byte));
    }
  }
  return x;
}

}  // namespace rafter
