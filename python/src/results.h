// Memory that a call needs: results of the caller's type, and workspace.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "arrays.h"
#include "kept_workspace.h"
#include "rafter/measure.h"
#include "torch_memory.h"

namespace rafter::python {

/// A result: the caller's own array, or one made by the library of the call's first array.
class ResultArray {
 public:
  enum class Fill : std::uint8_t { none, zero };

  /// `out` None: one is made, of `dtype`, contiguous; with `heads_first` the caller gets it as
  /// [batch, heads, seqlen, head_dim].
  ResultArray(const char* name, nb::handle out, const Place& place,
              std::span<const std::int64_t> shape, DType dtype, Fill fill = Fill::none,
              bool heads_first = false);

  const Tensor& tensor() const { return tensor_; }
  /// What the caller gets, when the work is queued.
  nb::object finish(const Place& place) const;

 private:
  void make(const Place& place, std::span<const std::int64_t> shape, DType dtype, Fill fill,
            bool heads_first);

  nb::object array_;    // what the caller gets
  bool adopt_ = false;  // `array_` is ours, to be handed to the caller's library
  Tensor tensor_;
};

/// Workspace of one call. On CUDA it is what the stream keeps, or comes from the allocator of the
/// arrays' library, which gives it to nobody before the work that is queued on the call's stream
/// has run.
class Scratch {
 public:
  Scratch(const Place& place, std::int64_t bytes);
  Workspace workspace() const { return workspace_; }

 private:
  struct Delete {
    void operator()(ManagedTensor* tensor) const { tensor->deleter(tensor); }
    void operator()(void* memory) const;
  };
  Workspace workspace_;
  std::optional<KeptWorkspace> kept_;
  std::optional<TorchBytes> torch_;
  std::unique_ptr<ManagedTensor, Delete> managed_;
  std::unique_ptr<void, Delete> host_;
  nb::object array_;
  std::optional<DeviceMemory> device_;
};

}  // namespace rafter::python
