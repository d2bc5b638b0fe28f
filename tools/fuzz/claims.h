// What must hold whatever the bytes are; a claim that does not hold ends the fuzzer.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "rafter/status.h"

namespace rafter::fuzz {

inline void claim(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "claim does not hold: %s\n", what);
    std::abort();
  }
}

/// An error is one line that begins with the name of the input.
inline void claim_error_line(const Status& status, const std::string& label) {
  const std::string line = status.message();
  claim(line.find('\n') == std::string::npos, "an error is one line");
  claim(line.starts_with(label), "an error begins with the name of the input");
  claim(line.size() < 4096, "an error is short");
}

}  // namespace rafter::fuzz
