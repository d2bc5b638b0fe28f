#include "support/backward_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <random>
#include <utility>

#include "rafter/kernels.h"
#include "rafter/measure.h"
#include "support/oracle.h"
#include "support/oracle_backward.h"
#include "support/placed.h"

namespace rafter::testing {
namespace {

/// An lse in memory: heads a padded row apart.
struct PlacedLse {
  GuardedBuffer buffer;
  LseView view;
};
PlacedLse place_lse(std::int64_t batch, std::int64_t heads, std::int64_t rows, Fill fill) {
  PlacedLse placed;
  const std::int64_t stride = rows + 3;
  placed.buffer =
      GuardedBuffer(index(std::max<std::int64_t>(1, batch * heads * stride)) * sizeof(float), fill);
  placed.view = {
      static_cast<float*>(placed.buffer.data()), batch, heads, rows, heads * stride, stride, 1};
  return placed;
}

struct Scene {
  AttentionProblem problem;
  Placed q, k, v, o, d_o, dq, dk, dv;
  PlacedLse lse, dlse;
  Indices cu_q, cu_kv, used;
  std::vector<std::int64_t> q_starts = {0}, kv_starts = {0};  // packed: first rows

  bool packed() const { return problem.layout == Layout::packed; }
  /// Batch and row in a tensor of row i of sequence b.
  std::pair<std::int64_t, std::int64_t> at(const std::vector<std::int64_t>& starts, std::size_t b,
                                           std::int64_t i) const {
    return packed() ? std::pair(std::int64_t{0}, starts[b] + i)
                    : std::pair(static_cast<std::int64_t>(b), i);
  }
};

/// Visits (value index, batch, row, head, dim) of a tensor in the order of Values.
template <typename Visit>
void each_element(const Scene& scene, const std::vector<std::int64_t>& lengths,
                  const std::vector<std::int64_t>& starts, std::int64_t heads, std::int64_t dim,
                  Visit visit) {
  std::size_t n = 0;
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    for (std::int64_t i = 0; i < lengths[b]; ++i) {
      const auto [batch, row] = scene.at(starts, b, i);
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t d = 0; d < dim; ++d) {
          visit(n++, batch, row, h, d);
        }
      }
    }
  }
}

void write_tensor(const Scene& scene, const std::vector<std::int64_t>& lengths,
                  const std::vector<std::int64_t>& starts, const TensorView& t,
                  const std::vector<float>& values) {
  each_element(scene, lengths, starts, t.heads, t.head_dim,
               [&](std::size_t n, std::int64_t batch, std::int64_t row, std::int64_t head,
                   std::int64_t dim) { write(t, batch, row, head, dim, values[n]); });
}

void write_lse(const Scene& scene, const Case& c, const LseView& lse,
               const std::vector<float>& values) {
  each_element(
      scene, c.lengths_q, scene.q_starts, lse.heads, 1,
      [&](std::size_t n, std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t) {
        lse.data[batch * lse.stride_batch + head * lse.stride_heads + row] = values[n];
      });
}

Scene make_scene(const Case& c, const BackwardValues& values, const RunOptions& options) {
  Scene scene;
  AttentionProblem& p = scene.problem;
  p = sized_problem(c);
  const auto [heads_kv, dim_v] = dims_of(p);
  if (scene.packed()) {
    for (std::size_t b = 0; b < c.lengths_q.size(); ++b) {
      scene.q_starts.push_back(scene.q_starts.back() + c.lengths_q[b]);
      scene.kv_starts.push_back(scene.kv_starts.back() + c.lengths_kv[b] +
                                (p.seqused_kv ? static_cast<std::int64_t>(b % 2) : 0));
    }
    scene.cu_q = make_indices(scene.q_starts, options.index_dtype);
    scene.cu_kv = make_indices(scene.kv_starts, options.index_dtype);
  }
  if (p.seqused_kv) {
    scene.used = make_indices(c.lengths_kv, options.index_dtype);
  }
  const std::int64_t batch = scene.packed() ? 1 : p.batch;
  const std::int64_t rows = scene.packed() ? p.total_q : p.seqlen_q;
  const std::int64_t keys = scene.packed() ? p.total_kv : p.seqlen_kv;
  const DType out = options.problem_dtype_out ? p.dtype : DType::f32;
  const Fill fill = options.fill;
  scene.q = place(nth_style(c.style, 0), p.dtype, batch, rows, p.heads_q, p.head_dim, fill);
  scene.k = place(nth_style(c.style, 1), p.dtype, batch, keys, heads_kv, p.head_dim, fill);
  scene.v = place(nth_style(c.style, 2), p.dtype, batch, keys, heads_kv, dim_v, fill);
  const Style other = options.style_besides_qkv.value_or(c.style);
  const DType o = options.f32_o ? DType::f32 : p.dtype;
  scene.o = place(nth_style(other, 3), o, batch, rows, p.heads_q, dim_v, fill);
  scene.d_o = place(nth_style(other, 4), o, batch, rows, p.heads_q, dim_v, fill);
  scene.dq = place(nth_style(other, 5), out, batch, rows, p.heads_q, p.head_dim, fill);
  scene.dk = place(nth_style(other, 6), out, batch, keys, heads_kv, p.head_dim, fill);
  scene.dv = place(nth_style(other, 7), out, batch, keys, heads_kv, dim_v, fill);
  scene.lse = place_lse(batch, p.heads_q, rows, fill);
  scene.dlse = place_lse(batch, p.heads_q, rows, fill);
  write_tensor(scene, c.lengths_q, scene.q_starts, scene.q.view, values.in.q);
  write_tensor(scene, c.lengths_kv, scene.kv_starts, scene.k.view, values.in.k);
  write_tensor(scene, c.lengths_kv, scene.kv_starts, scene.v.view, values.in.v);
  write_tensor(scene, c.lengths_q, scene.q_starts, scene.o.view, values.o);
  write_tensor(scene, c.lengths_q, scene.q_starts, scene.d_o.view, values.d_o);
  write_lse(scene, c, scene.lse.view, values.lse);
  if (!values.dlse.empty()) {
    write_lse(scene, c, scene.dlse.view, values.dlse);
  }
  return scene;
}

/// Memory of a case where its device can reach it: itself, or copies on a CUDA device.
class Reach {
 public:
  explicit Reach(const Device& device) : device_(device) {}

  /// Where `address` of the buffer is for the device.
  template <typename T>
  T* lend(GuardedBuffer& buffer, T* address) {
    if (device_.kind == Device::Kind::cpu) {
      return address;
    }
    const auto bytes = static_cast<std::int64_t>(buffer.bytes());
    Result<DeviceMemory> memory = DeviceMemory::allocate(device_, std::max<std::int64_t>(bytes, 1));
    if (!memory || !memory->upload(buffer.data(), bytes)) {
      ADD_FAILURE() << "no device memory for " << bytes << " bytes";
      return nullptr;
    }
    const auto offset =
        reinterpret_cast<const std::byte*>(address) - static_cast<const std::byte*>(buffer.data());
    copies_.emplace_back(&buffer, *memory);
    return reinterpret_cast<T*>(static_cast<std::byte*>(memory->data()) + offset);
  }
  TensorView lend(Placed& placed) {
    TensorView view = placed.view;
    view.data = lend(placed.buffer, static_cast<std::byte*>(view.data));
    return view;
  }
  LseView lend(PlacedLse& placed) {
    LseView view = placed.view;
    view.data = lend(placed.buffer, view.data);
    return view;
  }
  IndexView lend(Indices& indices) {
    IndexView view = indices.view;
    if (view.data != nullptr) {
      view.data = lend(indices.buffer, static_cast<const std::byte*>(view.data));
    }
    return view;
  }
  /// Everything back; waits for the device.
  void fetch() const {
    for (const auto& [buffer, memory] : copies_) {
      const Status status =
          memory.download(buffer->data(), static_cast<std::int64_t>(buffer->bytes()));
      EXPECT_TRUE(status.is_ok()) << status.message();
    }
  }

 private:
  Device device_;
  std::vector<std::pair<GuardedBuffer*, DeviceMemory>> copies_;
};

/// Takes a gradient out of its tensor; every byte that belongs to no row must still be the fill.
std::vector<float> take(const char* name, const Scene& scene,
                        const std::vector<std::int64_t>& lengths,
                        const std::vector<std::int64_t>& starts, Placed& placed, Fill fill) {
  const TensorView& t = placed.view;
  std::vector<float> values;
  each_element(
      scene, lengths, starts, t.heads, t.head_dim,
      [&](std::size_t, std::int64_t batch, std::int64_t row, std::int64_t head, std::int64_t dim) {
        values.push_back(read(t, batch, row, head, dim));
        std::memset(element_at(t, batch, row, head, dim), static_cast<int>(fill),
                    static_cast<std::size_t>(bits_of(t.dtype) / 8));
      });
  const auto* const bytes = static_cast<const unsigned char*>(placed.buffer.data());
  EXPECT_TRUE(
      std::all_of(bytes, bytes + placed.buffer.bytes(),
                  [fill](unsigned char b) { return b == static_cast<unsigned char>(fill); }))
      << name << " was written outside its rows";
  EXPECT_TRUE(placed.buffer.intact()) << name << " was written outside its buffer";
  return values;
}

/// Largest of |a − b|.
double distance(const std::vector<float>& a, const std::vector<double>& b) {
  double most = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    most = std::fmax(most, std::fabs(static_cast<double>(a[i]) - b[i]));
  }
  return most;
}

double largest(const std::vector<double>& values) {
  double most = 0;
  for (const double value : values) {
    most = std::fmax(most, std::fabs(value));
  }
  return most;
}

/// Adds one head of one sequence to [Σ rows, heads, dim].
template <typename T>
void add_head(const std::vector<T>& part, std::int64_t first, std::int64_t rows, std::int64_t heads,
              std::int64_t head, std::int64_t dim, std::vector<T>& into) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t d = 0; d < dim; ++d) {
      into[index(((first + i) * heads + head) * dim + d)] += part[index(i * dim + d)];
    }
  }
}

/// Whose plan checks a call of an emulated kernel and fills in its defaults.
constexpr const char* kStandIn = "backward_simd_portable";

const KernelEntry* emulated_backward(const std::string& kernel) {
  for (const KernelEntry& entry : emulated_backwards()) {
    if (entry.name == kernel) {
      return &entry;
    }
  }
  return nullptr;
}

/// Three tensors of one element type, of a problem or of one head.
template <typename T>
struct Three {
  std::vector<T> dq, dk, dv;
};

}  // namespace

BackwardValues make_backward_values(const Case& c, bool with_dlse) {
  BackwardValues values;
  values.in = make_values(c);
  set_output(c, values);
  std::mt19937 generator(c.seed + 1000);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < values.o.size(); ++i) {
    values.d_o.push_back(round_to(c.problem.dtype, normal(generator)));
  }
  for (std::size_t i = 0; with_dlse && i < values.lse.size(); ++i) {
    values.dlse.push_back(normal(generator));
  }
  return values;
}

void set_output(const Case& c, BackwardValues& values) {
  const AttentionProblem& p = c.problem;
  const std::int64_t dim_v = dims_of(p).dim_v;
  values.o.resize(index(sum_of(c.lengths_q) * p.heads_q * dim_v));
  values.lse.resize(index(sum_of(c.lengths_q) * p.heads_q));
  std::vector<double> o(index(dim_v));
  for_each_head(c, values.in, [&](const CaseHead& at, const OracleHead& head) {
    for (std::int64_t i = 0; i < at.rows; ++i) {
      const std::size_t row = index((at.q_first + i) * p.heads_q + at.h);
      values.lse[row] = static_cast<float>(oracle_row(head, oracle_options(p), i, o.data()));
      for (std::size_t d = 0; d < o.size(); ++d) {
        values.o[row * o.size() + d] = round_to(p.dtype, static_cast<float>(o[d]));
      }
    }
  });
}

Status try_backward(const Case& c, const BackwardValues& values, const RunOptions& options,
                    Gradients& gradients) {
  Scene scene = make_scene(c, values, options);
  const KernelEntry* const emulated = emulated_backward(options.kernel);
  const std::string kernel = emulated == nullptr ? options.kernel : kStandIn;
  const Result<Plan> planned =
      plan(scene.problem, options.device,
           {.pass = Pass::backward, .kernel = kernel, .threads = options.threads});
  if (!planned) {
    return planned.status();
  }
  EXPECT_EQ(planned->kernel(), kernel);
  const KernelProblem problem = {.attention = planned->problem(), .threads = planned->threads()};
  const std::int64_t bytes =
      emulated == nullptr ? planned->workspace_bytes() : emulated->workspace(problem);
  GuardedBuffer workspace(static_cast<std::size_t>(bytes), options.fill);
  Reach reach(options.device);
  const BackwardInputs in{.q = reach.lend(scene.q),
                          .k = reach.lend(scene.k),
                          .v = reach.lend(scene.v),
                          .o = reach.lend(scene.o),
                          .lse = reach.lend(scene.lse),
                          .d_o = reach.lend(scene.d_o),
                          .dlse = values.dlse.empty() ? LseView{} : reach.lend(scene.dlse),
                          .cu_seqlens_q = reach.lend(scene.cu_q),
                          .cu_seqlens_kv = reach.lend(scene.cu_kv),
                          .seqused_kv = reach.lend(scene.used)};
  const BackwardOutputs out{reach.lend(scene.dq), reach.lend(scene.dk), reach.lend(scene.dv)};
  const Workspace lent = {reach.lend(workspace, static_cast<std::byte*>(workspace.data())),
                          static_cast<std::int64_t>(workspace.bytes())};
  const Status status = emulated == nullptr ? planned->backward(in, out, lent)
                                            : emulated->backward({problem, in, out, lent});
  reach.fetch();
  EXPECT_TRUE(workspace.intact()) << "the workspace was left";
  if (status) {
    gradients.dq = take("dq", scene, c.lengths_q, scene.q_starts, scene.dq, options.fill);
    gradients.dk = take("dk", scene, c.lengths_kv, scene.kv_starts, scene.dk, options.fill);
    gradients.dv = take("dv", scene, c.lengths_kv, scene.kv_starts, scene.dv, options.fill);
  }
  return status;
}

std::int64_t workspace_of(const AttentionProblem& problem, const std::string& kernel) {
  const KernelEntry* const emulated = emulated_backward(kernel);
  const Result<Plan> planned = plan(
      problem, Device::cpu(),
      {.pass = Pass::backward, .kernel = emulated == nullptr ? kernel : kStandIn, .threads = 2});
  EXPECT_TRUE(planned) << planned.status().message();
  return emulated == nullptr ? planned->workspace_bytes()
                             : emulated->workspace({.attention = planned->problem(), .threads = 2});
}

Status call_backward(const AttentionProblem& problem, const std::string& kernel,
                     const BackwardInputs& in, const BackwardOutputs& out) {
  const KernelEntry* const emulated = emulated_backward(kernel);
  const Result<Plan> planned = plan(
      problem, Device::cpu(),
      {.pass = Pass::backward, .kernel = emulated == nullptr ? kernel : kStandIn, .threads = 2});
  if (!planned) {
    return planned.status();
  }
  GuardedBuffer room(static_cast<std::size_t>(workspace_of(problem, kernel)), Fill::nan);
  const Workspace lent{room.data(), static_cast<std::int64_t>(room.bytes())};
  return emulated == nullptr
             ? planned->backward(in, out, lent)
             : emulated->backward({{.attention = planned->problem(), .threads = 2}, in, out, lent});
}

Gradients run_backward(const Case& c, const BackwardValues& values, const RunOptions& options) {
  Gradients gradients;
  const Status status = try_backward(c, values, options, gradients);
  EXPECT_TRUE(status.is_ok()) << options.kernel << ": " << status.message();
  return gradients;
}

ExpectedGradients expect_gradients(const Case& c, const BackwardValues& values) {
  const AttentionProblem& p = c.problem;
  const auto [heads_kv, dim_v] = dims_of(p);
  const OracleOptions options = oracle_options(p);
  const auto round = [&p](float x) { return round_to(p.dtype, x); };
  const std::int64_t total_q = sum_of(c.lengths_q), total_kv = sum_of(c.lengths_kv);
  const auto empty = [&, heads = heads_kv, dim = dim_v](auto zero) {
    using T = decltype(zero);
    return Three<T>{std::vector<T>(index(total_q * p.heads_q * p.head_dim), zero),
                    std::vector<T>(index(total_kv * heads * p.head_dim), zero),
                    std::vector<T>(index(total_kv * heads * dim), zero)};
  };
  Three<double> exact = empty(0.0), size = empty(0.0);
  Three<float> naive[2] = {empty(0.0F), empty(0.0F)};
  ExpectedGradients expected;
  for_each_head(
      c, values.in, [&, heads = heads_kv, dim = dim_v](const CaseHead& at, const OracleHead& head) {
        const auto of_rows = [&](const std::vector<float>& from, std::int64_t width) {
          return head_of(from, at.q_first, at.rows, p.heads_q, at.h, width);
        };
        const auto o = of_rows(values.o, dim), d_o = of_rows(values.d_o, dim);
        const auto dlse = values.dlse.empty() ? std::vector<double>(index(at.rows), 0.0)
                                              : of_rows(values.dlse, 1);
        const auto head_sized = [&](auto zero) {
          using T = decltype(zero);
          return Three<T>{std::vector<T>(index(at.rows * p.head_dim), zero),
                          std::vector<T>(index(at.keys * p.head_dim), zero),
                          std::vector<T>(index(at.keys * dim), zero)};
        };
        const auto gather = [&](const auto& part, auto& into) {
          add_head(part.dq, at.q_first, at.rows, p.heads_q, at.h, p.head_dim, into.dq);
          add_head(part.dk, at.kv_first, at.keys, heads, at.h_kv, p.head_dim, into.dk);
          add_head(part.dv, at.kv_first, at.keys, heads, at.h_kv, dim, into.dv);
        };
        Three<double> one = head_sized(0.0), one_size = head_sized(0.0);
        for (std::int64_t i = 0; i < at.rows; ++i) {
          oracle_backward_row(head, options, i, d_o.data() + i * dim, dlse[index(i)],
                              {one.dq.data(), one.dk.data(), one.dv.data()},
                              {one_size.dq.data(), one_size.dk.data(), one_size.dv.data()});
          expected.largest_logit =
              std::fmax(expected.largest_logit, oracle_largest_logit(head, options, i));
        }
        gather(one, exact);
        gather(one_size, size);
        for (const bool descending : {false, true}) {
          Three<float> rough = head_sized(0.0F);
          naive_backward_head(head, options, d_o.data(), o.data(), dlse.data(), descending, round,
                              rough.dq.data(), rough.dk.data(), rough.dv.data());
          gather(rough, naive[descending ? 1 : 0]);
        }
      });
  const auto finish = [&](std::vector<double> Three<double>::*of,
                          std::vector<float> Three<float>::*f, ExpectedGradient& into) {
    into.values = exact.*of;
    into.size = largest(size.*of);
    for (const Three<float>& one : naive) {
      std::vector<float> rounded;
      for (const float x : one.*f) {
        rounded.push_back(round(x));
      }
      into.naive_error = std::fmax(into.naive_error, distance(rounded, into.values));
    }
  };
  finish(&Three<double>::dq, &Three<float>::dq, expected.dq);
  finish(&Three<double>::dk, &Three<float>::dk, expected.dk);
  finish(&Three<double>::dv, &Three<float>::dv, expected.dv);
  return expected;
}

namespace {

::testing::AssertionResult compare(const char* name, const std::vector<float>& got,
                                   const ExpectedGradient& want, double largest_logit,
                                   double half_ulp) {
  if (got.size() != want.values.size()) {
    return ::testing::AssertionFailure()
           << name << " has " << got.size() << " elements, " << want.values.size() << " expected";
  }
  constexpr double kUlp32 = 0x1p-23;
  // 4 ulp of the sum of absolute terms in f32, 1 ulp of the largest logit, which exp turns into a
  // relative error of P, and half an ulp of the dtype for one more rounding of the result.
  const double bound = 1.5 * want.naive_error + (4 + largest_logit) * kUlp32 * want.size +
                       half_ulp * largest(want.values);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::fabs(static_cast<double>(got[i]) - want.values[i]);
    if (!(error <= bound)) {  // a NaN is one, too
      return ::testing::AssertionFailure()
             << name << "[" << i << "] is " << got[i] << ", " << want.values[i]
             << " expected: error " << error << " above " << bound << " = 1.5 * naive "
             << want.naive_error << " + ulps of " << want.size;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace

::testing::AssertionResult close_to(const Gradients& gradients, const ExpectedGradients& expected,
                                    const Case& c) {
  const DType dtype = c.problem.dtype;
  const double half_ulp = dtype == DType::bf16 ? 0x1p-9 : dtype == DType::f16 ? 0x1p-12 : 0;
  for (const ::testing::AssertionResult& result :
       {compare("dq", gradients.dq, expected.dq, expected.largest_logit, half_ulp),
        compare("dk", gradients.dk, expected.dk, expected.largest_logit, half_ulp),
        compare("dv", gradients.dv, expected.dv, expected.largest_logit, half_ulp)}) {
    if (!result) {
      return result;
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_bits(const Gradients& a, const Gradients& b) {
  const std::tuple<const char*, const std::vector<float>*, const std::vector<float>*> arrays[] = {
      {"dq", &a.dq, &b.dq}, {"dk", &a.dk, &b.dk}, {"dv", &a.dv, &b.dv}};
  for (const auto& [name, x, y] : arrays) {
    if (x->size() != y->size()) {
      return ::testing::AssertionFailure() << x->size() << " and " << y->size() << " elements";
    }
    for (std::size_t i = 0; i < x->size(); ++i) {
      if (std::memcmp(&(*x)[i], &(*y)[i], sizeof(float)) != 0) {
        return ::testing::AssertionFailure()
               << name << "[" << i << "]: " << (*x)[i] << " and " << (*y)[i];
      }
    }
  }
  return ::testing::AssertionSuccess();
}

std::vector<std::string> backward_kernels() {
  std::vector<std::string> names = cpu_kernels(Pass::backward);
  for (const KernelEntry& entry : emulated_backwards()) {
    names.emplace_back(entry.name);
  }
  return names;
}

std::vector<DType> backward_dtypes(const std::string& kernel, std::initializer_list<DType> of) {
  std::vector<DType> taken;
  const auto take = [&](const std::vector<DType>& dtypes) {
    std::copy_if(of.begin(), of.end(), std::back_inserter(taken), [&](DType dtype) {
      return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
    });
  };
  if (const KernelEntry* const emulated = emulated_backward(kernel)) {
    take(emulated->dtypes);
  }
  for (const KernelInfo& info : list_kernels()) {
    if (info.name == kernel) {
      take(info.dtypes);
    }
  }
  return taken;
}

std::string backward_refusal_of(const Case& c, const std::string& kernel) {
  const KernelEntry* const emulated = emulated_backward(kernel);
  const Result<Plan> planned =
      plan(sized_problem(c), Device::cpu(),
           {.pass = Pass::backward, .kernel = emulated == nullptr ? kernel : kStandIn});
  if (!planned || emulated == nullptr) {
    return planned ? std::string() : planned.status().message();
  }
  const Acceptance taken = emulated->accepts({.attention = planned->problem()});
  return taken.yes ? std::string() : kernel + ": " + taken.reason;
}

}  // namespace rafter::testing
