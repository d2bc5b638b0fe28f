// The device database: every built-in file, the parser's refusals, the round trip.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "rafter/device.h"

namespace rafter {
namespace {

using nlohmann::json;

json good() {
  return json::parse(R"({
    "name": "toy", "title": "A toy", "kind": "cuda",
    "figures": {"bandwidth_bytes_per_s": {"value": 1e12, "unit": "B/s", "kind": "measured",
                                          "source": "a test", "low": 9e11, "high": 1e12,
                                          "samples": 12},
                "peak_bf16_flop_per_s": {"value": 1e15, "unit": "FLOP/s", "kind": "spec",
                                         "source": "a test"}},
    "notes": {"driver": "1.2"}})");
}

std::string refusal(const std::string& text) {
  const Result<DeviceSpec> spec = parse_device(text);
  return spec ? "accepted" : spec.status().message();
}

class EveryBuiltInDevice : public testing::TestWithParam<std::string> {};

TEST_P(EveryBuiltInDevice, ParsesAndIsNamedAsItsFile) {
  const Result<DeviceSpec> spec = find_device(GetParam());
  ASSERT_TRUE(spec) << spec.status().message();
  EXPECT_EQ(spec->name, GetParam());
  EXPECT_TRUE(spec->peak(DType::bf16));
  EXPECT_TRUE(spec->value("bandwidth_bytes_per_s"));
  EXPECT_TRUE(spec->value("capacity_bytes"));
}

TEST_P(EveryBuiltInDevice, HoldsDensePeaksOnly) {
  const DeviceSpec spec = *find_device(GetParam());
  // Matrix units double from bf16 to eight bits; a sparse figure among dense ones shows as a factor
  // of two too much.
  const double bf16 = *spec.peak(DType::bf16);
  for (const DType narrow : {DType::e4m3, DType::e5m2, DType::int8}) {
    if (const Result<double> peak = spec.peak(narrow)) {
      EXPECT_NEAR(*peak / bf16, 2, 0.01) << to_string(narrow);
    }
  }
  if (const Figure* tf32 = spec.find("peak_tf32_flop_per_s")) {
    EXPECT_NEAR(tf32->value / bf16, 0.5, 0.01);
  }
  for (const auto& [key, figure] : spec.figures) {
    const bool sparse = figure.source.find("with sparsity") != std::string::npos;
    const bool halved = figure.source.find("halved") != std::string::npos;
    EXPECT_TRUE(!sparse || halved) << key << ": " << figure.source;
  }
}

TEST_P(EveryBuiltInDevice, ComesBackFromItsDocumentUnchanged) {
  const DeviceSpec spec = *find_device(GetParam());
  const Result<DeviceSpec> again = parse_device(to_json(spec));
  ASSERT_TRUE(again) << again.status().message();
  EXPECT_EQ(to_json(*again), to_json(spec));
  ASSERT_EQ(again->figures.size(), spec.figures.size());
  for (const auto& [key, figure] : spec.figures) {
    EXPECT_EQ(again->find(key)->value, figure.value) << key;
    EXPECT_EQ(again->find(key)->source, figure.source) << key;
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, EveryBuiltInDevice, testing::ValuesIn(device_names()),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& ch : name) {
                             ch = ch == '-' ? '_' : ch;
                           }
                           return name;
                         });

TEST(Devices, AreThoseOfTheContract) {
  EXPECT_EQ(device_names(), (std::vector<std::string>{"a100-80gb-sxm", "b200", "device-r",
                                                      "h100-pcie", "h100-sxm", "h200", "mi300x"}));
}

TEST(Devices, AMissingFigureIsAnErrorThatNamesItAndTheDevice) {
  const DeviceSpec spec = *find_device("device-r");
  EXPECT_EQ(spec.find("launch_s"), nullptr);
  const Result<double> peak = spec.peak(DType::e4m3);
  ASSERT_FALSE(peak);
  EXPECT_NE(peak.status().message().find("peak_e4m3_flop_per_s"), std::string::npos);
  EXPECT_NE(peak.status().message().find("device-r"), std::string::npos);
}

TEST(Devices, AnUnknownNameListsTheKnownOnes) {
  const Result<DeviceSpec> spec = find_device("h1000");
  ASSERT_FALSE(spec);
  EXPECT_EQ(spec.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(spec.status().message().find("h100-sxm"), std::string::npos);
}

TEST(ParseDevice, ReadsEveryField) {
  const Result<DeviceSpec> spec = parse_device(good().dump());
  ASSERT_TRUE(spec) << spec.status().message();
  EXPECT_EQ(spec->title, "A toy");
  EXPECT_EQ(spec->kind, Device::Kind::cuda);
  EXPECT_EQ(spec->notes.at("driver"), "1.2");
  const Figure& bandwidth = *spec->find("bandwidth_bytes_per_s");
  EXPECT_EQ(bandwidth.kind, FigureKind::measured);
  EXPECT_EQ(bandwidth.low, 9e11);
  EXPECT_EQ(bandwidth.high, 1e12);
  EXPECT_EQ(bandwidth.samples, 12);
}

TEST(ParseDevice, EveryKnownKeyIsReadWithItsUnitAndRefusedWithAnother) {
  for (const FigureKey& key : figure_keys()) {
    json document = good();
    document["figures"] = {
        {key.key, {{"value", 3.5}, {"unit", key.unit}, {"kind", "assumed"}, {"source", "x"}}}};
    EXPECT_EQ(refusal(document.dump()), "accepted") << key.key;
    document["figures"][key.key]["unit"] = "furlong";
    EXPECT_NE(refusal(document.dump()).find(key.key + ".unit"), std::string::npos) << key.key;
  }
}

TEST(ParseDevice, RefusesAnythingMissing) {
  for (const char* key : {"name", "title", "kind", "figures"}) {
    json document = good();
    document.erase(key);
    EXPECT_NE(refusal(document.dump()).find(key), std::string::npos) << key;
  }
  for (const char* key : {"value", "unit", "kind", "source"}) {
    json document = good();
    document["figures"]["peak_bf16_flop_per_s"].erase(key);
    EXPECT_NE(refusal(document.dump()).find(std::string("peak_bf16_flop_per_s.") + key),
              std::string::npos)
        << key;
  }
}

TEST(ParseDevice, RefusesValuesThatMeanNothing) {
  for (const json& value :
       {json(0), json(-1), json("7"), json(nullptr), json(true), json::array(), json::object()}) {
    json document = good();
    document["figures"]["peak_bf16_flop_per_s"]["value"] = value;
    EXPECT_NE(refusal(document.dump()).find("peak_bf16_flop_per_s.value"), std::string::npos)
        << value;
  }
  std::string text = good().dump();
  for (const char* number : {"NaN", "nan", "Infinity", "1e999", "-1e999"}) {
    std::string broken = text;
    const std::string value = json(1e15).dump();
    const std::size_t at = broken.find(value);
    ASSERT_NE(at, std::string::npos);
    broken.replace(at, value.size(), number);
    EXPECT_NE(refusal(broken), "accepted") << number;
  }
}

TEST(ParseDevice, RefusesAnErrorBarThatDoesNotHoldTheValue) {
  for (const auto& [low, high] : {std::pair{2e12, 3e12}, {1e11, 2e11}}) {
    json document = good();
    document["figures"]["bandwidth_bytes_per_s"]["low"] = low;
    document["figures"]["bandwidth_bytes_per_s"]["high"] = high;
    EXPECT_NE(refusal(document.dump()).find("low, high"), std::string::npos);
  }
  json document = good();
  document["figures"]["bandwidth_bytes_per_s"].erase("low");
  EXPECT_NE(refusal(document.dump()).find("low, high"), std::string::npos);
}

TEST(ParseDevice, RefusesUnknownAndDoubledKeys) {
  json document = good();
  document["colour"] = "green";
  EXPECT_NE(refusal(document.dump()).find("colour"), std::string::npos);
  document = good();
  document["figures"]["peak_bf18_flop_per_s"] = document["figures"]["peak_bf16_flop_per_s"];
  EXPECT_NE(refusal(document.dump()).find("peak_bf18_flop_per_s"), std::string::npos);
  document = good();
  document["figures"]["peak_bf16_flop_per_s"]["clock"] = 1;
  EXPECT_NE(refusal(document.dump()).find("clock"), std::string::npos);

  std::string doubled = good().dump();
  doubled.insert(1, R"("name": "other", )");
  EXPECT_NE(refusal(doubled).find("name"), std::string::npos);
  EXPECT_NE(refusal(doubled).find("twice"), std::string::npos);
  // The same key in two objects is no doubling.
  EXPECT_EQ(refusal(good().dump()), "accepted");
}

TEST(ParseDevice, SurvivesDeepNestingAndHugeInput) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_NE(refusal(deep), "accepted");
  EXPECT_NE(refusal(R"({"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":{"a":1}}}}}}}}})").find("nesting"),
            std::string::npos);
  const std::string huge(3'000'000, ' ');
  EXPECT_NE(refusal(huge).find("bytes"), std::string::npos);
  json document = good();
  document["title"] = std::string(5000, 'x');
  EXPECT_NE(refusal(document.dump()).find("title"), std::string::npos);
}

TEST(ParseDevice, RefusesTextThatIsNotADeviceAsSuch) {
  for (const char* text : {"", "{", "[]", "7", "\"x\"", "null", "{}", "\xff\xfe", "{\"name\": }",
                           "{\"name\":\"a\"}{"}) {
    EXPECT_NE(refusal(text), "accepted") << text;
  }
  EXPECT_EQ(parse_device("{").status().code(), StatusCode::kIoError);
  EXPECT_EQ(parse_device("{}").status().code(), StatusCode::kInvalidArgument);
  json document = good();
  document["name"] = "two\nlines";
  EXPECT_EQ(refusal(document.dump()).find('\n'), std::string::npos);
  EXPECT_NE(refusal(document.dump()), "accepted");
}

TEST(ParseDevice, EveryPrefixOfADocumentIsRefusedQuietly) {
  const std::string text = to_json(*find_device("device-r"));
  for (std::size_t size = 0; size + 2 < text.size(); ++size) {
    EXPECT_NE(refusal(text.substr(0, size)), "accepted") << size;
  }
}

TEST(LoadDevice, ReadsAFileAndNamesOneThatIsNotThere) {
  const std::string path = testing::TempDir() + "/rafter_device_test.json";
  std::ofstream(path) << good().dump();
  EXPECT_TRUE(load_device(path));
  const Result<DeviceSpec> none = load_device(path + ".absent");
  ASSERT_FALSE(none);
  EXPECT_EQ(none.status().code(), StatusCode::kIoError);
  EXPECT_NE(none.status().message().find(".absent"), std::string::npos);
}

TEST(ToJson, NeverThrowsOnTextThatIsNotUtf8) {
  DeviceSpec spec = *find_device("device-r");
  spec.title = "\xff\xfe";
  EXPECT_FALSE(to_json(spec).empty());
}

TEST(EstimateThisCpu, IsACompleteDeviceOfAssumedFigures) {
  const DeviceSpec spec = estimate_this_cpu();
  EXPECT_EQ(spec.kind, Device::Kind::cpu);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    ASSERT_TRUE(spec.peak(dtype));
    EXPECT_GT(*spec.peak(dtype), 1e9);
    EXPECT_LT(*spec.peak(dtype), 1e15);
  }
  EXPECT_TRUE(spec.value("bandwidth_bytes_per_s"));
  EXPECT_TRUE(spec.value("launch_s"));
  for (const auto& [key, figure] : spec.figures) {
    EXPECT_EQ(figure.kind, FigureKind::assumed) << key;
    EXPECT_FALSE(figure.source.empty()) << key;
  }
  const Result<DeviceSpec> again = parse_device(to_json(spec));
  EXPECT_TRUE(again) << again.status().message();
}

TEST(ProbePath, FollowsTheEnvironmentInOrder) {
  // Restores what it changes: other tests may read these.
  const auto saved = [](const char* name) {
    const char* value = std::getenv(name);
    return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
  };
  const auto restore = [](const char* name, const std::optional<std::string>& value) {
    value ? setenv(name, value->c_str(), 1) : unsetenv(name);
  };
  const auto rafter_home = saved("RAFTER_HOME"), cache = saved("XDG_CACHE_HOME"),
             home = saved("HOME");
  setenv("HOME", "/h", 1);
  unsetenv("XDG_CACHE_HOME");
  unsetenv("RAFTER_HOME");
  EXPECT_EQ(probe_path(Device::Kind::cpu), "/h/.cache/rafter/cpu.json");
  setenv("XDG_CACHE_HOME", "/c", 1);
  EXPECT_EQ(probe_path(Device::Kind::cuda), "/c/rafter/cuda.json");
  setenv("RAFTER_HOME", "/r", 1);
  EXPECT_EQ(probe_path(Device::Kind::cpu), "/r/cpu.json");
  restore("HOME", home);
  restore("XDG_CACHE_HOME", cache);
  restore("RAFTER_HOME", rafter_home);
}

}  // namespace
}  // namespace rafter
