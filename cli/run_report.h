// What rafter run prints.
#pragma once

#include <optional>

#include "cli/array.h"
#include "cli/command.h"
#include "cli/run_flags.h"
#include "rafter/attention.h"
#include "rafter/measure.h"

namespace rafter::cli {

/// A pass as it was planned and timed.
struct TimedPass {
  const Plan& plan;
  Timing timing;
};

void report_run(const RunFlags& flags, const TimedPass& forward,
                const std::optional<TimedPass>& backward, const Array& o, const Context& context);

}  // namespace rafter::cli
