// Where work runs (Device) and what that machine can do (DeviceSpec: every figure with unit, kind
// and source).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter {

/// A place to run on.
struct Device {
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index = 0) { return {Kind::cuda, index}; }
};
const char* to_string(Device::Kind kind);
/// "other" for none.
const char* to_string(const std::optional<Device::Kind>& kind);

/// How a figure came about.
enum class FigureKind : std::uint8_t {
  spec,      // printed by the vendor (dense rates only)
  measured,  // by `rafter probe`
  derived,   // computed from other figures here; the source says how
  assumed,   // stated by the one who describes a machine on paper
};
const char* to_string(FigureKind kind);

/// One figure of a device in SI base units.
struct Figure {
  double value = 0;
  std::string unit;  // "FLOP/s", "B/s", "B", "s", "Hz", "1", "op/s"
  FigureKind kind = FigureKind::spec;
  std::string source;
  // Of measured figures (0 when not measured):
  double low = 0, high = 0;  // 10th and 90th percentile of the samples
  std::int64_t samples = 0;
};

/// A machine as the roofline sees it: named figures. figure_keys() lists every key with its unit;
/// the cost models use
///   peak_<dtype>_flop_per_s     dense matmul peak of f32 | f16 | bf16 | e4m3 | e5m2 | int8 | int4
///   peak_vector_f32_flop_per_s  without matrix units
///   exp_per_s                   exponentials per second, whole device
///   bandwidth_bytes_per_s       main memory; bandwidth_{read,write,copy,l1,l2,l3}_bytes_per_s
///   where
///                               known
///   capacity_bytes              main memory; usable_bytes what is left of it for a workload
///   sm_count                    SMs, or cores of a CPU; fast_memory_bytes of one of them; l2_bytes
///   launch_s, graph_launch_s    cost of one launch; of one inside a graph
///   graph_submit_s              cost of submitting a graph
///   clock_hz                    the clock that the peaks assume
struct DeviceSpec {
  std::string name;                  // "h100-sxm"
  std::string title;                 // "NVIDIA H100 SXM5 80 GB"
  std::optional<Device::Kind> kind;  // what runs kernels there; none: only costs are known of it
  std::map<std::string, Figure, std::less<>> figures;
  std::map<std::string, std::string, std::less<>>
      notes;  // date, driver, commit, … of a measured device

  const Figure* find(std::string_view key) const;
  /// The figure's value; invalid_argument names the device and the missing figure. Never 0 for
  /// missing.
  Result<double> value(std::string_view key) const;
  /// Matmul peak for a dtype; invalid_argument when the device has none.
  Result<double> peak(DType dtype) const;
};

/// A key that a device file may have, and the unit that its figure must be in.
struct FigureKey {
  std::string key, unit, what;
};
const std::vector<FigureKey>& figure_keys();

/// Names of the built-in devices, sorted.
std::vector<std::string> device_names();
/// A built-in device; invalid_argument lists the names.
Result<DeviceSpec> find_device(std::string_view name);
/// Parses one device document: {"name", "title", "kind": "cpu" | "cuda" | "other",
/// "figures": {key: {"value", "unit", "kind": "spec" | "measured" | "derived" | "assumed",
/// "source", and of measured ones "low", "high", "samples"}}, "notes": {key: text}}. Errors name
/// the key, what was given and what is allowed (io_error when it is not JSON): unknown, doubled or
/// missing keys, values that are not finite and above 0, another unit than the key's, an empty
/// source, low > value or value > high.
Result<DeviceSpec> parse_device(std::string_view json);
/// Reads a device file. Errors: io_error, or as parse_device.
Result<DeviceSpec> load_device(const std::string& path);
/// The document that parse_device reads, indented, ending in a newline.
std::string to_json(const DeviceSpec& spec);
/// An estimate of this machine's CPU from CPUID, cores and clock: figures of kind `assumed`, used
/// where no probe was made.
DeviceSpec estimate_this_cpu();
/// Where `rafter probe` keeps this machine's file: $RAFTER_HOME or $XDG_CACHE_HOME/rafter or
/// ~/.cache/rafter, + /cpu.json.
std::string probe_path(Device::Kind kind);

}  // namespace rafter
