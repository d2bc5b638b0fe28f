#include "dispatch/registry.h"
#include "rafter/kernels.h"

namespace rafter {

std::vector<KernelInfo> list_kernels() {
  std::vector<KernelInfo> list;
  for (const dispatch::Registered& kernel : dispatch::kernels()) {
    const KernelEntry& entry = *kernel.entry;
    list.push_back({.name = std::string(entry.name),
                    .device = entry.device,
                    .pass = entry.pass(),
                    .pipeline = entry.pipeline,
                    .instruction_set = std::string(entry.instruction_set),
                    .dtypes = entry.dtypes,
                    .kv_dtypes = entry.kv_dtypes,
                    .accepts = std::string(entry.accepts_text),
                    .machine_has = kernel.machine.yes,
                    .machine_reason = kernel.machine.reason});
  }
  return list;
}

}  // namespace rafter
