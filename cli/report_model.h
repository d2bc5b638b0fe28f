// rafter report --model: one page about a whole model, its steps operation by operation.
#pragma once

#include <cstdint>
#include <string>

#include "cli/command.h"
#include "cli/timed_model.h"

namespace rafter::cli {

struct ModelReportOptions {
  std::string model;  // empty: a report about attention
  std::optional<std::int64_t> seqlen;
  std::int64_t batch = 1;
  std::string out, device;
  bool quick = false, probe = false;
};
/// Times a prefill and a decode step, writes the page, prints its figures.
void report_model(const ModelReportOptions& options, Context& context);

}  // namespace rafter::cli
