// The sizes of a problem as documents echo them.
#pragma once

#include "cli/output.h"
#include "rafter/tensor.h"

namespace rafter::cli {

/// Of an AttentionProblem or a DecodeProblem.
template <typename Problem>
Json sizes_json(const Problem& problem) {
  Json json = Json::object();
  json["batch"] = problem.batch;
  json["heads_q"] = problem.heads_q;
  json["heads_kv"] = problem.heads_kv;
  json["seqlen_q"] = problem.seqlen_q;
  json["seqlen_kv"] = problem.seqlen_kv;
  json["head_dim"] = problem.head_dim;
  json["head_dim_v"] = problem.head_dim_v;
  json["dtype"] = to_string(problem.dtype);
  return json;
}

}  // namespace rafter::cli
