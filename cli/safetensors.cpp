#include "cli/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/failure.h"

namespace rafter::cli {
namespace {

constexpr std::int64_t kLongestHeader = 100'000'000;  // the limit of the format's own library
constexpr std::size_t kHighestRank = 64;

using Entry = Safetensors::Entry;
using Entries = std::map<std::string, Entry, std::less<>>;
using Metadata = std::map<std::string, std::string, std::less<>>;

/// Bits of an element of a dtype of the format; 0 for a name it does not have.
std::int64_t bits_of_name(std::string_view dtype) {
  static constexpr std::pair<std::string_view, std::int64_t> kBits[] = {
      {"BOOL", 8},    {"U8", 8},   {"I8", 8},   {"F8_E4M3", 8}, {"F8_E5M2", 8},
      {"F8_E8M0", 8}, {"F4", 4},   {"I16", 16}, {"U16", 16},    {"F16", 16},
      {"BF16", 16},   {"I32", 32}, {"U32", 32}, {"F32", 32},    {"F64", 64},
      {"I64", 64},    {"U64", 64}, {"C64", 64}, {"F6_E2M3", 6}, {"F6_E3M2", 6},
  };
  for (const auto& [name, bits] : kBits) {
    if (name == dtype) {
      return bits;
    }
  }
  return 0;
}

/// Takes the header's JSON event by event and stops at the first thing that the format does not
/// have, so that memory stays within what the tensors listed need, however deep or long the text.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(Entries& entries, Metadata& metadata) : entries_(entries), metadata_(metadata) {}
  const std::string& problem() const { return problem_; }

  bool null() override { return unexpected("null"); }
  bool boolean(bool /*value*/) override { return unexpected("a boolean"); }
  bool number_float(double /*value*/, const std::string& /*text*/) override {
    return unexpected("a number that is not a whole number of 63 bits");
  }
  bool number_integer(std::int64_t value) override {
    return value < 0 ? unexpected("a negative number") : number(value);
  }
  bool number_unsigned(std::uint64_t value) override {
    return value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())
               ? unexpected("a number beyond 63 bits")
               : number(static_cast<std::int64_t>(value));
  }
  bool string(std::string& value) override {
    if (place_ == Place::metadata) {
      metadata_[key_] = value;
      return true;
    }
    if (place_ == Place::entry && key_ == "dtype") {
      entry_->dtype = value;
      return true;
    }
    return unexpected("a string");
  }
  bool binary(binary_t& /*value*/) override { return unexpected("binary"); }

  bool key(std::string& name) override {
    key_ = name;
    if (place_ == Place::entry) {
      bool* seen = name == "dtype"          ? &seen_dtype_
                   : name == "shape"        ? &seen_shape_
                   : name == "data_offsets" ? &seen_offsets_
                                            : nullptr;
      if (seen == nullptr || *seen) {
        return fail(fmt::format("tensor {}: {} {}", one_line(tensor_),
                                seen == nullptr ? "unknown key" : "two of", one_line(name)));
      }
      *seen = true;
      return true;
    }
    const bool duplicate = place_ == Place::metadata
                               ? metadata_.contains(name)
                               : entries_.contains(name) || (name == "__metadata__" &&
                                                             std::exchange(seen_metadata_, true));
    return !duplicate || fail(fmt::format("the name {} stands twice", one_line(name)));
  }
  bool start_object(std::size_t /*size*/) override {
    if (place_ == Place::outside) {
      place_ = Place::top;
      return true;
    }
    if (place_ != Place::top) {
      return unexpected("an object");
    }
    if (key_ == "__metadata__") {
      place_ = Place::metadata;
      return true;
    }
    place_ = Place::entry;
    tensor_ = key_;
    entry_ = &entries_[tensor_];
    seen_dtype_ = seen_shape_ = seen_offsets_ = false;
    return true;
  }
  bool end_object() override {
    if (place_ == Place::entry) {
      if (!seen_dtype_ || !seen_shape_ || !seen_offsets_) {
        return fail(
            fmt::format("tensor {}: dtype, shape and data_offsets are needed", one_line(tensor_)));
      }
      entry_->begin = offsets_[0];
      entry_->end = offsets_[1];
    }
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }
  bool start_array(std::size_t /*size*/) override {
    if (place_ != Place::entry || (key_ != "shape" && key_ != "data_offsets")) {
      return unexpected("an array");
    }
    place_ = key_ == "shape" ? Place::shape : Place::offsets;
    offset_count_ = 0;
    return true;
  }
  bool end_array() override {
    if (place_ == Place::offsets && offset_count_ != offsets_.size()) {
      return fail(fmt::format("tensor {}: data_offsets are two numbers", one_line(tensor_)));
    }
    place_ = Place::entry;
    return true;
  }
  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    return fail(fmt::format("not JSON at byte {}", position));
  }

 private:
  enum class Place : std::uint8_t { outside, top, metadata, entry, shape, offsets };

  bool fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }
  bool unexpected(std::string_view what) {
    switch (place_) {
      case Place::outside:
        return fail(fmt::format("{} where an object is needed", what));
      case Place::top:
        return fail(fmt::format("{} where tensor {} is described", what, one_line(key_)));
      case Place::metadata:
        return fail(fmt::format("{} under __metadata__, which maps names to strings", what));
      default:
        return fail(fmt::format("tensor {}: {} under {}", one_line(tensor_), what, key_));
    }
  }
  bool number(std::int64_t value) {
    if (place_ == Place::shape) {
      if (entry_->shape.size() == kHighestRank) {
        return fail(
            fmt::format("tensor {}: more than {} dimensions", one_line(tensor_), kHighestRank));
      }
      entry_->shape.push_back(value);
      return true;
    }
    if (place_ == Place::offsets && offset_count_ < offsets_.size()) {
      offsets_[offset_count_++] = value;
      return true;
    }
    return unexpected("a number");
  }

  Entries& entries_;
  Metadata& metadata_;
  Place place_ = Place::outside;
  std::string key_;     // the last one
  std::string tensor_;  // the one being described
  Entry* entry_ = nullptr;
  bool seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false, seen_metadata_ = false;
  std::array<std::int64_t, 2> offsets_ = {};
  std::size_t offset_count_ = 0;
  std::string problem_;
};

Result<std::int64_t> header_length(const ByteSource& source) {
  const std::string& label = source.label();
  if (source.size() < 8) {
    return Status::io_error(label,
                            source.size() == 0
                                ? "the file is empty"
                                : fmt::format("is truncated: {} bytes", source.size()),
                            "a .safetensors file is needed");
  }
  std::array<std::byte, 8> start = {};
  if (const Status done = source.read(0, start); !done) {
    return done;
  }
  std::uint64_t length = 0;
  for (std::size_t i = start.size(); i-- > 0;) {
    length = length << 8U | std::to_integer<std::uint64_t>(start[i]);
  }
  if (length > static_cast<std::uint64_t>(kLongestHeader)) {
    return Status::io_error(label, fmt::format("header of {} bytes", length),
                            fmt::format("at most {} are accepted", kLongestHeader));
  }
  if (static_cast<std::int64_t>(length) > source.size() - 8) {
    return Status::io_error(label, fmt::format("is truncated: header of {} bytes in a file of {}",
                                               length, source.size()));
  }
  return static_cast<std::int64_t>(length);
}

}  // namespace

Result<Safetensors> Safetensors::open(std::shared_ptr<const ByteSource> source) {
  const Result<std::int64_t> length = header_length(*source);
  if (!length) {
    return length.status();
  }
  std::string text(static_cast<std::size_t>(*length), '\0');
  if (const Status done = source->read(8, std::as_writable_bytes(std::span(text))); !done) {
    return done;
  }
  Safetensors file;
  file.source_ = std::move(source);
  file.data_offset_ = 8 + *length;
  HeaderReader reader(file.entries_, file.metadata_);
  if (!nlohmann::json::sax_parse(text, &reader)) {
    return Status::io_error(file.source_->label(),
                            fmt::format("header is malformed: {}", reader.problem()));
  }
  if (const Status done = file.check_entries(file.source_->size() - file.data_offset_); !done) {
    return done;
  }
  return file;
}

Result<Safetensors> Safetensors::open(const std::string& path, const std::string& flag) {
  const Result<std::shared_ptr<const ByteSource>> source = open_source(path, flag);
  return source ? open(*source) : Result<Safetensors>(source.status());
}

Status Safetensors::check_entries(std::int64_t data_bytes) const {
  std::vector<std::pair<std::int64_t, const Entries::value_type*>> by_offset;
  for (const Entries::value_type& named : entries_) {
    const auto& [name, entry] = named;
    const std::string label = fmt::format("{} tensor {}", source_->label(), one_line(name));
    if (entry.begin > entry.end || entry.end > data_bytes) {
      return Status::io_error(label, fmt::format("offsets {} to {}", entry.begin, entry.end),
                              fmt::format("the file has {} bytes behind its header", data_bytes));
    }
    const std::int64_t bits = bits_of_name(entry.dtype);
    if (bits == 0) {
      return Status::io_error(label, fmt::format("unknown dtype {}", one_line(entry.dtype)));
    }
    const Result<std::int64_t> bytes = array_bytes(entry.shape, bits, label);
    if (!bytes) {
      return bytes.status();
    }
    if (*bytes != entry.end - entry.begin) {
      return Status::io_error(
          label,
          fmt::format("shape {} of {} takes {} bytes, its offsets hold {}", shape_text(entry.shape),
                      entry.dtype, *bytes, entry.end - entry.begin));
    }
    by_offset.emplace_back(entry.begin, &named);
  }
  // Empty tensors share an offset with the one behind them: the shorter comes first.
  std::sort(by_offset.begin(), by_offset.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first, a.second->second.end) < std::pair(b.first, b.second->second.end);
  });
  std::int64_t covered = 0;
  for (const auto& [begin, named] : by_offset) {
    if (begin != covered) {
      return Status::io_error(
          fmt::format("{} tensor {}", source_->label(), one_line(named->first)),
          fmt::format("{} at offset {}", begin < covered ? "overlaps another" : "leaves a hole",
                      std::min(begin, covered)),
          "tensors follow each other");
    }
    covered = named->second.end;
  }
  if (covered != data_bytes) {
    return Status::io_error(source_->label(),
                            fmt::format("has {} trailing bytes", data_bytes - covered),
                            "tensors reach to the end of the file");
  }
  return Status::ok();
}

std::vector<std::string> Safetensors::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) {
    names.push_back(name);
  }
  return names;
}

Result<Array> Safetensors::read(std::string_view name, Expect expect) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    constexpr std::size_t kShown = 8;
    std::vector<std::string> there;
    for (const auto& [other, entry] : entries_) {
      if (there.size() == kShown) {
        there.emplace_back("…");
        break;
      }
      there.push_back(one_line(other));
    }
    return Status::io_error(
        source_->label(), fmt::format("has no tensor {}", one_line(name)),
        fmt::format("it has {}",
                    there.empty() ? "none" : fmt::format("{}", fmt::join(there, ", "))));
  }
  const Entry& entry = found->second;
  const std::string label = fmt::format("{} tensor {}", source_->label(), one_line(name));
  // The last two for a KV cache only.
  static constexpr std::pair<std::string_view, DType> kValues[] = {{"F32", DType::f32},
                                                                   {"F16", DType::f16},
                                                                   {"BF16", DType::bf16},
                                                                   {"I8", DType::int8},
                                                                   {"F8_E4M3", DType::e4m3}};
  static constexpr std::pair<std::string_view, DType> kIndices[] = {{"I32", DType::i32},
                                                                    {"I64", DType::i64}};
  const bool indices = expect == Expect::indices;
  const bool cache = expect != Expect::values && expect != Expect::values_bf16;
  const std::span<const std::pair<std::string_view, DType>> allowed =
      indices ? std::span<const std::pair<std::string_view, DType>>(kIndices)
              : std::span<const std::pair<std::string_view, DType>>(kValues).first(cache ? 5 : 3);
  const auto dtype = std::find_if(allowed.begin(), allowed.end(),
                                  [&](const auto& row) { return row.first == entry.dtype; });
  if (dtype == allowed.end()) {
    return Status::invalid_argument(label, one_line(entry.dtype),
                                    indices ? "I32, I64" : "F32, F16, BF16");
  }
  Result<Array> array = allocate_array(dtype->second, entry.shape, label);
  if (!array) {
    return array;
  }
  const Status done = source_->read(data_offset_ + entry.begin, array->span());
  return done ? array : Result<Array>(done);
}

}  // namespace rafter::cli
