// backward_sm90: the host side of the fused, deterministic backward for sm_90a.
//   rows of dO ∘ O → the kernel over blocks of keys (dK, dV, sums of dQ) → dQ
// Where a head dimension is no multiple of 8, that kernel reads copies of Q, K, V and dO.
#include "kernels/cuda/backward_sm90.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "base/checked.h"
#include "dispatch/kernel_entry.h"
#include "hw/cuda/tensor_map.h"
#include "kernels/cuda/accepts_sm90.h"
#include "kernels/cuda/score_problem.h"
#include "tiles/tile_order.h"

namespace rafter {
namespace {

using tiles::kSm90BackwardRowCount;
using tiles::kSm90BackwardRows;
using tiles::Sm90BackwardRow;

// Q, dO and the sums of dQ of the heads in flight; the L2 of an H200 has 50 MiB.
constexpr std::int64_t kCacheBytes = std::int64_t{32} << 20;
// KV heads in flight at least: where blocks of keys are equally long, and under a mask, by row.
constexpr std::array<std::array<std::int64_t, 2>, kSm90BackwardRowCount> kLeastHeads = {
    {{32, 32}, {16, 32}, {1, 16}}};

using LaunchFunction = Status (*)(const cuda::BackwardParams&, unsigned, void*);
constexpr std::array<std::array<LaunchFunction, kSm90BackwardRowCount>, 2> kLaunch = {{
    {cuda::launch_backward_sm90<DType::bf16, 0>, cuda::launch_backward_sm90<DType::bf16, 1>,
     cuda::launch_backward_sm90<DType::bf16, 2>},
    {cuda::launch_backward_sm90<DType::f16, 0>, cuda::launch_backward_sm90<DType::f16, 1>,
     cuda::launch_backward_sm90<DType::f16, 2>},
}};

Acceptance machine_has() {
  std::string reason = cuda::why_not_sm90(0);
  return reason.empty() ? Acceptance::accept() : Acceptance::refuse(std::move(reason));
}

int row_of(const AttentionProblem& p) {
  return tiles::sm90_backward_row_for(p.head_dim, p.head_dim_v);
}
bool is_packed(const AttentionProblem& p) { return p.layout == Layout::packed; }

/// Rows of q, o and d_o.
std::int64_t rows_of(const AttentionProblem& p) {
  return is_packed(p) ? p.total_q : p.batch * p.seqlen_q;
}

std::int64_t slots_of(const AttentionProblem& p) {
  return tiles::slot_count(is_packed(p), p.batch, p.total_q, p.seqlen_q,
                           kSm90BackwardRows[row_of(p)].tile_q);
}

/// Items of the problem, at most.
std::int64_t items_of(const AttentionProblem& p) {
  const std::int64_t tile_kv = kSm90BackwardRows[row_of(p)].tile_kv;
  const std::int64_t blocks =
      is_packed(p) ? p.total_kv / tile_kv + p.batch : p.batch * base::div_up(p.seqlen_kv, tile_kv);
  return blocks * p.heads_kv;
}

std::int64_t keys_of(const AttentionProblem& p) {
  return is_packed(p) ? p.total_kv : p.batch * p.seqlen_kv;
}

/// The copy engine reads rows of whole 16 bytes.
bool is_widened(const AttentionProblem& p) { return p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0; }

/// Byte offsets in the workspace. q, k and v: of copies.
struct Places {
  std::int64_t turns = 64, rows = 0, dq_sums = 0, d_o = 0, q = 0, k = 0, v = 0, total = 0;
};

Places places_of(const AttentionProblem& p) {
  constexpr std::int64_t kAlign = 128;
  const Sm90BackwardRow& shape = kSm90BackwardRows[row_of(p)];
  const std::int64_t tiles = slots_of(p) * p.heads_q;
  Places out;
  out.rows =
      base::round_up(out.turns + tiles * static_cast<std::int64_t>(sizeof(unsigned)), kAlign);
  out.dq_sums = out.rows + tiles * 2 * shape.row_bytes();
  out.d_o = out.dq_sums + tiles * shape.parts() * Sm90BackwardRow::kPartBytes;
  const std::int64_t wide = cuda::whole_chunks(p.head_dim) * 2,
                     wide_v = cuda::whole_chunks(p.head_dim_v) * 2;
  out.total = out.d_o + rows_of(p) * p.heads_q * wide_v;
  if (is_widened(p)) {
    out.q = base::round_up(out.total, kAlign);
    out.k = base::round_up(out.q + rows_of(p) * p.heads_q * wide, kAlign);
    out.v = base::round_up(out.k + keys_of(p) * p.heads_kv * wide, kAlign);
    out.total = out.v + keys_of(p) * p.heads_kv * wide_v;
  }
  return out;
}

Acceptance accepts(const KernelProblem& problem) {
  const AttentionProblem& p = problem.attention;
  if (Acceptance common = cuda::accepts_sm90_layout(problem); !common.yes) {
    return common;
  }
  if (row_of(p) < 0) {
    return Acceptance::refuse(
        fmt::format("head_dim {}, head_dim_v {} is beyond 256", p.head_dim, p.head_dim_v));
  }
  const std::int64_t longest =
      std::max({p.seqlen_q, p.seqlen_kv, p.total_q, p.total_kv, p.heads_q, p.batch});
  constexpr std::int64_t kMostParts = 16;  // of a query tile
  if (longest >= cuda::kMaxLength || items_of(p) >= cuda::kMaxLength ||
      !base::checked_product({slots_of(p), p.heads_q}) ||
      slots_of(p) * p.heads_q >= std::numeric_limits<std::int32_t>::max() / kMostParts) {
    return Acceptance::refuse("more than 2^29 rows, or 2^27 query tiles");
  }
  return cuda::accepts_sm90_device(problem);
}

std::int64_t workspace(const KernelProblem& problem) { return places_of(problem.attention).total; }

Reach reach(const KernelProblem&, const DeviceSpec&) {
  return {.compute = 0.5, .bandwidth = 0.8, .fixed_seconds = 1e-5};
}

/// One call: its tensors, and where its intermediate results stand.
class Call {
 public:
  explicit Call(const BackwardCall& call)
      : call_(call),
        p_(call.problem.attention),
        row_(row_of(p_)),
        places_(places_of(p_)),
        params_{} {}

  Status run() {
    set_problem();
    if (Status status = set_tensors(); !status) {
      return status;
    }
    const Result<int> sms = cuda::sm_count();
    if (!sms) {
      return sms.status();
    }
    void* const stream = call_.stream.handle;
    if (Status status = cuda::clear(at(0), places_.rows, stream); !status) {
      return status;
    }
    const bool f16 = p_.dtype == DType::f16;
    const auto rows =
        f16 ? cuda::launch_backward_rows<DType::f16> : cuda::launch_backward_rows<DType::bf16>;
    const auto dq =
        f16 ? cuda::launch_backward_dq<DType::f16> : cuda::launch_backward_dq<DType::bf16>;
    if (Status status = rows(params_, inputs_, row_, stream); !status) {
      return status;
    }
    const std::int64_t blocks = std::min<std::int64_t>(*sms, items_of(p_));
    if (Status status = kLaunch[f16 ? 1 : 0][static_cast<std::size_t>(row_)](
            params_, static_cast<unsigned>(blocks), stream);
        !status) {
      return status;
    }
    return dq(params_, row_, stream);
  }

 private:
  std::byte* at(std::int64_t bytes) const {
    return static_cast<std::byte*>(call_.workspace.data) + bytes;
  }

  cuda::PlainTensor plain(const TensorView& view) const {
    const std::int64_t size = bits_of(view.dtype) / 8, elements = 16 / size;
    const auto whole = [elements](std::int64_t stride) { return stride % elements == 0; };
    return {.data = view.data,
            .stride_batch = view.stride_batch,
            .stride_seqlen = view.stride_seqlen,
            .stride_heads = view.stride_heads,
            .is_f32 = view.dtype == DType::f32,
            .aligned = !is_widened(p_) && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
                       whole(view.stride_batch) && whole(view.stride_seqlen) &&
                       whole(view.stride_heads)};
  }
  static cuda::LseTarget target(const LseView& lse) {
    return {lse.data, lse.stride_batch, lse.stride_heads, lse.stride_seqlen};
  }

  void set_problem() {
    params_.problem = cuda::score_problem(p_, call_.in);
    params_.head_dim = static_cast<int>(p_.head_dim);
    params_.head_dim_v = static_cast<int>(p_.head_dim_v);
    constexpr float kLog2E = 1.44269504088896341f;
    params_.softmax_scale = *p_.softmax_scale;
    params_.scale_log2 = *p_.softmax_scale * kLog2E;
    if (p_.softcap > 0) {
      params_.softcap = true;
      params_.scale_log2 = p_.softcap * kLog2E;
      params_.transform_scale = 2 * kLog2E * *p_.softmax_scale / p_.softcap;
    }
    params_.section = static_cast<int>(section());
    params_.counter = reinterpret_cast<unsigned*>(at(0));
    params_.turns = reinterpret_cast<unsigned*>(at(places_.turns));
    params_.rows = reinterpret_cast<float*>(at(places_.rows));
    params_.dq_sums = reinterpret_cast<float*>(at(places_.dq_sums));
    params_.slots = slots_of(p_);
  }

  /// KV heads in flight together: those whose queries the cache holds, and more where few are.
  /// Blocks of a head wait for one another's dQ, so few of one head at a time is better; they walk
  /// the same queries a tile or two apart, so that the cache needs little of each head.
  std::int64_t section() const {
    const std::int64_t group = p_.heads_q / p_.heads_kv;
    const std::int64_t heads = is_packed(p_) ? p_.heads_kv : p_.batch * p_.heads_kv;
    const std::int64_t bytes = p_.seqlen_q * group * (p_.head_dim * 6 + p_.head_dim_v * 2);
    const std::int64_t least =
        kLeastHeads[static_cast<std::size_t>(row_)][p_.mask.is_none() ? 0 : 1];
    return std::min(heads, std::max(least, tiles::heads_in_cache(heads, 1, bytes, kCacheBytes)));
  }

  Status set_tensors() {
    const Sm90BackwardRow& shape = kSm90BackwardRows[row_];
    const bool packed = is_packed(p_);
    const std::int64_t batch = packed ? 1 : p_.batch;
    TensorView q = call_.in.q, k = call_.in.k, v = call_.in.v;
    if (is_widened(p_)) {
      const auto widen = [&](TensorView& view, std::int64_t place, std::int64_t seqlen,
                             std::int64_t heads, std::int64_t head_dim) {
        const cuda::WidenParams copy = {plain(view), at(place), batch,
                                        seqlen,      heads,     static_cast<int>(head_dim)};
        view = TensorView::contiguous(copy.to, p_.dtype, batch, seqlen, heads,
                                      cuda::whole_chunks(head_dim));
        return cuda::launch_widen_rows(copy, call_.stream.handle);
      };
      const std::int64_t queries = packed ? p_.total_q : p_.seqlen_q;
      const std::int64_t keys = packed ? p_.total_kv : p_.seqlen_kv;
      for (const Status& status : {widen(q, places_.q, queries, p_.heads_q, p_.head_dim),
                                   widen(k, places_.k, keys, p_.heads_kv, p_.head_dim),
                                   widen(v, places_.v, keys, p_.heads_kv, p_.head_dim_v)}) {
        if (!status) {
          return status;
        }
      }
    }
    if (Status status =
            map("q", q, shape.tile_q, params_.q, params_.q_batch_step, params_.q_heads_step);
        !status) {
      return status;
    }
    if (Status status =
            map("k", k, shape.tile_kv, params_.k, params_.k_batch_step, params_.k_heads_step);
        !status) {
      return status;
    }
    if (Status status =
            map("v", v, shape.tile_kv, params_.v, params_.v_batch_step, params_.v_heads_step);
        !status) {
      return status;
    }
    params_.dq = plain(call_.out.dq);
    params_.dk = plain(call_.out.dk);
    params_.dv = plain(call_.out.dv);
    inputs_ = {.o = plain(call_.in.o),
               .d_o = plain(call_.in.d_o),
               .lse = target(call_.in.lse),
               .dlse = target(call_.in.dlse)};
    return set_d_o();
  }

  static Status map(const char* name, const TensorView& view, int box_rows, CUtensorMap& to,
                    int& batch_step, int& heads_step) {
    cuda::TensorMap made;
    if (Status status = cuda::make_tensor_map(name, view, box_rows, made); !status) {
      return status;
    }
    to = made.map;
    batch_step = made.batch_step;
    heads_step = made.heads_step;
    return Status::ok();
  }

  /// dO as it is, or, where it is f32 or the copy engine cannot read it, its copy.
  Status set_d_o() {
    const int tile_q = kSm90BackwardRows[row_].tile_q;
    const auto map_of = [&](const TensorView& view) {
      return map("d_o", view, tile_q, params_.d_o, params_.d_o_batch_step, params_.d_o_heads_step);
    };
    if (!is_widened(p_) && call_.in.d_o.dtype == p_.dtype && map_of(call_.in.d_o)) {
      return Status::ok();
    }
    inputs_.d_o_copy = at(places_.d_o);
    const std::int64_t batch = is_packed(p_) ? 1 : p_.batch;
    return map_of(TensorView::contiguous(inputs_.d_o_copy, p_.dtype, batch,
                                         is_packed(p_) ? p_.total_q : p_.seqlen_q, p_.heads_q,
                                         cuda::whole_chunks(p_.head_dim_v)));
  }

  const BackwardCall& call_;
  const AttentionProblem& p_;
  int row_;
  Places places_;
  cuda::BackwardParams params_;
  cuda::BackwardRowInputs inputs_;
};

Status backward(const BackwardCall& call) {
  const cuda::DeviceScope device(call.problem.device_index);
  return device.status() ? Call(call).run() : device.status();
}

}  // namespace

std::span<const KernelEntry> entries_backward_sm90() {
  static const std::array<KernelEntry, 1> kEntries = {KernelEntry{
      .name = "backward_sm90",
      .device = Device::Kind::cuda,
      .pipeline = Pipeline::fused,
      .instruction_set = "sm_90a",
      .dtypes = {DType::bf16, DType::f16},
      .accepts_text = "dense and packed layouts, head_dim and head_dim_v up to 256 (others than "
                      "multiples of 8 through copies of q, k, v and d_o), every mask, softcap, "
                      "seqused_kv; strides of q, k, v multiples of 8 elements",
      .machine_has = machine_has,
      .accepts = accepts,
      .reach = reach,
      .workspace = workspace,
      .backward = backward}};
  return kEntries;
}

}  // namespace rafter
