#include "cli/array.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "cli/failure.h"

namespace rafter::cli {
namespace {

constexpr std::align_val_t kAlignment{64};

std::int64_t memory_bytes() {
  return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
}

class FileSource final : public ByteSource {
 public:
  FileSource(int descriptor, std::int64_t size, std::string label)
      : ByteSource(std::move(label)), descriptor_(descriptor), size_(size) {}
  ~FileSource() override { close(descriptor_); }
  std::int64_t size() const override { return size_; }

  Status read(std::int64_t offset, std::span<std::byte> into) const override {
    while (!into.empty()) {
      const ssize_t got = pread(descriptor_, into.data(), into.size(), offset);
      if (got < 0 && errno == EINTR) {
        continue;
      }
      if (got <= 0) {
        return Status::io_error(
            label(), got < 0 ? std::strerror(errno) : "the file shrank while it was read");
      }
      into = into.subspan(static_cast<std::size_t>(got));
      offset += got;
    }
    return Status::ok();
  }

 private:
  int descriptor_;
  std::int64_t size_;
};

const char* what_it_is(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFDIR:
      return "is a directory";
    case S_IFIFO:
      return "is a pipe";
    case S_IFSOCK:
      return "is a socket";
    default:
      return "is a device";
  }
}

float widen(const std::byte* at, DType dtype) {
  if (dtype == DType::f32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return dtype == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

void narrow(float value, std::byte* at, DType dtype) {
  if (dtype == DType::f32) {
    std::memcpy(at, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == DType::f16 ? f32_to_f16(value) : f32_to_bf16(value);
  std::memcpy(at, &bits, sizeof bits);
}

}  // namespace

std::int64_t Array::elements() const {
  std::int64_t product = 1;
  for (const std::int64_t dimension : shape) {
    product *= dimension;
  }
  return product;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  constexpr std::size_t kShown = 8;  // an error stays one line whatever a header claims
  return fmt::format("[{}{}]", fmt::join(shape.first(std::min(shape.size(), kShown)), ", "),
                     shape.size() > kShown ? ", …" : "");
}

Result<std::int64_t> array_bytes(std::span<const std::int64_t> shape, std::int64_t bits,
                                 const std::string& label) {
  std::int64_t product = bits;
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0 ||
        __builtin_mul_overflow(product, std::max<std::int64_t>(dimension, 1), &product)) {
      return Status::io_error(
          label, fmt::format("shape {} is impossible", shape_text(shape)),
          dimension < 0 ? "dimensions are 0 or more" : "its size exceeds 64 bits");
    }
    empty = empty || dimension == 0;
  }
  return empty ? 0 : product / 8 + (product % 8 != 0 ? 1 : 0);
}

Result<Array> allocate_array(DType dtype, std::vector<std::int64_t> shape,
                             const std::string& label) {
  const Result<std::int64_t> bytes = array_bytes(shape, bits_of(dtype), label);
  if (!bytes) {
    return bytes.status();
  }
  const auto too_much = [&] {
    return Status::io_error(
        label, fmt::format("{} bytes are needed for shape {}", *bytes, shape_text(shape)),
        fmt::format("this machine has {} bytes of memory", memory_bytes()));
  };
  if (*bytes > memory_bytes()) {
    return too_much();
  }
  // Never a null pointer, even for no elements: to the library null means absent.
  void* memory = operator new(static_cast<std::size_t>(std::max<std::int64_t>(*bytes, 1)),
                              kAlignment, std::nothrow);
  if (memory == nullptr) {
    return too_much();
  }
  Array array{dtype, std::move(shape), {}};
  array.data = std::shared_ptr<std::byte[]>(
      static_cast<std::byte*>(memory), [](std::byte* data) { operator delete(data, kAlignment); });
  return array;
}

Result<Array> convert(const Array& from, DType to, const std::string& label) {
  if (from.dtype == to) {
    return from;
  }
  Result<Array> result = allocate_array(to, from.shape, label);
  if (!result) {
    return result;
  }
  const std::int64_t from_step = bits_of(from.dtype) / 8;
  const std::int64_t to_step = bits_of(to) / 8;
  const std::int64_t count = from.elements();
  for (std::int64_t i = 0; i < count; ++i) {
    narrow(widen(from.data.get() + i * from_step, from.dtype), result->data.get() + i * to_step,
           to);
  }
  return result;
}

double unit_roundoff(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
}

Result<std::shared_ptr<const ByteSource>> open_source(const std::string& path,
                                                      const std::string& flag) {
  const std::string label = flag.empty() ? one_line(path) : flag + " " + one_line(path);
  if (path.find('\0') != std::string::npos) {
    return Status::io_error(label, "a file name has no zero byte");
  }
  // O_NONBLOCK: opening a pipe that nobody writes to must not hang.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    return Status::io_error(label, fmt::format("cannot be opened: {}", std::strerror(errno)),
                            "a readable regular file is needed");
  }
  struct stat found = {};
  const bool known = fstat(descriptor, &found) == 0;
  if (!known || !S_ISREG(found.st_mode)) {
    close(descriptor);
    return Status::io_error(label, known ? what_it_is(found.st_mode) : std::strerror(errno),
                            "a readable regular file is needed");
  }
  return std::shared_ptr<const ByteSource>(
      std::make_shared<FileSource>(descriptor, static_cast<std::int64_t>(found.st_size), label));
}

Status MemorySource::read(std::int64_t offset, std::span<std::byte> into) const {
  if (!into.empty()) {
    std::memcpy(into.data(), bytes_.data() + offset, into.size());
  }
  return Status::ok();
}

}  // namespace rafter::cli
