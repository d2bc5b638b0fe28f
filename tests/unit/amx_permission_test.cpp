// Who may use AMX: the reasons for refusing, without a machine that refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "hw/cpu/amx.h"

#if RAFTER_HAS_AMX_CODE
namespace rafter::hw::amx {
namespace {

using ::testing::HasSubstr;

int asked = 0;
bool grants() {
  ++asked;
  return true;
}
bool refuses() {
  ++asked;
  return false;
}

constexpr Facts kXeon = {.tiles_of_bf16 = true, .xsave = true, .xcr0 = 0x600e7};

TEST(AmxPermission, IsThereWhenCpuSystemAndKernelAgree) {
  asked = 0;
  EXPECT_EQ(refusal(kXeon, grants), "");
  EXPECT_EQ(asked, 1);
}

TEST(AmxPermission, RefusedByTheKernelIsSaidSo) {
  asked = 0;
  EXPECT_EQ(refusal(kXeon, refuses), "the kernel refuses permission to use AMX (arch_prctl)");
  EXPECT_EQ(asked, 1);
}

TEST(AmxPermission, IsNotAskedForWhereTheStateIsNotThere) {
  asked = 0;
  Facts facts = kXeon;
  facts.xcr0 = 0x200e7;  // XTILEDATA without XTILECFG
  EXPECT_THAT(refusal(facts, grants), HasSubstr("XCR0"));
  facts = kXeon;
  facts.xsave = false;
  EXPECT_THAT(refusal(facts, grants), HasSubstr("XSAVE"));
  facts = kXeon;
  facts.tiles_of_bf16 = false;
  EXPECT_THAT(refusal(facts, grants), HasSubstr("no AMX with bf16"));
  EXPECT_EQ(asked, 0) << "the kernel was asked in vain";
}

}  // namespace
}  // namespace rafter::hw::amx
#endif
