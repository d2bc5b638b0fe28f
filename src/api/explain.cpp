#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "api/plan_state.h"
#include "rafter/attention.h"

namespace rafter {
namespace {

std::string seconds_text(double seconds) {
  if (seconds >= 1) {
    return fmt::format("{:.3g} s", seconds);
  }
  if (seconds >= 1e-3) {
    return fmt::format("{:.3g} ms", seconds * 1e3);
  }
  return fmt::format("{:.3g} us", seconds * 1e6);
}

std::string mask_text(const Mask& mask) {
  if (mask.is_none()) {
    return "no mask";
  }
  const char* align = mask.align == MaskAlign::bottom_right ? "bottom-right" : "top-left";
  if (mask.window_left < 0 && mask.window_right == 0) {
    return fmt::format("causal {}", align);
  }
  return fmt::format("window ({}, {}) {}", mask.window_left, mask.window_right, align);
}

std::string layout_text(const AttentionProblem& p) {
  switch (p.layout) {
    case Layout::packed:
      return fmt::format("packed (total_q {}, total_kv {})", p.total_q, p.total_kv);
    case Layout::paged:
      return fmt::format("paged ({} pages of {})", p.num_pages, p.page_size);
    case Layout::dense:
      break;
  }
  return "dense";
}

std::string problem_text(const AttentionProblem& p, Pass pass) {
  std::string text = fmt::format(
      "attention {}, {}, {}: batch {}, heads_q {}, heads_kv {} (group {}), seqlen_q {}, "
      "seqlen_kv {}, head_dim {}, head_dim_v {}, {}, softmax_scale {:.6g}",
      to_string(pass), to_string(p.dtype), layout_text(p), p.batch, p.heads_q, p.heads_kv,
      p.heads_q / p.heads_kv, p.seqlen_q, p.seqlen_kv, p.head_dim, p.head_dim_v, mask_text(p.mask),
      *p.softmax_scale);
  if (*p.kv_dtype != p.dtype) {
    text += fmt::format(", k and v in {}", to_string(*p.kv_dtype));
  }
  if (p.softcap > 0) {
    text += fmt::format(", softcap {:.6g}", p.softcap);
  }
  text += p.tree_mask ? ", tree_mask" : "";
  return text + (p.seqused_kv ? ", seqused_kv\n" : "\n");
}

std::string candidate_text(const Candidate& c, const detail::PlanState& state) {
  if (!c.accepted) {
    return "refused: " + c.refusal;
  }
  std::string text = seconds_text(c.seconds);
  if (c.kernel == state.kernel) {
    text += state.forced ? ", chosen: the caller named it" : ", chosen: least predicted time";
  } else if (c.only_when_forced) {
    text += ", only when forced";
  }
  return text;
}

}  // namespace

std::string Plan::explain() const {
  const detail::PlanState& state = *state_;
  const KernelEntry& entry = *state.entry;
  std::string text = problem_text(problem(), pass());
  auto out = std::back_inserter(text);
  fmt::format_to(out, "kernel {} ({}, {}), ", entry.name, to_string(entry.pipeline),
                 entry.instruction_set);
  if (entry.device == Device::Kind::cpu) {
    fmt::format_to(out, "{} thread{}, ", threads(), threads() == 1 ? "" : "s");
  }
  fmt::format_to(out, "workspace {} B\n", workspace_bytes());
  if (entry.note != nullptr) {
    if (const std::string note = entry.note(state.problem); !note.empty()) {
      fmt::format_to(out, "note: {}\n", note);
    }
  }
  const Prediction& p = prediction();
  fmt::format_to(out, "roofline of {}: {} for {:.4g} FLOP and {:.4g} B; wall: {}{}\n", p.device,
                 seconds_text(p.time_s), cost().flops, cost().bytes, to_string(p.wall),
                 p.near_ridge ? " (near the ridge)" : "");
  std::size_t width = 0;
  for (const Candidate& c : candidates()) {
    width = std::max(width, c.kernel.size());
  }
  text += "candidates (time of one sequence on every core, which decides):\n";
  for (const Candidate& c : candidates()) {
    fmt::format_to(out, "  {:<{}}  {:<10}  {}\n", c.kernel, width, to_string(c.pipeline),
                   candidate_text(c, state));
  }
  return text;
}

}  // namespace rafter
