#include "kernels/cpu/onednn_common.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

namespace rafter::cpu {
namespace {

using base::round_up;

constexpr std::int64_t kAlign = 64;  // bytes; also elements of a score row

dnnl::memory::data_type dnnl_type(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return dnnl::memory::data_type::bf16;
    case DType::f16:
      return dnnl::memory::data_type::f16;
    default:
      return dnnl::memory::data_type::f32;
  }
}

const dnnl::engine& cpu_engine() {
  static const dnnl::engine kEngine(dnnl::engine::kind::cpu, 0);
  return kEngine;
}

struct Isa {
  dnnl_cpu_isa_t dnnl;
  std::string_view name;
};
// Ascending; the last that the effective set contains names it.
constexpr Isa kIsas[] = {{dnnl_cpu_isa_sse41, "portable"},
                         {dnnl_cpu_isa_avx2, "avx2"},
                         {dnnl_cpu_isa_avx512_core, "avx512"},
                         {dnnl_cpu_isa_avx512_core_bf16, "avx512_bf16"},
                         {dnnl_cpu_isa_avx512_core_amx, "amx"}};

std::string_view find_instruction_set() {
  if (const char* limit = std::getenv("RAFTER_CPU_ISA"); limit != nullptr) {
    for (const Isa& isa : kIsas) {
      if (isa.name == limit) {
        // Refused when oneDNN already ran in this process; the chooser then compares the names.
        static_cast<void>(dnnl_set_max_cpu_isa(isa.dnnl));
      }
    }
  }
  const dnnl_cpu_isa_t effective = dnnl_get_effective_cpu_isa();
  std::string_view name = kIsas[0].name;
  for (const Isa& isa : kIsas) {
    if ((effective & isa.dnnl) == isa.dnnl) {
      name = isa.name;
    }
  }
  return name;
}

using Dims = dnnl::memory::dims;

/// Which operand is stored transposed: B [n, k] (C in the operand dtype, or in f32), none, or A
/// [k, m].
enum class Form : std::uint8_t { b_transposed, b_transposed_f32, plain, a_transposed };

dnnl::matmul::primitive_desc describe(DType operand, const BlockProducts::Shape& s, Form form,
                                      float alpha) {
  const dnnl::memory::data_type type = dnnl_type(operand);
  const bool scaled = form == Form::b_transposed || form == Form::b_transposed_f32;
  const dnnl::memory::desc a(Dims{s.m, s.k}, type,
                             form == Form::a_transposed ? Dims{1, s.lda} : Dims{s.lda, 1});
  const dnnl::memory::desc b(Dims{s.k, s.n}, type, scaled ? Dims{1, s.ldb} : Dims{s.ldb, 1});
  const dnnl::memory::desc c(Dims{s.m, s.n},
                             form == Form::b_transposed ? type : dnnl::memory::data_type::f32,
                             Dims{s.ldc, 1});
  dnnl::primitive_attr attributes;
  if (scaled) {
    attributes.set_output_scales(0, {alpha});
  }
  return {dnnl::matmul::desc(a, b, c), attributes, cpu_engine()};
}

bool has_product(DType operand) {
  const BlockProducts::Shape shape{64, 64, 64, 64, 64, 64};
  try {
    for (const Form form : {Form::b_transposed, Form::plain}) {
      const std::string name = describe(operand, shape, form, 0.125f).impl_info_str();
      if (name.find("ref") !=
          std::string::npos) {  // oneDNN's plain loops: hundreds of times slower
        return false;
      }
    }
    return true;
  } catch (const dnnl::error&) {
    return false;
  }
}

Status dnnl_failure(const char* what, int code) {
  return Status::device_error("oneDNN",
                              std::string(what) + " failed with status " + std::to_string(code));
}

}  // namespace

std::string_view onednn_instruction_set() {
  static const std::string_view kName = find_instruction_set();
  return kName;
}

bool onednn_multiplies(DType dtype) {
  onednn_instruction_set();  // before anything that fixes oneDNN's choice
  static const bool kBf16 = has_product(DType::bf16);
  static const bool kF16 = has_product(DType::f16);
  return dtype == DType::f32 || (dtype == DType::bf16 ? kBf16 : dtype == DType::f16 && kF16);
}

std::string onednn_note(const KernelProblem& problem) {
  const DType dtype = problem.attention.dtype;
  if (onednn_multiplies(dtype)) {
    return problem.attention.kv_dtype.value_or(dtype) == dtype || dtype == DType::f32
               ? std::string{}
               : "keys and values are widened and multiplied in f32, scores are kept in " +
                     std::string(to_string(dtype));
  }
  const dnnl_version_t* version = dnnl_version();
  return "oneDNN " + std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch) + " has no " + to_string(dtype) +
         " matmul on this CPU: row blocks are converted and multiplied in f32, scores are kept "
         "in " +
         to_string(dtype);
}

// ------------------------------------------------------------------------------------- products

struct BlockProducts::Primitives {
  struct Made {
    Shape shape;
    Form form;
    float alpha;
    dnnl::matmul::primitive_desc description;
    dnnl::matmul primitive;
  };
  DType operand;
  dnnl::stream stream{cpu_engine()};
  std::vector<Made> made;

  const Made& find(const Shape& shape, Form form, float alpha) {
    for (const Made& m : made) {
      if (m.shape == shape && m.form == form && m.alpha == alpha) {
        return m;
      }
    }
    dnnl::matmul::primitive_desc description = describe(operand, shape, form, alpha);
    dnnl::matmul primitive(description);
    made.push_back({shape, form, alpha, std::move(description), std::move(primitive)});
    return made.back();
  }

  Status run(const Shape& shape, Form form, float alpha, const void* a, const void* b, void* c) {
    try {
      const Made& m = find(shape, form, alpha);
      m.primitive.execute(
          stream,
          {{DNNL_ARG_SRC, {m.description.src_desc(), cpu_engine(), const_cast<void*>(a)}},
           {DNNL_ARG_WEIGHTS, {m.description.weights_desc(), cpu_engine(), const_cast<void*>(b)}},
           {DNNL_ARG_DST, {m.description.dst_desc(), cpu_engine(), c}}});
      stream.wait();
      return Status::ok();
    } catch (const dnnl::error& error) {
      return dnnl_failure("matmul", error.status);
    }
  }
};

BlockProducts::BlockProducts(DType operand) {
  if (operand != DType::f32) {
    primitives_ = std::make_unique<Primitives>();
    primitives_->operand = operand;
  }
}
BlockProducts::~BlockProducts() = default;

namespace {

/// C[m, n] times 0, which keeps what is not finite as NaN. oneDNN given a scale of 0 leaves C as it
/// was, or sets zeros unread, by instruction set.
void multiply_by_zero(const BlockProducts::Shape& s, DType dtype, void* c) {
  const RowOps& ops = row_ops(onednn_instruction_set());
  float row[kKeyChunk];
  for (std::int64_t i = 0; i < s.m; ++i) {
    for (std::int64_t j = 0; j < s.n; j += kKeyChunk) {
      const std::int64_t count = std::min(kKeyChunk, s.n - j);
      auto* const at = static_cast<std::byte*>(c) + (i * s.ldc + j) * (bits_of(dtype) / 8);
      ops.load(at, dtype, count, row);
      ops.store(row, 0.0f, dtype, count, at);
    }
  }
}

}  // namespace

Status BlockProducts::times_transposed(const Shape& s, float alpha, const void* a, const void* b,
                                       void* c) {
  if (alpha == 0) {
    const Status status = times_transposed(s, 1.0f, a, b, c);
    multiply_by_zero(s, primitives_ != nullptr ? primitives_->operand : DType::f32, c);
    return status;
  }
  if (primitives_ != nullptr) {
    return primitives_->run(s, Form::b_transposed, alpha, a, b, c);
  }
  const dnnl_status_t status =
      dnnl_sgemm('N', 'T', s.m, s.n, s.k, alpha, static_cast<const float*>(a), s.lda,
                 static_cast<const float*>(b), s.ldb, 0.0f, static_cast<float*>(c), s.ldc);
  return status == dnnl_success ? Status::ok() : dnnl_failure("sgemm", status);
}

Status BlockProducts::times_transposed_f32(const Shape& s, float alpha, const void* a,
                                           const void* b, float* c) {
  if (alpha == 0) {
    const Status status = times_transposed_f32(s, 1.0f, a, b, c);
    multiply_by_zero(s, DType::f32, c);
    return status;
  }
  return primitives_ != nullptr ? primitives_->run(s, Form::b_transposed_f32, alpha, a, b, c)
                                : times_transposed(s, alpha, a, b, c);
}

Status BlockProducts::times(const Shape& s, const void* a, const void* b, float* c) {
  if (primitives_ != nullptr) {
    return primitives_->run(s, Form::plain, 1.0f, a, b, c);
  }
  const dnnl_status_t status =
      dnnl_sgemm('N', 'N', s.m, s.n, s.k, 1.0f, static_cast<const float*>(a), s.lda,
                 static_cast<const float*>(b), s.ldb, 0.0f, c, s.ldc);
  return status == dnnl_success ? Status::ok() : dnnl_failure("sgemm", status);
}

Status BlockProducts::transposed_times(const Shape& s, const void* a, const void* b, float* c) {
  if (primitives_ != nullptr) {
    return primitives_->run(s, Form::a_transposed, 1.0f, a, b, c);
  }
  const dnnl_status_t status =
      dnnl_sgemm('T', 'N', s.m, s.n, s.k, 1.0f, static_cast<const float*>(a), s.lda,
                 static_cast<const float*>(b), s.ldb, 0.0f, c, s.ldc);
  return status == dnnl_success ? Status::ok() : dnnl_failure("sgemm", status);
}

// ------------------------------------------------------------------------------------- workspace

namespace {

/// bf16 would round what int8 times its scale holds: such a cache is multiplied in f32.
DType operand_of(const AttentionProblem& p) {
  const bool as_stored = onednn_multiplies(p.dtype) && p.kv_dtype.value_or(p.dtype) == p.dtype;
  return as_stored ? p.dtype : DType::f32;
}
std::int64_t size_of(DType dtype) { return bits_of(dtype) / 8; }

struct ThreadSizes {
  std::int64_t q, chunk, operand, o, product, row, sum, maximum;
  std::int64_t total() const { return q + chunk + operand + o + product + row + sum + maximum; }
};
ThreadSizes thread_sizes(const AttentionProblem& p, std::int64_t row_block) {
  const std::int64_t element = size_of(operand_of(p));
  constexpr std::int64_t kFloat = sizeof(float);
  return {round_up(row_block * p.head_dim * element, kAlign),
          row_block * kKeyChunk * kFloat,
          row_block * kKeyChunk * element,
          round_up(row_block * p.head_dim_v * kFloat, kAlign),
          round_up(row_block * p.head_dim_v * kFloat, kAlign),
          round_up(p.seqlen_kv * kFloat, kAlign),
          round_up(row_block * static_cast<std::int64_t>(sizeof(double)), kAlign),
          round_up(row_block * kFloat, kAlign)};
}

/// Rows of q and of k over the whole batch, by capacity.
struct TotalRows {
  std::int64_t q, kv;
};
TotalRows total_rows(const AttentionProblem& p) {
  if (p.layout == Layout::packed) {
    return {p.total_q, p.total_kv};
  }
  return {p.batch * p.seqlen_q, p.batch * p.seqlen_kv};
}

/// First row of a sequence in arrays over the whole batch.
std::int64_t first_q(const AttentionProblem& p, const Sequence& s, std::int64_t batch) {
  return p.layout == Layout::packed ? s.q_row : batch * p.seqlen_q;
}
std::int64_t first_kv(const AttentionProblem& p, const Sequence& s, std::int64_t batch) {
  return p.layout == Layout::packed ? s.kv_row : batch * p.seqlen_kv;
}

}  // namespace

std::optional<MaterialisedSizes> materialised_sizes(const KernelProblem& problem,
                                                    std::int64_t row_block) {
  using base::checked_product;
  const AttentionProblem& p = problem.attention;
  if (p.seqlen_kv > (std::int64_t{1} << 58)) {
    return std::nullopt;
  }
  const std::int64_t element = size_of(operand_of(p));
  if (p.layout != Layout::packed &&
      (!checked_product({p.batch, p.seqlen_q}) || !checked_product({p.batch, p.seqlen_kv}))) {
    return std::nullopt;
  }
  const TotalRows rows = total_rows(p);
  const auto chunks = base::checked_sum({rows.kv / kKeyChunk, p.batch, 1});
  const auto k = checked_product({rows.kv, p.heads_kv, p.head_dim, element});
  const auto v = checked_product({rows.kv, p.heads_kv, p.head_dim_v, element});
  const auto scores =
      checked_product({rows.q, p.heads_q, round_up(p.seqlen_kv, kAlign), size_of(p.dtype)});
  const auto flags = chunks ? checked_product({*chunks, p.heads_kv}) : std::nullopt;
  const std::int64_t thread = thread_sizes(p, row_block).total();
  const auto threads = checked_product({problem.threads, thread});
  constexpr std::int64_t kLimit = std::int64_t{1} << 60;
  for (const auto& part : {k, v, flags, scores, threads}) {
    if (!part || *part > kLimit) {
      return std::nullopt;
    }
  }
  MaterialisedSizes sizes{.row_block = row_block,
                          .k_bytes = round_up(*k, kAlign),
                          .v_bytes = round_up(*v, kAlign),
                          .flag_bytes = round_up(*flags, kAlign),
                          .score_bytes = round_up(*scores, kAlign),
                          .thread_bytes = thread};
  sizes.total_bytes =
      sizes.k_bytes + sizes.v_bytes + sizes.flag_bytes + sizes.score_bytes + *threads;
  return sizes;
}

Acceptance accepts_materialised(const KernelProblem& problem, std::int64_t row_block) {
  const DType dtype = problem.attention.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16) {
    return Acceptance::refuse(std::string(to_string(dtype)) + " is not among f32, f16, bf16");
  }
  if (!materialised_sizes(problem, row_block)) {
    return Acceptance::refuse("the scores would need 2^60 bytes or more");
  }
  return Acceptance::accept();
}

MaterialisedCall::MaterialisedCall(const ForwardCall& call, std::int64_t row_block)
    : call_(call),
      problem_(call.problem.attention),
      ops_(row_ops(onednn_instruction_set())),
      operand_(operand_of(problem_)),
      sizes_(materialised_sizes(call.problem, row_block).value_or(MaterialisedSizes{})) {
  auto* const base = static_cast<std::byte*>(call.workspace.data);
  k_ = base;
  v_ = k_ + sizes_.k_bytes;
  finite_ = reinterpret_cast<std::uint8_t*>(v_ + sizes_.v_bytes);
  scores_ = v_ + sizes_.v_bytes + sizes_.flag_bytes;
  scratch_ = scores_ + sizes_.score_bytes;
}

ThreadScratch MaterialisedCall::scratch_of(int thread) const {
  const ThreadSizes t = thread_sizes(problem_, sizes_.row_block);
  std::byte* at = scratch_ + thread * sizes_.thread_bytes;
  const auto take = [&at](std::int64_t bytes) {
    std::byte* const here = at;
    at += bytes;
    return here;
  };
  ThreadScratch scratch;
  scratch.q = take(t.q);
  scratch.chunk = reinterpret_cast<float*>(take(t.chunk));
  scratch.operand = take(t.operand);
  scratch.o = reinterpret_cast<float*>(take(t.o));
  scratch.product = reinterpret_cast<float*>(take(t.product));
  scratch.row = reinterpret_cast<float*>(take(t.row));
  scratch.sum = reinterpret_cast<double*>(take(t.sum));
  scratch.maximum = reinterpret_cast<float*>(take(t.maximum));
  return scratch;
}

RowBlock MaterialisedCall::block_of(std::int64_t batch, const Sequence& sequence,
                                    std::int64_t index) const {
  const std::int64_t blocks = base::div_up(sequence.seqlen_q, sizes_.row_block);
  RowBlock block;
  block.sequence = sequence;
  block.window = mask_window(problem_.mask, sequence);
  block.batch = batch;
  block.head_q = index / blocks;
  block.head_kv = block.head_q / (problem_.heads_q / problem_.heads_kv);
  // Last rows first: under a causal mask they see most.
  block.first = (blocks - 1 - index % blocks) * sizes_.row_block;
  block.rows = std::min(sizes_.row_block, sequence.seqlen_q - block.first);
  block.hull = block.window.hull(block.first, block.first + block.rows);
  return block;
}

// ------------------------------------------------------------------------------------ K, V and S

std::byte* MaterialisedCall::packed(std::byte* base, const Sequence& s, std::int64_t batch,
                                    std::int64_t head_kv, std::int64_t key,
                                    std::int64_t dim) const {
  const std::int64_t row =
      first_kv(problem_, s, batch) * problem_.heads_kv + head_kv * s.seqlen_kv + key;
  return base + row * dim * size_of(operand_);
}

std::uint8_t* MaterialisedCall::finite_flag(const Sequence& s, std::int64_t batch,
                                            std::int64_t head_kv, std::int64_t key) const {
  // Sequences before this one have at most first_kv / kKeyChunk + batch chunks.
  const std::int64_t before = first_kv(problem_, s, batch) / kKeyChunk + batch;
  return finite_ + before * problem_.heads_kv + head_kv * base::div_up(s.seqlen_kv, kKeyChunk) +
         key / kKeyChunk;
}

/// The factor of a row of k or v: 1 where it has none.
float MaterialisedCall::scale_of(const TensorView& scale, const Sequence& s, std::int64_t key,
                                 std::int64_t head_kv) const {
  return scale.data == nullptr ? 1.0f : key_scale(problem_, call_.in, scale, s, key, head_kv);
}

/// One row of a tensor times `scale` in the operand dtype; true when it is finite.
bool MaterialisedCall::pack_row(const TensorView& view, std::int64_t offset, std::int64_t dim,
                                float scale, void* target) const {
  const std::int64_t element = size_of(view.dtype);
  const auto* const source = static_cast<const std::byte*>(view.data) + offset * element;
  const bool contiguous = view.stride_head_dim == 1 || dim == 1;
  float values[256];  // head_dim is at most 256
  float* const row = operand_ == DType::f32 ? static_cast<float*>(target) : values;
  const bool finite = contiguous
                          ? ops_.load(source, view.dtype, dim, row)
                          : ops_.load_strided(source, view.dtype, view.stride_head_dim, dim, row);
  if (operand_ != DType::f32) {
    ops_.store(values, scale, operand_, dim, target);
  } else if (view.dtype == DType::int8) {
    ops_.scale(row, scale, dim);
  }
  return finite && std::isfinite(scale);
}

void MaterialisedCall::pack_chunk(const Sequence& s, std::int64_t batch, std::int64_t head_kv,
                                  tiles::Range keys) const {
  bool finite = true;
  for (std::int64_t j = keys.first; j < keys.last; ++j) {
    pack_row(call_.in.k, key_offset(problem_, call_.in, call_.in.k, s, j, head_kv),
             problem_.head_dim, scale_of(call_.in.k_scale, s, j, head_kv),
             packed(k_, s, batch, head_kv, j, problem_.head_dim));
    finite = pack_row(call_.in.v, key_offset(problem_, call_.in, call_.in.v, s, j, head_kv),
                      problem_.head_dim_v, scale_of(call_.in.v_scale, s, j, head_kv),
                      packed(v_, s, batch, head_kv, j, problem_.head_dim_v)) &&
             finite;
  }
  *finite_flag(s, batch, head_kv, keys.first) = finite ? 1 : 0;
}

void MaterialisedCall::pack_keys_and_values() const {
#pragma omp parallel num_threads(call_.problem.threads)
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    const Sequence s = sequence_of(problem_, call_.in, b);
    const tiles::Range seen = mask_window(problem_.mask, s).hull(0, s.seqlen_q);
    const std::int64_t chunks = base::div_up(s.seqlen_kv, kKeyChunk);
#pragma omp for schedule(dynamic, 1) nowait
    for (std::int64_t i = 0; i < problem_.heads_kv * chunks; ++i) {
      const std::int64_t first = i % chunks * kKeyChunk;
      const tiles::Range keys = intersect({first, first + kKeyChunk}, seen);
      if (keys.size() > 0) {
        pack_chunk(s, b, i / chunks, keys);
      }
    }
  }
}

std::int64_t MaterialisedCall::score_stride(const Sequence& sequence) const {
  return round_up(sequence.seqlen_kv, kAlign);
}

std::byte* MaterialisedCall::scores(const RowBlock& block, std::int64_t row,
                                    std::int64_t key) const {
  const Sequence& s = block.sequence;
  const std::int64_t rows_before =
      first_q(problem_, s, block.batch) * problem_.heads_q + block.head_q * s.seqlen_q;
  const std::int64_t capacity_stride = round_up(problem_.seqlen_kv, kAlign);
  return scores_ +
         (rows_before * capacity_stride + row * score_stride(s) + key) * size_of(problem_.dtype);
}

Status MaterialisedCall::score_block(const RowBlock& block, ThreadScratch& scratch,
                                     BlockProducts& products) const {
  const Sequence& s = block.sequence;
  const std::int64_t dim = problem_.head_dim;
  auto* const q = static_cast<std::byte*>(scratch.q);
  for (std::int64_t r = 0; r < block.rows; ++r) {
    pack_row(call_.in.q, offset_of(call_.in.q, s.q_batch, s.q_row + block.first + r, block.head_q),
             dim, 1.0f, q + r * dim * size_of(operand_));
  }
  const bool in_place = operand_ == problem_.dtype;
  for (std::int64_t key = block.hull.first; key < block.hull.last;) {
    const std::int64_t end = std::min(block.hull.last, (key / kKeyChunk + 1) * kKeyChunk);
    const BlockProducts::Shape shape{block.rows, end - key, dim,
                                     dim,        dim,       in_place ? score_stride(s) : kKeyChunk};
    void* const c = in_place ? static_cast<void*>(scores(block, block.first, key)) : scratch.chunk;
    if (Status status =
            products.times_transposed(shape, *problem_.softmax_scale, q,
                                      packed(k_, s, block.batch, block.head_kv, key, dim), c);
        !status) {
      return status;
    }
    for (std::int64_t r = 0; !in_place && r < block.rows; ++r) {
      ops_.store(scratch.chunk + r * kKeyChunk, 1.0f, problem_.dtype, end - key,
                 scores(block, block.first + r, key));
    }
    key = end;
  }
  return Status::ok();
}

Status MaterialisedCall::compute_scores() {
  pack_keys_and_values();
  return for_each_block(
      [this](const RowBlock& block, ThreadScratch& scratch, BlockProducts& products) {
        return score_block(block, scratch, products);
      });
}

// ----------------------------------------------------------------------------------------- output

Status MaterialisedCall::add_values(const RowBlock& block, tiles::Range keys, const void* p,
                                    std::int64_t stride, ThreadScratch& scratch,
                                    BlockProducts& products) const {
  const Sequence& s = block.sequence;
  const std::int64_t dim = problem_.head_dim_v;
  std::byte* const values = packed(v_, s, block.batch, block.head_kv, keys.first, dim);
  if (*finite_flag(s, block.batch, block.head_kv, keys.first) != 0) {
    const Status status = products.times({block.rows, dim, keys.size(), stride, dim, dim}, p,
                                         values, scratch.product);
    ops_.add(scratch.o, scratch.product, block.rows * dim);
    return status;
  }
  // 0 · NaN is NaN: a product would carry such a value to rows that do not see its key.
  for (std::int64_t r = 0; r < block.rows; ++r) {
    const tiles::Range seen = intersect(keys, block.window.row(block.first + r));
    const auto* const row = static_cast<const std::byte*>(p) + r * stride * size_of(operand_);
    float weight = 0;
    float value[256];  // head_dim_v is at most 256
    for (std::int64_t j = seen.first; j < seen.last; ++j) {
      const std::int64_t at = j - keys.first;
      ops_.load(row + at * size_of(operand_), operand_, 1, &weight);
      ops_.load(values + at * dim * size_of(operand_), operand_, dim, value);
      for (std::int64_t d = 0; d < dim; ++d) {
        scratch.o[r * dim + d] += weight * value[d];
      }
    }
  }
  return Status::ok();
}

void MaterialisedCall::store_output(const RowBlock& block, std::int64_t row, const float* values,
                                    float factor) const {
  const TensorView& o = call_.out.o;
  const Sequence& s = block.sequence;
  const std::int64_t element = size_of(o.dtype);
  auto* const target = static_cast<std::byte*>(o.data) +
                       offset_of(o, s.q_batch, s.q_row + row, block.head_q) * element;
  if (o.stride_head_dim == 1) {
    ops_.store(values, factor, o.dtype, problem_.head_dim_v, target);
    return;
  }
  for (std::int64_t d = 0; d < problem_.head_dim_v; ++d) {
    ops_.store(values + d, factor, o.dtype, 1, target + d * o.stride_head_dim * element);
  }
}

void MaterialisedCall::store_lse(const RowBlock& block, std::int64_t row, double lse) const {
  if (call_.out.lse.data != nullptr) {
    const Sequence& s = block.sequence;
    *lse_of(call_.out.lse, s.q_batch, block.head_q, s.q_row + row) = static_cast<float>(lse);
  }
}

}  // namespace rafter::cpu
