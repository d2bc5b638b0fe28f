// Typed flags: every value is parsed here, once, with the same words and the same refusals.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/command.h"
#include "rafter/attention.h"
#include "rafter/device.h"
#include "rafter/roofline.h"
#include "rafter/tensor.h"

namespace rafter::cli {

// ---- text to values; a failure says what was given and what is allowed ----

/// Whole numbers: 4096, 4k (= 4096), 32K, 1m (= 1048576), 1g. No sign, no fraction, no "-0".
Result<std::int64_t> parse_length(std::string_view text, std::int64_t least = 0,
                                  std::int64_t most = std::int64_t{1} << 40);
/// A finite decimal number: 989e12, 0.5. No nan, inf, hex, -0, and nothing that overflows.
Result<double> parse_real(std::string_view text, double least, double most);
/// true, false, 1, 0, yes, no, on, off.
Result<bool> parse_switch(std::string_view text);
/// "a,b,c" in pieces; an empty piece is refused.
Result<std::vector<std::string>> split_list(std::string_view text);

// ---- flags ----
// `name` is CLI11's list of names ("--impl" aliases as "--pipeline,--impl"). The target's value at
// the time of the call is the default that --help shows; a std::optional target has none.

struct LengthRange {
  std::int64_t least = 1;
  std::int64_t most = std::int64_t{1} << 40;
};
struct RealRange {
  double least = 0;
  double most = 1e300;
};

CLI::Option* add_length(CLI::App& command, const std::string& name, std::int64_t& target,
                        const std::string& what, LengthRange range = {});
CLI::Option* add_length(CLI::App& command, const std::string& name,
                        std::optional<std::int64_t>& target, const std::string& what,
                        LengthRange range = {});
/// Lists: 512,1k,2k.
CLI::Option* add_lengths(CLI::App& command, const std::string& name,
                         std::vector<std::int64_t>& target, const std::string& what,
                         LengthRange range = {});
CLI::Option* add_real(CLI::App& command, const std::string& name, double& target,
                      const std::string& what, RealRange range = {});
CLI::Option* add_real(CLI::App& command, const std::string& name, std::optional<double>& target,
                      const std::string& what, RealRange range = {});
/// --flag, or --flag true|false.
CLI::Option* add_switch(CLI::App& command, const std::string& name, bool& target,
                        const std::string& what);
CLI::Option* add_switch(CLI::App& command, const std::string& name, std::optional<bool>& target,
                        const std::string& what);
CLI::Option* add_switches(CLI::App& command, const std::string& name, std::vector<bool>& target,
                          const std::string& what);  // 0,1
CLI::Option* add_dtype(CLI::App& command, const std::string& name, DType& target,
                       const std::string& what);
CLI::Option* add_dtype(CLI::App& command, const std::string& name, std::optional<DType>& target,
                       const std::string& what);
CLI::Option* add_dtypes(CLI::App& command, const std::string& name, std::vector<DType>& target,
                        const std::string& what);
/// --pipeline, and --impl as the derivations call it (partly-fused = half-fused).
CLI::Option* add_pipeline(CLI::App& command, Pipeline& target, const std::string& what);
CLI::Option* add_pipeline(CLI::App& command, std::optional<Pipeline>& target,
                          const std::string& what);
/// A list of pipelines, or all.
CLI::Option* add_pipelines(CLI::App& command, std::vector<Pipeline>& target,
                           const std::string& what);
/// Any text, kept as it is; empty text is refused.
CLI::Option* add_text(CLI::App& command, const std::string& name, std::string& target,
                      const std::string& what, const std::string& type_name);
/// One of the words.
CLI::Option* add_choice(CLI::App& command, const std::string& name, std::string& target,
                        const std::vector<std::string>& words, const std::string& what);

/// --causal, --window L R, --causal-align: how a mask is said. Call mask() after parsing.
struct MaskFlags {
  bool causal = false;
  std::vector<std::string> window;  // two of them, or none
  std::string align = "bottom-right";
};
void add_mask(CLI::App& command, MaskFlags& flags);
/// Refuses --causal with a --window that sees keys to the right.
Mask mask_of(const MaskFlags& flags);

/// --device NAME|FILE.json of a cost model. device_of: the named device, the file, or by default
/// this machine's probe file when there is one, else h100-sxm.
CLI::Option* add_device(CLI::App& command, std::string& target);
DeviceSpec device_of(const std::string& name_or_file, const std::string& flag = "--device");

/// Ends the command with what is wrong with the name or file that a flag was given.
[[noreturn]] void fail_about(const std::string& flag, const std::string& given, bool is_file,
                             const Status& status);

/// The base of all the above: parse refuses with a Status whose `given` and `allowed` are printed
/// behind the flag's name.
CLI::Option* add_parsed(CLI::App& command, const std::string& name, const std::string& what,
                        const std::string& type_name,
                        std::function<Status(const std::string&)> parse);

}  // namespace rafter::cli
