// run_tool: builds the tree of commands, parses, and turns whatever goes wrong into one line.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <numeric>

#include "cli/command.h"
#include "cli/output.h"
#include "cli/version.h"

namespace rafter::cli {

#define RAFTER_COMMAND(verb) void add_##verb(CLI::App& app, Context& context);
#include "command_list.inc"
#undef RAFTER_COMMAND

namespace {

void add_commands(CLI::App& app, Context& context) {
#define RAFTER_COMMAND(verb) add_##verb(app, context);
#include "command_list.inc"
#undef RAFTER_COMMAND
}

/// A closed descriptor would be handed to the next file opened, and stdout would land in it.
void keep_standard_descriptors() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) == -1) {
      // Opened against its use, so that writing to a closed stdout still fails.
      const int opened = open("/dev/null", descriptor == 0 ? O_WRONLY : O_RDONLY);
      static_cast<void>(opened);
    }
  }
}

/// The command that the arguments reached.
CLI::App* deepest(CLI::App* app) {
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().front();
  }
  return app;
}

std::string full_name(const CLI::App* app) {
  const CLI::App* parent = app->get_parent();
  return parent == nullptr ? "rafter" : full_name(parent) + " " + app->get_name();
}

std::string join(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, ", "));
}

std::vector<std::string> flags_of(CLI::App* app) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : app->get_options()) {
    if (!option->get_lnames().empty()) {
      flags.push_back("--" + option->get_lnames().front());
    } else {
      flags.push_back(option->get_name());  // positional
    }
  }
  return flags;
}

std::vector<std::string> verbs_of(CLI::App* app) {
  std::vector<std::string> verbs;
  for (const CLI::App* sub : app->get_subcommands([](CLI::App*) { return true; })) {
    verbs.push_back(sub->get_name());
  }
  return verbs;
}

/// Levenshtein distance.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

/// "did you mean X? " when one of the words is close, else nothing.
std::string suggestion(std::string_view given, const std::vector<std::string>& words) {
  if (given.size() > 64) {
    return "";
  }
  const std::string* best = nullptr;
  std::size_t least = std::max<std::size_t>(2, given.size() / 4) + 1;
  for (const std::string& word : words) {
    const std::size_t d = distance(given, word);
    if (d < least) {
      least = d;
      best = &word;
    }
  }
  return best == nullptr ? "" : fmt::format("did you mean {}? ", *best);
}

/// What is wrong with arguments that nothing took.
std::string describe_extras(CLI::App* command, const std::vector<std::string>& extras) {
  const auto flag = std::find_if(extras.begin(), extras.end(), [](const std::string& extra) {
    return extra.size() > 1 && extra.front() == '-' && extra != "--";
  });
  if (flag != extras.end()) {
    const std::string name = flag->substr(0, flag->find('='));
    const std::vector<std::string> flags = flags_of(command);
    return fmt::format("{}: unknown flag of {}; {}{} allowed", one_line(name), full_name(command),
                       suggestion(name, flags), join(flags));
  }
  const std::vector<std::string> verbs = verbs_of(command);
  if (!verbs.empty()) {
    return fmt::format("{}: unknown command of {}; {}{} allowed", one_line(extras.front()),
                       full_name(command), suggestion(extras.front(), verbs), join(verbs));
  }
  return fmt::format("{}: unexpected argument of {}; {} allowed", one_line(extras.front()),
                     full_name(command), join(flags_of(command)));
}

/// The option that CLI11's error text starts with.
const CLI::Option* option_of(CLI::App* command, const std::string& text) {
  for (const CLI::Option* option : command->get_options()) {
    if (text.starts_with(option->get_name() + ":") || text.starts_with(option->get_name() + " ")) {
      return option;
    }
  }
  return nullptr;
}

/// CLI11's error as one line that names the flag and what is allowed.
std::string describe(CLI::App& app, const CLI::ParseError& error) {
  CLI::App* command = deepest(&app);
  const std::vector<std::string> extras = app.remaining(true);
  const bool missing = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
  if (!extras.empty() && (missing || dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr)) {
    return describe_extras(command, extras);
  }
  std::string text = error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  const CLI::Option* option = option_of(command, text);
  if (option == nullptr) {
    return text;
  }
  const std::string allowed =
      fmt::format("{} allowed ({})", option->get_type_name(), option->get_description());
  if (missing) {
    return fmt::format("{}: not given, and needed; {}", option->get_name(), allowed);
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    return option->count() > 1 ? fmt::format("{}: {} values given; one {}", option->get_name(),
                                             option->count(), allowed)
                               : fmt::format("{}: no value given; {}", option->get_name(), allowed);
  }
  return fmt::format("{}; {}", text, allowed);
}

/// The line of a Failure, with a parameter printed as the flag that sets it.
std::string describe(CLI::App& app, const Failure& failure) {
  const Status& status = failure.status();
  std::string flag = "--" + status.parameter();
  std::replace(flag.begin(), flag.end(), '_', '-');
  const std::string& parameter =
      !status.parameter().empty() && deepest(&app)->get_option_no_throw(flag) != nullptr
          ? flag
          : status.parameter();
  std::string text = Status(status.code(), parameter, status.given(), status.allowed()).message();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

int complain(const std::string& text, Exit exit) {
  const std::string line = "rafter: " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
  return static_cast<int>(exit);
}

/// "--flag=" with nothing behind it would swallow the next argument.
void refuse_empty_values(const std::vector<std::string>& arguments) {
  for (const std::string& argument : arguments) {
    if (argument == "--") {
      return;
    }
    if (argument.size() > 3 && argument.starts_with("--") &&
        argument.find('=') == argument.size() - 1) {
      fail_flag(argument.substr(0, argument.size() - 1), "", "a value after the =");
    }
  }
}

int parse_and_run(CLI::App& app, Context& context, std::vector<std::string> arguments) {
  if (arguments.empty()) {
    const std::string usage = app.help();
    std::fwrite(usage.data(), 1, usage.size(), stderr);
    return static_cast<int>(Exit::bad_input);
  }
  try {
    refuse_empty_values(arguments);
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    app.parse(std::move(arguments));
    CLI::App* command = deepest(&app);
    if (!verbs_of(command).empty()) {
      fail_flag(full_name(command), "no command", join(verbs_of(command)));
    }
    return static_cast<int>(context.exit);
  } catch (const CLI::CallForHelp&) {
    write_stdout(app.help());
    return static_cast<int>(Exit::done);
  } catch (const CLI::CallForVersion& version) {
    write_stdout(std::string(version.what()) + "\n");
    return static_cast<int>(Exit::done);
  }
}

}  // namespace

int run_tool(int argc, const char* const* argv) {
  keep_standard_descriptors();
  std::signal(SIGPIPE,
              SIG_IGN);  // a reader that stops early is an error of write(), see output.cpp
  Context context;
  CLI::App app(
      "Fused attention that knows its roofline: what attention costs, which wall it meets, "
      "and kernels that run it.",
      "rafter");
  try {
    app.get_formatter()->column_width(42);
    app.set_version_flag("--version", version_text, "version, kernels, CUDA and instruction sets");
    app.footer(
        "rafter COMMAND --help explains a command. Exit codes: 0 done; 1 a check failed or it "
        "does not fit;\n2 bad input, one line on stderr; 3 a measurement that cannot be "
        "trusted; 77 the hardware is not here.");
    add_commands(app, context);
    return parse_and_run(app, context, {argv + std::min(argc, 1), argv + argc});
  } catch (const Failure& failure) {
    return complain(describe(app, failure), failure.exit());
  } catch (const CLI::ParseError& error) {
    return complain(describe(app, error), Exit::bad_input);
  } catch (const std::bad_alloc&) {
    return complain("out of memory", Exit::check_failed);
  } catch (const std::exception& error) {
    return complain(one_line(error.what()), Exit::check_failed);
  }
}

void add_format(CLI::App& command, Context& context) {
  command
      .add_option_function<std::string>(
          "--format",
          [&context](const std::string& text) {
            if (text == "table") {
              context.format = Format::table;
            } else if (text == "json") {
              context.format = Format::json;
            } else if (text == "csv") {
              context.format = Format::csv;
            } else {
              fail_flag("--format", text, "table, json, csv");
            }
          },
          "table for people, json for programs (one document), csv for spreadsheets")
      ->type_name("table|json|csv")
      ->default_str("table");
}

std::string examples(const std::vector<std::pair<std::string, std::string>>& commands) {
  std::string text = "Examples:";
  for (const auto& [command, shows] : commands) {
    text += fmt::format("\n  {}\n      {}", command, shows);
  }
  return text;
}

}  // namespace rafter::cli
