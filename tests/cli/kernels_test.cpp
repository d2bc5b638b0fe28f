// rafter kernels: what this build can run, and whether this machine has it.
#include <gtest/gtest.h>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

TEST(Kernels, EachSaysWhatItIsAndWhyItIsNotHere) {
  const auto kernels = run_json({"kernels"}).at("kernels");
  ASSERT_FALSE(kernels.empty());
  bool reference = false;
  for (const auto& kernel : kernels) {
    for (const char* key : {"kernel", "device", "pass", "pipeline", "instruction_set", "accepts"}) {
      EXPECT_FALSE(kernel.at(key).get<std::string>().empty()) << kernel.dump();
    }
    EXPECT_FALSE(kernel.at("dtypes").empty()) << kernel.dump();
    if (kernel.at("machine_has").get<bool>()) {
      EXPECT_TRUE(kernel.at("machine_reason").is_null()) << kernel.dump();
    } else {
      EXPECT_FALSE(kernel.at("machine_reason").get<std::string>().empty()) << kernel.dump();
    }
    reference = reference || (kernel.at("kernel") == "forward_reference" &&
                              kernel.at("machine_has").get<bool>());
  }
  EXPECT_TRUE(reference) << "the float64 reference runs on every machine";
}

TEST(Kernels, AreSortedByName) {
  std::string before;
  const auto listing = run_json({"kernels"});
  for (const auto& kernel : listing.at("kernels")) {
    EXPECT_LE(before, kernel.at("kernel").get<std::string>());
    before = kernel.at("kernel").get<std::string>();
  }
}

TEST(Kernels, TheTableListsThemAll) {
  const ToolRun run = run_tool({"kernels"});
  EXPECT_EQ(run.exit_code, 0);
  const auto listing = run_json({"kernels"});
  for (const auto& kernel : listing.at("kernels")) {
    EXPECT_NE(run.out.find(kernel.at("kernel").get<std::string>()), std::string::npos);
  }
}

}  // namespace
}  // namespace rafter::test
