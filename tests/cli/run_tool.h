// Runs the tool as a user's shell would: its own process, stdout and stderr apart, exit code.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__) && defined(__linux__)
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace rafter::test {

struct ToolRun {
  int exit_code = -1;  // 128 + signal when one ended it
  std::string out, err;

  bool one_line_error() const {
    return !err.empty() && std::count(err.begin(), err.end(), '\n') == 1 && err.back() == '\n';
  }
};

struct ToolOptions {
  std::vector<std::pair<std::string, std::string>> environment = {};
  std::string input = {};      // its stdin; at most 64 KiB
  bool close_stdout = false;   // start it with stdout closed
  std::string stdout_to = {};  // a path that its stdout is opened on, such as /dev/full
  bool deny_amx = false;       // every arch_prctl(ARCH_REQ_XCOMP_PERM) fails with EPERM
};

#if defined(__x86_64__) && defined(__linux__)
/// Of this process and what it executes, for good.
inline void deny_amx() {
  constexpr unsigned kArchReqXcompPerm = 0x1023;
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchReqXcompPerm, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {std::size(filter), filter};
  constexpr int kNoFilter = 126;
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    _exit(kNoFilter);
  }
}
#else
inline void deny_amx() {}
#endif

/// Runs RAFTER_TOOL with these arguments. RAFTER_HOME points to a folder that does not exist, so
/// that a probe file of the machine changes no test; override it through the environment.
inline ToolRun run_tool(const std::vector<std::string>& arguments,
                        const ToolOptions& options = {}) {
  std::array<int, 2> out{}, err{}, in{};
  if (pipe2(out.data(), O_CLOEXEC) != 0 || pipe2(err.data(), O_CLOEXEC) != 0 ||
      pipe2(in.data(), O_CLOEXEC) != 0) {
    ADD_FAILURE() << "no pipe";
    return {};
  }
  std::vector<const char*> argv = {RAFTER_TOOL};
  for (const std::string& argument : arguments) {
    argv.push_back(argument.c_str());
  }
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(in[0], 0);
    dup2(out[1], 1);
    dup2(err[1], 2);
    if (options.close_stdout) {
      close(1);
    } else if (!options.stdout_to.empty()) {
      dup2(open(options.stdout_to.c_str(), O_WRONLY), 1);
    }
    signal(SIGPIPE, SIG_DFL);
    setenv("RAFTER_HOME", "/nonexistent/rafter-test", 1);
    for (const auto& [name, value] : options.environment) {
      setenv(name.c_str(), value.c_str(), 1);
    }
    if (options.deny_amx) {
      deny_amx();
    }
    execv(RAFTER_TOOL, const_cast<char* const*>(argv.data()));
    _exit(127);
  }
  close(in[0]);
  close(out[1]);
  close(err[1]);
  if (!options.input.empty() && write(in[1], options.input.data(), options.input.size()) !=
                                    static_cast<ssize_t>(options.input.size())) {
    ADD_FAILURE() << "stdin was not taken";
  }
  close(in[1]);
  ToolRun run;
  std::array<pollfd, 2> waiting = {pollfd{out[0], POLLIN, 0}, pollfd{err[0], POLLIN, 0}};
  std::array<char, 65536> block;
  for (int open_pipes = 2; open_pipes > 0;) {
    poll(waiting.data(), waiting.size(), -1);
    for (std::size_t i = 0; i < 2; ++i) {
      if (waiting[i].fd >= 0 && waiting[i].revents != 0) {
        const ssize_t got = read(waiting[i].fd, block.data(), block.size());
        if (got > 0) {
          (i == 0 ? run.out : run.err).append(block.data(), static_cast<std::size_t>(got));
        } else {
          close(waiting[i].fd);
          waiting[i].fd = -1;
          --open_pipes;
        }
      }
    }
  }
  int status = 0;
  waitpid(child, &status, 0);
  run.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return run;
}

/// Runs with --format json, expects exit 0 and one JSON document on stdout; returns it.
inline nlohmann::ordered_json run_json(std::vector<std::string> arguments,
                                       const ToolOptions& options = {}) {
  arguments.insert(arguments.end(), {"--format", "json"});
  const ToolRun run = run_tool(arguments, options);
  EXPECT_EQ(run.exit_code, 0) << run.err;
  auto document = nlohmann::ordered_json::parse(run.out, nullptr, false);
  EXPECT_FALSE(document.is_discarded()) << "not one JSON document: " << run.out;
  return document;
}

/// Bad input: exit 2, nothing on stdout, one line on stderr that holds each of these words.
inline void expect_refused(const std::vector<std::string>& arguments,
                           const std::vector<std::string>& words) {
  const ToolRun run = run_tool(arguments);
  std::string command;
  for (const std::string& argument : arguments) {
    command += " " + argument;
  }
  EXPECT_EQ(run.exit_code, 2) << command << "\n" << run.out << run.err;
  EXPECT_EQ(run.out, "") << command;
  EXPECT_TRUE(run.one_line_error()) << command << "\n" << run.err;
  for (const std::string& word : words) {
    EXPECT_NE(run.err.find(word), std::string::npos)
        << command << ": '" << word << "' is not in: " << run.err;
  }
}

/// Whether this build and machine can run a CUDA kernel.
inline bool machine_has_cuda() {
  const auto listed = run_json({"kernels"});
  for (const auto& kernel : listed["kernels"]) {
    if (kernel["device"] == "cuda" && kernel["machine_has"].get<bool>()) {
      return true;
    }
  }
  return false;
}

/// A folder of its own that goes when the test ends.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "rafter-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) {
      ADD_FAILURE() << "no temporary folder";
    }
    path_ = name;
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace rafter::test
