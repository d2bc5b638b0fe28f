// The frame of the tool. To add a verb, drop one file cli/cmd_<verb>.cpp:
//
//     namespace rafter::cli {
//     void add_probe(CLI::App& app, Context& context) {          // cmd_probe.cpp defines add_probe
//       auto options = std::make_shared<Options>();              // lives as long as the callback
//       CLI::App* command = app.add_subcommand("probe", "measure this machine's ceilings");
//       command->footer(examples({{"rafter probe", "measure and keep the file"}}));
//       add_length(*command, "--seqlen", options->seqlen, "tokens");   // cli/args.h: typed flags
//       add_format(*command, context);                                 // --format table|json|csv
//       command->callback([options, &context] {
//         Measured m = value_or_fail(measure(...));              // cli/failure.h: ends the command
//         Document document;                                     // cli/output.h: content, once
//         document.set("bandwidth_bytes_per_s", m.bandwidth);
//         document.print(context);
//         context.exit = Exit::done;
//       });
//     }
//     }
//
// CMake lists the files (generated/command_list.inc); nothing else names a verb. run_tool turns
// every error of CLI11, every Failure and every exception into one line on stderr and an exit code.
// Files that commands write go through cli/files.h (temporary file, then rename).
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/failure.h"

namespace rafter::cli {

enum class Format : std::uint8_t { table, json, csv };

/// What a command gets from the tool and hands back to it.
struct Context {
  Format format = Format::table;
  Exit exit = Exit::done;
};

/// Adds --format table|json|csv.
void add_format(CLI::App& command, Context& context);

/// The footer of a --help page: each example with what it shows.
std::string examples(const std::vector<std::pair<std::string, std::string>>& commands);

/// Runs the tool; returns its exit code.
int run_tool(int argc, const char* const* argv);

}  // namespace rafter::cli
