#include "hw/cuda/blas.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "hw/cuda/launch.h"
#include "hw/cuda/loaded_library.h"

namespace rafter::cuda {
namespace {

/// The functions used, found by name.
struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtGetStatusName) status_name = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoCheck) algorithm_check = nullptr;
  decltype(&cublasLtMatmulDescInit_internal) desc_init = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutInit_internal) layout_init = nullptr;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
  decltype(&cublasLtMatmulPreferenceInit_internal) preference_init = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  std::string missing;  // why it cannot be used
};

Library open_library() {
  Library library;
  static_assert(CUBLAS_VER_MAJOR == 13);  // the name below, and the layout of its structs
  LoadedLibrary opened("cuBLASLt",
                       {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"});
  opened.find("cublasLtCreate", library.create);
  opened.find("cublasLtGetStatusName", library.status_name);
  opened.find("cublasLtMatmul", library.matmul);
  opened.find("cublasLtMatmulAlgoGetHeuristic", library.heuristic);
  opened.find("cublasLtMatmulAlgoCheck", library.algorithm_check);
  opened.find("cublasLtMatmulDescInit_internal", library.desc_init);
  opened.find("cublasLtMatmulDescSetAttribute", library.desc_set);
  opened.find("cublasLtMatrixLayoutInit_internal", library.layout_init);
  opened.find("cublasLtMatrixLayoutSetAttribute", library.layout_set);
  opened.find("cublasLtMatmulPreferenceInit_internal", library.preference_init);
  opened.find("cublasLtMatmulPreferenceSetAttribute", library.preference_set);
  library.missing = opened.missing();
  return library;
}

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

Status status_of_blas(cublasStatus_t code, const char* what) {
  return code == CUBLAS_STATUS_SUCCESS
             ? Status::ok()
             : Status::device_error(what, fmt::format("cuBLASLt: {}", library().status_name(code)));
}

/// Chains calls until one fails.
class Steps {
 public:
  explicit Steps(const char* what) : what_(what) {}
  void add(cublasStatus_t code) {
    if (status_) {
      status_ = status_of_blas(code, what_);
    }
  }
  const Status& status() const { return status_; }

 private:
  const char* what_;
  Status status_;
};

struct Types {
  cudaDataType_t operand = CUDA_R_16BF, result = CUDA_R_16BF, scale = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  std::int64_t result_bytes = 2;
};

Result<Types> types_of(const Matmul& product) {
  const auto half = [&product](cudaDataType_t type) {
    return Types{type, product.c_is_f32 ? CUDA_R_32F : type, CUDA_R_32F, CUBLAS_COMPUTE_32F,
                 product.c_is_f32 ? 4 : 2};
  };
  switch (product.dtype) {
    case DType::bf16:
      return half(CUDA_R_16BF);
    case DType::f16:
      return half(CUDA_R_16F);
    case DType::f32:
      return Types{CUDA_R_32F, CUDA_R_32F, CUDA_R_32F,
                   product.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, 4};
    case DType::e4m3:
      return Types{CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, 2};
    case DType::int8:
      return Types{CUDA_R_8I, CUDA_R_32I, CUDA_R_32I, CUBLAS_COMPUTE_32I, 4};
    default:
      return Status::unsupported("dtype", to_string(product.dtype), "bf16, f16, f32, e4m3, int8");
  }
}

/// cuBLASLt is column-major: row-major C = A B is its Cᵀ = Bᵀ Aᵀ, so B comes first.
struct Descriptors {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t first, second, result;
};

Status describe(const Matmul& p, const Types& types, std::int64_t batch, Descriptors& made) {
  const Library& lt = library();
  Steps steps("description of a matrix product");
  steps.add(lt.desc_init(&made.product, sizeof made.product, types.compute, types.scale));
  const cublasOperation_t first = p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  steps.add(lt.desc_set(&made.product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
  const cublasOperation_t second = p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  steps.add(lt.desc_set(&made.product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
  if (p.bias != nullptr) {  // along the rows of its C, which are our columns
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    steps.add(
        lt.desc_set(&made.product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    steps.add(
        lt.desc_set(&made.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof p.bias));
  }
  struct Side {
    cublasLtMatrixLayoutOpaque_t* layout;
    cudaDataType_t type;
    std::int64_t rows, cols, ld, stride;
  };
  const Side sides[] = {{&made.first, types.operand, p.b_transposed ? p.k : p.n,
                         p.b_transposed ? p.n : p.k, p.ldb, p.stride_b},
                        {&made.second, types.operand, p.a_transposed ? p.m : p.k,
                         p.a_transposed ? p.k : p.m, p.lda, p.stride_a},
                        {&made.result, types.result, p.n, p.m, p.ldc, p.stride_c}};
  const auto count = static_cast<std::int32_t>(batch);
  for (const Side& side : sides) {
    steps.add(lt.layout_init(side.layout, sizeof *side.layout, side.type,
                             static_cast<std::uint64_t>(side.rows),
                             static_cast<std::uint64_t>(side.cols), side.ld));
    steps.add(lt.layout_set(side.layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    steps.add(lt.layout_set(side.layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &side.stride,
                            sizeof side.stride));
  }
  return steps.status();
}

/// How products of one shape are done.
struct Choice {
  cublasLtMatmulAlgo_t algorithm;
  bool one_by_one = false;  // the algorithm takes one matrix at a time
};

Status set_preference(cublasLtMatmulPreferenceOpaque_t& preference, bool split) {
  const Library& lt = library();
  Steps steps("choice of a matrix product");
  steps.add(lt.preference_init(&preference, sizeof preference));
  const auto bytes = static_cast<std::uint64_t>(kMatmulWorkspaceBytes);
  steps.add(lt.preference_set(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                              sizeof bytes));
  // In the compute type through the workspace: no atomics.
  const std::uint32_t reduction =
      split ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
  steps.add(lt.preference_set(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                              sizeof reduction));
  const std::uint32_t alignment = 16;
  for (const auto which :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    steps.add(lt.preference_set(&preference, which, &alignment, sizeof alignment));
  }
  return steps.status();
}

/// The library's first choice for `batch` matrices; unsupported when it has none.
Result<cublasLtMatmulAlgo_t> first_choice(cublasLtHandle_t handle, const Matmul& p,
                                          const Types& types, std::int64_t batch) {
  Descriptors made;
  if (Status status = describe(p, types, batch, made); !status) {
    return status;
  }
  cublasLtMatmulPreferenceOpaque_t preference;
  if (Status status = set_preference(preference, p.split); !status) {
    return status;
  }
  cublasLtMatmulHeuristicResult_t found;
  int count = 0;
  const cublasStatus_t code =
      library().heuristic(handle, &made.product, &made.first, &made.second, &made.result,
                          &made.result, &preference, 1, &found, &count);
  if (code == CUBLAS_STATUS_NOT_SUPPORTED ||
      (code == CUBLAS_STATUS_SUCCESS && (count == 0 || found.state != CUBLAS_STATUS_SUCCESS))) {
    return Status::unsupported("matrix product",
                               fmt::format("{} x {} x {} in {}", p.m, p.n, p.k, to_string(p.dtype)),
                               "what cuBLASLt has an algorithm for");
  }
  if (Status status = status_of_blas(code, "choice of a matrix product"); !status) {
    return status;
  }
  return found.algo;
}

/// Whether the algorithm chosen for some matrices takes one of them as well.
bool takes_one(cublasLtHandle_t handle, const Matmul& p, const Types& types,
               const cublasLtMatmulAlgo_t& algorithm) {
  Descriptors made;
  cublasLtMatmulHeuristicResult_t result;
  return describe(p, types, 1, made) &&
         library().algorithm_check(handle, &made.product, &made.first, &made.second, &made.result,
                                   &made.result, &algorithm, &result) == CUBLAS_STATUS_SUCCESS;
}

/// The same choice whatever the number of matrices, so that it changes no bit: that for sixteen, or
/// for one where the library cannot do several alike.
Result<Choice> choose(cublasLtHandle_t handle, const Matmul& p, const Types& types) {
  constexpr std::int64_t kSeveral = 16;
  if (p.stride_c != 0) {
    const Result<cublasLtMatmulAlgo_t> several = first_choice(handle, p, types, kSeveral);
    if (several && takes_one(handle, p, types, *several)) {
      return Choice{*several, false};
    }
  }
  const Result<cublasLtMatmulAlgo_t> one = first_choice(handle, p, types, 1);
  return one ? Result<Choice>(Choice{*one, true}) : one.status();
}

/// What decides about the algorithm.
using Key = std::tuple<int, int, std::array<bool, 6>, std::array<std::int64_t, 9>>;
Key key_of(int device, const Matmul& p) {
  return {device,
          static_cast<int>(p.dtype),
          {p.c_is_f32, p.tf32, p.a_transposed, p.b_transposed, p.bias != nullptr, p.split},
          {p.m, p.n, p.k, p.lda, p.ldb, p.ldc, p.stride_a, p.stride_b, p.stride_c}};
}

/// Handles by device and choices by shape, for as long as the process lives.
class Choices {
 public:
  Result<std::pair<cublasLtHandle_t, Choice>> find(const Matmul& p, const Types& types) {
    int device = 0;
    if (Status status = status_of(cudaGetDevice(&device), "current device"); !status) {
      return status;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    cublasLtHandle_t& handle = handles_[device];
    if (handle == nullptr) {
      if (Status status = status_of_blas(library().create(&handle), "cuBLASLt handle"); !status) {
        handle = nullptr;
        return status;
      }
    }
    const Key key = key_of(device, p);
    if (const auto known = choices_.find(key); known != choices_.end()) {
      return std::pair{handle, known->second};
    }
    const Result<Choice> chosen = choose(handle, p, types);
    if (!chosen) {
      return chosen.status();
    }
    choices_.emplace(key, *chosen);
    return std::pair{handle, *chosen};
  }

 private:
  std::mutex mutex_;
  std::map<int, cublasLtHandle_t> handles_;
  std::map<Key, Choice> choices_;
};

}  // namespace

std::string why_no_cublaslt() { return library().missing; }

Status matmul(const Matmul& p, const void* a, const void* b, void* c, void* workspace,
              void* stream) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) {
    return Status::ok();
  }
  if (!library().missing.empty()) {
    return Status::device_error("cuBLASLt", library().missing);
  }
  const Result<Types> types = types_of(p);
  if (!types) {
    return types.status();
  }
  static Choices* const choices = new Choices;  // never destroyed: the driver may be gone by then
  const auto chosen = choices->find(p, *types);
  if (!chosen) {
    return chosen.status();
  }
  const auto& [handle, choice] = *chosen;
  const std::int64_t together = choice.one_by_one ? 1 : p.batch;
  Descriptors made;
  if (Status status = describe(p, *types, together, made); !status) {
    return status;
  }
  const float one = p.alpha, zero = 0;
  const std::int32_t integer_one = 1, integer_zero = 0;
  const bool integer = types->scale == CUDA_R_32I;
  const void* const alpha = integer ? static_cast<const void*>(&integer_one) : &one;
  const void* const beta = integer ? static_cast<const void*>(&integer_zero) : &zero;
  const std::int64_t operand = bits_of(p.dtype) / 8, result = types->result_bytes;
  for (std::int64_t i = 0; i < p.batch; i += together) {
    const auto* const a_i = static_cast<const std::byte*>(a) + i * p.stride_a * operand;
    const auto* const b_i = static_cast<const std::byte*>(b) + i * p.stride_b * operand;
    auto* const c_i = static_cast<std::byte*>(c) + i * p.stride_c * result;
    const cublasStatus_t code = library().matmul(
        handle, &made.product, alpha, b_i, &made.first, a_i, &made.second, beta, c_i, &made.result,
        c_i, &made.result, &choice.algorithm, workspace,
        static_cast<std::size_t>(kMatmulWorkspaceBytes), static_cast<cudaStream_t>(stream));
    if (Status status = status_of_blas(code, "matrix product"); !status) {
      return status;
    }
  }
  return Status::ok();
}

}  // namespace rafter::cuda
