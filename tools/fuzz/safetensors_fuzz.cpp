// Safetensors::open on any bytes, then every tensor of what was accepted.
#include <memory>
#include <span>

#include "cli/safetensors.h"
#include "tools/fuzz/claims.h"

using rafter::Result;
using rafter::cli::Array;
using rafter::cli::Expect;
using rafter::cli::Safetensors;
using rafter::fuzz::claim;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Result<Safetensors> file = Safetensors::open(
      std::make_shared<rafter::cli::MemorySource>(std::as_bytes(std::span(data, size)), "input"));
  if (!file) {
    rafter::fuzz::claim_error_line(file.status(), "input");
    return 0;
  }
  std::size_t total = 0;
  for (const std::string& name : file->names()) {
    claim(file->has(name), "a name that is listed is there");
    for (const Expect expect : {Expect::values, Expect::indices}) {
      const Result<Array> array = file->read(name, expect);
      if (array) {
        total += static_cast<std::size_t>(array->bytes());
      } else {
        rafter::fuzz::claim_error_line(array.status(), "input");
      }
    }
  }
  claim(total <= size, "no byte belongs to two tensors");
  const std::string absent = "no such tensor";
  if (!file->has(absent)) {
    rafter::fuzz::claim_error_line(file->read(absent, Expect::values).status(), "input");
  }
  return 0;
}
