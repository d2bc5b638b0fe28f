// What the fuzzers have found, run again with every build: the fuzzers' own claims on their corpus.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#define LLVMFuzzerTestOneInput fuzz_npy
#include "tools/fuzz/npy_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_safetensors
#include "tools/fuzz/safetensors_fuzz.cpp"
#undef LLVMFuzzerTestOneInput
#define LLVMFuzzerTestOneInput fuzz_device
#include "tools/fuzz/device_fuzz.cpp"
#undef LLVMFuzzerTestOneInput

namespace {

using Fuzzer = int (*)(const std::uint8_t*, std::size_t);

/// A claim that does not hold aborts the test.
void run_corpus(const std::string& name, Fuzzer fuzzer) {
  int files = 0;
  const auto corpus = std::filesystem::path(RAFTER_SOURCE_DIR) / "tools/fuzz/corpus" / name;
  for (const auto& entry : std::filesystem::directory_iterator(corpus)) {
    SCOPED_TRACE(entry.path());
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    EXPECT_EQ(fuzzer(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()), 0);
    ++files;
  }
  EXPECT_GE(files, 20) << "the corpus of " << name << " is missing";
}

TEST(FuzzCorpus, Npy) { run_corpus("npy", fuzz_npy); }
TEST(FuzzCorpus, Safetensors) { run_corpus("safetensors", fuzz_safetensors); }
TEST(FuzzCorpus, Device) { run_corpus("device", fuzz_device); }

}  // namespace
