#include "cli/probe_file.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>

#include "cli/args.h"
#include "cli/progress.h"
#include "cli/resident.h"

namespace rafter::cli {

double figure_spread(const Figure& figure) {
  return figure.high > 0 ? (figure.high - figure.low) / figure.high : 0;
}

OutputFile open_probe_file(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) {
      fail(Status::io_error(folder.string(), error.message()));
    }
  }
  return value_or_fail(OutputFile::create(path));
}

Json figure_rows(const DeviceSpec& spec, Format format) {
  Json rows = Json::array();
  for (const auto& [key, figure] : spec.figures) {
    Json row = Json::object();
    row["figure"] = key;
    const bool measured = figure.samples > 0;
    if (format == Format::table) {
      row["value"] = figure.unit == "1" ? plain_number(figure.value)
                                        : with_si_prefix(figure.value, figure.unit);
      row["spread"] = measured ? fmt::format("{:.0f}%", 100 * figure_spread(figure)) : "";
      row["samples"] = measured ? fmt::format("{}", figure.samples) : "";
    } else {
      row["value"] = number(figure.value);
      row["unit"] = figure.unit;
      row["low"] = measured ? number(figure.low) : Json();
      row["high"] = measured ? number(figure.high) : Json();
      row["samples"] = figure.samples;
      row["noisy"] = measured && figure_spread(figure) > kNoisySpread;
    }
    row["kind"] = to_string(figure.kind);
    row["source"] = figure.source;
    rows.push_back(std::move(row));
  }
  return rows;
}

namespace {

std::string note_of(const DeviceSpec& spec, std::string_view key) {
  const auto note = spec.notes.find(key);
  return note == spec.notes.end() ? std::string() : note->second;
}

// Days since the epoch of "2026-11-29T…"; -1 when it is no such date.
long day_of(const std::string& date) {
  int year = 0, month = 0, day = 0;
  if (std::sscanf(date.c_str(), "%4d-%2d-%2dT", &year, &month, &day) != 3) {
    return -1;
  }
  const std::chrono::year_month_day calendar{std::chrono::year(year),
                                             std::chrono::month(static_cast<unsigned>(month)),
                                             std::chrono::day(static_cast<unsigned>(day))};
  return calendar.ok() ? std::chrono::sys_days(calendar).time_since_epoch().count() : -1;
}

bool is_of_this_machine(const DeviceSpec& spec, int threads) {
  std::map<std::string, std::string> now;
  for (auto& [key, value] : describe_this_machine()) {
    now[key] = value;
  }
  const long made = day_of(note_of(spec, "date"));
  if (note_of(spec, "cpu") != now["cpu"] || made < 0 || day_of(now["date"]) - made > 1) {
    return false;
  }
  if (spec.kind == Device::Kind::cuda) {
    return note_of(spec, "gpu_uuid") == cuda_uuid(0);
  }
  return note_of(spec, "threads") == (threads > 0 ? std::to_string(threads) : now["cores"]);
}

/// The device that --device names, and the file, if it names one.
Device device_and_spec(const std::string& word, int threads, DeviceSpec& spec) {
  Device device = Device::cpu();
  if (word == "cuda") {
    device = Device::cuda(0);
  } else if (!word.empty() && word != "cpu") {
    spec = device_of(word);
    device.kind = spec.kind.value_or(Device::Kind::cpu);
    const bool of_us = spec.kind == Device::Kind::cpu || word.find_first_of("./") < word.size();
    if (!of_us || (spec.kind != Device::Kind::cpu && spec.kind != Device::Kind::cuda)) {
      fail_flag("--device", word,
                "cpu, cuda, or the device file of a CPU or CUDA device (measured beside predicted "
                "means this machine)");
    }
  }
  if (device.kind == Device::Kind::cuda) {
    require_cuda();
    if (threads > 0) {
      fail_flag("--threads", std::to_string(threads), "0 with a CUDA device");
    }
  }
  return device;
}

}  // namespace

ThisMachine this_machine(const std::string& device, int threads, bool reprobe,
                         std::string_view verb) {
  ThisMachine machine;
  machine.device = device_and_spec(device, threads, machine.spec);
  if (!machine.spec.name.empty()) {
    machine.source = device;
  } else if (const std::string path = probe_path(machine.device.kind);
             !reprobe && std::filesystem::exists(path)) {
    Result<DeviceSpec> kept = load_device(path);
    if (kept && is_of_this_machine(*kept, threads)) {
      machine.spec = std::move(kept).value();
      machine.source = fmt::format("probe file of {}", note_of(machine.spec, "date"));
    }
  }
  if (machine.source.empty()) {
    Progress progress(verb);
    ProbeOptions options;
    options.quick = true;
    options.threads = threads;
    options.progress = [&progress](std::string_view step) { progress.step(step); };
    Probe probe = value_or_fail(machine.device.kind == Device::Kind::cuda
                                    ? probe_cuda(machine.device, options)
                                    : probe_cpu(options));
    machine.spec = std::move(probe.spec);
    machine.sweep = std::move(probe.sweep);
    machine.missing = std::move(probe.missing);
    machine.source = "a quick probe made for this run";
    machine.fresh = true;
  }
  machine.noisy = noisy_figures(machine.spec);
  machine.distrust = distrust_of(machine.spec);
  return machine;
}

}  // namespace rafter::cli
