// Arrays of Python as the library's views: any object with DLPack or a buffer, without a copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "dlpack_exchange.h"
#include "rafter/attention.h"

namespace rafter::python {

/// What an array is, without what keeps it.
struct ArrayView {
  void* data = nullptr;
  nb::dlpack::dtype dtype{};
  Device device;
  int rank = 0;
  std::array<std::int64_t, 4> shape{}, stride{};  // the first `rank` of them; strides in elements

  std::int64_t size() const;
  /// Takes what DLPack says. A ValueError names the array where it has more than 4 dims or lies
  /// neither in host memory nor on a CUDA device.
  void take(const std::string& name, const nb::dlpack::dltensor& tensor);
};

/// Where a call runs: where its first array lies, on the current stream of that array's library.
struct Place {
  nb::handle array;  // borrowed: the caller's argument
  ArrayView first;   // what it is, where its library lends that; else without data and dtype
  const ExchangeApi* api = nullptr;
  nb::handle api_type;  // the type that `api` is of
  Device device;
  Stream stream;
  mutable std::optional<bool> is_current;  // the device is its library's current one; asked once

  bool is_cuda() const { return device.kind == Device::Kind::cuda; }
  /// That of the library, which must have an `api`, on the device.
  void set_current_stream();
};

/// "cpu", "cuda:1".
std::string text(const Device& device);
nb::object tuple_of(std::span<const std::int64_t> values);

/// Memory, sizes and what keeps them.
class Array : public ArrayView {
 public:
  enum class Access : std::uint8_t { read, write };

  Array() = default;
  /// A ValueError names the argument where the object is no array, has more than 4 dims, lies
  /// elsewhere than the place, or is read-only and must be written.
  Array(const std::string& name, nb::handle object, const Place& place, Access access);

 private:
  friend Place place_of(const std::string& name, nb::handle array, nb::handle stream);
  void read(const std::string& name, nb::handle object, const Place& place, Access access);
  void import(const std::string& name, nb::handle object, const Place& place, Access access);

  struct Delete {
    void operator()(ManagedTensor* tensor) const { tensor->deleter(tensor); }
  };
  std::unique_ptr<ManagedTensor, Delete> managed_;
  nb::ndarray<nb::ro> imported_;
};

/// `stream` is the handle of a CUDA stream that the caller named, or None for the current one of
/// the array's library (the legacy default stream where it tells none).
Place place_of(const std::string& name, nb::handle array, nb::handle stream);

/// What an array of the place's type on a CUDA device is, without keeping it: valid while the array
/// lives. False where it is no such array, its library does not lend it, or it requires grad and
/// may not.
bool lend(nb::handle array, const Place& place, bool may_require_grad, nb::dlpack::dltensor& out);

/// A tensor argument, which knows its name for errors.
struct Tensor {
  std::string name;
  Array array;
  DType dtype = DType::f32;

  Tensor() = default;
  /// `grad` allows a tensor of an autograd library that requires grad: its gradient would be lost.
  Tensor(std::string name, nb::handle object, const Place& place,
         Array::Access access = Array::Access::read, bool grad = false);

  /// Reads [batch, heads, seqlen, head_dim] as [batch, seqlen, heads, head_dim].
  void swap_heads();
  /// As [batch, seqlen, heads, head_dim]. A tensor of three dims is [total, heads, head_dim] with
  /// `packed`, else [batch, heads, head_dim] with one row per sequence.
  TensorView view(bool packed) const;
  /// lse [batch, heads, seqlen]; of two dims [heads, total] with `packed`, else [batch, heads].
  LseView lse(bool packed) const;
  /// Scales of the rows of `keys`: of its shape without head_dim, or [heads], the same for all rows
  /// of a head.
  TensorView scale(const TensorView& keys) const;
};

/// An index argument: lengths, offsets or a page table. None gives an empty view.
struct Indices {
  Array array;
  IndexView view = {};

  Indices() = default;
  Indices(const char* name, nb::handle object, int rank, const Place& place);
  /// The largest difference between neighbours, within [0, most]: the longest of packed sequences.
  /// Wants indices in host memory.
  std::int64_t longest(std::int64_t most) const;
};

/// Words of bits [batch, seqlen], int64 or uint64. None gives an empty view.
struct Bits {
  Array array;
  BitsView view = {};

  Bits() = default;
  Bits(const char* name, nb::handle object, const Place& place);
};

/// A vector of int32 that a call writes. None gives an empty view.
struct Counts {
  Array array;
  CountView view = {};

  Counts() = default;
  Counts(const char* name, nb::handle object, const Place& place);
};

}  // namespace rafter::python
