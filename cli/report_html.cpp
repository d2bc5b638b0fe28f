#include <span>
#include <string_view>
#include <utility>

#include "cli/report_data.h"

namespace rafter::cli {

// Generated from cli/report and Chart.js.
std::span<const std::pair<std::string_view, std::string_view>> embedded_report_files();

namespace {

/// JSON that may stand inside a script element: nothing in it can end the element or start markup.
std::string script_json(const Json& json) {
  const std::string text = json.dump(-1, ' ', true, Json::error_handler_t::replace);
  std::string safe;
  safe.reserve(text.size());
  for (char c : text) {  // inside JSON these three only occur in strings
    switch (c) {
      case '<':
        safe += "\\u003c";
        break;
      case '>':
        safe += "\\u003e";
        break;
      case '&':
        safe += "\\u0026";
        break;
      default:
        safe += c;
    }
  }
  return safe;
}

std::string_view embedded(std::string_view name) {
  for (const auto& [file, contents] : embedded_report_files()) {
    if (file == name) {
      return contents;
    }
  }
  fail(Exit::bad_input, std::string(name), "is missing from this build's report files");
}

/// A template with what it names in its place: data, templates, and files as they are.
void expand(std::string_view rest, const Json& report, std::string& page) {
  for (std::size_t open = rest.find("{{"); open != std::string_view::npos; open = rest.find("{{")) {
    const std::size_t close = rest.find("}}", open);
    const std::string_view name = rest.substr(open + 2, close - open - 2);
    page += rest.substr(0, open);
    if (name == "data") {
      page += script_json(report);
    } else if (name.ends_with(".html")) {
      expand(embedded(name), report, page);
    } else {
      page += embedded(name);
    }
    rest.remove_prefix(close + 2);
  }
  page += rest;
}

}  // namespace

void check_page(const std::string& out, const Status& status) {
  if (!status) {
    fail(Status(status.code(), "--out " + one_line(out), status.given(), status.allowed()));
  }
}

std::string report_html(const Json& report) {
  std::string page;
  const bool of_model = report.value("schema", "") == "rafter-model-report-1";
  expand(embedded(of_model ? "step_template.html" : "template.html"), report, page);
  return page;
}

}  // namespace rafter::cli
