#include "cli/run_report.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <utility>

#include "cli/output.h"
#include "cli/problem_json.h"

namespace rafter::cli {
namespace {

std::int64_t nan_elements(const Array& array) {
  const float* values = reinterpret_cast<const float*>(array.data.get());
  return std::count_if(values, values + array.elements(), [](float x) { return std::isnan(x); });
}

Json echo(const AttentionProblem& problem, const char* layout) {
  Json json = Json::object();
  json["layout"] = layout;
  json.update(sizes_json(problem));
  json["kv_dtype"] = to_string(*problem.kv_dtype);
  json["window_left"] = problem.mask.window_left;
  json["window_right"] = problem.mask.window_right;
  json["mask_align"] = problem.mask.align == MaskAlign::top_left ? "top-left" : "bottom-right";
  json["softmax_scale"] = number(static_cast<double>(*problem.softmax_scale));
  json["softcap"] = number(static_cast<double>(problem.softcap));
  json["tree_mask"] = problem.tree_mask;
  return json;
}

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::packed:
      return "packed";
    case Layout::paged:
      return "paged";
    default:
      return "dense";
  }
}

/// What a pass was predicted to take, and took.
template <typename Keys>
void set_pass(Keys& keys, const TimedPass& pass) {
  const auto& [plan, timing] = pass;
  const Prediction& predicted = plan.prediction();
  const auto set = [&keys](const char* key, Json value) {
    if constexpr (std::is_same_v<Keys, Json>) {
      keys[key] = std::move(value);
    } else {
      keys.set(key, std::move(value));
    }
  };
  set("wall", to_string(predicted.wall));
  set("near_ridge", predicted.near_ridge);
  set("predicted_time_s", number(predicted.time_s));
  set("measured_time_s", number(timing.seconds.median));
  set("measured_time_low_s", number(timing.seconds.p10));
  set("measured_time_high_s", number(timing.seconds.p90));
  set("runs", timing.seconds.n * timing.calls_per_sample);
  set("flops", number(plan.cost().flops));
  set("bytes", number(plan.cost().bytes));
  set("measured_flop_per_s", number(plan.cost().flops / timing.seconds.median));
  set("workspace_bytes", plan.workspace_bytes());
}

Json backward_json(const TimedPass& pass) {
  Json json = {{"kernel", pass.plan.kernel()}, {"pipeline", to_string(pass.plan.pipeline())}};
  set_pass(json, pass);
  return json;
}

}  // namespace

void report_run(const RunFlags& flags, const TimedPass& forward,
                const std::optional<TimedPass>& backward, const Array& o, const Context& context) {
  const Plan& plan = forward.plan;
  Document document;
  document.set("kernel", plan.kernel())
      .set("pipeline", to_string(plan.pipeline()))
      .set("threads", Json(plan.threads()))
      .set("problem", echo(plan.problem(), layout_name(plan.problem().layout)));
  set_pass(document, forward);
  document.set("device", plan.prediction().device)
      .set("convention", plan.prediction().convention)
      .set("nan_elements", Json(nan_elements(o)));
  if (backward) {
    document.set("backward", backward_json(*backward));
  }
  for (const auto& [flag, path] : flags.outputs()) {
    const std::string key = flag + 2;
    if (backward || key == "out" || key == "lse") {
      document.set(key, path->empty() ? Json(nullptr) : Json(*path));
      document.label(key, (key == "out" ? "o" : key) + " written to");
    }
  }
  document.label("nan_elements", "NaN in the output");
  document.print(context);
}

}  // namespace rafter::cli
