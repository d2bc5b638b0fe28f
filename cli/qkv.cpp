#include "cli/qkv.h"

#include <fmt/format.h>

#include <array>

#include "cli/args.h"
#include "cli/npy.h"
#include "cli/safetensors.h"

namespace rafter::cli {
namespace {

/// An array with what its errors are to be called.
struct Named {
  Array array;
  std::string label;
};
using Three = std::array<Named, 3>;  // q, k, v

constexpr std::array kNames = {"q", "k", "v"};

[[noreturn]] void refuse(const Named& tensor, std::string given, std::string allowed) {
  fail(Status::invalid_argument(tensor.label, std::move(given), std::move(allowed)));
}

Three read_three(const QkvFlags& flags, bool words_are_bf16) {
  Three three;
  const Expect values = words_are_bf16 ? Expect::values_bf16 : Expect::values;
  const Expect cache = flags.kv_dtype == DType::e4m3 ? Expect::cache_e4m3
                       : words_are_bf16              ? Expect::cache_bf16
                                                     : Expect::cache;
  const std::array expect = {values, cache, cache};
  const std::array<const std::string*, 3> files = {&flags.q, &flags.k, &flags.v};
  if (flags.qkv.empty()) {
    for (std::size_t i = 0; i < three.size(); ++i) {
      const std::string flag = fmt::format("--{}", kNames[i]);
      if (files[i]->empty()) {
        fail_flag(flag, "nothing", fmt::format("{} FILE.npy, or --qkv FILE.safetensors,", flag));
      }
      three[i] = {value_or_fail(read_npy(*files[i], expect[i], flag)),
                  flag + " " + one_line(*files[i])};
    }
    return three;
  }
  for (std::size_t i = 0; i < three.size(); ++i) {
    if (!files[i]->empty()) {
      fail_flag(fmt::format("--{}", kNames[i]), "together with --qkv",
                "--q, --k and --v, or --qkv alone,");
    }
  }
  const Safetensors file = value_or_fail(Safetensors::open(flags.qkv, "--qkv"));
  for (std::size_t i = 0; i < three.size(); ++i) {
    const std::string name = flags.prefix + kNames[i];
    three[i] = {value_or_fail(file.read(name, expect[i])),
                fmt::format("--qkv {} tensor {}", one_line(flags.qkv), one_line(name))};
  }
  return three;
}

bool is_8_bit(DType dtype) { return dtype == DType::int8 || dtype == DType::e4m3; }

void bring_to_one_dtype(Three& three, std::optional<DType> dtype) {
  for (Named& tensor : three) {
    if (is_8_bit(tensor.array.dtype)) {
      continue;
    }
    if (dtype) {
      tensor.array = value_or_fail(convert(tensor.array, *dtype, tensor.label));
    } else if (tensor.array.dtype != three[0].array.dtype) {
      refuse(tensor, to_string(tensor.array.dtype),
             fmt::format("{} as in {}, or --dtype to convert all,", to_string(three[0].array.dtype),
                         three[0].label));
    }
  }
}

void check_rank(const Named& tensor, QkvShape shape) {
  const bool packed = shape == QkvShape::packed;
  if (tensor.array.shape.size() != (packed ? 3U : 4U)) {
    refuse(tensor, "shape " + shape_text(tensor.array.shape),
           packed ? "[total, heads, head_dim] with --cu-seqlens-q and --cu-seqlens-kv"
                  : "[batch, seqlen, heads, head_dim], or [total, heads, head_dim] with "
                    "--cu-seqlens-q and --cu-seqlens-kv,");
  }
}

/// Dimension `at` of a tensor must be that of another.
void check_equal(const Named& tensor, const Named& other, std::size_t at, const char* what) {
  const std::int64_t wanted = other.array.shape[at];
  if (tensor.array.shape[at] != wanted) {
    refuse(tensor, fmt::format("{} {}", what, tensor.array.shape[at]),
           fmt::format("{} as in {}", wanted, other.label));
  }
}

void check_shapes(const Three& three, QkvShape shape) {
  for (const Named& tensor : three) {
    check_rank(tensor, shape);
  }
  const auto& [q, k, v] = three;
  const std::size_t rank = q.array.shape.size();
  check_equal(k, q, rank - 1, "head_dim");
  check_equal(v, k, rank - 2, "heads");
  if (shape == QkvShape::dense) {
    check_equal(k, q, 0, "batch");
    check_equal(v, k, 0, "batch");
    check_equal(v, k, 1, "seqlen");
  } else {
    check_equal(v, k, 0, shape == QkvShape::packed ? "total" : "pages");
    if (shape == QkvShape::paged) {
      check_equal(v, k, 1, "page_size");
    }
  }
  // To the library 0 heads_kv and 0 head_dim_v mean a default; as sizes of an array they are wrong.
  for (const Named& tensor : three) {
    if (tensor.array.shape[rank - 2] < 1) {
      refuse(tensor, "0 heads", "1 or more");
    }
    if (tensor.array.shape[rank - 1] < 1) {
      refuse(tensor, "head_dim 0", "1 or more");
    }
  }
}

/// k and v are what --kv-dtype says, where it is given.
void check_kv_dtype(const Three& three, std::optional<DType> kv_dtype) {
  for (std::size_t i = 1; kv_dtype && i < three.size(); ++i) {
    if (three[i].array.dtype != *kv_dtype) {
      refuse(three[i], to_string(three[i].array.dtype),
             fmt::format("{} (--kv-dtype; caches are not converted)", to_string(*kv_dtype)));
    }
  }
}

/// The scales of k or v in int8 or e4m3, of its shape with a head_dim of 1 (which may be left out).
Array read_scale(const std::string& path, const std::string& flag, const Named& of) {
  Named scale{value_or_fail(read_npy(path, Expect::values, flag)), flag + " " + one_line(path)};
  std::vector<std::int64_t> wanted = of.array.shape;
  wanted.pop_back();
  if (scale.array.shape == wanted) {
    scale.array.shape.push_back(1);
  }
  wanted.push_back(1);
  if (scale.array.dtype != DType::f32 || scale.array.shape != wanted) {
    refuse(scale, fmt::format("{} {}", to_string(scale.array.dtype), shape_text(scale.array.shape)),
           fmt::format("float32 {} as in {}", shape_text(wanted), of.label));
  }
  return scale.array;
}

/// Scales of k and v in int8, which have them, and in e4m3, which may.
void read_scales(const QkvFlags& flags, const Three& three, Qkv& qkv) {
  const auto& [q, k, v] = three;
  if (k.array.dtype != v.array.dtype) {
    refuse(v, to_string(v.array.dtype),
           fmt::format("{} as in {}", to_string(k.array.dtype), k.label));
  }
  const bool wanted = k.array.dtype == DType::int8;
  const bool allowed = is_8_bit(k.array.dtype);
  const std::pair<const char*, const std::string*> files[] = {{"--k-scale", &flags.k_scale},
                                                              {"--v-scale", &flags.v_scale}};
  for (const auto& [flag, path] : files) {
    if (wanted && path->empty()) {
      fail_flag(flag, "nothing", "FILE.npy, a scale for each row of k and v in int8,");
    }
    if (!allowed && !path->empty()) {
      fail_flag(flag, one_line(*path),
                fmt::format("none (k and v are {}, without scales)", to_string(k.array.dtype)));
    }
  }
  if (!flags.k_scale.empty()) {
    qkv.k_scale = read_scale(flags.k_scale, "--k-scale", k);
  }
  if (!flags.v_scale.empty()) {
    qkv.v_scale = read_scale(flags.v_scale, "--v-scale", v);
  }
}

}  // namespace

void add_qkv(CLI::App& command, QkvFlags& flags) {
  const std::string shape = " [batch, seqlen, heads, head_dim]";
  add_text(command, "--q", flags.q, "queries" + shape, "FILE.npy");
  add_text(command, "--k", flags.k, "keys" + shape, "FILE.npy");
  add_text(command, "--v", flags.v, "values" + shape, "FILE.npy");
  add_text(command, "--qkv", flags.qkv, "tensors q, k and v in one file, in place of the three",
           "FILE.safetensors");
  add_text(command, "--qkv-prefix", flags.prefix,
           "what stands before q, k, v in the names of its tensors", "TEXT");
  add_text(command, "--k-scale", flags.k_scale,
           "float32 factor of each row of k in int8 or e4m3 [batch, seqlen, heads]", "FILE.npy");
  add_text(command, "--v-scale", flags.v_scale, "the same of v", "FILE.npy");
  add_dtype(
      command, "--kv-dtype", flags.kv_dtype,
      "of k and v; e4m3 is read from uint8 files or F8_E4M3 tensors (default: the files' own)");
}

Qkv read_qkv(const QkvFlags& flags, std::optional<DType> dtype, QkvShape shape) {
  if (dtype && *dtype != DType::f32 && *dtype != DType::f16 && *dtype != DType::bf16) {
    fail_flag("--dtype", to_string(*dtype), "f32, f16, bf16");
  }
  if (flags.qkv.empty() && !flags.prefix.empty()) {
    fail_flag("--qkv-prefix", "without --qkv", "only with --qkv");
  }
  Three three = read_three(flags, dtype == DType::bf16);
  check_shapes(three, shape);
  bring_to_one_dtype(three, dtype);
  check_kv_dtype(three, flags.kv_dtype);
  Qkv qkv{three[0].array, three[1].array, three[2].array};
  read_scales(flags, three, qkv);
  return qkv;
}

AttentionProblem dense_problem(const Qkv& qkv) {
  AttentionProblem problem;
  problem.batch = qkv.q.shape[0];
  problem.seqlen_q = qkv.q.shape[1];
  problem.heads_q = qkv.q.shape[2];
  problem.head_dim = qkv.q.shape[3];
  problem.seqlen_kv = qkv.k.shape[1];
  problem.heads_kv = qkv.k.shape[2];
  problem.head_dim_v = qkv.v.shape[3];
  problem.dtype = qkv.q.dtype;
  if (qkv.k.dtype != qkv.q.dtype) {
    problem.kv_dtype = qkv.k.dtype;  // else it follows dtype, which callers may change
  }
  return problem;
}

TensorView view_of(const Array& array) {
  const std::vector<std::int64_t>& s = array.shape;
  return s.size() == 3
             ? TensorView::contiguous(array.data.get(), array.dtype, 1, s[0], s[1], s[2])
             : TensorView::contiguous(array.data.get(), array.dtype, s[0], s[1], s[2], s[3]);
}

}  // namespace rafter::cli
