// What the report says, as one JSON value: the page is a function of it alone.
#pragma once

#include <string>
#include <vector>

#include "cli/output.h"
#include "cli/probe_file.h"
#include "cli/timed_attention.h"

namespace rafter::cli {

/// One timed point: a length, a dtype, a pipeline, and the data it ran on.
struct ReportPoint {
  AttentionProblem problem;
  std::string data;  // "random", or what the user's tensors are called
  CaseResult result;
};

/// One pipeline in one dtype against the float64 reference.
struct ReportAccuracy {
  Pipeline pipeline = Pipeline::fused;
  DType dtype = DType::f32;
  std::string kernel;
  double max_abs_error = 0, relative_rms_error = 0;
  std::vector<std::int64_t> at;  // [batch, row, head, column] of the largest error
  double limit = 0;
  bool ok() const { return max_abs_error <= limit; }
};

struct ReportContent {
  ThisMachine machine;
  std::string data_source;  // a sentence
  AttentionProblem shape;   // batch, heads and head_dim of the points
  std::vector<ReportPoint> points;
  std::vector<ReportAccuracy> accuracy;
  std::string accuracy_note;
  double seconds = 0;  // that the report took
};

Json report_json(const ReportContent& content);
/// What every report says of the machine: "machine", "subtitle", "date", "commit", "ceilings",
/// "figures".
void set_machine(const ThisMachine& machine, const std::string& data_source, Json& report);
/// What is to be known of the machine's ceilings before anything else.
Json machine_alerts(const ThisMachine& machine);
/// The page, self-contained. The same JSON gives the same bytes.
std::string report_html(const Json& report);
/// Ends the command with an i/o error of the page, by its flag.
void check_page(const std::string& out, const Status& status);

/// The wall of a pipeline and what would move it, in one sentence, and a headline of a few words.
struct Sentence {
  std::string headline, text;
};
Sentence verdict_sentence(Pipeline pipeline, const std::vector<ReportPoint>& points);

/// Figures of the library for a grid of problems, by which the page checks its own cost model.
Json model_check_grid();

/// What `--format json` prints of a report: all of it, and the path of its page.
void print_json(const Json& report, const std::string& path, const Context& context);

}  // namespace rafter::cli
