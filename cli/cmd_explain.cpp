// rafter explain: what a kernel or a model costs and which wall it meets. No hardware needed.
#include "cli/command.h"
#include "cli/explain.h"

namespace rafter::cli {

void add_explain(CLI::App& app, Context& context) {
  CLI::App* explain = app.add_subcommand(
      "explain", "what a kernel or a model costs and which wall it meets, on any device");
  explain->footer(examples({{"rafter explain attention --seqlen 4096 --pipeline unfused",
                             "the wall of attention written as three kernels, on an H100"},
                            {"rafter explain crossover --convention lecture --device h100-sxm",
                             "the length from which fused attention is compute-bound"},
                            {"rafter explain model decode --seqlen 4096 --batch 8 --format json",
                             "one decode step of a 7B model, for a program"}}));
  add_explain_attention(*explain, context);
  add_explain_decode(*explain, context);
  add_explain_gemm(*explain, context);
  add_explain_elementwise(*explain, context);
  add_explain_ridge(*explain, context);
  add_explain_crossover(*explain, context);
  add_explain_memory(*explain, context);
  add_explain_recompute(*explain, context);
  add_explain_online_softmax(*explain, context);
  add_explain_merge(*explain, context);
  add_explain_tiling(*explain, context);
  add_explain_model(*explain, context);
  add_explain_conventions(*explain, context);
}

/// Each parameter with its meaning, what it may be, and its value in the three conventions.
void add_explain_conventions(CLI::App& explain, Context& context) {
  CLI::App* command = explain.add_subcommand(
      "conventions", "list the parameters of counting and their values in each convention");
  command->footer(examples({{"rafter explain conventions", "the three conventions side by side"}}));
  add_format(*command, context);
  command->callback([&context] {
    const std::vector<std::string> exact = Convention::exact().values();
    const std::vector<std::string> lecture = Convention::lecture().values();
    const std::vector<std::string> solution = Convention::solution().values();
    Json rows = Json::array();
    std::size_t index = 0;
    for (const ConventionParameter& parameter : convention_parameters()) {
      Json row = Json::object();
      row["parameter"] = parameter.name;
      row["exact"] = exact[index];
      row["lecture"] = lecture[index];
      row["solution"] = solution[index];
      row["allowed"] = parameter.allowed;
      row["what"] = parameter.what;
      rows.push_back(std::move(row));
      ++index;
    }
    Document document;
    document.headline(
        "How costs are counted. Choose with --convention NAME; each parameter is a "
        "flag too (softmax_flops_per_element: --softmax-flops-per-element).");
    document.set("conventions", std::move(rows)).rows("conventions");
    document.label("conventions", "Parameters");
    document.print(context);
  });
}

}  // namespace rafter::cli
