// How the tool takes what a user types: help, version, and every kind of bad flag.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> list;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    list.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return list;
}

/// The verbs that a --help page lists.
std::vector<std::string> verbs_of(const std::string& help) {
  std::vector<std::string> verbs;
  std::size_t at = help.find("Subcommands:\n");
  while (at != std::string::npos && (at = help.find('\n', at)) != std::string::npos &&
         help.compare(at, 3, "\n  ") == 0) {
    verbs.push_back(help.substr(at + 3, help.find(' ', at + 3) - at - 3));
    ++at;
  }
  return verbs;
}

/// Every command, deepest first: "explain attention", "explain model prefill", "devices", …
void collect_commands(const std::string& prefix, std::vector<std::string>& all) {
  std::vector<std::string> arguments = words(prefix);
  arguments.push_back("--help");
  const ToolRun run = run_tool(arguments);
  EXPECT_EQ(run.exit_code, 0) << prefix;
  for (const std::string& verb : verbs_of(run.out)) {
    collect_commands(prefix.empty() ? verb : prefix + " " + verb, all);
  }
  all.push_back(prefix);
}

TEST(Usage, WithoutACommandItPrintsItsUsageAndFails) {
  const ToolRun run = run_tool({});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.out, "");
  EXPECT_NE(run.err.find("Usage: rafter"), std::string::npos);
  EXPECT_NE(run.err.find("explain"), std::string::npos);
}

TEST(Usage, TheVersionNamesKernelsCudaAndInstructionSets) {
  const ToolRun run = run_tool({"--version"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(run.err, "");
  EXPECT_TRUE(run.out.starts_with("rafter "));
  EXPECT_EQ(run.out.back(), '\n');
  for (const char* word : {"\ncommit ", "\ncompiler ", "\ncuda ", "\nisa ", "portable"}) {
    EXPECT_NE(run.out.find(word), std::string::npos) << word << run.out;
  }
  // Every kernel has its line behind "kernels", marked where this machine lacks what it needs.
  const std::string list = run.out.substr(std::min(run.out.find("\nkernels "), run.out.size()));
  const auto kernels = run_json({"kernels"}).at("kernels");
  bool any_cuda = false;
  for (const auto& kernel : kernels) {
    const std::string line = " " + kernel.at("kernel").get<std::string>() +
                             (kernel.at("machine_has").get<bool>() ? "\n" : " (not here)\n");
    EXPECT_NE(list.find(line), std::string::npos) << line << run.out;
    any_cuda = any_cuda || kernel.at("device") == "cuda";
  }
  EXPECT_EQ(static_cast<std::size_t>(std::count(list.begin(), list.end(), '\n')),
            kernels.size() + 1);
  EXPECT_EQ(run.out.find("\ncuda      none in this build\n") == std::string::npos, any_cuda);
}

TEST(Usage, EveryCommandHasHelpWithExamplesAndRefusesAnUnknownFlag) {
  std::vector<std::string> commands;
  collect_commands("", commands);
  EXPECT_GE(commands.size(), 17U);  // 13 verbs of explain, their parents, devices, kernels
  for (const std::string& command : commands) {
    std::vector<std::string> arguments = words(command);
    arguments.push_back("--help");
    const ToolRun help = run_tool(arguments);
    EXPECT_EQ(help.exit_code, 0) << command;
    EXPECT_EQ(help.err, "") << command;
    if (!command.empty()) {
      EXPECT_NE(help.out.find("Examples:\n  rafter " + words(command).front()), std::string::npos)
          << command;
    }
    arguments.back() = "--no-such-flag";
    expect_refused(arguments, {"--no-such-flag", "--help", "allowed"});
  }
}

TEST(Usage, EveryExampleOfExplainRuns) {
  std::vector<std::string> commands;
  collect_commands("explain", commands);
  int examples = 0;
  for (const std::string& command : commands) {
    std::vector<std::string> arguments = words(command);
    arguments.push_back("--help");
    const std::string help = run_tool(arguments).out;
    for (std::size_t at = help.find("\n  rafter "); at != std::string::npos;
         at = help.find("\n  rafter ", at + 1)) {
      const std::string line = help.substr(at + 10, help.find('\n', at + 1) - at - 10);
      if (line.find("config.json") != std::string::npos) {
        continue;  // the user's own file
      }
      const ToolRun run = run_tool(words(line));
      EXPECT_TRUE(run.exit_code == 0 || run.exit_code == 1) << line << "\n" << run.err;
      ++examples;
    }
  }
  EXPECT_GE(examples, 20);
}

TEST(Usage, AnUnknownCommandNamesTheNearestOne) {
  expect_refused({"explian"}, {"explian", "did you mean explain?", "devices"});
  expect_refused({"explain", "atention"}, {"atention", "did you mean attention?"});
  expect_refused({"explain", "model", "prefil"}, {"prefil", "prefill", "decode"});
  expect_refused({"explain"}, {"explain", "attention", "crossover"});
  expect_refused({"explain", "model"}, {"prefill", "decode"});
}

TEST(Usage, AnUnknownFlagNamesTheNearestOneAndAllThatAreAllowed) {
  expect_refused({"explain", "attention", "--seqln", "4096"},
                 {"--seqln", "did you mean --seqlen?", "--head-dim", "--pipeline"});
  expect_refused({"explain", "merge", "--statse", "1,2,3"}, {"--statse", "--states"});
  expect_refused({"explain", "attention", "-z"}, {"-z", "--seqlen"});
  expect_refused({"devices", "h100-sxm", "extra"}, {"extra", "--format"});
}

TEST(Usage, AMissingOrRepeatedOrEmptyValueNamesItsFlag) {
  expect_refused({"explain", "attention", "--seqlen"}, {"--seqlen", "allowed"});
  expect_refused({"explain", "attention", "--seqlen", ""}, {"--seqlen", "''", "whole number"});
  expect_refused({"explain", "attention", "--seqlen=", "--causal"}, {"--seqlen", "allowed"});
  expect_refused({"explain", "attention", "--seqlen", "1", "--seqlen", "2"}, {"--seqlen", "2"});
  expect_refused({"explain", "attention", "--seqlen", "--causal"}, {"--seqlen", "--causal"});
  expect_refused({"explain", "attention", "--window", "1"}, {"--window"});
  expect_refused({"explain", "merge"}, {"--states"});
  expect_refused({"explain", "attention", "--device", ""}, {"--device"});
}

TEST(Usage, EmptyAndNonAsciiArgumentsAreRefusedNotCrashedOn) {
  expect_refused({""}, {"''", "explain"});
  expect_refused({"explain", ""}, {"''"});
  expect_refused({"größe"}, {"größe"});
  expect_refused({"explain", "attention", "--dtype", "bf१६"}, {"--dtype", "bf१६", "bf16"});
  expect_refused({"explain", "attention", "--seqlen", "\xff\xfe"}, {"--seqlen", "\\xff\\xfe"});
  expect_refused({"explain", "attention", "--seqlen", "4\n5"}, {"--seqlen", "4\\x0a5"});
  expect_refused({"explain", "attention", "--seqlen", std::string(10000, '9')},
                 {"--seqlen", "whole number"});
  expect_refused({std::string(100000, 'x')}, {"xxxx", "explain"});
}

class LengthThatIsNone : public testing::TestWithParam<const char*> {};
TEST_P(LengthThatIsNone, IsRefusedWithWhatIsAllowed) {
  expect_refused({"explain", "attention", "--seqlen", GetParam()},
                 {"--seqlen", GetParam(), "whole number from 1 to 1099511627776", "allowed"});
}
INSTANTIATE_TEST_SUITE_P(Usage, LengthThatIsNone,
                         testing::Values("abc", "0", "-1", "-0", "1.5", "1e3", "0x10", "4kk", "k",
                                         "4 ", " 4", "+4", "nan", "inf", "4,5", "1t", "2000g",
                                         "1099511627777", "9223372036854775808",
                                         "18446744073709551617"));

class NumberThatIsNone : public testing::TestWithParam<const char*> {};
TEST_P(NumberThatIsNone, IsRefusedWithWhatIsAllowed) {
  for (const char* flag : {"--peak-flops-per-s", "--bandwidth-bytes-per-s", "--capacity-bytes",
                           "--softmax-flops-per-element", "--compute-efficiency", "--dead-band"}) {
    expect_refused({"explain", "attention", flag, GetParam()}, {flag, "allowed"});
  }
}
INSTANTIATE_TEST_SUITE_P(Usage, NumberThatIsNone,
                         testing::Values("abc", "-1", "-0", "nan", "inf", "-inf", "1e999", "0x1p3",
                                         "1,5", "1 ", "--"));

TEST(Usage, ImpossibleValuesNameTheFlagAndWhatIsAllowed) {
  const std::vector<std::string> attention = {"explain", "attention"};
  const std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>> cases = {
      {{"--dtype", "fp8"}, {"--dtype", "fp8", "e4m3"}},
      {{"--dtype", "i32"}, {"--dtype", "i32"}},
      {{"--pipeline", "flash"}, {"--pipeline", "flash", "half-fused"}},
      {{"--pass", "sideways"}, {"--pass", "forward, backward"}},
      {{"--batch", "0"}, {"--batch", "0", "from 1"}},
      {{"--heads-q", "0"}, {"--heads-q", "from 1"}},
      {{"--heads-q", "7", "--heads-kv", "2"}, {"heads", "7"}},
      {{"--head-dim", "0"}, {"--head-dim", "from 1"}},
      {{"--convention", "approximate"}, {"--convention", "exact, lecture, solution"}},
      {{"--compute-efficiency", "0"}, {"--compute-efficiency", "above 0"}},
      {{"--compute-efficiency", "1.01"}, {"--compute-efficiency", "at most 1"}},
      {{"--bandwidth-efficiency", "2"}, {"--bandwidth-efficiency", "at most 1"}},
      {{"--dead-band", "0.5"}, {"--dead-band", "1"}},
      {{"--traffic-model", "none"}, {"--traffic-model", "compulsory, tiled"}},
      {{"--time-model", "min"}, {"--time-model", "max, sum"}},
      {{"--count-qkvo", "maybe"}, {"--count-qkvo", "true, false"}},
      {{"--causal", "maybe"}, {"--causal", "true, false"}},
      {{"--causal-align", "left"}, {"--causal-align", "bottom-right, top-left"}},
      {{"--window", "-2", "0"}, {"--window", "-1"}},
      {{"--window", "a", "b"}, {"--window", "a b"}},
      {{"--device", "h1000"}, {"--device", "h1000", "h100-sxm"}},
      {{"--device", "nowhere/none.json"}, {"--device nowhere/none.json", "file"}},
      {{"--device", "/"}, {"--device"}},
      {{"--format", "xml"}, {"--format", "table, json, csv"}},
      {{"--peak-flops-per-s", "0"}, {"--peak-flops-per-s", "above 0"}},
  };
  for (const auto& [flags, expected] : cases) {
    std::vector<std::string> arguments = attention;
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    expect_refused(arguments, expected);
  }
}

TEST(Usage, ContradictionsNameTheFlag) {
  expect_refused({"explain", "attention", "--seqlen", "1k", "--seqlen-q", "1k"},
                 {"--seqlen", "--seqlen-q"});
  expect_refused({"explain", "attention", "--seqlen-q", "1k"}, {"--seqlen-q", "--seqlen-kv"});
  expect_refused({"explain", "attention", "--splits", "4"}, {"--splits", "split-kv"});
  expect_refused({"explain", "attention", "--causal", "--window", "128", "128"},
                 {"--causal", "--window"});
  expect_refused({"explain", "attention", "--group", "4", "--heads-q", "32", "--heads-kv", "4"},
                 {"--group", "--heads-q", "--heads-kv"});
  expect_refused({"explain", "online-softmax", "--scores", "1,2", "--blocks", "1/2"},
                 {"--blocks", "--scores"});
  expect_refused({"explain", "online-softmax", "--scores", "1,2", "--values", "1,2,3"},
                 {"--values", "3 numbers", "2"});
  expect_refused({"explain", "model", "prefill", "--heads-kv", "5"}, {"--heads-kv", "5", "32"});
}

TEST(Usage, FilesThatAreNoDevicesOrModelsAreRefused) {
  TemporaryFolder folder;
  const std::vector<std::string> texts = {"",   "{",    "[]",   "null", "{\"name\": 3}",
                                          "{}", "text", "\"x\""};
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const std::string path = folder / ("file" + std::to_string(i) + ".json");
    std::ofstream(path) << texts[i];
    expect_refused({"explain", "attention", "--device", path}, {"--device"});
    expect_refused({"devices", path}, {"NAME"});
    expect_refused({"explain", "model", "prefill", "--model", path}, {"--model"});
  }
  expect_refused({"explain", "memory", "--model", "gpt-5"}, {"--model", "gpt-5", "reference-7b"});
  expect_refused({"explain", "memory", "--model", folder.path().string()}, {"--model"});
}

TEST(Usage, AStdoutThatTakesNothingIsAnErrorAndAReaderThatLeavesIsNot) {
  for (const ToolOptions& options :
       {ToolOptions{.environment = {}, .input = {}, .close_stdout = true, .stdout_to = {}},
        ToolOptions{
            .environment = {}, .input = {}, .close_stdout = false, .stdout_to = "/dev/full"}}) {
    const ToolRun run = run_tool({"explain", "attention"}, options);
    EXPECT_EQ(run.exit_code, 2);
    EXPECT_TRUE(run.one_line_error()) << run.err;
    EXPECT_NE(run.err.find("stdout"), std::string::npos);
  }
  const std::string command =
      std::string(RAFTER_TOOL) + " explain attention | true; exit ${PIPESTATUS[0]}";
  EXPECT_EQ(std::system(("bash -c '" + command + "'").c_str()), 0);
}

}  // namespace
}  // namespace rafter::test
