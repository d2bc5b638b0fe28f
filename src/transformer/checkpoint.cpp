#include "transformer/checkpoint.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "base/checked.h"

namespace rafter::transformer {
namespace {

using nlohmann::json;

constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kMostIndexBytes = std::size_t{64} << 20;

/// A whole file in memory's address space.
struct Mapped {
  std::shared_ptr<const void> memory;
  std::int64_t bytes = 0;
  const std::byte* data() const { return static_cast<const std::byte*>(memory.get()); }
};

Result<Mapped> map_file(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    return Status::io_error(path, "cannot be opened");
  }
  struct stat about = {};
  const bool regular = ::fstat(descriptor, &about) == 0 && S_ISREG(about.st_mode);
  const auto size = regular ? static_cast<std::size_t>(about.st_size) : 0;
  void* const memory =
      size > 0 ? ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0) : MAP_FAILED;
  ::close(descriptor);
  if (memory == MAP_FAILED) {
    return Status::io_error(path, size > 0 ? "cannot be mapped" : "is empty or no regular file");
  }
  return Mapped{{memory, [size](const void* owned) { ::munmap(const_cast<void*>(owned), size); }},
                static_cast<std::int64_t>(size)};
}

/// The elements that a stored tensor may have; a file with any other is refused.
bool dtype_of(const std::string& name, DType& dtype) {
  for (const auto& [text, value] :
       {std::pair{"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}}) {
    if (name == text) {
      dtype = value;
      return true;
    }
  }
  return false;
}

bool is_count(const json& value) {
  return value.is_number_unsigned() && value.get<std::uint64_t>() <= (std::uint64_t{1} << 62);
}

/// One entry of the header, its claims checked against the bytes that there are.
Result<StoredTensor> read_entry(const std::string& path, const std::string& name, const json& entry,
                                const std::byte* data, std::int64_t bytes) {
  const std::string label = path + " tensor " + name;
  const bool whole =
      entry.is_object() && entry.size() == 3 && entry.contains("dtype") &&
      entry["dtype"].is_string() && entry.contains("shape") && entry["shape"].is_array() &&
      entry.contains("data_offsets") && entry["data_offsets"].is_array() &&
      entry["data_offsets"].size() == 2 &&
      std::all_of(entry["shape"].begin(), entry["shape"].end(), is_count) &&
      std::all_of(entry["data_offsets"].begin(), entry["data_offsets"].end(), is_count);
  if (!whole) {
    return Status::io_error(label, "is described otherwise than by dtype, shape, data_offsets");
  }
  StoredTensor tensor;
  tensor.file = path;
  if (!dtype_of(entry["dtype"].get<std::string>(), tensor.dtype)) {
    return Status::io_error(label, "has dtype " + entry["dtype"].get<std::string>(),
                            "F32, F16 and BF16 are read");
  }
  std::int64_t elements = 1;
  for (const json& size : entry["shape"]) {
    tensor.shape.push_back(size.get<std::int64_t>());
    const auto product = base::checked_product({elements, tensor.shape.back()});
    if (!product || *product > (std::int64_t{1} << 60)) {
      return Status::io_error(label, "has more elements than there can be");
    }
    elements = *product;
  }
  const auto first = entry["data_offsets"][0].get<std::int64_t>(),
             last = entry["data_offsets"][1].get<std::int64_t>();
  const std::int64_t wanted = elements * bits_of(tensor.dtype) / 8;
  if (first > last || last > bytes || last - first != wanted) {
    return Status::io_error(
        label, fmt::format("has offsets {} to {}", first, last),
        fmt::format("{} bytes of the {} behind the header are needed", wanted, bytes));
  }
  tensor.data = data + first;
  return tensor;
}

Result<json> read_json(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::string text(kMostIndexBytes + 1, '\0');
  if (!stream) {
    return Status::io_error(path, "cannot be opened");
  }
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(stream.gcount()));
  json document = json::parse(text, nullptr, false);
  if (stream.bad() || text.size() > kMostIndexBytes || !document.is_object()) {
    return Status::io_error(path, "is no JSON object of up to 64 MiB");
  }
  return document;
}

}  // namespace

Status Checkpoint::add_file(const std::string& path) {
  const Result<Mapped> mapped = map_file(path);
  if (!mapped) {
    return mapped.status();
  }
  std::uint64_t length = 0;
  if (mapped->bytes >= 8) {
    std::memcpy(&length, mapped->data(), 8);  // little-endian, as this machine
  }
  if (mapped->bytes < 8 || length > kLongestHeader ||
      static_cast<std::int64_t>(length) > mapped->bytes - 8) {
    return Status::io_error(path, "is truncated or no .safetensors file");
  }
  const auto* const text = reinterpret_cast<const char*>(mapped->data() + 8);
  const json header = json::parse(text, text + length, nullptr, false);
  if (!header.is_object()) {
    return Status::io_error(path, "has a header that is no JSON object");
  }
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      continue;
    }
    Result<StoredTensor> tensor = read_entry(path, name, entry, mapped->data() + 8 + length,
                                             mapped->bytes - 8 - static_cast<std::int64_t>(length));
    if (!tensor) {
      return tensor.status();
    }
    if (!tensors_.emplace(name, *std::move(tensor)).second) {
      return Status::io_error(path, "has tensor " + name, "another shard has it too");
    }
  }
  mapped_.push_back(mapped->memory);
  return Status::ok();
}

Result<Checkpoint> Checkpoint::open(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  Checkpoint made;
  const fs::path one = fs::path(folder) / "model.safetensors",
                 index = fs::path(folder) / "model.safetensors.index.json";
  if (!fs::exists(index, ignored)) {
    made.source_ = one.string();
    Status done = made.add_file(one.string());
    return done ? Result<Checkpoint>(std::move(made)) : done;
  }
  made.source_ = index.string();
  const Result<json> document = read_json(index.string());
  if (!document) {
    return document.status();
  }
  const auto map = document->find("weight_map");
  if (map == document->end() || !map->is_object()) {
    return Status::io_error(index.string(), "has no weight_map");
  }
  std::set<std::string> files;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string() ||
        fs::path(file.get<std::string>()).filename() != file.get<std::string>()) {
      return Status::io_error(index.string(), "puts " + name + " elsewhere than in this folder");
    }
    files.insert(file.get<std::string>());
  }
  for (const std::string& file : files) {
    if (Status s = made.add_file((fs::path(folder) / file).string()); !s) {
      return s;
    }
  }
  for (const auto& [name, file] : map->items()) {
    const StoredTensor* const tensor = made.find(name);
    if (tensor == nullptr || fs::path(tensor->file).filename() != file.get<std::string>()) {
      return Status::io_error(index.string(),
                              fmt::format("puts {} in {}", name, file.get<std::string>()),
                              "it is not there");
    }
  }
  return made;
}

const StoredTensor* Checkpoint::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) {
    names.push_back(name);
  }
  return names;
}

}  // namespace rafter::transformer
