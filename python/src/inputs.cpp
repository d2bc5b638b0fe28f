#include "inputs.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <span>
#include <utility>

#include "errors.h"

namespace rafter::python {
namespace {

/// One side of a window: None and -1 are unbounded.
std::int64_t bound(nb::handle side) {
  std::int64_t keys = -1;
  if (!side.is_none() && (!nb::try_cast(side, keys) || keys < -1)) {
    raise_invalid_value("window", side, "0 or more, or None");
  }
  return keys;
}

Tensor optional_tensor(const char* name, nb::handle object, const Place& place) {
  return object.is_none() ? Tensor() : Tensor(name, object, place);
}

void raise_by_caller(const Status& status, bool decode) {
  raise(decode ? with_names(status, {{"k", "k_cache"}, {"v", "v_cache"}, {"seqused_kv", "seqused"}})
               : status);
}

/// Capacity of packed sequences: what the caller says; else read where the offsets can be read, and
/// the rows of all sequences where not.
std::int64_t capacity(std::int64_t stated, const Indices& offsets, std::int64_t total,
                      bool readable) {
  return stated > 0 ? stated : readable ? offsets.longest(total) : total;
}

}  // namespace

Mask mask_of(nb::handle causal, nb::handle window, nb::handle align) {
  Mask mask;
  if (!window.is_none()) {
    if (!nb::isinstance<nb::sequence>(window) || nb::len(window) != 2) {
      raise_invalid_value("window", window, "(left, right)");
    }
    mask.window_left = bound(window[0]);
    mask.window_right = bound(window[1]);
  }
  if (argument<bool>("causal", causal, "True or False")) {
    if (mask.window_right > 0) {
      raise_invalid("window", "keys up to " + std::to_string(mask.window_right) + " to the right",
                    "(left, 0) or (left, None) with causal=True");
    }
    mask.window_right = 0;
  }
  if (!align.is_none()) {
    const auto text = argument<std::string>("align", align, "bottom-right, top-left");
    if (mask.is_none()) {
      raise_invalid("align", text, "None without causal or window");
    }
    if (text != "bottom-right" && text != "top-left") {
      raise_invalid("align", text, "bottom-right, top-left");
    }
    mask.align = text == "top-left" ? MaskAlign::top_left : MaskAlign::bottom_right;
  }
  return mask;
}

MaxLengths max_lengths_of(nb::handle q, nb::handle kv) {
  const auto length = [](const char* name, nb::handle value) {
    if (value.is_none()) {
      return std::int64_t{0};
    }
    const auto most = argument<std::int64_t>(name, value, "an integer or None");
    if (most < 0) {
      raise_invalid(name, std::to_string(most), "0 or more");
    }
    return most;
  };
  return {length("max_seqlen_q", q), length("max_seqlen_kv", kv)};
}

Options::Options(const nb::tuple& given) : mask(mask_of(given[0], given[1], given[2])) {
  if (const nb::handle scale = given[3]; !scale.is_none()) {
    softmax_scale = argument<float>("softmax_scale", scale, "a number or None");
  }
  if (const nb::handle cap = given[4]; !cap.is_none()) {
    softcap = argument<float>("softcap", cap, "a number or None");
  }
  if (const nb::handle name = given[5]; !name.is_none()) {
    pipeline =
        value_or_raise(parse_pipeline(argument<std::string>("pipeline", name, "a name or None")));
  }
  if (const nb::handle name = given[6]; !name.is_none()) {
    kernel = argument<std::string>("kernel", name, "a name or None");
  }
  threads = argument<int>("threads", given[7], "an integer");
  splits = argument<std::int64_t>("splits", given[8], "an integer");
}

void Options::describe(AttentionProblem& problem) const {
  problem.mask = mask;
  problem.softmax_scale = softmax_scale;
  problem.softcap = softcap;
}

PlanOptions Options::plan_options(Pass pass, const DeviceSpec* spec) const {
  return {.pass = pass,
          .pipeline = pipeline,
          .kernel = kernel,
          .threads = threads,
          .splits = splits,
          .device_spec = spec};
}

Inputs::Inputs(const nb::tuple& arrays, nb::handle stream, bool decode_, bool grad,
               HeadsFirst heads_first_, bool torch)
    : decode(decode_),
      heads_first(heads_first_),
      place(place_of("q", arrays[0], stream)),
      q("q", arrays[0], place, Array::Access::read, grad),
      k(decode ? "k_cache" : "k", arrays[1], place, Array::Access::read, grad),
      v(decode ? "v_cache" : "v", arrays[2], place, Array::Access::read, grad),
      k_scale(optional_tensor("k_scale", arrays[7], place)),
      v_scale(optional_tensor("v_scale", arrays[8], place)),
      cu_seqlens_q("cu_seqlens_q", arrays[3], 1, place),
      cu_seqlens_kv("cu_seqlens_kv", arrays[4], 1, place),
      seqused_kv(decode ? "seqused" : "seqused_kv", arrays[5], 1, place),
      page_table("page_table", arrays[6], 2, place),
      tree_mask("tree_mask", arrays[9], place),
      bad_pages("bad_pages", arrays[10], place) {
  if (torch) {
    copy_rows(arrays);
  }
  if (heads_first == HeadsFirst::none) {
    return;
  }
  for (Tensor* tensor : {&q, &k, &v}) {
    if (tensor->array.rank != 4) {
      raise_invalid(tensor->name, std::to_string(tensor->array.rank) + " dims",
                    "4: [batch, heads, seqlen, head_dim]");
    }
    tensor->swap_heads();
  }
}

void Inputs::copy_rows(const nb::tuple& arrays) {
  std::size_t i = 0;
  for (Tensor* tensor : {&q, &k, &v}) {
    const Array& array = tensor->array;
    const auto last = static_cast<std::size_t>(std::max(array.rank, 1) - 1);
    if (array.stride[last] != 1 && array.shape[last] > 1) {
      copies[i] = arrays[i].attr("contiguous")();
      *tensor = Tensor(tensor->name, copies[i], place, Array::Access::read, true);
    }
    ++i;
  }
}

void Inputs::raise_named(const Status& status) const { raise_by_caller(status, decode); }
void ForwardArguments::raise_named(const Status& status) const { raise_by_caller(status, decode); }

ForwardInputs Inputs::views() const {
  ForwardInputs in{.q = q.view(packed()),
                   .k = k.view(packed()),
                   .v = v.view(packed()),
                   .cu_seqlens_q = cu_seqlens_q.view,
                   .cu_seqlens_kv = cu_seqlens_kv.view,
                   .seqused_kv = seqused_kv.view,
                   .page_table = page_table.view,
                   .tree_mask = tree_mask.view};
  if (!k_scale.name.empty()) {
    in.k_scale = k_scale.scale(in.k);
  }
  if (!v_scale.name.empty()) {
    in.v_scale = v_scale.scale(in.v);
  }
  return in;
}

void Inputs::check_layout() const {
  if (!packed()) {
    for (const Tensor* tensor : {&k, &v}) {  // of three dims it is some other layout, unbatched
      if (tensor->array.rank != 4) {
        raise_invalid(tensor->name, std::to_string(tensor->array.rank) + " dims",
                      "4: [batch, seqlen, heads, head_dim]; 3 with cu_seqlens");
      }
    }
    return;
  }
  for (const auto& [name, indices] :
       {std::pair("cu_seqlens_q", &cu_seqlens_q), std::pair("cu_seqlens_kv", &cu_seqlens_kv)}) {
    if (indices->view.empty()) {
      raise_invalid(name, "None", "an array: packed sequences need cu_seqlens_q and cu_seqlens_kv");
    }
  }
  if (!page_table.view.empty()) {
    raise_invalid("page_table", "an array", "None with cu_seqlens_q (pages go with dense queries)");
  }
}

AttentionProblem Inputs::problem(const MaxLengths& longest) const {
  check_layout();
  const ForwardInputs in = views();
  AttentionProblem problem{.batch = in.q.batch,
                           .heads_q = in.q.heads,
                           .heads_kv = in.k.heads,
                           .seqlen_q = in.q.seqlen,
                           .seqlen_kv = in.k.seqlen,
                           .head_dim = in.q.head_dim,
                           .head_dim_v = in.v.head_dim,
                           .dtype = in.q.dtype,
                           .seqused_kv = !seqused_kv.view.empty(),
                           .tree_mask = tree_mask.view.data != nullptr};
  if (bits_of(in.k.dtype) < 16) {
    problem.kv_dtype = in.k.dtype;
  }
  if (packed()) {
    problem.layout = Layout::packed;
    problem.batch = std::max<std::int64_t>(in.cu_seqlens_q.size - 1, 0);
    problem.total_q = in.q.seqlen;
    problem.total_kv = in.k.seqlen;
    const bool readable = !place.is_cuda();
    problem.seqlen_q = capacity(longest.q, cu_seqlens_q, problem.total_q, readable);
    problem.seqlen_kv = capacity(longest.kv, cu_seqlens_kv, problem.total_kv, readable);
    return problem;
  }
  for (const auto& [name, stated] :
       {std::pair("max_seqlen_q", longest.q), std::pair("max_seqlen_kv", longest.kv)}) {
    if (stated != 0) {
      raise_invalid(name, std::to_string(stated), "None without cu_seqlens_q");
    }
  }
  if (!page_table.view.empty()) {
    problem.layout = Layout::paged;
    problem.num_pages = in.k.batch;
    problem.page_size = in.k.seqlen;
    if (__builtin_mul_overflow(in.page_table.cols, problem.page_size, &problem.seqlen_kv)) {
      raise_invalid("page_table", std::to_string(in.page_table.cols) + " pages per sequence",
                    "fewer than 2^63 keys");
    }
  }
  return problem;
}

ForwardArguments Inputs::forward_arguments() const {
  return {.place = place,
          .in = views(),
          .bad_pages = bad_pages.view,
          .o_shape = o_shape(),
          .lse_shape = lse_shape(),
          .dtype = q.dtype,
          .packed = packed(),
          .decode = decode,
          .o_heads_first = heads_first == HeadsFirst::inputs_and_o};
}

Inputs::Sizes Inputs::o_shape() const {
  const auto at = [](const Tensor& tensor, int dim) {
    return tensor.array.shape[static_cast<std::size_t>(dim)];
  };
  Sizes sizes{q.array.shape, static_cast<std::size_t>(q.array.rank)};
  sizes.size[sizes.rank - 1] = at(v, v.array.rank - 1);
  return sizes;
}

Inputs::Sizes Inputs::lse_shape() const {
  const TensorView view = q.view(packed());
  if (packed()) {
    return {{view.heads, view.seqlen}, 2};
  }
  return q.array.rank == 3 ? Sizes{{view.batch, view.heads}, 2}
                           : Sizes{{view.batch, view.heads, view.seqlen}, 3};
}

}  // namespace rafter::python
