#include "cli/bench_data.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "cli/quantise.h"

namespace rafter::cli {
namespace {

Result<Array> to_e4m3(const Array& from) {
  Result<Array> bytes = allocate_array(DType::e4m3, from.shape, "random data");
  if (bytes) {
    const auto* const values = reinterpret_cast<const float*>(from.data.get());
    auto* const to = reinterpret_cast<std::uint8_t*>(bytes->data.get());
    std::transform(values, values + from.elements(), to, f32_to_e4m3);
  }
  return bytes;
}

}  // namespace

Result<Array> random_array(DType dtype, std::vector<std::int64_t> shape, unsigned seed) {
  Result<Array> array = allocate_array(DType::f32, std::move(shape), "random data");
  if (!array) {
    return array;
  }
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  auto* values = reinterpret_cast<float*>(array->data.get());
  // A cache of many gigabytes repeats itself: deviates are slow, and time does not see it.
  constexpr std::int64_t kPeriod = (std::int64_t{1} << 22) + 17;
  const std::int64_t count = array->elements();
  const std::int64_t drawn = std::min(count, kPeriod);
  std::generate(values, values + drawn, [&] { return normal(generator); });
  for (std::int64_t i = drawn; i < count; ++i) {
    values[i] = values[i - kPeriod];
  }
  if (dtype == DType::int8) {
    return array;
  }
  return dtype == DType::e4m3 ? to_e4m3(*array) : convert(*array, dtype, "random data");
}

namespace {

// f32 [batch, seqlen, heads, head_dim] as int8 with a scale for each row.
Status quantise(Array& values, Array& scales) {
  std::vector<std::int64_t> shape = values.shape;
  const std::int64_t dim = std::exchange(shape.back(), 1);
  Result<Array> rows = allocate_array(DType::int8, values.shape, "random data");
  Result<Array> factors = allocate_array(DType::f32, shape, "random data");
  for (const Result<Array>* array : {&rows, &factors}) {
    if (!*array) {
      return array->status();
    }
  }
  const auto* const from = reinterpret_cast<const float*>(values.data.get());
  auto* const to = reinterpret_cast<std::int8_t*>(rows->data.get());
  auto* const factor = reinterpret_cast<float*>(factors->data.get());
  for (std::int64_t row = 0; row < factors->elements(); ++row) {
    factor[row] = int8_scale({from + row * dim, static_cast<std::size_t>(dim)});
    for (std::int64_t d = 0; d < dim; ++d) {
      to[row * dim + d] = to_int8(from[row * dim + d], factor[row]);
    }
  }
  values = *rows;
  scales = *factors;
  return Status::ok();
}

}  // namespace

Result<Array> shuffled_pages(const AttentionProblem& p, std::span<const std::int64_t> lengths) {
  const std::int64_t columns = (p.seqlen_kv + p.page_size - 1) / p.page_size;
  Result<Array> table = allocate_array(DType::i32, {p.batch, columns}, "page table");
  if (!table) {
    return table;
  }
  auto* const pages = reinterpret_cast<std::int32_t*>(table->data.get());
  std::fill_n(pages, table->elements(), -1);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(p.num_pages));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(4));
  std::size_t next = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t keys = lengths.empty() ? p.seqlen_kv : lengths[static_cast<std::size_t>(b)];
    for (std::int64_t i = 0; i * p.page_size < keys; ++i) {
      pages[b * columns + i] = ids[next++];
    }
  }
  return table;
}

namespace {

// The first rows of every sequence of [batch, seqlen, heads, head_dim], the batch `copies` times.
Result<Array> first_rows(const Array& from, std::int64_t rows, std::int64_t copies, DType dtype) {
  const std::int64_t batch = from.shape[0], row = from.shape[2] * from.shape[3];
  Result<Array> part =
      allocate_array(from.dtype, {batch * copies, rows, from.shape[2], from.shape[3]}, "excerpt");
  if (!part) {
    return part;
  }
  const auto row_bytes = static_cast<std::size_t>(row * bits_of(from.dtype) / 8);
  for (std::int64_t b = 0; b < batch * copies; ++b) {
    std::memcpy(part->data.get() + static_cast<std::size_t>(b * rows) * row_bytes,
                from.data.get() + static_cast<std::size_t>(b % batch * from.shape[1]) * row_bytes,
                static_cast<std::size_t>(rows) * row_bytes);
  }
  return convert(*part, dtype, "excerpt");
}

}  // namespace

Result<Qkv> random_data(const AttentionProblem& p, std::span<const std::int64_t> lengths) {
  const std::int64_t heads_kv = p.heads_kv == 0 ? p.heads_q : p.heads_kv;
  const std::int64_t head_dim_v = p.head_dim_v == 0 ? p.head_dim : p.head_dim_v;
  Result<Array> q = random_array(p.dtype, {p.batch, p.seqlen_q, p.heads_q, p.head_dim}, 1);
  const bool paged = p.layout == Layout::paged;
  const std::int64_t batch_kv = paged ? p.num_pages : p.batch;
  const std::int64_t rows_kv = paged ? p.page_size : p.seqlen_kv;
  const DType kv = p.kv_dtype.value_or(p.dtype);
  Result<Array> k = random_array(kv, {batch_kv, rows_kv, heads_kv, p.head_dim}, 2);
  Result<Array> v = random_array(kv, {batch_kv, rows_kv, heads_kv, head_dim_v}, 3);
  for (const Result<Array>* array : {&q, &k, &v}) {
    if (!*array) {
      return array->status();
    }
  }
  Qkv data{*q, *k, *v};
  if (kv == DType::int8) {
    for (const Status& status : {quantise(data.k, data.k_scale), quantise(data.v, data.v_scale)}) {
      if (!status) {
        return status;
      }
    }
  }
  if (paged) {
    Result<Array> table = shuffled_pages(p, lengths);
    if (!table) {
      return table.status();
    }
    data.page_table = *table;
  }
  return data;
}

Result<Qkv> excerpt(const Qkv& from, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                    std::int64_t copies, DType dtype) {
  Result<Array> q = first_rows(from.q, seqlen_q, copies, dtype);
  Result<Array> k = first_rows(from.k, seqlen_kv, copies, dtype);
  Result<Array> v = first_rows(from.v, seqlen_kv, copies, dtype);
  for (const Result<Array>* array : {&q, &k, &v}) {
    if (!*array) {
      return array->status();
    }
  }
  return Qkv{*q, *k, *v};
}

}  // namespace rafter::cli
