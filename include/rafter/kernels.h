// What this build can run: every kernel with what it accepts and whether this machine has it.
#pragma once

#include <string>
#include <vector>

#include "rafter/device.h"
#include "rafter/roofline.h"
#include "rafter/tensor.h"

namespace rafter {

struct KernelInfo {
  std::string name;
  Device::Kind device = Device::Kind::cpu;
  Pass pass = Pass::forward;
  Pipeline pipeline = Pipeline::fused;
  std::string instruction_set;  // "portable", "avx2", "avx512", "amx", "sm_90a", …
  std::vector<DType> dtypes;
  std::vector<DType> kv_dtypes;  // of k and v, besides that of q
  std::string accepts;           // in words
  bool machine_has = false;
  std::string machine_reason;  // why not, when machine_has is false
};

/// All kernels of this build, sorted by name.
std::vector<KernelInfo> list_kernels();

}  // namespace rafter
