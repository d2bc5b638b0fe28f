#include "api/c_convert.h"

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/checked.h"

namespace rafter::c_abi {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

template <typename T>
struct Constant {
  std::int32_t value;
  T meaning;
  const char* name;
};

constexpr Constant<DType> kDTypes[] = {
    {RAFTER_F32, DType::f32, "RAFTER_F32"},    {RAFTER_F16, DType::f16, "RAFTER_F16"},
    {RAFTER_BF16, DType::bf16, "RAFTER_BF16"}, {RAFTER_E4M3, DType::e4m3, "RAFTER_E4M3"},
    {RAFTER_E5M2, DType::e5m2, "RAFTER_E5M2"}, {RAFTER_INT8, DType::int8, "RAFTER_INT8"},
    {RAFTER_INT4, DType::int4, "RAFTER_INT4"}, {RAFTER_I32, DType::i32, "RAFTER_I32"},
    {RAFTER_I64, DType::i64, "RAFTER_I64"},
};
constexpr Constant<Layout> kLayouts[] = {
    {RAFTER_DENSE, Layout::dense, "RAFTER_DENSE"},
    {RAFTER_PACKED, Layout::packed, "RAFTER_PACKED"},
    {RAFTER_PAGED, Layout::paged, "RAFTER_PAGED"},
};
constexpr Constant<MaskAlign> kAligns[] = {
    {RAFTER_BOTTOM_RIGHT, MaskAlign::bottom_right, "RAFTER_BOTTOM_RIGHT"},
    {RAFTER_TOP_LEFT, MaskAlign::top_left, "RAFTER_TOP_LEFT"},
};
constexpr Constant<std::optional<Pipeline>> kPipelines[] = {
    {RAFTER_PIPELINE_ANY, std::nullopt, "RAFTER_PIPELINE_ANY"},
    {RAFTER_UNFUSED, Pipeline::unfused, "RAFTER_UNFUSED"},
    {RAFTER_HALF_FUSED, Pipeline::half_fused, "RAFTER_HALF_FUSED"},
    {RAFTER_FUSED, Pipeline::fused, "RAFTER_FUSED"},
    {RAFTER_SPLIT_KV, Pipeline::split_kv, "RAFTER_SPLIT_KV"},
};
constexpr Constant<Device::Kind> kDevices[] = {
    {RAFTER_CPU, Device::Kind::cpu, "RAFTER_CPU"},
    {RAFTER_CUDA, Device::Kind::cuda, "RAFTER_CUDA"},
};
constexpr Constant<Pass> kPasses[] = {
    {RAFTER_PASS_FORWARD, Pass::forward, "RAFTER_PASS_FORWARD"},
    {RAFTER_PASS_BACKWARD, Pass::backward, "RAFTER_PASS_BACKWARD"},
};
constexpr Constant<Rope::Pairs> kRopePairs[] = {
    {RAFTER_ROPE_HALF_SPLIT, Rope::Pairs::half_split, "RAFTER_ROPE_HALF_SPLIT"},
    {RAFTER_ROPE_INTERLEAVED, Rope::Pairs::interleaved, "RAFTER_ROPE_INTERLEAVED"},
};
enum class MaskKind : std::uint8_t { none, causal, window };
constexpr Constant<MaskKind> kMasks[] = {
    {RAFTER_MASK_NONE, MaskKind::none, "RAFTER_MASK_NONE"},
    {RAFTER_MASK_CAUSAL, MaskKind::causal, "RAFTER_MASK_CAUSAL"},
    {RAFTER_MASK_WINDOW, MaskKind::window, "RAFTER_MASK_WINDOW"},
};

template <typename T, std::size_t n>
Status look_up(std::string_view name, std::int32_t value, const Constant<T> (&constants)[n],
               T& out) {
  std::string allowed;
  for (const Constant<T>& constant : constants) {
    if (constant.value == value) {
      out = constant.meaning;
      return Status::ok();
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(constant.name);
  }
  return Status::invalid_argument(std::string(name), text(value), allowed);
}

Status flag(const char* name, std::int32_t value) {
  return value == 0 || value == 1 ? Status::ok()
                                  : Status::invalid_argument(name, text(value), "0 or 1");
}

Status to_kv_dtype(rafter_dtype given, std::optional<DType>& out) {
  return given == 0 ? Status::ok() : look_up("kv_dtype", given, kDTypes, out.emplace());
}

Status to_mask(const rafter_problem& given, Mask& out) {
  MaskKind kind{};
  if (Status s = look_up("mask", given.mask, kMasks, kind); !s) {
    return s;
  }
  if (Status s = look_up("mask_align", given.mask_align, kAligns, out.align); !s) {
    return s;
  }
  if (kind == MaskKind::window) {
    out.window_left = given.window_left;
    out.window_right = given.window_right;
    return Status::ok();
  }
  // An option changes the result or is refused.
  for (const auto& [name, value] : {std::pair("window_left", given.window_left),
                                    std::pair("window_right", given.window_right)}) {
    if (value != 0) {
      return Status::invalid_argument(name, text(value), "0 (mask is not RAFTER_MASK_WINDOW)");
    }
  }
  out.window_right = kind == MaskKind::causal ? 0 : -1;
  return Status::ok();
}

}  // namespace

Status reserved(const char* name, std::int32_t value) {
  return value == 0 ? Status::ok() : Status::invalid_argument(name, text(value), "0");
}

Status to_device(rafter_device given, std::int32_t index, Device& out) {
  out.index = index;
  return look_up("device", given, kDevices, out.kind);
}

Status to_rope_pairs(rafter_rope_pairs given, Rope::Pairs& out) {
  return look_up("rope_pairs", given, kRopePairs, out);
}

CountView to_counts(const rafter_counts& given) {
  return {.data = given.data, .size = given.count};
}

Status to_problem(const rafter_problem& given, AttentionProblem& out) {
  out.batch = given.batch;
  out.heads_q = given.heads_q;
  out.heads_kv = given.heads_kv;
  out.seqlen_q = given.seqlen_q;
  out.seqlen_kv = given.seqlen_kv;
  out.head_dim = given.head_dim;
  out.head_dim_v = given.head_dim_v;
  out.softcap = given.softcap;
  out.seqused_kv = given.seqused_kv == 1;
  out.tree_mask = given.tree_mask == 1;
  out.total_q = given.total_q;
  out.total_kv = given.total_kv;
  out.page_size = given.page_size;
  out.num_pages = given.num_pages;
  if (given.has_softmax_scale == 1) {
    out.softmax_scale = given.softmax_scale;
  } else if (given.softmax_scale != 0) {
    return Status::invalid_argument("softmax_scale", std::to_string(given.softmax_scale),
                                    "0 (has_softmax_scale is not 1)");
  }
  for (const Status& s :
       {flag("has_softmax_scale", given.has_softmax_scale), flag("seqused_kv", given.seqused_kv),
        look_up("dtype", given.dtype, kDTypes, out.dtype),
        look_up("layout", given.layout, kLayouts, out.layout),
        to_kv_dtype(given.kv_dtype, out.kv_dtype), flag("tree_mask", given.tree_mask)}) {
    if (!s) {
      return s;
    }
  }
  return to_mask(given, out.mask);
}

Status to_pipeline(rafter_pipeline given, std::optional<Pipeline>& out) {
  return look_up("pipeline", given, kPipelines, out);
}

Status to_options(const rafter_plan_options& given, Device& device, PlanOptions& out) {
  out.threads = given.threads;
  out.splits = given.splits;
  out.kernel = given.kernel == nullptr ? "" : given.kernel;
  for (const Status& s : {to_device(given.device, given.device_index, device),
                          look_up("pass", given.pass, kPasses, out.pass),
                          reserved("options.reserved", given.reserved)}) {
    if (!s) {
      return s;
    }
  }
  return to_pipeline(given.pipeline, out.pipeline);
}

Status to_tensor(const char* name, const rafter_tensor& given, TensorView& out) {
  out = {.data = given.data,
         .batch = given.shape[0],
         .seqlen = given.shape[1],
         .heads = given.shape[2],
         .head_dim = given.shape[3],
         .stride_batch = given.stride[0],
         .stride_seqlen = given.stride[1],
         .stride_heads = given.stride[2],
         .stride_head_dim = given.stride[3]};
  return look_up(std::string(name) + ".dtype", given.dtype, kDTypes, out.dtype);
}

Status to_indices(const char* name, const rafter_indices& given, bool table, IndexView& out) {
  if (given.data == nullptr) {
    return Status::ok();
  }
  const std::optional<std::int64_t> size = given.rows < 0 || given.cols < 0
                                               ? std::nullopt
                                               : base::checked_product({given.rows, given.cols});
  if (!size || (!table && given.rows != 1)) {
    return Status::invalid_argument(name, text(given.rows) + " rows of " + text(given.cols),
                                    table ? "rows and cols of 0 or more" : "1 row");
  }
  out = {.data = given.data, .size = *size, .cols = table ? given.cols : 0};
  return look_up(std::string(name) + ".dtype", given.dtype, kDTypes, out.dtype);
}

LseView to_lse(const rafter_lse& given) {
  return {given.data,      given.shape[0],  given.shape[1], given.shape[2],
          given.stride[0], given.stride[1], given.stride[2]};
}

Result<DeviceSpec> to_device_spec(const char* name_or_path) {
  const std::string name = name_or_path;
  return name.find('/') == std::string::npos ? find_device(name) : load_device(name);
}

static_assert(static_cast<int>(Wall::dispatch) + RAFTER_WALL_COMPUTE == RAFTER_WALL_DISPATCH);

rafter_cost to_cost(const Cost& cost, const Prediction& prediction) {
  return {.size = sizeof(rafter_cost),
          .flops = cost.flops,
          .matmul_flops = cost.matmul_flops,
          .softmax_flops = cost.softmax_flops,
          .bytes = cost.bytes,
          .footprint_bytes = cost.footprint_bytes,
          .launches = cost.launches,
          .intensity_flop_per_byte = prediction.intensity_flop_per_byte,
          .ridge_flop_per_byte = prediction.ridge_flop_per_byte,
          .attainable_flop_per_s = prediction.attainable_flop_per_s,
          .time_s = prediction.time_s,
          .time_compute_s = prediction.time_compute_s,
          .time_bandwidth_s = prediction.time_bandwidth_s,
          .time_dispatch_s = prediction.time_dispatch_s,
          .wall = static_cast<rafter_wall>(prediction.wall) + RAFTER_WALL_COMPUTE,
          .near_ridge = prediction.near_ridge ? 1 : 0};
}

}  // namespace rafter::c_abi
