// rafter devices: the database, with a source for every figure.
#include <gtest/gtest.h>

#include "cli/run_tool.h"

namespace rafter::test {
namespace {

TEST(Devices, TheListHoldsTheContractsMachines) {
  const auto rows = run_json({"devices"}).at("devices");
  std::vector<std::string> names;
  for (const auto& row : rows) {
    names.push_back(row.at("device").get<std::string>());
  }
  for (const char* name :
       {"h100-sxm", "h100-pcie", "h200", "a100-80gb-sxm", "b200", "mi300x", "device-r"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
  }
}

TEST(Devices, EveryFigureHasAUnitAKindAndASource) {
  const auto listing = run_json({"devices"});
  for (const auto& device : listing.at("devices")) {
    const std::string name = device.at("device").get<std::string>();
    const auto figures = run_json({"devices", name}).at("figures");
    EXPECT_GE(figures.size(), 2U) << name;
    for (const auto& figure : figures) {
      EXPECT_TRUE(figure.at("value").is_number()) << name << " " << figure.dump();
      EXPECT_FALSE(figure.at("unit").get<std::string>().empty()) << figure.dump();
      EXPECT_FALSE(figure.at("source").get<std::string>().empty()) << figure.dump();
      const std::string kind = figure.at("kind").get<std::string>();
      EXPECT_TRUE(kind == "spec" || kind == "measured" || kind == "derived" || kind == "assumed")
          << kind;
    }
  }
}

TEST(Devices, OneDeviceMayBeAFile) {
  const std::string file = std::string(RAFTER_SOURCE_DIR) + "/src/devices/h100-sxm.json";
  EXPECT_EQ(run_json({"devices", file}), run_json({"devices", "h100-sxm"}));
}

TEST(Devices, TheTableShowsUnitsWithPrefixes) {
  const ToolRun run = run_tool({"devices", "h100-sxm"});
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_NE(run.out.find("3.35 TB/s"), std::string::npos);
  EXPECT_NE(run.out.find("989 TFLOP/s"), std::string::npos);
}

TEST(Devices, AnUnknownDeviceNamesThoseThatExist) {
  expect_refused({"devices", "h100"}, {"NAME", "h100", "h100-sxm", "device-r"});
}

}  // namespace
}  // namespace rafter::test
