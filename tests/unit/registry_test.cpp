// The registry and RAFTER_CPU_ISA.
#include "dispatch/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "dispatch/isa_limit.h"
#include "rafter/attention.h"
#include "rafter/kernels.h"

namespace rafter {
namespace {

using ::testing::HasSubstr;

/// Sets RAFTER_CPU_ISA for as long as it lives.
class IsaVariable {
 public:
  explicit IsaVariable(const char* value) {
    if (const char* old = std::getenv("RAFTER_CPU_ISA"); old != nullptr) {
      before_ = old;
      had_ = true;
    }
    setenv("RAFTER_CPU_ISA", value, 1);
  }
  ~IsaVariable() {
    if (had_) {
      setenv("RAFTER_CPU_ISA", before_.c_str(), 1);
    } else {
      unsetenv("RAFTER_CPU_ISA");
    }
  }
  IsaVariable(const IsaVariable&) = delete;
  IsaVariable& operator=(const IsaVariable&) = delete;

 private:
  std::string before_;
  bool had_ = false;
};

TEST(Registry, KernelsAreSortedNamedOnceAndComplete) {
  const std::vector<KernelInfo> kernels = list_kernels();
  std::set<std::string> names;
  std::string previous;
  for (const KernelInfo& kernel : kernels) {
    EXPECT_LT(previous, kernel.name);
    previous = kernel.name;
    names.insert(kernel.name);
    EXPECT_FALSE(kernel.dtypes.empty()) << kernel.name;
    EXPECT_FALSE(kernel.accepts.empty()) << kernel.name;
    EXPECT_FALSE(kernel.instruction_set.empty()) << kernel.name;
    EXPECT_NE(kernel.machine_has, !kernel.machine_reason.empty()) << kernel.name;
  }
  for (const char* name :
       {"forward_reference", "unfused_onednn", "half_fused_onednn", "backward_reference"}) {
    EXPECT_EQ(names.count(name), 1U) << name;
  }
  EXPECT_EQ(dispatch::find_kernel("nothing"), nullptr);
  EXPECT_EQ(dispatch::find_kernel("forward_reference")->entry->name, "forward_reference");
}

TEST(Registry, EveryCpuKernelNamesAnInstructionSetThatTheLimitKnows) {
  for (const KernelInfo& kernel : list_kernels()) {
    if (kernel.device == Device::Kind::cpu) {
      EXPECT_TRUE(dispatch::isa_rank(kernel.instruction_set)) << kernel.name;
    }
  }
}

// P16: the order of the instruction sets, and kernels kept to a limit.
TEST(Registry, TheLimitBoundsWhatIsChosenAndForced) {
  EXPECT_LT(dispatch::isa_rank("portable"), dispatch::isa_rank("avx2"));
  EXPECT_LT(dispatch::isa_rank("avx2"), dispatch::isa_rank("avx512"));
  EXPECT_LT(dispatch::isa_rank("avx512"), dispatch::isa_rank("avx512_bf16"));
  EXPECT_LT(dispatch::isa_rank("avx512_bf16"), dispatch::isa_rank("amx"));
  // every kernel takes bf16, some nothing else
  const AttentionProblem problem{
      .seqlen_q = 64, .seqlen_kv = 64, .head_dim = 64, .dtype = DType::bf16};
  for (const char* limit : {"portable", "avx2", "avx512", "avx512_bf16", "amx"}) {
    const IsaVariable variable(limit);
    const Result<Plan> planned = plan(problem, Device::cpu());
    ASSERT_TRUE(planned) << planned.status().message();
    EXPECT_LE(dispatch::isa_rank(dispatch::find_kernel(planned->kernel())->entry->instruction_set),
              dispatch::isa_rank(limit));
    for (const KernelInfo& kernel : list_kernels()) {
      if (kernel.device != Device::Kind::cpu || !kernel.machine_has) {
        continue;
      }
      const Result<Plan> forced =
          plan(problem, Device::cpu(), {.pass = kernel.pass, .kernel = kernel.name});
      const bool within = dispatch::isa_rank(kernel.instruction_set) <= dispatch::isa_rank(limit);
      EXPECT_EQ(forced.is_ok(), within) << kernel.name << " under " << limit;
      if (!forced) {
        EXPECT_THAT(forced.status().message(),
                    HasSubstr("RAFTER_CPU_ISA is " + std::string(limit)));
      }
    }
  }
}

TEST(Registry, AnUnknownLimitIsAnError) {
  const IsaVariable variable("sse9");
  const Status status =
      plan({.seqlen_q = 1, .seqlen_kv = 1, .head_dim = 8}, Device::cpu()).status();
  EXPECT_EQ(status.message(),
            "RAFTER_CPU_ISA: sse9 given; portable, avx2, avx512, avx512_bf16 or amx allowed");
}

}  // namespace
}  // namespace rafter
