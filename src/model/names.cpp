// Names of the engine's enumerations, as the command line and JSON spell them.
#include <string>

#include "rafter/model.h"
#include "rafter/roofline.h"

namespace rafter {

const char* to_string(Pipeline pipeline) {
  switch (pipeline) {
    case Pipeline::unfused:
      return "unfused";
    case Pipeline::half_fused:
      return "half-fused";
    case Pipeline::fused:
      return "fused";
    case Pipeline::split_kv:
      return "split-kv";
  }
  return "unknown";
}

Result<Pipeline> parse_pipeline(std::string_view name) {
  for (const Pipeline p :
       {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused, Pipeline::split_kv}) {
    if (name == to_string(p)) {
      return p;
    }
  }
  return Status::invalid_argument("pipeline", std::string(name),
                                  "unfused, half-fused, fused, split-kv");
}

const char* to_string(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

Result<Pass> parse_pass(std::string_view name) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (name == to_string(pass)) {
      return pass;
    }
  }
  return Status::invalid_argument("pass", std::string(name), "forward, backward");
}

const char* to_string(Wall wall) {
  switch (wall) {
    case Wall::compute:
      return "compute";
    case Wall::bandwidth:
      return "bandwidth";
    case Wall::dispatch:
      return "dispatch";
  }
  return "unknown";
}

const char* to_string(Phase phase) { return phase == Phase::prefill ? "prefill" : "decode"; }

}  // namespace rafter
