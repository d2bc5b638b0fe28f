#include "known_calls.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <utility>

namespace rafter::python {
namespace {

// The arrays of Inputs, in its order.
constexpr std::size_t kArrays = 10, kBadPages = 10, kKScale = 7, kVScale = 8;
constexpr std::size_t kOptions = 9;
constexpr std::size_t kMostCalls = 4;

using Arrays = std::array<ArrayView, kArrays>;  // of dtype 0 where there is none

struct Kept {
  nb::object type;  // of the arrays
  std::array<nb::object, kOptions> options;
  nb::object max_seqlen_q, max_seqlen_kv;
  bool decode, grad;
  int heads_first;
  Arrays arrays;  // where they lay does not count
  DevicePlan plan;
  ForwardArguments arguments;  // of an earlier call: pointers, array and stream are not these
};
using KeptCalls = std::array<std::unique_ptr<Kept>, kMostCalls>;

/// The last ones, latest first. Not freed: the interpreter is gone by then.
KeptCalls& kept_calls() {
  static auto* const calls = new KeptCalls;
  return *calls;
}

/// The same object, or one of the same type that is equal.
bool same(nb::handle a, nb::handle b) {
  if (a.is(b)) {
    return true;
  }
  if (!a.type().is(b.type())) {
    return false;
  }
  const int equal = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (equal < 0) {
    PyErr_Clear();  // the long way says what is wrong with it
  }
  return equal == 1;
}

bool alike(const ArrayView& a, const ArrayView& b) {
  return a.rank == b.rank && a.shape == b.shape && a.stride == b.stride &&
         a.dtype.code == b.dtype.code && a.dtype.bits == b.dtype.bits &&
         a.dtype.lanes == b.dtype.lanes && a.device.kind == b.device.kind &&
         a.device.index == b.device.index;
}

bool is_known(const Kept& kept, const CallKey& key, const Arrays& arrays) {
  if (kept.decode != key.decode || kept.grad != key.grad || kept.heads_first != key.heads_first ||
      !kept.type.is(key.arrays[0].type()) || !std::ranges::equal(kept.arrays, arrays, alike)) {
    return false;
  }
  for (std::size_t i = 0; i < kOptions; ++i) {
    if (!same(kept.options[i], key.options[i])) {
      return false;
    }
  }
  return same(kept.max_seqlen_q, key.max_seqlen_q) && same(kept.max_seqlen_kv, key.max_seqlen_kv);
}

/// What the arrays are; nothing where one is of another type than q, must be refused or written, or
/// is not lent.
bool lend_all(const CallKey& key, const Place& place, Arrays& lent) {
  if (!key.arrays[kBadPages].is_none()) {
    return false;
  }
  for (std::size_t i = 0; i < kArrays; ++i) {
    const nb::handle array = key.arrays[i];
    if (array.is_none()) {
      continue;
    }
    const bool may_require_grad = (i < 3 && key.grad) || (i >= 3 && i != kKScale && i != kVScale);
    if (!lend(array, place, may_require_grad, lent[i])) {
      return false;
    }
  }
  return true;
}

/// Where the arrays lie, in what the library takes.
void set_data(ForwardInputs& in, const Arrays& arrays) {
  const auto set = [&](std::size_t i, auto& view) {
    if (arrays[i].dtype.bits != 0) {
      view.data = static_cast<decltype(view.data)>(arrays[i].data);
    }
  };
  set(0, in.q);
  set(1, in.k);
  set(2, in.v);
  set(3, in.cu_seqlens_q);
  set(4, in.cu_seqlens_kv);
  set(5, in.seqused_kv);
  set(6, in.page_table);
  set(kKScale, in.k_scale);
  set(kVScale, in.v_scale);
  set(9, in.tree_mask);
}

}  // namespace

std::optional<KnownCall> known_call(const CallKey& key) {
  KeptCalls& calls = kept_calls();
  const nb::handle q = key.arrays[0];
  const auto of_type = std::ranges::find_if(
      calls, [&](const auto& kept) { return kept != nullptr && kept->type.is(q.type()); });
  Arrays arrays;
  if (of_type == calls.end() || !lend_all(key, (*of_type)->arguments.place, arrays)) {
    return std::nullopt;
  }
  const auto found = std::ranges::find_if(
      calls, [&](const auto& kept) { return kept != nullptr && is_known(*kept, key, arrays); });
  if (found == calls.end()) {
    return std::nullopt;
  }
  std::rotate(calls.begin(), found, found + 1);
  std::optional<KnownCall> call(std::in_place, calls[0]->plan, calls[0]->arguments);
  set_data(call->arguments.in, arrays);
  Place& place = call->arguments.place;
  place.array = q;
  place.first = arrays[0];
  place.set_current_stream();
  return call;
}

void remember_call(const CallKey& key, const Inputs& in, const DevicePlan& plan,
                   const ForwardArguments& arguments) {
  const Place& place = in.place;
  Arrays arrays;
  if (!place.is_cuda() || place.first.dtype.bits == 0 || in.copied() ||
      !lend_all(key, place, arrays)) {
    return;
  }
  auto kept = std::make_unique<Kept>(Kept{.type = nb::borrow(place.api_type),
                                          .options = {},
                                          .max_seqlen_q = nb::borrow(key.max_seqlen_q),
                                          .max_seqlen_kv = nb::borrow(key.max_seqlen_kv),
                                          .decode = key.decode,
                                          .grad = key.grad,
                                          .heads_first = key.heads_first,
                                          .arrays = arrays,
                                          .plan = plan,
                                          .arguments = arguments});
  for (std::size_t i = 0; i < kOptions; ++i) {
    kept->options[i] = key.options[i];
  }
  kept->arguments.place.is_current.reset();
  kept->arguments.place.array = nb::handle();  // borrowed from a call that is over
  KeptCalls& calls = kept_calls();
  std::rotate(calls.begin(), calls.end() - 1, calls.end());
  calls[0] = std::move(kept);
}

}  // namespace rafter::python
