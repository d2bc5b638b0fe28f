// The tensors of a Hugging Face folder: model.safetensors, or shards named by an index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "rafter/status.h"
#include "rafter/tensor.h"

namespace rafter::transformer {

/// One tensor of a file that stays mapped for as long as the checkpoint lives.
struct StoredTensor {
  std::string file;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  const std::byte* data = nullptr;  // not aligned
};

/// Every header is read and checked against its file when it is opened; elements are read from the
/// mapped file. Errors: io_error names the file and the tensor.
/// Source of the format: the safetensors documentation, huggingface.co/docs/safetensors.
class Checkpoint {
 public:
  static Result<Checkpoint> open(const std::string& folder);
  /// Null where there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  std::vector<std::string> names() const;
  const std::string& source() const { return source_; }

 private:
  Status add_file(const std::string& path);

  std::string source_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
  std::vector<std::shared_ptr<const void>> mapped_;
};

}  // namespace rafter::transformer
