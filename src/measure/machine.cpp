#include "measure/machine.h"

#include <fmt/format.h>
#include <omp.h>
#include <sys/utsname.h>

#include <ctime>
#include <fstream>

#include "git_commit.h"
#include "rafter/measure.h"

namespace rafter::measure {
namespace {

// The first line "key : value" of a /proc file.
std::string proc_value(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) {
      continue;
    }
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) {
      continue;
    }
    const std::size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? std::string() : line.substr(start);
  }
  return {};
}

double memory_bytes(std::string_view key) {
  const std::string text = proc_value("/proc/meminfo", key);  // "24653124 kB", kB being KiB
  return text.empty() ? 0 : 1024.0 * std::strtod(text.c_str(), nullptr);
}

}  // namespace

std::string cpu_model() {
  const std::string model = proc_value("/proc/cpuinfo", "model name");
  return model.empty() ? "unknown CPU" : model;
}

std::string instruction_sets() {
  std::string names;
  const std::string flags = fmt::format(" {} ", proc_value("/proc/cpuinfo", "flags"));
  for (const char* name :
       {"sse4_2", "avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
        "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"}) {
    if (flags.find(fmt::format(" {} ", name)) != std::string::npos) {
      names += fmt::format("{}{}", names.empty() ? "" : " ", name);
    }
  }
  return names.empty() ? "unknown" : names;
}

std::string operating_system() {
  utsname name{};
  return uname(&name) == 0 ? std::string(name.sysname) + " " + name.release : "unknown";
}

std::string date_utc() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
  return text;
}

double memory_total_bytes() { return memory_bytes("MemTotal"); }
double memory_available_bytes() { return memory_bytes("MemAvailable"); }

}  // namespace rafter::measure

namespace rafter {

std::vector<std::pair<std::string, std::string>> describe_this_machine() {
#if defined(__clang__)
  const std::string compiler = "clang " __clang_version__;
#elif defined(__GNUC__)
  const std::string compiler = "gcc " __VERSION__;
#else
  const std::string compiler = "unknown";
#endif
  return {{"date", measure::date_utc()},
          {"commit", RAFTER_GIT_COMMIT},
          {"compiler", compiler},
          {"cpu", measure::cpu_model()},
          {"cores", std::to_string(omp_get_num_procs())},
          {"isa", measure::instruction_sets()},
          {"kernel", measure::operating_system()},
          {"driver", "none"}};
}

}  // namespace rafter
