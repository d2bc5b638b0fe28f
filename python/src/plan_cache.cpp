#include "plan_cache.h"

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace rafter::python {
namespace {

/// All that a plan depends on.
struct Key {
  AttentionProblem problem;
  int device_index;
  Pass pass;
  std::optional<Pipeline> pipeline;
  std::string kernel;
  std::int64_t splits;

  bool operator==(const Key&) const = default;
};

struct Hash {
  std::size_t operator()(const Key& key) const {
    const AttentionProblem& p = key.problem;
    std::size_t hash = static_cast<std::size_t>(key.pass);
    for (const std::int64_t part :
         {p.batch, p.heads_q, p.heads_kv, p.seqlen_q, p.seqlen_kv, p.head_dim, p.head_dim_v,
          p.total_q, p.total_kv, p.num_pages, p.mask.window_left, p.mask.window_right,
          static_cast<std::int64_t>(p.dtype), static_cast<std::int64_t>(key.device_index)}) {
      hash = hash * 0x9e3779b97f4a7c15u + static_cast<std::size_t>(part);
    }
    return hash;
  }
};

constexpr std::size_t kMostPlans = 4096;  // about 4 MB

}  // namespace

Result<Plan> planned(const AttentionProblem& problem, const Device& device,
                     const PlanOptions& options) {
  if (device.kind == Device::Kind::cuda && options.threads != 0) {
    return Status::invalid_argument("threads", std::to_string(options.threads),
                                    "0 with a CUDA device");
  }
  if (device.kind == Device::Kind::cpu || options.device_spec != nullptr) {
    return rafter::plan(problem, device, options);
  }
  static std::unordered_map<Key, Plan, Hash> plans;
  Key key{problem, device.index, options.pass, options.pipeline, options.kernel, options.splits};
  if (const auto found = plans.find(key); found != plans.end()) {
    return found->second;
  }
  Result<Plan> made = rafter::plan(problem, device, options);
  if (made) {
    if (plans.size() >= kMostPlans) {
      plans.clear();
    }
    plans.emplace(std::move(key), *made);
  }
  return made;
}

}  // namespace rafter::python
