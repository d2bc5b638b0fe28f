// Progress on stderr, on one line that is rewritten, when stderr is a terminal.
#pragma once

#include <string_view>

namespace rafter::cli {

class Progress {
 public:
  explicit Progress(std::string_view verb);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(std::string_view what);

 private:
  std::string_view verb_;
  bool terminal_ = false;
  bool shown_ = false;
};

}  // namespace rafter::cli
