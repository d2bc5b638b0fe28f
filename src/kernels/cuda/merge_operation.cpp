// Merge on CUDA: the host side of inst/merge_states.cu.
#include <array>
#include <memory>
#include <span>

#include "dispatch/operation_entry.h"
#include "hw/cuda/launch.h"
#include "kernels/cuda/merge_states.h"

namespace rafter {
namespace {

cuda::MergeState state_of(const AttentionState& state) {
  return {.o = cuda::rows_of(state.o),
          .lse = state.lse.data,
          .lse_stride_batch = state.lse.stride_batch,
          .lse_stride_heads = state.lse.stride_heads,
          .lse_stride_seqlen = state.lse.stride_seqlen};
}

template <int kCapacity>
Status merge_with(const MergeCall& call, std::int64_t rows) {
  const auto params = std::make_unique<cuda::MergeParams<kCapacity>>();
  const TensorView& o = call.out.o;
  for (std::size_t i = 0; i < call.states.size(); ++i) {
    params->states[i] = state_of(call.states[i]);
  }
  params->out = state_of(call.out);
  params->count = static_cast<int>(call.states.size());
  params->head_dim = static_cast<int>(o.head_dim);
  params->heads = static_cast<int>(o.heads);
  params->seqlen = static_cast<int>(o.seqlen);
  params->lane_bits = cuda::lane_bits_of(o.head_dim);
  params->rows = rows;
  return cuda::launch_merge(*params, call.stream.handle);
}

Status merge(const MergeCall& call) {
  const TensorView& o = call.out.o;
  constexpr double kMostRows = 2147483648.0;
  const double rows =
      static_cast<double>(o.batch) * static_cast<double>(o.seqlen) * static_cast<double>(o.heads);
  if (rows >= kMostRows || static_cast<double>(o.head_dim) >= kMostRows) {
    return Status::unsupported("out.o", "2^31 rows or more", "fewer in one launch");
  }
  const cuda::DeviceScope device(call.device_index);
  if (!device.status()) {
    return device.status();
  }
  const auto count = static_cast<std::int64_t>(rows);
  return call.states.size() <= cuda::kFewStates ? merge_with<cuda::kFewStates>(call, count)
                                                : merge_with<cuda::kManyStates>(call, count);
}

}  // namespace

std::span<const OperationEntry> operations_merge_cuda() {
  static const std::array<OperationEntry, 1> kEntries = {
      OperationEntry{.device = Device::Kind::cuda, .why_not = cuda::why_not_sm90, .merge = merge}};
  return kEntries;
}

}  // namespace rafter
