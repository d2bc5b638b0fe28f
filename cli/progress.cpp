#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace rafter::cli {

Progress::Progress(std::string_view verb) : verb_(verb), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) {
    std::fputs("\r\033[K", stderr);
  }
}

void Progress::step(std::string_view what) {
  if (terminal_) {
    shown_ = true;
    const std::string line = fmt::format("\r\033[K{}: {} …", verb_, what);
    std::fwrite(line.data(), 1, line.size(), stderr);
  }
}

}  // namespace rafter::cli
