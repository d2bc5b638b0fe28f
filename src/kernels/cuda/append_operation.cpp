// Append on CUDA: the host side of inst/append.cu.
#include <array>
#include <span>

#include "dispatch/operation_entry.h"
#include "hw/cuda/launch.h"
#include "kernels/cuda/append.h"

namespace rafter {
namespace {

cuda::AppendRows rows(const TensorView& from, const TensorView& to, const TensorView& given,
                      const TensorView& computed) {
  return {.from = cuda::rows_of(from),
          .to = cuda::rows_of(to),
          .computed = cuda::rows_of(computed),
          .given = static_cast<const float*>(given.data),
          .given_stride = given.stride_heads,
          .heads = static_cast<int>(from.heads),
          .head_dim = static_cast<int>(from.head_dim)};
}

Status append(const AppendCall& call) {
  const AppendInputs& in = call.in;
  const AppendOutputs& out = call.out;
  constexpr std::int64_t kMostItems = std::int64_t{1} << 31;
  const bool with_q = in.q.data != nullptr;
  cuda::AppendParams params;
  params.k = rows(in.k, out.k_cache, in.k_scale, out.k_scale);
  params.v = rows(in.v, out.v_cache, in.v_scale, out.v_scale);
  if (with_q) {
    params.q = rows(in.q, out.q, {}, {});
  }
  const double items = static_cast<double>(in.k.batch) * static_cast<double>(in.k.seqlen) *
                       static_cast<double>(2 * in.k.heads + (with_q ? in.q.heads : 0));
  if (items >= static_cast<double>(kMostItems)) {
    return Status::unsupported("k", "2^31 rows of k, v and q or more", "fewer in one launch");
  }
  params.tokens = in.k.batch * in.k.seqlen;
  params.seqused_kv = cuda::device_indices(in.seqused_kv);
  params.seqused_new = cuda::device_indices(in.seqused_new);
  params.page_table = cuda::device_indices(in.page_table);
  params.page_cols = in.page_table.cols;
  params.places = out.k_cache.batch;
  params.place_rows = out.k_cache.seqlen;
  params.seqlen = static_cast<int>(in.k.seqlen);
  params.lane_bits = cuda::lane_bits_of(std::max(in.k.head_dim, in.v.head_dim));
  params.rope = cuda::rope_tables(in.rope);
  const cuda::DeviceScope device(call.device_index);
  if (!device.status()) {
    return device.status();
  }
  if (out.dropped.data != nullptr && out.dropped.size > 0) {
    params.dropped = out.dropped.data;
    if (Status s = cuda::clear(params.dropped, out.dropped.size * 4, call.stream.handle); !s) {
      return s;
    }
  }
  return cuda::launch_append(params, call.stream.handle);
}

}  // namespace

std::span<const OperationEntry> operations_append_cuda() {
  static const std::array<OperationEntry, 1> kEntries = {OperationEntry{
      .device = Device::Kind::cuda, .why_not = cuda::why_not_sm90, .append = append}};
  return kEntries;
}

}  // namespace rafter
