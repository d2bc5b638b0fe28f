// What one benchmark row says, in the three forms it is asked for: a row of google-benchmark's
// frame, a record line for bench/results, a comparison with a baseline.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "cli/output.h"
#include "cli/timed_attention.h"
#include "rafter/measure.h"

namespace rafter::cli {

struct BenchRow {
  std::string kind;      // "attention", "gemm"
  Json shape;            // the case: seqlen, head_dim, …, dtype, threads
  std::string pipeline;  // "" where there is none
  std::string kernel;
  Cost cost;
  Prediction predicted;  // with the bandwidth of the level that holds the working set
  double bound_s = 0;    // least time by that
  std::string level;     // its name
  Timing timing;
  std::string wall_measured, wall_reason;
  Json more = Json::object();     // keys of this kind alone
  Json kept = Json::object();     // the same, that records keep as well
  Json columns = Json::object();  // of the table, behind the shape; none: the common ones

  std::string name() const;  // "attention/seqlen:512/…": what identifies the case and pipeline
};

/// Sets counted_bytes and its parts, or null with the reason.
void set_counted(const CaseResult& result, Json& json);
/// One element of "benchmarks".
Json benchmark_json(const BenchRow& row);
/// "context": google-benchmark's keys and what describes this machine and build.
Json benchmark_context(const DeviceSpec& spec);
/// One line of a record file.
Json record_json(const BenchRow& row, const DeviceSpec& spec);

/// A file of record lines: the newest record of each name. Errors: io_error with the line.
using Baseline = std::map<std::string, MedianInterval>;
Result<Baseline> read_baseline(const std::string& path);
/// Appends record lines to a file, which is replaced as a whole.
Status append_records(const std::string& path, const std::vector<Json>& records);

}  // namespace rafter::cli
