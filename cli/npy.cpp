#include "cli/npy.h"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "cli/failure.h"

namespace rafter::cli {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::int64_t kLongestHeader = 65535;  // what format 1.0 can say; NumPy writes under 200

/// What the header says.
struct Claim {
  std::string descr;
  bool structured = false;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
  std::int64_t data_offset = 0;
};

/// Reads the header's Python dict: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }.
class DictParser {
 public:
  explicit DictParser(std::string_view text) : text_(text) {}

  /// False when the text is not such a dict; problem() then says where.
  bool parse(Claim& claim) {
    if (!token('{')) {
      return fail("a dict");
    }
    bool descr = false;
    bool order = false;
    bool shape = false;
    while (!token('}')) {
      const std::optional<std::string> key = string();
      if (!key || !token(':')) {
        return fail("a key and ':'");
      }
      bool* seen = *key == "descr"           ? &descr
                   : *key == "fortran_order" ? &order
                   : *key == "shape"         ? &shape
                                             : nullptr;
      if (seen == nullptr || *seen) {
        return fail("each of 'descr', 'fortran_order', 'shape' once");
      }
      *seen = true;
      if (!(seen == &descr   ? parse_descr(claim)
            : seen == &order ? parse_order(claim)
                             : parse_shape(claim))) {
        return false;
      }
      if (claim.structured) {
        return true;  // refused as a whole: no need to understand the fields
      }
      if (!token(',') && peek() != '}') {
        return fail("',' or '}'");
      }
    }
    if (!descr || !order || !shape) {
      return fail("each of 'descr', 'fortran_order', 'shape' once");
    }
    skip_space();
    return at_ == text_.size() || fail("nothing but spaces after the dict");
  }

  std::string problem() const {
    return fmt::format("header is malformed at byte {}: {} expected", at_, wanted_);
  }

 private:
  bool fail(std::string_view wanted) {
    wanted_ = wanted;
    return false;
  }
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) {
      ++at_;
    }
  }
  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool token(char wanted) {
    if (peek() != wanted || at_ == text_.size()) {
      return false;
    }
    ++at_;
    return true;
  }
  bool word(std::string_view wanted) {
    skip_space();
    if (!text_.substr(at_).starts_with(wanted)) {
      return false;
    }
    at_ += wanted.size();
    return true;
  }
  /// A quoted string without escapes: no header that NumPy writes has any.
  std::optional<std::string> string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') {
      return std::nullopt;
    }
    const std::size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) {
      return std::nullopt;
    }
    std::string content(text_.substr(at_ + 1, end - at_ - 1));
    if (content.find('\\') != std::string::npos) {
      return std::nullopt;
    }
    at_ = end + 1;
    return content;
  }

  bool parse_descr(Claim& claim) {
    if (peek() == '[') {
      claim.structured = true;
      return true;
    }
    const std::optional<std::string> descr = string();
    if (!descr) {
      return fail("a dtype in quotes");
    }
    claim.descr = *descr;
    return true;
  }
  bool parse_order(Claim& claim) {
    claim.fortran_order = word("True");
    return claim.fortran_order || word("False") || fail("True or False");
  }
  bool parse_shape(Claim& claim) {
    if (!token('(')) {
      return fail("a tuple");
    }
    while (!token(')')) {
      const std::optional<std::int64_t> dimension = integer();
      if (!dimension) {
        return fail("a whole number from -2^63 to 2^63 - 1");
      }
      claim.shape.push_back(*dimension);
      const bool comma = token(',');
      if (!comma && (peek() != ')' || claim.shape.size() == 1)) {
        return fail("','");  // (3) is a number, not a tuple
      }
    }
    return true;
  }
  /// Negative numbers are read too, so that they can be refused as a shape and not as a character.
  std::optional<std::int64_t> integer() {
    const bool negative = token('-');
    const std::size_t begin = at_;
    std::int64_t value = 0;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      if (__builtin_mul_overflow(value, 10, &value) ||
          __builtin_add_overflow(value, text_[at_] - '0', &value)) {
        return std::nullopt;
      }
      ++at_;
    }
    if (at_ == begin) {
      return std::nullopt;
    }
    static_cast<void>(word("L"));  // Python 2 wrote (2L, 3L)
    return negative ? -value : value;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::string_view wanted_;
};

std::int64_t little_endian(std::span<const std::byte> bytes) {
  std::int64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | std::to_integer<std::int64_t>(bytes[i]);
  }
  return value;
}

Result<Claim> read_claim(const ByteSource& source) {
  const std::string& label = source.label();
  if (source.size() == 0) {
    return Status::io_error(label, "the file is empty", "a .npy file is needed");
  }
  std::array<std::byte, 12> start = {};
  const std::int64_t available = std::min<std::int64_t>(source.size(), 12);
  if (const Status done =
          source.read(0, std::span(start).first(static_cast<std::size_t>(available)));
      !done) {
    return done;
  }
  if (available < 6 || std::memcmp(start.data(), kMagic.data(), kMagic.size()) != 0) {
    return Status::io_error(label, "does not begin as a .npy file",
                            "a .npy file is needed (.safetensors files go to --qkv)");
  }
  const Status truncated = Status::io_error(
      label, fmt::format("is truncated: {} bytes do not hold its header", source.size()));
  if (available < 10) {
    return truncated;
  }
  const auto major = std::to_integer<int>(start[6]);
  const auto minor = std::to_integer<int>(start[7]);
  if (major < 1 || major > 3 || minor != 0) {
    return Status::io_error(label, fmt::format(".npy format {}.{}", major, minor),
                            "1.0, 2.0 and 3.0 are known");
  }
  const std::int64_t length_bytes = major == 1 ? 2 : 4;
  const std::int64_t header_offset = 8 + length_bytes;
  if (available < header_offset) {
    return truncated;
  }
  const std::int64_t length =
      little_endian(std::span(start).subspan(8, static_cast<std::size_t>(length_bytes)));
  if (length > kLongestHeader) {
    return Status::io_error(label, fmt::format("header of {} bytes", length),
                            fmt::format("at most {} are accepted", kLongestHeader));
  }
  if (length > source.size() - header_offset) {
    return truncated;
  }
  std::string header(static_cast<std::size_t>(length), '\0');
  if (const Status done = source.read(header_offset, std::as_writable_bytes(std::span(header)));
      !done) {
    return done;
  }
  Claim claim;
  DictParser parser(header);
  if (!parser.parse(claim)) {
    return Status::io_error(label, parser.problem());
  }
  claim.data_offset = header_offset + length;
  return claim;
}

/// "<f8" as NumPy says it: "float64"; the descr itself when it is none of NumPy's numbers.
std::string words_of(std::string_view descr) {
  if (descr.size() < 2) {
    return fmt::format("dtype '{}'", one_line(descr));
  }
  const std::string_view order = descr.front() == '>' ? "big-endian " : "";
  const std::string_view size = descr.substr(2);
  const bool digits = !size.empty() && size.size() <= 3 &&
                      size.find_first_not_of("0123456789") == std::string_view::npos;
  const int bits = digits ? std::stoi(std::string(size)) * 8 : 0;
  switch (descr[1]) {
    case 'f':
      return fmt::format("{}float{}", order, bits);
    case 'i':
      return fmt::format("{}int{}", order, bits);
    case 'u':
      return fmt::format("{}uint{}", order, bits);
    case 'c':
      return fmt::format("{}complex{}", order, bits);
    case 'b':
      return "bool";
    case 'O':
      return "object";
    default:
      return fmt::format("dtype '{}'", one_line(descr));
  }
}

Result<DType> dtype_of(const Claim& claim, Expect expect, const std::string& label) {
  const std::string& descr = claim.descr;
  if (expect == Expect::indices) {
    if (descr == "<i4") {
      return DType::i32;
    }
    if (descr == "<i8") {
      return DType::i64;
    }
  } else {
    if (descr == "<f4") {
      return DType::f32;
    }
    if (descr == "<f2") {
      return DType::f16;
    }
    const bool words = descr == "<u2" || descr == "<V2" || descr == "|V2";
    if (words && (expect == Expect::values_bf16 || expect == Expect::cache_bf16)) {
      return DType::bf16;
    }
    const bool cache = expect == Expect::cache || expect == Expect::cache_bf16;
    if (cache && (descr == "|i1" || descr == "<i1")) {
      return DType::int8;
    }
    if (expect == Expect::cache_e4m3 && (descr == "|u1" || descr == "<u1")) {
      return DType::e4m3;
    }
  }
  const std::string given = claim.structured ? "structured dtype" : words_of(descr);
  return Status::invalid_argument(
      label, given,
      expect == Expect::indices ? "little-endian int32, int64"
      : expect == Expect::cache_e4m3
          ? "uint8, the bits of e4m3,"
          : "little-endian float32, float16, and bfloat16 as uint16 with --dtype bf16");
}

}  // namespace

Result<Array> read_npy(const ByteSource& source, Expect expect) {
  const Result<Claim> claim = read_claim(source);
  if (!claim) {
    return claim.status();
  }
  const Result<DType> dtype = dtype_of(*claim, expect, source.label());
  if (!dtype) {
    return dtype.status();
  }
  const Result<std::int64_t> bytes = array_bytes(claim->shape, bits_of(*dtype), source.label());
  if (!bytes) {
    return bytes.status();
  }
  // One dimension, or none, is the same in both orders.
  if (claim->fortran_order && claim->shape.size() > 1) {
    return Status::invalid_argument(source.label(), "Fortran order",
                                    "C order (numpy.ascontiguousarray)");
  }
  const std::int64_t present = source.size() - claim->data_offset;
  if (present != *bytes) {
    return Status::io_error(
        source.label(), fmt::format("{}: shape {} of {} takes {} bytes, {} follow the header",
                                    present < *bytes ? "is truncated" : "has trailing bytes",
                                    shape_text(claim->shape), to_string(*dtype), *bytes, present));
  }
  Result<Array> array = allocate_array(*dtype, claim->shape, source.label());
  if (!array) {
    return array;
  }
  const Status done = source.read(claim->data_offset, array->span());
  return done ? array : Result<Array>(done);
}

Result<Array> read_npy(const std::string& path, Expect expect, const std::string& flag) {
  const Result<std::shared_ptr<const ByteSource>> source = open_source(path, flag);
  return source ? read_npy(**source, expect) : Result<Array>(source.status());
}

std::string npy_header(std::span<const std::int64_t> shape) {
  std::string dict = fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}{}), }}",
                                 fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  constexpr std::size_t kPrefix = 10;
  dict.append(63 - (kPrefix + dict.size()) % 64, ' ');
  dict += '\n';
  std::string header(kMagic);
  header += {'\x01', '\x00', static_cast<char>(dict.size() & 0xFFU),
             static_cast<char>(dict.size() >> 8U)};
  return header + dict;
}

}  // namespace rafter::cli
