// Processes that fork, as data loaders and servers with workers do: the child of a process whose
// OpenMP threads already run computes too, with the same bits.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/every_kernel.h"

namespace rafter::testing {
namespace {

class ForwardFork : public EveryKernelTest {};

// With the address sanitizer one child in some hundred forks hung, without it none: GCC 12's does
// not hold its own locks over fork(), which is the likely cause.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kAttempts = 2;
#else
constexpr int kAttempts = 1;
#endif

TEST_P(ForwardFork, TheChildComputesTheSameBits) {
  const Case c =
      Case{.problem = {.heads_q = 4, .head_dim = 64, .dtype = any_dtype()}}.lengths({192}, {192});
  const Values values = make_values(c);
  RunOptions run = options();
  run.threads = 4;
  const Output before = run_case(c, values, run);  // starts the threads that the child will miss
  int status = 0;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);  // a child that waits for threads which are not there is ended by SIGALRM
      const bool same = same_bits(before, run_case(c, values, run)) &&
                        same_bits(before, run_case(c, values, run));
      _exit(same ? 0 : 1);
    }
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (WIFEXITED(status)) {
      break;
    }
  }
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, ForwardFork, ::testing::ValuesIn(cpu_kernels()),
                         kernel_test_name);

}  // namespace
}  // namespace rafter::testing
