// parse_device on any text; what it accepts must survive a round through to_json.
#include <string_view>

#include "rafter/device.h"
#include "tools/fuzz/claims.h"

using rafter::DeviceSpec;
using rafter::Result;
using rafter::fuzz::claim;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Result<DeviceSpec> spec = rafter::parse_device(text);
  if (!spec) {
    rafter::fuzz::claim_error_line(spec.status(), "");
    return 0;
  }
  const std::string json = rafter::to_json(*spec);
  const Result<DeviceSpec> again = rafter::parse_device(json);
  claim(again.is_ok(), "what to_json writes is accepted");
  claim(rafter::to_json(*again) == json, "a round through to_json changes nothing");
  return 0;
}
