#include <fmt/format.h>

#include "rafter/device.h"

namespace rafter {

const std::vector<FigureKey>& figure_keys() {
  static const std::vector<FigureKey> keys = [] {
    std::vector<FigureKey> list;
    for (const char* dtype :
         {"f64", "tf32", "f32", "f16", "bf16", "e4m3", "e5m2", "int8", "int4"}) {
      const std::string rate = std::string(dtype) + "_flop_per_s";
      list.push_back({"peak_" + rate, "FLOP/s", "dense matmul peak"});
      list.push_back(
          {"burst_" + rate, "FLOP/s", "library GEMM, first fraction of a second of load"});
      list.push_back({"sustained_" + rate, "FLOP/s", "library GEMM under lasting load"});
    }
    for (const char* dtype : {"f16", "bf16"}) {
      const std::string rate = fmt::format("attention_{}_flop_per_s", dtype);
      list.push_back({rate, "FLOP/s", "attention's two products with the softmax between them"});
      list.push_back({"sustained_" + rate, "FLOP/s", "the same under lasting load"});
    }
    list.push_back({"peak_vector_f32_flop_per_s", "FLOP/s", "f32 without matrix units"});
    list.push_back({"exp_per_s", "op/s", "exponentials, whole device"});
    list.push_back({"bandwidth_bytes_per_s", "B/s", "main memory"});
    for (const char* way : {"read", "write", "copy"}) {
      list.push_back(
          {fmt::format("bandwidth_{}_bytes_per_s", way), "B/s", "main memory, this way"});
    }
    list.push_back({"bandwidth_scores_bytes_per_s", "B/s",
                    "main memory, library GEMM with k = 128 whose results are most of the bytes"});
    for (const char* level : {"l1", "l2", "l3"}) {
      list.push_back(
          {fmt::format("bandwidth_{}_bytes_per_s", level), "B/s", "cache, whole device"});
      for (const char* way : {"read", "write", "copy"}) {
        list.push_back({fmt::format("bandwidth_{}_{}_bytes_per_s", level, way), "B/s",
                        "cache, whole device, this way"});
      }
      list.push_back({fmt::format("{}_bytes", level), "B",
                      "size of the cache: of one core (CPU) or the whole device (GPU)"});
    }
    list.push_back({"capacity_bytes", "B", "main memory"});
    list.push_back({"usable_bytes", "B", "main memory left for a workload"});
    list.push_back({"fast_memory_bytes", "B", "shared memory or private cache of one SM or core"});
    list.push_back({"sm_count", "1", "SMs, compute units or cores"});
    list.push_back({"launch_s", "s", "one kernel launch, or one parallel region of a CPU"});
    list.push_back({"launch_sync_s", "s", "one launch and the wait for it"});
    list.push_back({"launch_fork_s", "s", "one parallel region, until the last thread has begun"});
    list.push_back({"launch_cold_s", "s", "one parallel region after the threads have slept"});
    list.push_back({"graph_launch_s", "s", "one launch inside a captured graph"});
    list.push_back({"graph_submit_s", "s", "one submission of a captured graph"});
    list.push_back({"clock_hz", "Hz", "the clock that the peaks assume"});
    list.push_back({"power_w", "W", "power limit"});
    return list;
  }();
  return keys;
}

}  // namespace rafter
