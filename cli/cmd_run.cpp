// rafter run: attention on the user's own arrays, results to .npy files.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>

#include "cli/args.h"
#include "cli/files.h"
#include "cli/kernel_flag.h"
#include "cli/npy.h"
#include "cli/output.h"
#include "cli/qkv.h"
#include "cli/resident.h"
#include "rafter/attention.h"
#include "rafter/kernels.h"
#include "rafter/measure.h"

namespace rafter::cli {
namespace {

struct RunFlags {
  QkvFlags qkv;
  std::string out, lse;
  std::optional<DType> dtype;
  std::string device = "cpu";
  std::optional<Pipeline> pipeline;
  std::string kernel;
  std::optional<std::int64_t> threads, splits;
  MaskFlags mask;
  std::optional<double> softmax_scale;
  double softcap = 0;
  std::string cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table, tree_mask;
  std::string dout, dlse, dq, dk, dv;

  /// The flags that name files to write, and where to.
  std::vector<std::pair<const char*, const std::string*>> outputs() const {
    return {{"--out", &out}, {"--lse", &lse}, {"--dq", &dq}, {"--dk", &dk}, {"--dv", &dv}};
  }
  /// Those that name files to read.
  std::vector<std::pair<const char*, const std::string*>> inputs() const {
    return {{"--q", &qkv.q},
            {"--k", &qkv.k},
            {"--v", &qkv.v},
            {"--qkv", &qkv.qkv},
            {"--k-scale", &qkv.k_scale},
            {"--v-scale", &qkv.v_scale},
            {"--dout", &dout},
            {"--dlse", &dlse},
            {"--cu-seqlens-q", &cu_seqlens_q},
            {"--cu-seqlens-kv", &cu_seqlens_kv},
            {"--seqused-kv", &seqused_kv},
            {"--page-table", &page_table},
            {"--tree-mask", &tree_mask}};
  }
};

/// Index files of the layout; those not given stay empty.
struct Indices {
  std::optional<Array> cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table;
  std::optional<Array> tree_mask;  // int64 words
};

IndexView view_of_indices(const std::optional<Array>& array) {
  if (!array) {
    return {};
  }
  return value_or_fail(Resident::copy_of(Device::cpu(), *array)).indices();
}

std::optional<Array> read_indices(const std::string& path, const std::string& flag,
                                  std::size_t rank, const char* shape) {
  if (path.empty()) {
    return std::nullopt;
  }
  Array array = value_or_fail(read_npy(path, Expect::indices, flag));
  if (array.shape.size() != rank) {
    fail(Status::invalid_argument(flag + " " + one_line(path), "shape " + shape_text(array.shape),
                                  shape));
  }
  return array;
}

Indices read_all_indices(const RunFlags& flags) {
  if (flags.cu_seqlens_q.empty() != flags.cu_seqlens_kv.empty()) {
    fail_flag(flags.cu_seqlens_q.empty() ? "--cu-seqlens-q" : "--cu-seqlens-kv", "nothing",
              "--cu-seqlens-q and --cu-seqlens-kv together");
  }
  if (!flags.cu_seqlens_q.empty() && !flags.page_table.empty()) {
    fail_flag("--page-table", "together with --cu-seqlens-q", "one of the two layouts");
  }
  Indices indices;
  indices.cu_seqlens_q = read_indices(flags.cu_seqlens_q, "--cu-seqlens-q", 1, "[batch + 1]");
  indices.cu_seqlens_kv = read_indices(flags.cu_seqlens_kv, "--cu-seqlens-kv", 1, "[batch + 1]");
  indices.seqused_kv = read_indices(flags.seqused_kv, "--seqused-kv", 1, "[batch]");
  indices.page_table =
      read_indices(flags.page_table, "--page-table", 2, "[batch, pages per sequence]");
  indices.tree_mask = read_indices(flags.tree_mask, "--tree-mask", 2, "[batch, seqlen_q]");
  if (indices.tree_mask && indices.tree_mask->dtype != DType::i64) {
    fail(Status::invalid_argument("--tree-mask " + one_line(flags.tree_mask), "int32",
                                  "int64, a word of bits for each query,"));
  }
  if (indices.cu_seqlens_q && indices.cu_seqlens_q->elements() == 0) {
    fail(Status::invalid_argument("--cu-seqlens-q " + one_line(flags.cu_seqlens_q), "no entry",
                                  "[batch + 1] entries, the first of them 0,"));
  }
  return indices;
}

/// The longest sequence, at most `total`: entries that are out of order or range are left for the
/// library to name.
std::int64_t longest(const IndexView& cu_seqlens, std::int64_t total) {
  std::int64_t most = 0;
  for (std::int64_t b = 0; b + 1 < cu_seqlens.size; ++b) {
    std::int64_t length = 0;
    if (!__builtin_sub_overflow(cu_seqlens[b + 1], cu_seqlens[b], &length)) {
      most = std::max(most, length);
    }
  }
  return std::min(most, total);
}

AttentionProblem packed_problem(const Qkv& qkv, const Indices& indices) {
  AttentionProblem problem;
  problem.layout = Layout::packed;
  problem.batch = indices.cu_seqlens_q->elements() - 1;
  problem.total_q = qkv.q.shape[0];
  problem.total_kv = qkv.k.shape[0];
  problem.seqlen_q = longest(view_of_indices(indices.cu_seqlens_q), problem.total_q);
  problem.seqlen_kv = longest(view_of_indices(indices.cu_seqlens_kv), problem.total_kv);
  problem.heads_q = qkv.q.shape[1];
  problem.heads_kv = qkv.k.shape[1];
  problem.head_dim = qkv.q.shape[2];
  problem.head_dim_v = qkv.v.shape[2];
  problem.dtype = qkv.q.dtype;
  problem.kv_dtype = qkv.k.dtype;
  return problem;
}

AttentionProblem paged_problem(const Qkv& qkv, const Array& table, const std::string& path) {
  AttentionProblem problem = dense_problem(qkv);
  problem.layout = Layout::paged;
  problem.num_pages = qkv.k.shape[0];
  problem.page_size = qkv.k.shape[1];
  if (table.shape[0] != problem.batch) {
    fail(Status::invalid_argument("--page-table " + one_line(path),
                                  "shape " + shape_text(table.shape),
                                  fmt::format("[batch = {}, pages per sequence]", problem.batch)));
  }
  if (__builtin_mul_overflow(table.shape[1], problem.page_size, &problem.seqlen_kv)) {
    fail(Status::invalid_argument("--page-table " + one_line(path),
                                  "shape " + shape_text(table.shape),
                                  "fewer than 2^63 keys per sequence"));
  }
  return problem;
}

AttentionProblem problem_of(const RunFlags& flags, const Qkv& qkv, const Indices& indices) {
  AttentionProblem problem = indices.cu_seqlens_q ? packed_problem(qkv, indices)
                             : indices.page_table
                                 ? paged_problem(qkv, *indices.page_table, flags.page_table)
                                 : dense_problem(qkv);
  problem.mask = mask_of(flags.mask);
  if (flags.softmax_scale) {
    problem.softmax_scale = static_cast<float>(*flags.softmax_scale);
  }
  problem.softcap = static_cast<float>(flags.softcap);
  problem.seqused_kv = indices.seqused_kv.has_value();
  problem.tree_mask = indices.tree_mask.has_value();
  return problem;
}

/// The same path, or another way to the same file.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code none;
  return !a.empty() && (a == b || std::filesystem::equivalent(a, b, none));
}

/// Refusals that need no file's contents.
void check_flags(const RunFlags& flags) {
  for (const auto& [flag, path] : {std::pair("--dlse", &flags.dlse), std::pair("--dq", &flags.dq),
                                   std::pair("--dk", &flags.dk), std::pair("--dv", &flags.dv)}) {
    if (!path->empty() && flags.dout.empty()) {
      fail_flag(flag, "without --dout", "only with --dout, the gradient of o,");
    }
  }
  if (!flags.dout.empty() && !flags.page_table.empty()) {
    fail_flag("--dout", "together with --page-table",
              "dense or packed keys (a gradient has no pages)");
  }
  if (required_device(flags.device).kind == Device::Kind::cuda && flags.threads) {
    fail_flag("--threads", std::to_string(*flags.threads), "none with --device cuda");
  }
  const auto outputs = flags.outputs();
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [flag, path] = outputs[i];
    for (std::size_t j = 0; j < i && !path->empty(); ++j) {
      if (same_file(*path, *outputs[j].second)) {
        fail_flag(flag, *path, fmt::format("another file than that of {}", outputs[j].first));
      }
    }
    for (const auto& [input, read] : flags.inputs()) {
      if (same_file(*path, *read)) {
        fail_flag(flag, *path, fmt::format("another file than that of {}", input));
      }
    }
    if (path->ends_with(".safetensors")) {
      fail_flag(flag, *path, "a .npy file");
    }
  }
}

/// An output array and the file it goes to.
struct Output {
  Array array;
  std::optional<OutputFile> file;
};

/// The temporary file is made before the work, so that a folder that cannot be written is refused
/// at once.
Output make_output(std::vector<std::int64_t> shape, const std::string& path,
                   const std::string& flag) {
  Output output{value_or_fail(allocate_array(DType::f32, std::move(shape), flag)), {}};
  if (!path.empty()) {
    Result<OutputFile> file = OutputFile::create(path);
    if (!file.is_ok()) {
      const Status& status = file.status();
      fail(Status(status.code(), flag + " " + one_line(path), status.given(), status.allowed()));
    }
    output.file = std::move(file).value();
  }
  return output;
}

/// Writes the array behind its header; the file appears under its name in commit() only.
void write_output(Output& output, const std::string& label) {
  if (!output.file) {
    return;
  }
  const std::string header = npy_header(output.array.shape);
  for (const std::span<const std::byte> bytes :
       {std::as_bytes(std::span(header)), std::span<const std::byte>(output.array.span())}) {
    const Status status = output.file->write(bytes.data(), bytes.size());
    if (!status) {
      fail(Status(status.code(), label, status.given(), status.allowed()));
    }
  }
}

void commit_output(Output& output, const std::string& label) {
  if (output.file) {
    const Status status = output.file->commit();
    if (!status) {
      fail(Status(status.code(), label, status.given(), status.allowed()));
    }
  }
}

/// The pass that --kernel names; forward without it.
Pass pass_of_kernel(const std::string& name) {
  for (const KernelInfo& kernel : list_kernels()) {
    if (kernel.name == name) {
      return kernel.pass;
    }
  }
  return Pass::forward;
}

/// A plan of each pass that runs, on this machine's measured ceilings where `rafter probe` has been
/// run, else on the library's estimate of them. With --dout, --pipeline is the backward's.
struct Plans {
  std::optional<Plan> forward, backward;
};
Plans make_plans(const RunFlags& flags, const AttentionProblem& problem) {
  std::optional<DeviceSpec> measured;
  const Device device = required_device(flags.device);
  const std::string probe = probe_path(device.kind);
  if (access(probe.c_str(), R_OK) == 0) {
    measured = device_of(probe, probe);
  }
  const bool has_backward = !flags.dout.empty();
  const Pass named = pass_of_kernel(flags.kernel);
  if (named == Pass::backward && !has_backward) {
    fail_flag("--kernel", flags.kernel, "a kernel of the forward pass, or --dout beside it,");
  }
  const auto make = [&](Pass pass) {
    const bool last = pass == Pass::backward || !has_backward;
    return value_or_fail(plan(problem, device,
                              {.pass = pass,
                               .pipeline = last ? flags.pipeline : std::nullopt,
                               .kernel = pass == named ? flags.kernel : "",
                               .threads = static_cast<int>(flags.threads.value_or(0)),
                               .splits = last ? flags.splits.value_or(0) : 0,
                               .device_spec = measured ? &*measured : nullptr}));
  };
  Plans plans{.forward = make(Pass::forward), .backward = {}};
  if (has_backward) {
    plans.backward = make(Pass::backward);
  }
  return plans;
}

/// Median over a fraction of a second; the first call has already given the result. With a clock,
/// on its stream, call after call.
Timing time_runs(const Work& work, const std::optional<DeviceClock>& clock) {
  const StopRule rule{.min_samples = 3, .min_time_s = 0.1, .max_time_s = 1};
  if (!clock) {
    return value_or_fail(time_calls(work, rule));
  }
  const TimedWork timed = clock->timed(work, Queueing::stream);
  return value_or_fail(time_alternating(std::span<const TimedWork>(&timed, 1), rule)).front();
}

/// The tensors and indices of a run where its device reaches them.
struct Placed {
  Resident q, k, v, o, lse, workspace;
  std::optional<Resident> cu_seqlens_q, cu_seqlens_kv, seqused_kv, page_table;
  std::optional<Resident> k_scale, v_scale, tree_mask;

  ForwardInputs inputs() const {
    const auto indices = [](const std::optional<Resident>& array) {
      return array ? array->indices() : IndexView{};
    };
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .cu_seqlens_q = indices(cu_seqlens_q),
            .cu_seqlens_kv = indices(cu_seqlens_kv),
            .seqused_kv = indices(seqused_kv),
            .page_table = indices(page_table),
            .k_scale = k_scale ? k_scale->view() : TensorView{},
            .v_scale = v_scale ? v_scale->view() : TensorView{},
            .tree_mask = tree_mask ? words(tree_mask->indices()) : BitsView{}};
  }
  static BitsView words(const IndexView& array) {
    const std::int64_t rows = array.cols > 0 ? array.size / array.cols : 0;
    return BitsView::contiguous(static_cast<const std::uint64_t*>(array.data), rows, array.cols);
  }
};

Placed place(const Device& device, const Qkv& qkv, const Indices& indices, const Array& o,
             const Array& lse, const Plan& plan) {
  const auto copy = [&device](const Array& array) {
    return value_or_fail(Resident::copy_of(device, array));
  };
  const auto maybe = [&copy](const std::optional<Array>& array) {
    return array ? std::optional(copy(*array)) : std::nullopt;
  };
  const auto given = [&copy](const Array& array) {
    return array.data != nullptr ? std::optional(copy(array)) : std::nullopt;
  };
  Result<Resident> workspace =
      Resident::empty(device, DType::int8, {plan.workspace_bytes()}, "workspace");
  if (!workspace) {
    fail(Exit::check_failed, "workspace of " + plan.kernel(), workspace.status().given());
  }
  // Rows that belong to no sequence keep what the output arrays hold.
  return {copy(qkv.q),
          copy(qkv.k),
          copy(qkv.v),
          copy(o),
          copy(lse),
          *std::move(workspace),
          maybe(indices.cu_seqlens_q),
          maybe(indices.cu_seqlens_kv),
          maybe(indices.seqused_kv),
          maybe(indices.page_table),
          given(qkv.k_scale),
          given(qkv.v_scale),
          maybe(indices.tree_mask)};
}

/// What the device holds, in the array that goes to the file.
void fetch(const Resident& from, Array& into) { into = value_or_fail(from.fetch()); }

std::int64_t nan_elements(const Array& array) {
  const float* values = reinterpret_cast<const float*>(array.data.get());
  return std::count_if(values, values + array.elements(), [](float x) { return std::isnan(x); });
}

Json echo(const AttentionProblem& problem, const char* layout) {
  Json json = Json::object();
  json["layout"] = layout;
  json["batch"] = problem.batch;
  json["heads_q"] = problem.heads_q;
  json["heads_kv"] = problem.heads_kv;
  json["seqlen_q"] = problem.seqlen_q;
  json["seqlen_kv"] = problem.seqlen_kv;
  json["head_dim"] = problem.head_dim;
  json["head_dim_v"] = problem.head_dim_v;
  json["dtype"] = to_string(problem.dtype);
  json["kv_dtype"] = to_string(*problem.kv_dtype);
  json["window_left"] = problem.mask.window_left;
  json["window_right"] = problem.mask.window_right;
  json["mask_align"] = problem.mask.align == MaskAlign::top_left ? "top-left" : "bottom-right";
  json["softmax_scale"] = number(static_cast<double>(*problem.softmax_scale));
  json["softcap"] = number(static_cast<double>(problem.softcap));
  json["tree_mask"] = problem.tree_mask;
  return json;
}

const char* layout_name(Layout layout) {
  switch (layout) {
    case Layout::packed:
      return "packed";
    case Layout::paged:
      return "paged";
    default:
      return "dense";
  }
}

/// What a pass was predicted to take, and took.
template <typename Keys>
void set_pass(Keys& keys, const Plan& plan, const Timing& timing) {
  const Prediction& predicted = plan.prediction();
  const auto set = [&keys](const char* key, Json value) {
    if constexpr (std::is_same_v<Keys, Json>) {
      keys[key] = std::move(value);
    } else {
      keys.set(key, std::move(value));
    }
  };
  set("wall", to_string(predicted.wall));
  set("near_ridge", predicted.near_ridge);
  set("predicted_time_s", number(predicted.time_s));
  set("measured_time_s", number(timing.seconds.median));
  set("measured_time_low_s", number(timing.seconds.p10));
  set("measured_time_high_s", number(timing.seconds.p90));
  set("runs", timing.seconds.n * timing.calls_per_sample);
  set("flops", number(plan.cost().flops));
  set("bytes", number(plan.cost().bytes));
  set("measured_flop_per_s", number(plan.cost().flops / timing.seconds.median));
  set("workspace_bytes", plan.workspace_bytes());
}

Json backward_json(const Plan& plan, const Timing& timing) {
  Json json = {{"kernel", plan.kernel()}, {"pipeline", to_string(plan.pipeline())}};
  set_pass(json, plan, timing);
  return json;
}

/// The arrays of the gradients; all are computed, those with a file are kept.
struct Gradients {
  Array d_o, dlse;
  Output dq, dk, dv;
};

Array read_gradient(const std::string& path, const char* flag, const RunFlags& flags,
                    const std::vector<std::int64_t>& shape, DType dtype) {
  Array array = value_or_fail(
      read_npy(path, flags.dtype == DType::bf16 ? Expect::values_bf16 : Expect::values, flag));
  const std::string label = std::string(flag) + " " + one_line(path);
  if (array.shape != shape) {
    fail(Status::invalid_argument(label, "shape " + shape_text(array.shape), shape_text(shape)));
  }
  return value_or_fail(convert(array, dtype, label));
}

Gradients make_gradients(const RunFlags& flags, const Qkv& qkv, const Array& o, const Array& lse) {
  Gradients g;
  g.d_o = read_gradient(flags.dout, "--dout", flags, o.shape, qkv.q.dtype);
  if (!flags.dlse.empty()) {
    g.dlse = read_gradient(flags.dlse, "--dlse", flags, lse.shape, DType::f32);
  }
  g.dq = make_output(qkv.q.shape, flags.dq, "--dq");
  g.dk = make_output(qkv.k.shape, flags.dk, "--dk");
  g.dv = make_output(qkv.v.shape, flags.dv, "--dv");
  // rows that belong to no sequence have no gradient
  for (const Output* output : {&g.dq, &g.dk, &g.dv}) {
    std::memset(output->array.data.get(), 0, static_cast<std::size_t>(output->array.bytes()));
  }
  return g;
}

/// The gradients where the device of a run reaches them.
struct PlacedGradients {
  Resident d_o, dlse, dq, dk, dv;
};

PlacedGradients place(const Device& device, const Gradients& g) {
  const auto copy = [&device](const Array& array) {
    return array.data == nullptr ? Resident{} : value_or_fail(Resident::copy_of(device, array));
  };
  return {copy(g.d_o), copy(g.dlse), copy(g.dq.array), copy(g.dk.array), copy(g.dv.array)};
}

LseView lse_view(const Resident& lse, const TensorView& o) {
  return LseView::contiguous(static_cast<float*>(lse.data()), o.batch, o.heads, o.seqlen);
}

void report(const RunFlags& flags, const Plans& plans, const Timing& forward,
            const std::optional<Timing>& backward, const Array& o, const Context& context) {
  const Plan& plan = *plans.forward;
  Document document;
  document.set("kernel", plan.kernel())
      .set("pipeline", to_string(plan.pipeline()))
      .set("threads", Json(plan.threads()))
      .set("problem", echo(plan.problem(), layout_name(plan.problem().layout)));
  set_pass(document, plan, forward);
  document.set("device", plan.prediction().device)
      .set("convention", plan.prediction().convention)
      .set("nan_elements", Json(nan_elements(o)));
  if (backward) {
    document.set("backward", backward_json(*plans.backward, *backward));
  }
  for (const auto& [flag, path] : flags.outputs()) {
    const std::string key = flag + 2;
    if (backward || key == "out" || key == "lse") {
      document.set(key, path->empty() ? Json(nullptr) : Json(*path));
      document.label(key, (key == "out" ? "o" : key) + " written to");
    }
  }
  document.label("nan_elements", "NaN in the output");
  document.print(context);
}

void run(const RunFlags& flags, const Context& context) {
  check_flags(flags);
  require_kernel(flags.kernel);
  const Indices indices = read_all_indices(flags);
  const QkvShape shape = indices.cu_seqlens_q ? QkvShape::packed
                         : indices.page_table ? QkvShape::paged
                                              : QkvShape::dense;
  const Qkv qkv = read_qkv(flags.qkv, flags.dtype, shape);
  const Plans plans = make_plans(flags, problem_of(flags, qkv, indices));

  std::vector<std::int64_t> o_shape = qkv.q.shape;
  o_shape.back() = qkv.v.shape.back();
  std::vector<std::int64_t> lse_shape(qkv.q.shape.begin(), qkv.q.shape.end() - 1);
  std::swap(lse_shape[lse_shape.size() - 2], lse_shape[lse_shape.size() - 1]);
  Output o = make_output(std::move(o_shape), flags.out, "--out");
  Output lse = make_output(std::move(lse_shape), flags.lse, "--lse");
  const bool has_backward = plans.backward.has_value();
  std::optional<Gradients> g;
  if (has_backward) {
    g = make_gradients(flags, qkv, o.array, lse.array);
  }
  const Plan& largest =
      has_backward && plans.backward->workspace_bytes() > plans.forward->workspace_bytes()
          ? *plans.backward
          : *plans.forward;
  const Device device = required_device(flags.device);
  const Placed placed = place(device, qkv, indices, o.array, lse.array, largest);
  std::optional<DeviceClock> clock;
  if (device.kind == Device::Kind::cuda) {
    clock = value_or_fail(DeviceClock::make(device));
  }
  const ForwardInputs in = placed.inputs();
  const TensorView o_view = placed.o.view();
  const bool wants_lse = has_backward || !flags.lse.empty();
  const LseView l_view = wants_lse ? lse_view(placed.lse, o_view) : LseView{};
  const Workspace lent{placed.workspace.data(), largest.workspace_bytes()};
  const Stream stream = clock ? clock->stream() : Stream{};
  const Work forward = [&] { return plans.forward->forward(in, {o_view, l_view}, lent, stream); };
  check(forward());
  std::optional<PlacedGradients> placed_g;
  Work backward;
  if (has_backward) {
    placed_g = place(device, *g);
    backward = [&] {
      return plans.backward->backward(
          {.q = in.q,
           .k = in.k,
           .v = in.v,
           .o = o_view,
           .lse = l_view,
           .d_o = placed_g->d_o.view(),
           .dlse = flags.dlse.empty() ? LseView{} : lse_view(placed_g->dlse, o_view),
           .cu_seqlens_q = in.cu_seqlens_q,
           .cu_seqlens_kv = in.cu_seqlens_kv,
           .seqused_kv = in.seqused_kv},
          {placed_g->dq.view(), placed_g->dk.view(), placed_g->dv.view()}, lent, stream);
    };
    check(backward());
  }
  if (clock) {
    check(clock->synchronize());
  }
  fetch(placed.o, o.array);
  fetch(placed.lse, lse.array);
  std::vector<std::pair<Output*, std::string>> outputs = {{&o, "--out " + one_line(flags.out)},
                                                          {&lse, "--lse " + one_line(flags.lse)}};
  if (g) {
    fetch(placed_g->dq, g->dq.array);
    fetch(placed_g->dk, g->dk.array);
    fetch(placed_g->dv, g->dv.array);
    outputs.insert(outputs.end(), {{&g->dq, "--dq " + one_line(flags.dq)},
                                   {&g->dk, "--dk " + one_line(flags.dk)},
                                   {&g->dv, "--dv " + one_line(flags.dv)}});
  }
  for (const auto& [output, label] : outputs) {
    write_output(*output, label);
  }
  const Timing forward_time = time_runs(forward, clock);
  const std::optional<Timing> backward_time =
      has_backward ? std::optional(time_runs(backward, clock)) : std::nullopt;
  for (const auto& [output, label] : outputs) {
    commit_output(*output, label);
  }
  report(flags, plans, forward_time, backward_time, o.array, context);
}

void add_run_flags(CLI::App& command, RunFlags& flags) {
  add_qkv(command, flags.qkv);
  add_text(command, "--out", flags.out, "o as float32, in the shape of q with head_dim of v",
           "FILE.npy");
  add_text(command, "--lse", flags.lse, "lse as float32 [batch, heads, seqlen]", "FILE.npy");
  add_dtype(command, "--dtype", flags.dtype,
            "f32, f16 or bf16: what is computed in; uint16 files are bf16 then (default: the "
            "files' own)");
  add_choice(command, "--device", flags.device, {"cpu", "cuda"}, "where to run");
  add_pipeline(command, flags.pipeline,
               "unfused, half-fused, fused or split-kv (default: the cheapest)");
  add_kernel(command, flags.kernel, "run this kernel (rafter kernels lists them)");
  add_length(command, "--threads", flags.threads, "threads (default: all cores)", {1, 4096});
  add_mask(command, flags.mask);
  constexpr double kMost = std::numeric_limits<float>::max();
  add_real(command, "--softmax-scale", flags.softmax_scale,
           "factor of the scores (default: 1 / sqrt(head_dim))", {-kMost, kMost});
  add_real(command, "--softcap", flags.softcap,
           "c: scores become c * tanh(score / c); 0 leaves them", {0, kMost});
  add_text(command, "--cu-seqlens-q", flags.cu_seqlens_q,
           "offsets [batch + 1] of packed sequences; q, k, v are then [total, heads, head_dim]",
           "FILE.npy");
  add_text(command, "--cu-seqlens-kv", flags.cu_seqlens_kv, "the same of the keys", "FILE.npy");
  add_text(command, "--seqused-kv", flags.seqused_kv, "keys in use [batch] of each sequence",
           "FILE.npy");
  add_text(
      command, "--page-table", flags.page_table,
      "pages [batch, pages per sequence]; k, v are then [pages, page_size, heads_kv, head_dim]",
      "FILE.npy");
  add_text(
      command, "--tree-mask", flags.tree_mask,
      "int64 words [batch, seqlen_q]: bit j says that the query sees new token j, which is key "
      "seqlen_kv - seqlen_q + j",
      "FILE.npy");
  add_length(command, "--splits", flags.splits, "parts that the keys are split into",
             {1, std::int64_t{1} << 20});
  add_text(command, "--dout", flags.dout,
           "gradient of o, in its shape: runs the backward pass too; --pipeline is then the "
           "backward's",
           "FILE.npy");
  add_text(command, "--dlse", flags.dlse, "gradient of lse (default: zeros)", "FILE.npy");
  add_text(command, "--dq", flags.dq, "gradient of q as float32, in its shape", "FILE.npy");
  add_text(command, "--dk", flags.dk, "gradient of k, likewise", "FILE.npy");
  add_text(command, "--dv", flags.dv, "gradient of v, likewise", "FILE.npy");
}

}  // namespace

void add_run(CLI::App& app, Context& context) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* command = app.add_subcommand("run", "attention on your own arrays");
  command->footer(examples({
      {"rafter run --q q.npy --k k.npy --v v.npy --causal --out o.npy",
       "arrays [batch, seqlen, heads, head_dim] as NumPy saves them"},
      {"rafter run --qkv tensors.safetensors --dtype bf16 --out o.npy --lse lse.npy",
       "tensors q, k, v of one file, computed in bfloat16"},
      {"rafter run --q q.npy --k k.npy --v v.npy --dout do.npy --dq dq.npy --dk dk.npy --dv dv.npy",
       "and the gradients of q, k and v"},
      {"rafter run --q q.npy --k k.npy --v v.npy --k-scale ks.npy --v-scale vs.npy --dtype bf16",
       "a cache in int8, a factor for each of its rows"},
      {"rafter run --qkv tensors.safetensors --pipeline unfused --format json",
       "time one pipeline; nothing is written"},
  }));
  add_run_flags(*command, *flags);
  add_format(*command, context);
  command->callback([flags, &context] { run(*flags, context); });
}

}  // namespace rafter::cli
