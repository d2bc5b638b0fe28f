// A library of the CUDA toolkit that is opened when it is first needed: what is not installed is a
// reason, not a failure to start.
#pragma once

#include <dlfcn.h>
#include <fmt/format.h>

#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

namespace rafter::cuda {

class LoadedLibrary {
 public:
  /// Opens the first of `names` that is there. `title` names it in reasons.
  LoadedLibrary(std::string title, std::initializer_list<const char*> names)
      : title_(std::move(title)) {
    std::string why;
    for (const char* name : names) {
      handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (handle_ != nullptr) {
        return;
      }
      const char* text = dlerror();
      why = why.empty() && text != nullptr ? text : why;
    }
    missing_ = fmt::format("no {}: {}", title_, why);
  }

  template <typename Function>
  void find(const char* name, Function& function) {
    if (handle_ == nullptr) {
      return;
    }
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    if (function == nullptr) {
      missing_ = fmt::format("{} has no {}", title_, name);
    }
  }

  /// Why it cannot be used; empty where it can.
  const std::string& missing() const { return missing_; }

 private:
  std::string title_, missing_;
  void* handle_ = nullptr;
};

}  // namespace rafter::cuda
