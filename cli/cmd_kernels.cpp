// rafter kernels: every kernel of this build, what it accepts, and whether this machine has it.
#include <fmt/format.h>

#include "cli/command.h"
#include "cli/output.h"
#include "rafter/kernels.h"

namespace rafter::cli {
namespace {

void print_kernels(const Context& context) {
  Json rows = Json::array();
  std::size_t here = 0;
  for (const KernelInfo& kernel : list_kernels()) {
    Json dtypes = Json::array();
    for (const DType dtype : kernel.dtypes) {
      dtypes.push_back(to_string(dtype));
    }
    Json kv_dtypes = Json::array();
    for (const DType dtype : kernel.kv_dtypes) {
      kv_dtypes.push_back(to_string(dtype));
    }
    here += kernel.machine_has ? 1U : 0U;
    Json row = Json::object();
    row["kernel"] = kernel.name;
    row["device"] = to_string(kernel.device);
    row["pass"] = to_string(kernel.pass);
    row["pipeline"] = to_string(kernel.pipeline);
    row["instruction_set"] = kernel.instruction_set;
    row["dtypes"] = std::move(dtypes);
    row["kv_dtypes"] = std::move(kv_dtypes);
    row["machine_has"] = kernel.machine_has;
    row["machine_reason"] =
        kernel.machine_has ? Json(nullptr) : Json(kernel.machine_reason);  // why not
    row["accepts"] = kernel.accepts;
    rows.push_back(std::move(row));
  }
  Document document;
  document.headline(
      fmt::format("{} kernels in this build, {} of them run on this machine.", rows.size(), here));
  document.set("kernels", std::move(rows)).rows("kernels").label("kernels", "Kernels");
  document.label("machine_has", "here").label("machine_reason", "why not");
  document.print(context);
}

}  // namespace

void add_kernels(CLI::App& app, Context& context) {
  CLI::App* command =
      app.add_subcommand("kernels",
                         "list the kernels of this build and whether this machine has "
                         "what they need");
  command->footer(examples({{"rafter kernels", "name, device, dtypes, what each accepts"},
                            {"rafter kernels --format json", "the same for a program"}}));
  add_format(*command, context);
  command->callback([&context] { print_kernels(context); });
}

}  // namespace rafter::cli
