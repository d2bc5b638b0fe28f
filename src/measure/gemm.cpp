// The library GEMM on random data: what "matmul peak" means in a measured device file.
#include "measure/gemm.h"

#include <omp.h>

#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <random>

#include "rafter/measure.h"

namespace rafter {
namespace {

using Type = dnnl::memory::data_type;

// Operands and result of the product of each dtype; int8 multiplies u8 by s8, the pair that every
// integer dot-product instruction of x86 takes.
struct GemmTypes {
  Type a, b, c;
};

Result<GemmTypes> types_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return GemmTypes{Type::f32, Type::f32, Type::f32};
    case DType::bf16:
      return GemmTypes{Type::bf16, Type::bf16, Type::f32};
    case DType::f16:
      return GemmTypes{Type::f16, Type::f16, Type::f32};
    case DType::int8:
      return GemmTypes{Type::u8, Type::s8, Type::s32};
    default:
      return Status::unsupported("dtype", to_string(dtype), "f32, f16, bf16, int8");
  }
}

// A product ready to run: primitive, operands, arguments.
struct Gemm {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::matmul primitive;
  dnnl::memory a, b, c;
};

void fill_random(dnnl::memory& memory, unsigned seed) {
  std::mt19937 generator(seed);
  const std::size_t bytes = memory.get_desc().get_size();
  switch (memory.get_desc().data_type()) {
    case Type::f32: {
      std::uniform_real_distribution<float> uniform(-1, 1);
      auto* values = static_cast<float*>(memory.get_data_handle());
      for (std::size_t i = 0; i < bytes / 4; ++i) {
        values[i] = uniform(generator);
      }
      break;
    }
    case Type::bf16:
    case Type::f16: {
      // Sign and mantissa at random; the exponent field keeps the value in (1/4, 2) in magnitude.
      const bool bf16 = memory.get_desc().data_type() == Type::bf16;
      auto* values = static_cast<std::uint16_t*>(memory.get_data_handle());
      for (std::size_t i = 0; i < bytes / 2; ++i) {
        const auto bits = static_cast<std::uint32_t>(generator());
        const std::uint32_t exponent = (bf16 ? 125U : 13U) + (bits >> 16) % 3U;
        values[i] = static_cast<std::uint16_t>(bf16 ? (bits & 0x807FU) | (exponent << 7)
                                                    : (bits & 0x83FFU) | (exponent << 10));
      }
      break;
    }
    default: {
      auto* values = static_cast<std::uint8_t*>(memory.get_data_handle());
      for (std::size_t i = 0; i < bytes; ++i) {
        values[i] = static_cast<std::uint8_t>(generator() >> 24);
      }
    }
  }
}

Result<std::unique_ptr<Gemm>> make_gemm(std::int64_t m, std::int64_t n, std::int64_t k,
                                        DType dtype) {
  const Result<GemmTypes> types = types_of(dtype);
  if (!types) {
    return types.status();
  }
  using Tag = dnnl::memory::format_tag;
  try {
    auto gemm = std::make_unique<Gemm>();
    const dnnl::memory::desc a({m, k}, types->a, Tag::ab), b({k, n}, types->b, Tag::ab),
        c({m, n}, types->c, Tag::ab);
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b, c), gemm->engine);
    const std::string implementation = description.impl_info_str();
    if (implementation.find("ref") != std::string::npos) {
      return Status::unsupported("dtype", to_string(dtype),
                                 "oneDNN has only its reference loop (" + implementation +
                                     ") on this machine; others are");
    }
    gemm->primitive = dnnl::matmul(description);
    gemm->a = dnnl::memory(a, gemm->engine);
    gemm->b = dnnl::memory(b, gemm->engine);
    gemm->c = dnnl::memory(c, gemm->engine);
    fill_random(gemm->a, 1);
    fill_random(gemm->b, 2);
    return gemm;
  } catch (const dnnl::error& error) {
    return Status::unsupported("dtype", to_string(dtype),
                               "oneDNN has no such product on this machine");
  }
}

// Sets the number of OpenMP threads while it lives: oneDNN takes the caller's.
class ThreadsScope {
 public:
  explicit ThreadsScope(int threads) : before_(omp_get_max_threads()) {
    if (threads > 0) {
      omp_set_num_threads(threads);
    }
  }
  ~ThreadsScope() { omp_set_num_threads(before_); }
  ThreadsScope(const ThreadsScope&) = delete;
  ThreadsScope& operator=(const ThreadsScope&) = delete;

 private:
  int before_;
};

Status run(Gemm& gemm) {
  try {
    gemm.primitive.execute(
        gemm.stream, {{DNNL_ARG_SRC, gemm.a}, {DNNL_ARG_WEIGHTS, gemm.b}, {DNNL_ARG_DST, gemm.c}});
    gemm.stream.wait();
  } catch (const dnnl::error& error) {
    return Status::device_error("gemm", error.what());
  }
  return Status::ok();
}

}  // namespace

Result<Timing> time_gemm(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, int threads,
                         const StopRule& rule) {
  const std::pair<const char*, std::int64_t> sizes[] = {{"m", m}, {"n", n}, {"k", k}};
  for (const auto& [name, size] : sizes) {
    if (size < 1) {
      return Status::invalid_argument(name, std::to_string(size), "1 and more");
    }
  }
  if (threads < 0) {
    return Status::invalid_argument("threads", std::to_string(threads), "0 and more");
  }
  const ThreadsScope scope(threads);
  const Result<std::unique_ptr<Gemm>> gemm = make_gemm(m, n, k, dtype);
  if (!gemm) {
    return gemm.status();
  }
  return time_calls([&gemm]() { return run(**gemm); }, rule);
}

namespace measure {

Result<FreeRun> gemm_rates(std::int64_t n, DType dtype, int threads, double time_s) {
  if (const auto supported = make_gemm(n, n, n, dtype); !supported) {
    return supported.status();
  }
  std::vector<std::unique_ptr<Gemm>> gemms(static_cast<std::size_t>(threads));
  std::vector<Status> failures(static_cast<std::size_t>(threads));
  const double size = static_cast<double>(n);
  FreeRun rates =
      free_run(threads, std::size_t{1} << 40, 1e-4, time_s, Resource::own,
               [&](int thread, std::int64_t rounds) {
                 const ThreadsScope scope(1);  // a product takes the thread that calls it
                 const auto index = static_cast<std::size_t>(thread);
                 if (!gemms[index]) {
                   Result<std::unique_ptr<Gemm>> made = make_gemm(n, n, n, dtype);
                   if (!made) {
                     failures[index] = made.status();
                     return 0.0;
                   }
                   gemms[index] = std::move(*made);
                 }
                 for (std::int64_t i = 0; i < rounds; ++i) {
                   if (Status status = run(*gemms[index]); !status) {
                     failures[index] = status;
                   }
                 }
                 return 2 * size * size * size * static_cast<double>(rounds);
               });
  for (const Status& failure : failures) {
    if (!failure) {
      return failure;
    }
  }
  return rates;
}

}  // namespace measure
}  // namespace rafter
