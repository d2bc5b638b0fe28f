#include "cli/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace rafter::cli {
namespace {

// Temporary files of this process. The handler may run at any moment, so a slot is text in place
// and a flag that is raised after it was written.
struct Slot {
  std::atomic<bool> taken{false};
  std::atomic<bool> live{false};
  std::array<char, PATH_MAX> path{};
};
std::array<Slot, 16> slots;

extern "C" void remove_temporaries(int signal_number) {
  for (Slot& slot : slots) {
    if (slot.live.load()) {
      unlink(slot.path.data());
    }
  }
  // Installed with SA_RESETHAND: this ends the process as the signal would have.
  raise(signal_number);
}

void install_handler() {
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_handler = remove_temporaries;
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    for (const int signal_number : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction before = {};
      // nohup and the like: an ignored signal stays ignored
      if (sigaction(signal_number, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) {
        sigaction(signal_number, &action, nullptr);
      }
    }
    return true;
  }();
  static_cast<void>(installed);
}

int remember(const std::string& path) {
  install_handler();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (path.size() < slots[i].path.size() && !slots[i].taken.exchange(true)) {
      std::memcpy(slots[i].path.data(), path.c_str(), path.size() + 1);
      slots[i].live.store(true);
      return static_cast<int>(i);
    }
  }
  return -1;
}

void forget(int slot) {
  if (slot >= 0) {
    slots[static_cast<std::size_t>(slot)].live.store(false);
    slots[static_cast<std::size_t>(slot)].taken.store(false);
  }
}

Status failed(const std::string& path) { return Status::io_error(path, std::strerror(errno)); }

/// What a symbolic link points to, so that the link stays.
std::string behind_links(const std::string& path) {
  char* resolved = realpath(path.c_str(), nullptr);
  if (resolved == nullptr) {
    return path;
  }
  std::string target = resolved;
  std::free(resolved);
  return target;
}

}  // namespace

Result<std::string> read_file(const std::string& path, std::size_t most_bytes) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    return failed(path);
  }
  std::string contents;
  std::array<char, 1 << 16> block;
  ssize_t got = 0;
  while ((got = read(descriptor, block.data(), block.size())) != 0) {
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      const Status status = failed(path);
      close(descriptor);
      return status;
    }
    contents.append(block.data(), static_cast<std::size_t>(got));
    if (contents.size() > most_bytes) {
      close(descriptor);
      return Status::io_error(path, "a file of more than " + std::to_string(most_bytes) + " bytes",
                              "at most " + std::to_string(most_bytes) + " bytes");
    }
  }
  close(descriptor);
  return contents;
}

Result<OutputFile> OutputFile::create(const std::string& path) {
  OutputFile file;
  file.path_ = path;
  file.target_ = behind_links(path);
  struct stat about = {};
  if (stat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode)) {
    // a pipe, /dev/null: nothing to rename onto; a directory fails here
    file.descriptor_ = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (file.descriptor_ < 0) {
      return failed(path);
    }
    return file;
  }
  if (access(file.target_.c_str(), F_OK) == 0 && access(file.target_.c_str(), W_OK) != 0) {
    return failed(path);  // write-protected: a rename would not ask
  }
  const std::size_t slash = file.target_.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : file.target_.substr(0, slash + 1);
  file.temporary_ = folder + ".rafter-XXXXXX";
  file.descriptor_ = mkstemp(file.temporary_.data());
  if (file.descriptor_ < 0) {
    file.temporary_.clear();
    return failed(path);
  }
  file.slot_ = remember(file.temporary_);
  const mode_t mask = umask(0);
  umask(mask);
  const mode_t mode =
      access(file.target_.c_str(), F_OK) == 0 ? about.st_mode & 0777U : 0666U & ~mask;
  if (fchmod(file.descriptor_, mode) != 0) {
    return failed(path);
  }
  return file;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)),
      slot_(std::exchange(other.slot_, -1)) {}

OutputFile& OutputFile::operator=(OutputFile&& other) noexcept {
  if (this != &other) {
    discard();
    path_ = std::move(other.path_);
    target_ = std::move(other.target_);
    temporary_ = std::exchange(other.temporary_, {});
    descriptor_ = std::exchange(other.descriptor_, -1);
    slot_ = std::exchange(other.slot_, -1);
  }
  return *this;
}

OutputFile::~OutputFile() { discard(); }

void OutputFile::discard() noexcept {
  if (descriptor_ >= 0) {
    close(descriptor_);
    descriptor_ = -1;
  }
  if (!temporary_.empty()) {
    unlink(temporary_.c_str());
    temporary_.clear();
  }
  forget(std::exchange(slot_, -1));
}

Status OutputFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, bytes);
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written < 0) {
      return failed(path_);
    }
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
  return Status::ok();
}

Status OutputFile::commit() {
  const int closed = close(std::exchange(descriptor_, -1));
  if (closed != 0) {
    return failed(path_);
  }
  if (!temporary_.empty()) {
    if (rename(temporary_.c_str(), target_.c_str()) != 0) {
      return failed(path_);
    }
    temporary_.clear();
    forget(std::exchange(slot_, -1));
  }
  return Status::ok();
}

Status write_file(const std::string& path, std::string_view contents) {
  Result<OutputFile> file = OutputFile::create(path);
  if (!file.is_ok()) {
    return file.status();
  }
  if (Status written = file->write(contents.data(), contents.size()); !written.is_ok()) {
    return written;
  }
  return file->commit();
}

}  // namespace rafter::cli
