// Instruction sets by RAFTER_CPU_ISA, and a kernel of the operating system that denies AMX.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cli/arrays.h"
#include "cli/run_tool.h"

namespace rafter::test {
namespace {

using Json = nlohmann::ordered_json;

const std::vector<std::string> kOrder = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

std::ptrdiff_t rank(const std::string& isa) {
  return std::find(kOrder.begin(), kOrder.end(), isa) - kOrder.begin();
}

/// Kernels by name.
std::map<std::string, Json> kernels(const ToolOptions& options = {}) {
  std::map<std::string, Json> out;
  const Json listed = run_json({"kernels"}, options);
  for (const Json& kernel : listed.at("kernels")) {
    out[kernel.at("kernel").get<std::string>()] = kernel;
  }
  return out;
}

/// The fused forward of small arrays in bf16.
class IsaTest : public ::testing::Test {
 protected:
  IsaTest() {
    const Shape shape = {1, 96, 2, 64};
    for (const char* name : {"q", "k", "v"}) {
      const std::filesystem::path path = folder_ / (std::string(name) + ".npy");
      write_f32(path, shape, some_values(elements_of(shape), 1));
      arguments_.insert(arguments_.end(), {std::string("--") + name, path.string()});
    }
  }

  std::vector<std::string> arguments(const std::string& kernel = "") const {
    std::vector<std::string> out = {"run", "--dtype", "bf16"};
    out.insert(out.end(), arguments_.begin(), arguments_.end());
    out.insert(out.end(),
               {kernel.empty() ? "--pipeline" : "--kernel", kernel.empty() ? "fused" : kernel});
    return out;
  }
  /// The kernel that the planner takes.
  std::string planned(const ToolOptions& options) const {
    return run_json(arguments(), options).at("kernel").get<std::string>();
  }

 private:
  TemporaryFolder folder_;
  std::vector<std::string> arguments_;
};

TEST_F(IsaTest, TheLimitBoundsWhatThePlannerTakes) {
  const auto all = kernels();
  for (const std::string& limit : kOrder) {
    const std::string kernel = planned({.environment = {{"RAFTER_CPU_ISA", limit}}});
    EXPECT_LE(rank(all.at(kernel).at("instruction_set")), rank(limit)) << kernel;
  }
}

TEST_F(IsaTest, AKernelAboveTheLimitIsRefusedByName) {
  for (const auto& [name, kernel] : kernels()) {
    if (kernel.at("device") != "cpu" || kernel.at("pass") != "forward" ||
        kernel.at("pipeline") != "fused" || rank(kernel.at("instruction_set")) < rank("avx512")) {
      continue;
    }
    const ToolRun run = run_tool(arguments(name), {.environment = {{"RAFTER_CPU_ISA", "avx2"}}});
    EXPECT_NE(run.exit_code, 0) << name;
    EXPECT_TRUE(run.one_line_error()) << run.err;
    const std::string reason = kernel.at("machine_has").get<bool>()
                                   ? "RAFTER_CPU_ISA is avx2"
                                   : kernel.at("machine_reason").get<std::string>();
    EXPECT_NE(run.err.find(reason), std::string::npos) << name << ": " << run.err;
  }
}

TEST_F(IsaTest, AnUnknownLimitIsAnError) {
  const ToolRun run = run_tool(arguments(), {.environment = {{"RAFTER_CPU_ISA", "sse9"}}});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_TRUE(run.one_line_error()) << run.err;
  EXPECT_NE(run.err.find("RAFTER_CPU_ISA: sse9 given; portable, avx2, avx512, avx512_bf16 or amx "
                         "allowed"),
            std::string::npos)
      << run.err;
}

#if defined(__x86_64__) && defined(__linux__)
TEST_F(IsaTest, WithoutPermissionForAmxThePlannerTakesTheNextKernel) {
  const ToolOptions denied = {.deny_amx = true};
  for (const auto& [name, kernel] : kernels(denied)) {
    if (kernel.at("instruction_set") == "amx") {
      EXPECT_FALSE(kernel.at("machine_has").get<bool>()) << name;
      const std::string reason = kernel.at("machine_reason").get<std::string>();
      EXPECT_TRUE(reason == "this CPU has no AMX with bf16" ||
                  reason == "the kernel refuses permission to use AMX (arch_prctl)")
          << name << ": " << reason;
    }
  }
  const auto allowed = kernels();
  if (!allowed.contains("forward_amx_bf16")) {
    GTEST_SKIP() << "this build has no kernel for AMX";
  }
  if (allowed.at("forward_amx_bf16").at("machine_has").get<bool>()) {
    EXPECT_EQ(kernels(denied).at("forward_amx_bf16").at("machine_reason"),
              "the kernel refuses permission to use AMX (arch_prctl)");
  }
  const std::string taken = planned(denied);
  EXPECT_NE(allowed.at(taken).at("instruction_set"), "amx") << taken;
  const ToolRun forced = run_tool(arguments("forward_amx_bf16"), denied);
  EXPECT_NE(forced.exit_code, 0);
  EXPECT_TRUE(forced.one_line_error()) << forced.err;
  EXPECT_NE(forced.err.find("AMX"), std::string::npos) << forced.err;
}
#endif

}  // namespace
}  // namespace rafter::test
