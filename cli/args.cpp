#include "cli/args.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>

namespace rafter::cli {
namespace {

Status refuse(std::string_view given, std::string allowed) {
  return Status::invalid_argument("", one_line(given), std::move(allowed));
}

/// Sets the target, a T or a std::optional<T>, from a parser of one value.
template <typename Target, typename Parser>
std::function<Status(const std::string&)> into(Target& target, Parser parse) {
  return [&target, parse](const std::string& text) {
    auto value = parse(text);
    if (value.is_ok()) {
      target = *value;
    }
    return value.status();
  };
}

/// Sets the target from "a,b,c", each piece parsed alone.
template <typename T, typename Parser>
std::function<Status(const std::string&)> into_list(std::vector<T>& target, Parser parse) {
  return [&target, parse](const std::string& text) -> Status {
    const Result<std::vector<std::string>> pieces = split_list(text);
    if (!pieces.is_ok()) {
      return pieces.status();
    }
    std::vector<T> values;
    for (const std::string& piece : *pieces) {
      auto value = parse(piece);
      if (!value.is_ok()) {
        return value.status();
      }
      values.push_back(*value);
    }
    target = std::move(values);
    return Status::ok();
  };
}

template <typename T, typename Words>
std::string joined(const std::vector<T>& values, Words words) {
  std::string text;
  for (const T& value : values) {
    text += (text.empty() ? "" : ",") + std::string(words(value));
  }
  return text;
}

std::string number_text(double value) { return fmt::format("{:g}", value); }

Result<Pipeline> pipeline_of(const std::string& text) {
  // "partly-fused" is what the published derivations call it.
  return parse_pipeline(text == "partly-fused" ? "half-fused" : text);
}

auto length_parser(LengthRange range) {
  return [range](const std::string& text) { return parse_length(text, range.least, range.most); };
}
auto real_parser(RealRange range) {
  return [range](const std::string& text) { return parse_real(text, range.least, range.most); };
}
auto switch_parser() {
  return [](const std::string& text) -> Result<bool> {
    return text.empty() ? Result<bool>(true) : parse_switch(text);  // --flag alone
  };
}
auto dtype_parser() {
  return [](const std::string& text) { return parse_dtype(text); };
}

}  // namespace

Result<std::int64_t> parse_length(std::string_view text, std::int64_t least, std::int64_t most) {
  const std::string allowed =
      fmt::format("a whole number from {} to {}, such as 4096, 4k or 1m,", least, most);
  std::string_view digits = text;
  int shift = 0;
  if (!digits.empty()) {
    switch (digits.back()) {
      case 'k':
      case 'K':
        shift = 10;
        break;
      case 'm':
      case 'M':
        shift = 20;
        break;
      case 'g':
      case 'G':
        shift = 30;
        break;
      default:
        break;
    }
  }
  if (shift != 0) {
    digits.remove_suffix(1);
  }
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool all_digits = !digits.empty() && std::all_of(digits.begin(), digits.end(), [](char c) {
    return c >= '0' && c <= '9';
  });
  if (!all_digits || error != std::errc() || end != digits.data() + digits.size() ||
      value > (std::int64_t{1} << 62) >> shift || value << shift < least || value << shift > most) {
    return refuse(text, allowed);
  }
  return value << shift;
}

Result<double> parse_real(std::string_view text, double least, double most) {
  const bool zero_out = least > 0 && least < 1e-290;  // the smallest positive: "above 0"
  const std::string from = zero_out ? "above 0" : "from " + number_text(least);
  const std::string allowed = most >= 1e300
                                  ? (zero_out ? std::string("a number above 0")
                                              : "a number of at least " + number_text(least))
                                  : fmt::format("a number {} to {}", from, number_text(most));
  double value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value, std::chars_format::general);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() ||
      !std::isfinite(value) || (value == 0 && std::signbit(value)) || value < least ||
      value > most) {
    return refuse(text, allowed);
  }
  return value;
}

Result<bool> parse_switch(std::string_view text) {
  for (const std::string_view yes : {"true", "1", "yes", "on"}) {
    if (text == yes) {
      return true;
    }
  }
  for (const std::string_view no : {"false", "0", "no", "off"}) {
    if (text == no) {
      return false;
    }
  }
  return refuse(text, "true, false, 1, 0, yes, no, on, off");
}

Result<std::vector<std::string>> split_list(std::string_view text) {
  std::vector<std::string> pieces;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    if (comma == begin) {
      return refuse(text, "a list such as 1,2,3 without empty entries");
    }
    pieces.emplace_back(text.substr(begin, comma - begin));
    begin = comma + 1;
  }
  return pieces;
}

CLI::Option* add_parsed(CLI::App& command, const std::string& name, const std::string& what,
                        const std::string& type_name,
                        std::function<Status(const std::string&)> parse) {
  const std::string flag = name.substr(0, name.find(','));
  return command
      .add_option_function<std::string>(
          name,
          [flag, parse = std::move(parse)](const std::string& text) {
            const Status status = parse(text);
            if (!status.is_ok()) {
              fail(Status(status.code(), flag, status.given(), status.allowed()));
            }
          },
          what)
      ->type_name(type_name);
}

CLI::Option* add_length(CLI::App& command, const std::string& name, std::int64_t& target,
                        const std::string& what, LengthRange range) {
  return add_parsed(command, name, what, "N", into(target, length_parser(range)))
      ->default_str(std::to_string(target));
}
CLI::Option* add_length(CLI::App& command, const std::string& name,
                        std::optional<std::int64_t>& target, const std::string& what,
                        LengthRange range) {
  return add_parsed(command, name, what, "N", into(target, length_parser(range)));
}
CLI::Option* add_lengths(CLI::App& command, const std::string& name,
                         std::vector<std::int64_t>& target, const std::string& what,
                         LengthRange range) {
  return add_parsed(command, name, what, "N,N,...", into_list(target, length_parser(range)))
      ->default_str(joined(target, [](std::int64_t n) { return std::to_string(n); }));
}

CLI::Option* add_real(CLI::App& command, const std::string& name, double& target,
                      const std::string& what, RealRange range) {
  return add_parsed(command, name, what, "X", into(target, real_parser(range)))
      ->default_str(number_text(target));
}
CLI::Option* add_real(CLI::App& command, const std::string& name, std::optional<double>& target,
                      const std::string& what, RealRange range) {
  return add_parsed(command, name, what, "X", into(target, real_parser(range)));
}

CLI::Option* add_switch(CLI::App& command, const std::string& name, bool& target,
                        const std::string& what) {
  return add_parsed(command, name, what, "[true|false]", into(target, switch_parser()))
      ->expected(0, 1);
}
CLI::Option* add_switch(CLI::App& command, const std::string& name, std::optional<bool>& target,
                        const std::string& what) {
  return add_parsed(command, name, what, "[true|false]", into(target, switch_parser()))
      ->expected(0, 1);
}
CLI::Option* add_switches(CLI::App& command, const std::string& name, std::vector<bool>& target,
                          const std::string& what) {
  return add_parsed(command, name, what, "0|1|0,1",
                    into_list(target, [](const std::string& text) { return parse_switch(text); }))
      ->default_str(joined(target, [](bool b) { return b ? "1" : "0"; }));
}

CLI::Option* add_dtype(CLI::App& command, const std::string& name, DType& target,
                       const std::string& what) {
  return add_parsed(command, name, what, "DTYPE", into(target, dtype_parser()))
      ->default_str(to_string(target));
}
CLI::Option* add_dtype(CLI::App& command, const std::string& name, std::optional<DType>& target,
                       const std::string& what) {
  return add_parsed(command, name, what, "DTYPE", into(target, dtype_parser()));
}
CLI::Option* add_dtypes(CLI::App& command, const std::string& name, std::vector<DType>& target,
                        const std::string& what) {
  return add_parsed(command, name, what, "DTYPE,...", into_list(target, dtype_parser()))
      ->default_str(joined(target, [](DType d) { return to_string(d); }));
}

CLI::Option* add_pipeline(CLI::App& command, Pipeline& target, const std::string& what) {
  return add_parsed(command, "--pipeline,--impl", what, "PIPELINE", into(target, pipeline_of))
      ->default_str(to_string(target));
}
CLI::Option* add_pipeline(CLI::App& command, std::optional<Pipeline>& target,
                          const std::string& what) {
  return add_parsed(command, "--pipeline,--impl", what, "PIPELINE", into(target, pipeline_of));
}
CLI::Option* add_pipelines(CLI::App& command, std::vector<Pipeline>& target,
                           const std::string& what) {
  const auto parse_list = into_list(target, pipeline_of);
  return add_parsed(command, "--pipeline,--impl", what, "PIPELINE,...|all",
                    [&target, parse_list](const std::string& text) -> Status {
                      if (text == "all") {
                        target = {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused};
                        return Status::ok();
                      }
                      return parse_list(text);
                    })
      ->default_str(joined(target, [](Pipeline p) { return to_string(p); }));
}

CLI::Option* add_text(CLI::App& command, const std::string& name, std::string& target,
                      const std::string& what, const std::string& type_name) {
  return add_parsed(command, name, what, type_name,
                    [&target, type_name](const std::string& text) -> Status {
                      if (text.empty()) {
                        return refuse(text, "a non-empty " + type_name);
                      }
                      target = text;
                      return Status::ok();
                    })
      ->default_str(target);
}

CLI::Option* add_choice(CLI::App& command, const std::string& name, std::string& target,
                        const std::vector<std::string>& words, const std::string& what) {
  return add_parsed(command, name, what, fmt::format("{}", fmt::join(words, "|")),
                    [&target, words](const std::string& text) -> Status {
                      if (std::find(words.begin(), words.end(), text) == words.end()) {
                        return refuse(text, fmt::format("{}", fmt::join(words, ", ")));
                      }
                      target = text;
                      return Status::ok();
                    })
      ->default_str(target);
}

void add_mask(CLI::App& command, MaskFlags& flags) {
  add_switch(command, "--causal", flags.causal, "each query sees its own key and those before it");
  command
      .add_option("--window", flags.window,
                  "keys seen to the left and to the right of the diagonal; -1 is unbounded")
      ->expected(2)
      ->type_name("L R");
  add_choice(command, "--causal-align", flags.align, {"bottom-right", "top-left"},
             "corner in which the diagonal of a mask ends when the lengths differ");
}

Mask mask_of(const MaskFlags& flags) {
  const MaskAlign align = flags.align == "top-left" ? MaskAlign::top_left : MaskAlign::bottom_right;
  if (flags.window.empty()) {
    return flags.causal ? Mask::causal(align) : Mask::window(-1, -1, align);
  }
  std::int64_t side[2] = {-1, -1};
  for (std::size_t i = 0; i < 2; ++i) {
    if (flags.window[i] == "-1") {
      continue;
    }
    const Result<std::int64_t> keys = parse_length(flags.window[i]);
    if (!keys.is_ok()) {
      fail_flag("--window", fmt::format("{} {}", flags.window[0], flags.window[1]),
                "two of: -1, or a whole number of keys such as 128 or 4k,");
    }
    side[i] = *keys;
  }
  if (flags.causal && side[1] != 0 && side[1] != -1) {
    fail_flag("--causal",
              fmt::format("together with --window {} {}", flags.window[0], flags.window[1]),
              "--window L 0 or --window L -1 with --causal, or --window L R without --causal,");
  }
  return Mask::window(side[0], flags.causal ? 0 : side[1], align);
}

void fail_about(const std::string& flag, const std::string& given, bool is_file,
                const Status& status) {
  std::string subject = flag;
  if (is_file) {
    subject += " " + one_line(given);
    if (!status.parameter().empty() && status.parameter() != given) {
      subject += ": " + status.parameter();  // the key in the file
    }
  }
  fail(Status(status.code(), subject, one_line(status.given()), status.allowed()));
}

CLI::Option* add_device(CLI::App& command, std::string& target) {
  return add_text(command, "--device", target,
                  "device whose ceilings count (rafter devices lists them), or a file of `rafter "
                  "probe`; default: this machine's probe when it was made, else h100-sxm",
                  "NAME|FILE.json");
}

DeviceSpec device_of(const std::string& name_or_file, const std::string& flag) {
  if (name_or_file.empty()) {
    const std::string probe = probe_path(Device::Kind::cpu);
    return value_or_fail(access(probe.c_str(), R_OK) == 0 ? load_device(probe)
                                                          : find_device("h100-sxm"));
  }
  const bool is_file =
      name_or_file.find('/') != std::string::npos || name_or_file.ends_with(".json");
  Result<DeviceSpec> device = is_file ? load_device(name_or_file) : find_device(name_or_file);
  if (!device.is_ok()) {
    fail_about(flag, name_or_file, is_file, device.status());
  }
  return std::move(device).value();
}

}  // namespace rafter::cli
