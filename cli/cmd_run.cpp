// rafter run: attention on the user's own arrays, results to .npy files.
#include <unistd.h>

#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "cli/args.h"
#include "cli/files.h"
#include "cli/kernel_flag.h"
#include "cli/npy_output.h"
#include "cli/output.h"
#include "cli/qkv.h"
#include "cli/resident.h"
#include "cli/run_flags.h"
#include "cli/run_inputs.h"
#include "cli/run_report.h"
#include "rafter/attention.h"
#include "rafter/kernels.h"
#include "rafter/measure.h"

namespace rafter::cli {
namespace {

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

/// The arrays of the gradients; all are computed, those with a file are kept.
struct Gradients {
  Array d_o, dlse;
  Output dq, dk, dv;
};

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
  std::vector<Output*> outputs = {&o, &lse};
  if (g) {
    fetch(placed_g->dq, g->dq.array);
    fetch(placed_g->dk, g->dk.array);
    fetch(placed_g->dv, g->dv.array);
    outputs.insert(outputs.end(), {&g->dq, &g->dk, &g->dv});
  }
  for (Output* output : outputs) {
    write_output(*output);
  }
  const TimedPass timed_forward{*plans.forward, time_runs(forward, clock)};
  std::optional<TimedPass> timed_backward;
  if (has_backward) {
    timed_backward.emplace(TimedPass{*plans.backward, time_runs(backward, clock)});
  }
  for (Output* output : outputs) {
    commit_output(*output);
  }
  report_run(flags, timed_forward, timed_backward, o.array, context);
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
