// One forward pass of a Llama-like model: its products, its attention, its elementwise kernels and
// its launches, each with FLOPs, bytes and time.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/attention_terms.h"
#include "model/check.h"
#include "model/elementwise_terms.h"
#include "model/model_shape.h"
#include "model/predict.h"
#include "model/solve.h"

namespace rafter {

using model::check_range;
using model::Elementwise;
using model::first_error;

namespace {

/// FLOPs, bytes and seconds of a class of kernels.
struct Work {
  double flops = 0, bytes = 0, seconds = 0;
};

/// A step with every default filled in, at a length and batch that may be real.
struct Step {
  const ModelStep& request;
  const Convention& convention;
  ParameterCount params;
  Ridge roof;
  DType weight_dtype, kv_dtype;
  double seqlen = 0, batch = 0;
  const DeviceSpec* measured = nullptr;  // has what products of attention reach; null: the roofs

  bool prefill() const { return request.phase == Phase::prefill; }
  double tokens() const { return prefill() ? batch * seqlen : batch; }
  double logits() const { return prefill() && request.all_logits ? tokens() : batch; }
  double layers() const { return static_cast<double>(request.model.num_layers); }
  double bandwidth() const { return convention.bandwidth_efficiency * roof.bandwidth_bytes_per_s; }
};

/// Distinct experts of a layer that `tokens` tokens meet, each going to experts_per_token of them,
/// evenly and independently: one expert is missed by a token with probability 1 − k/E.
double experts_met(const ModelConfig& m, double tokens) {
  const auto experts = static_cast<double>(m.num_experts);
  const auto each = static_cast<double>(m.experts_per_token);
  return m.has_experts() ? experts * (1 - std::pow(1 - each / experts, tokens)) : 0;
}

/// One product of the model: [m, k] · [k, n], `count` times.
struct Product {
  double m, n, k, count;
};

std::vector<Product> products_of(const Step& step) {
  const ModelConfig& m = step.request.model;
  const double tokens = step.tokens();
  const auto h = static_cast<double>(m.hidden_size), f = static_cast<double>(m.intermediate_size);
  const auto q = static_cast<double>(m.heads_q) * static_cast<double>(m.head_dim);
  const auto kv = static_cast<double>(m.heads_kv) * static_cast<double>(m.head_dim);
  std::vector<Product> products = {{tokens, q, h, step.layers()},       // q
                                   {tokens, kv, h, 2 * step.layers()},  // k, v
                                   {tokens, h, q, step.layers()},       // o
                                   {step.logits(), static_cast<double>(m.vocab_size), h, 1}};
  double mlps = 1, rows = tokens;  // MLPs that are read, and the rows of each
  if (m.has_experts()) {
    mlps = experts_met(m, tokens);
    rows = mlps > 0 ? tokens * static_cast<double>(m.experts_per_token) / mlps : 0;
    products.push_back({tokens, static_cast<double>(m.num_experts), h, step.layers()});  // router
  }
  products.push_back({rows, f, h, 2 * step.layers() * mlps});  // gate, up
  products.push_back({rows, h, f, step.layers() * mlps});      // down
  return products;
}

struct Gemms {
  Work work;
  double weight_bytes = 0, activation_bytes = 0, weights_seconds = 0;
  double untiled_seconds = 0;  // every operand of every multiply-add fetched
};

/// Weight products. Under all_params they are one lump of 2 N FLOPs a token over N weights (with
/// experts, over those that are read); else each product by itself, an n_params override scaling
/// weights and FLOPs alike.
Gemms gemms_of(const Step& step) {
  const Convention& c = step.convention;
  const double b = bytes_of(step.request.model.dtype), b_weight = bytes_of(step.weight_dtype);
  const double peak = c.compute_efficiency * step.roof.peak_flop_per_s;
  struct Item {
    double flops, weights, activations;
  };
  std::vector<Item> items;
  double counted = 0, activations = 0;
  for (const Product& p : products_of(step)) {
    const double moved = c.count_gemm_activations ? p.count * (p.m * p.k + p.m * p.n) * b : 0;
    items.push_back({2 * p.m * p.n * p.k * p.count, p.n * p.k * p.count * b_weight, moved});
    counted += p.n * p.k * p.count;
    activations += moved;
  }
  if (c.gemm_flops == GemmFlops::all_params) {
    const ModelConfig& m = step.request.model;
    const double unread = static_cast<double>(m.num_experts) - experts_met(m, step.tokens());
    const double read = step.params.total - step.layers() * unread * 3 *
                                                static_cast<double>(m.hidden_size) *
                                                static_cast<double>(m.intermediate_size);
    items = {{2 * step.params.active * step.tokens(), read * b_weight, activations}};
  } else if (c.n_params) {
    for (Item& item : items) {
      item.flops *= step.params.total / counted;
      item.weights *= step.params.total / counted;
    }
  }
  Gemms g;
  for (const Item& item : items) {
    g.weight_bytes += item.weights;
  }
  double seconds_per_weight_byte = 1 / step.bandwidth();
  if (step.request.memory_floor_s) {
    const double floor =
        *step.request.memory_floor_s * b_weight / bytes_of(step.request.memory_floor_dtype);
    seconds_per_weight_byte = floor / g.weight_bytes;
  }
  g.weights_seconds = g.weight_bytes * seconds_per_weight_byte;
  for (const Item& item : items) {
    g.work.flops += item.flops;
    g.activation_bytes += item.activations;
    g.work.seconds += std::max(item.flops / peak, item.weights * seconds_per_weight_byte +
                                                      item.activations / step.bandwidth());
    g.untiled_seconds +=
        std::max(item.flops / peak, item.flops / 2 * (b + b_weight) / step.bandwidth());
  }
  g.work.bytes = g.weight_bytes + g.activation_bytes;
  return g;
}

Mask model_mask(const ModelConfig& m, bool causal) {
  return {m.sliding_window > 0 ? m.sliding_window - 1 : -1, causal ? 0 : -1,
          MaskAlign::bottom_right};
}

Mask prefill_mask(const Step& step) {
  return model_mask(step.request.model, step.request.causal.value_or(step.convention.causal));
}

struct Attention {
  Work work;
  double kv_bytes = 0, launches_per_layer = 0;
  double untiled_seconds = 0;
};

/// All layers' attention by a pipeline, the step's or the unfused one that it is compared with; an
/// override of score passes belongs to the step's own.
Attention attention_of(const Step& step, Pipeline pipeline) {
  const ModelConfig& m = step.request.model;
  Convention c = step.convention;
  if (pipeline != step.request.pipeline) {
    c.score_passes = std::nullopt;
    c.score_block_rows = step.request.unfused_score_block_rows.value_or(c.score_block_rows);
  }
  const std::int64_t splits = pipeline == Pipeline::split_kv ? step.request.splits : 1;
  const DType kv = step.prefill() ? m.dtype : step.kv_dtype;
  const model::AttentionShape shape = model::attention_shape(m, kv, splits);
  const double rows = step.prefill() ? step.seqlen : 1;
  const double keys = step.prefill() ? step.seqlen : model::keys_kept(m, step.seqlen);
  const Mask mask = step.prefill() ? prefill_mask(step) : Mask::none();
  model::AttentionTotals totals;
  totals.add(model::totals_of(shape, rows, keys, mask, c), step.batch);
  const Cost layer = step.prefill() ? model::forward_terms(shape, totals, pipeline,
                                                           model::counted_of(c, pipeline), c)
                                    : model::decode_terms(shape, totals, pipeline, c);
  const double efficiency = c.attention_compute_efficiency.value_or(c.compute_efficiency);
  Attention a;
  a.work.flops = step.layers() * layer.flops;
  a.work.bytes = step.layers() * layer.bytes;
  const double landing = step.measured != nullptr
                             ? model::landing_seconds(layer, *step.measured, step.bandwidth())
                             : 0;
  const double peak = efficiency * step.roof.peak_flop_per_s;
  const double fused =
      step.measured != nullptr ? model::fused_seconds(layer, *step.measured, peak) : 0;
  a.work.seconds = step.layers() *
                   std::max({layer.flops / peak, layer.bytes / step.bandwidth() + landing, fused});
  a.untiled_seconds =
      step.layers() * std::max(layer.flops / peak, layer.untiled_bytes / step.bandwidth());
  a.kv_bytes = step.layers() * layer.kv_bytes;
  a.launches_per_layer = layer.launches;
  return a;
}

/// Elementwise kernels, and the parameters of norms and biases.
Work elementwise_of(const Step& step, Elementwise how) {
  if (!step.convention.count_elementwise) {
    return {};
  }
  const ModelConfig& m = step.request.model;
  const model::ElementwiseTerms terms =
      model::elementwise_terms(step.request, step.tokens(), step.logits(), step.kv_dtype, how);
  Work w{terms.flops, terms.bytes, 0};
  const double tied = m.tie_word_embeddings ? 0 : step.params.head;
  const double others = std::max(0.0, step.params.total - step.params.embedding - tied -
                                          step.layers() * step.params.layer_matmul);
  w.bytes += step.convention.n_params ? 0 : others * bytes_of(step.weight_dtype);
  w.seconds = std::max(w.flops / (step.convention.compute_efficiency * step.roof.peak_flop_per_s),
                       w.bytes / step.bandwidth());
  return w;
}
Work elementwise_of(const Step& step) {
  return elementwise_of(step, {step.request.fuse, step.request.chain});
}

/// Per layer: norm, q, k, v, RoPE, append, attention, o, add, norm, gate, up, SwiGLU, down, add;
/// beside them the embedding, the last norm, the head and the sampling. With `fuse` as a session
/// queues them: q, k and v in one product, gate and up in one, no sampling; in a chain all four
/// products of a layer, and one of q, k and v before the first. Experts: grouped products, and the
/// router, its choice and the sum of a token's experts.
double counted_launches(const Step& step, double attention_launches, Elementwise how) {
  const double experts = step.request.model.has_experts() ? 3 : 0;
  if (!how.fuse) {
    return step.layers() * (14 + experts + attention_launches) + 4;
  }
  const double elementwise =
      model::elementwise_terms(step.request, step.tokens(), step.logits(), step.kv_dtype, how)
          .kernels;
  const double products = how.chain ? 1 + step.layers() : 4 * step.layers();
  return elementwise + products + step.layers() * (experts + attention_launches) + 1;
}

/// Seconds of a figure from the convention or the device; NaN and the reason where neither has it.
model::Dispatch seconds_of(const char* key, const std::optional<double>& given,
                           const DeviceSpec& device) {
  const Figure* figure = device.find(key);
  if (given || figure != nullptr) {
    return {given ? *given : figure->value, ""};
  }
  return {std::numeric_limits<double>::quiet_NaN(),
          fmt::format("{} has no {}; give {}", device.name, key, key)};
}

model::Dispatch step_dispatch(const Step& step, double launches, const DeviceSpec& device) {
  const Convention& c = step.convention;
  if (!c.count_dispatch && !step.request.launches && !step.request.graph) {
    return {0, "launches are not counted by this convention unless given"};
  }
  if (!step.request.graph) {
    model::Dispatch one = seconds_of("launch_s", c.launch_s, device);
    one.seconds *= launches;
    return one;
  }
  model::Dispatch submit = seconds_of("graph_submit_s", c.graph_submit_s, device);
  const model::Dispatch each = seconds_of("graph_launch_s", c.graph_launch_s, device);
  submit.seconds += launches * each.seconds;
  submit.reason = submit.reason.empty() ? each.reason : submit.reason;
  return submit;
}

FuseSaving fuse_saving_of(const Step& step, double attention_launches, const DeviceSpec& device) {
  const Convention& c = step.convention;
  FuseSaving saving;
  const Elementwise apart{false}, fused{true, step.request.chain};
  saving.bytes = elementwise_of(step, apart).bytes - elementwise_of(step, fused).bytes;
  saving.launches = counted_launches(step, attention_launches, apart) -
                    counted_launches(step, attention_launches, fused);
  saving.bytes_time_s = saving.bytes / step.bandwidth();
  const model::Dispatch each = step.request.graph
                                   ? seconds_of("graph_launch_s", c.graph_launch_s, device)
                                   : seconds_of("launch_s", c.launch_s, device);
  saving.launches_time_s = saving.launches * each.seconds;
  saving.launches_reason = each.reason;
  return saving;
}

double known(double seconds) { return std::isnan(seconds) ? 0 : seconds; }

double total_seconds(const Step& step, double device_seconds, double dispatch) {
  return step.convention.time_model == TimeModel::sum ? device_seconds + known(dispatch)
                                                      : std::max(device_seconds, known(dispatch));
}

/// The step at the roofs while an idea is not applied; those that do not apply are left out.
std::vector<Ceiling> ceilings_of(const Step& step, const DeviceSpec& device, const ModelBudget& b) {
  Convention at_roofs = step.convention;  // efficiencies are of times, never of ceilings
  at_roofs.compute_efficiency = at_roofs.bandwidth_efficiency = 1;
  at_roofs.attention_compute_efficiency = std::nullopt;
  Step roofs{step.request,  at_roofs,    step.params, step.roof, step.weight_dtype,
             step.kv_dtype, step.seqlen, step.batch,  nullptr};
  const Gemms gemms = gemms_of(roofs);
  const Attention attention = attention_of(roofs, step.request.pipeline);
  const double elementwise = elementwise_of(roofs).seconds;
  std::vector<Ceiling> list;
  const auto add = [&](const char* name, double seconds, const char* advice) {
    if (seconds > 0 && std::isfinite(seconds)) {
      list.push_back({name, b.flops / seconds, advice});
    }
  };
  const double seconds = gemms.work.seconds + attention.work.seconds + elementwise;
  add("compute peak", b.flops / step.roof.peak_flop_per_s, "a narrower dtype or a wider machine");
  add("bandwidth roof", b.bytes / step.roof.bandwidth_bytes_per_s,
      "more tokens for each weight, narrower weights and cache");
  add("kernels at their roofs", seconds, "fuse kernels of one wall with those of the other");
  const double unfused =
      gemms.work.seconds + attention_of(roofs, Pipeline::unfused).work.seconds + elementwise;
  if (unfused > seconds) {
    add("no fusion", unfused, "fuse softmax with both products so that the scores never land");
  }
  add("no tiling", gemms.untiled_seconds + attention.untiled_seconds + elementwise,
      "tile: hold blocks of the operands on chip and use each many times");
  const Figure* const vector = device.find("peak_vector_f32_flop_per_s");
  if (vector != nullptr && vector->value < step.roof.peak_flop_per_s) {
    roofs.roof.peak_flop_per_s = vector->value;
    add("no tensor cores",
        gemms_of(roofs).work.seconds + attention_of(roofs, step.request.pipeline).work.seconds +
            elementwise_of(roofs).seconds,
        "use the matrix units");
  }
  add("launch", b.dispatch_time_s, "fewer launches: fuse kernels, capture a graph, batch");
  std::ranges::stable_sort(list, {}, &Ceiling::flop_per_s);
  return list;
}

/// Everything that does not need the step's own validation again: lengths may be real.
ModelBudget budget_at(const Step& step, const DeviceSpec& device) {
  const ModelStep& request = step.request;
  const Gemms gemms = gemms_of(step);
  const Attention attention = attention_of(step, request.pipeline);
  const Attention unfused = attention_of(step, Pipeline::unfused);
  const Work elementwise = elementwise_of(step);
  ModelBudget b;
  b.device = device.name;
  b.convention = step.convention.name;
  b.words = step.convention.verdict_words;
  b.n_params = step.params.total;
  b.batch = step.batch;
  b.tokens = step.tokens();
  b.gemm_flops = gemms.work.flops;
  b.attention_flops = attention.work.flops;
  b.elementwise_flops = elementwise.flops;
  b.flops = b.gemm_flops + b.attention_flops + b.elementwise_flops;
  b.weight_bytes = gemms.weight_bytes;
  b.weight_resident_bytes = step.params.total * bytes_of(step.weight_dtype);
  b.experts_read = experts_met(request.model, step.tokens());
  b.activation_bytes = gemms.activation_bytes;
  b.attention_bytes = attention.work.bytes;
  b.elementwise_bytes = elementwise.bytes;
  b.bytes = gemms.work.bytes + attention.work.bytes + elementwise.bytes;
  b.kv_bytes_per_token = model::kv_bytes_per_token(request.model, step.kv_dtype);
  b.kv_bytes = step.prefill() ? b.tokens * b.kv_bytes_per_token : attention.kv_bytes;
  b.gemm_time_s = gemms.work.seconds;
  b.attention_time_s = attention.work.seconds;
  b.elementwise_time_s = elementwise.seconds;
  b.weights_time_s = gemms.weights_seconds;
  b.device_time_s = b.gemm_time_s + b.attention_time_s + b.elementwise_time_s;

  const auto launches_with = [&](const Attention& a) {
    return request.launches.value_or(
        counted_launches(step, a.launches_per_layer, {request.fuse, request.chain}));
  };
  b.launches = launches_with(attention);
  b.launches_per_layer = b.launches / step.layers();
  const model::Dispatch dispatch = step_dispatch(step, b.launches, device);
  b.dispatch_time_s = dispatch.seconds;
  b.dispatch_reason = dispatch.reason;
  b.time_s = total_seconds(step, b.device_time_s, dispatch.seconds);
  b.dispatch_fraction = dispatch.seconds / (dispatch.seconds + b.device_time_s);

  b.fusing = fuse_saving_of(step, attention.launches_per_layer, device);

  const double unfused_device = b.device_time_s - b.attention_time_s + unfused.work.seconds;
  const model::Dispatch unfused_dispatch = step_dispatch(step, launches_with(unfused), device);
  b.unfused_time_s = total_seconds(step, unfused_device, unfused_dispatch.seconds);
  b.gain_over_unfused = b.unfused_time_s / b.time_s;
  b.attention_share = b.attention_flops / b.flops;
  b.attention_time_share = b.attention_time_s / b.device_time_s;
  b.amdahl.share = unfused.work.seconds / unfused_device;
  b.amdahl.speedup = b.attention_time_s > 0 ? unfused.work.seconds / b.attention_time_s : 1;
  b.amdahl.gain = 1 / (1 - b.amdahl.share + b.amdahl.share / b.amdahl.speedup);
  b.amdahl.bound = 1 / (1 - b.amdahl.share);

  b.intensity_flop_per_byte = b.flops / b.bytes;
  b.gemm_intensity_flop_per_byte = gemms.work.flops / gemms.work.bytes;
  b.ridge_flop_per_byte = step.roof.flop_per_byte;
  b.tokens_per_s = b.tokens / b.time_s;
  const double floor_s = request.memory_floor_s
                             ? gemms.weights_seconds
                             : gemms.weight_bytes / step.roof.bandwidth_bytes_per_s;
  const double roof_s =
      std::max(b.flops / step.roof.peak_flop_per_s,
               floor_s + (b.bytes - gemms.weight_bytes) / step.roof.bandwidth_bytes_per_s);
  b.wall = dispatch.seconds > roof_s                            ? Wall::dispatch
           : b.intensity_flop_per_byte >= b.ridge_flop_per_byte ? Wall::compute
                                                                : Wall::bandwidth;
  b.near_ridge = model::within_band(b.intensity_flop_per_byte, b.ridge_flop_per_byte,
                                    step.convention.dead_band);
  return b;
}

Status check_step(const ModelStep& s, const Convention& c) {
  const std::int64_t shortest = s.phase == Phase::prefill ? 1 : 0;
  Status checked = first_error(
      c.validate(), model::check_model(s.model),
      check_range("seqlen", s.seqlen, shortest, model::kMaxLength),
      check_range("batch", s.batch, shortest, model::kMaxLength),
      check_range("splits", s.splits, 1, model::kMaxLength),
      check_range("page_size", s.page_size, 0, model::kMaxLength),
      model::check_element("weight_dtype", s.weight_dtype.value_or(DType::bf16)),
      model::check_element("kv_dtype", s.kv_dtype.value_or(DType::bf16)),
      model::check_element("memory_floor_dtype", s.memory_floor_dtype),
      s.launches ? model::check_not_negative("launches", *s.launches) : Status::ok(),
      s.memory_floor_s ? model::check_positive("memory_floor_s", *s.memory_floor_s) : Status::ok(),
      s.capacity_bytes ? model::check_positive("capacity_bytes", *s.capacity_bytes) : Status::ok(),
      s.unfused_score_block_rows
          ? model::check_not_negative("unfused_score_block_rows", *s.unfused_score_block_rows)
          : Status::ok());
  if (!checked) {
    return checked;
  }
  if (s.chain && (s.phase != Phase::decode || s.fuse != true || s.model.has_experts())) {
    return Status::invalid_argument(
        "chain", "true",
        "false, but for a decode step with fuse = true of a model without experts");
  }
  if (s.splits > 1 && s.pipeline != Pipeline::split_kv) {
    return Status::invalid_argument("splits", std::to_string(s.splits),
                                    fmt::format("1 with pipeline = {}", to_string(s.pipeline)));
  }
  return Status::ok();
}

Result<Step> make_step(const ModelStep& request, const DeviceSpec& device, const Convention& c) {
  if (Status s = check_step(request, c); !s) {
    return s;
  }
  Step step{.request = request,
            .convention = c,
            .params = {},
            .roof = {},
            .weight_dtype = request.weight_dtype.value_or(request.model.dtype),
            .kv_dtype = request.kv_dtype.value_or(request.model.dtype),
            .seqlen = static_cast<double>(request.seqlen),
            .batch = static_cast<double>(request.batch),
            .measured = &device};
  if (request.phase == Phase::prefill) {
    if (Status s = model::check_mask(prefill_mask(step), c); !s) {
      return s;
    }
  }
  Result<ParameterCount> params = count_parameters(request.model, c);
  const Result<Ridge> roof = ridge(device, request.model.dtype, c);
  if (Status s = first_error(params.status(), roof.status()); !s) {
    return s;
  }
  step.params = std::move(*params);
  step.roof = *roof;
  return step;
}

/// Sequences of the step's length whose KV cache fits beside (or after) the weights.
Result<double> max_batch_of(const Step& step, const DeviceSpec& device) {
  const Result<double> capacity = step.request.capacity_bytes
                                      ? Result<double>(*step.request.capacity_bytes)
                                      : model::capacity_of(device, step.convention);
  if (!capacity) {
    return capacity.status();
  }
  const double weights =
      step.convention.count_weights ? step.params.total * bytes_of(step.weight_dtype) : 0;
  const double sequence = model::kv_bytes_per_token(step.request.model, step.kv_dtype) *
                          model::rows_held(step.request.model, step.seqlen, step.request.page_size);
  return std::max(0.0, std::floor((*capacity - weights) / sequence));
}

}  // namespace

std::string ModelBudget::verdict() const {
  return model::verdict_words(words, wall, near_ridge, false);
}

Result<ModelBudget> model_budget(const ModelStep& request, const DeviceSpec& device,
                                 const Convention& convention) {
  Result<Step> step = make_step(request, device, convention);
  if (!step) {
    return step.status();
  }
  std::optional<double> max_batch;
  if (request.seqlen > 0) {
    const Result<double> most = max_batch_of(*step, device);
    if (!most && request.batch == 0) {
      return most.status();
    }
    if (most) {
      max_batch = *most;
    }
  }
  if (request.batch == 0) {
    if (!max_batch || *max_batch < 1) {
      return Status::invalid_argument("batch", "0 (as many sequences as fit)",
                                      request.seqlen == 0
                                          ? "1 and up with seqlen = 0"
                                          : "a length of which one sequence fits the memory");
    }
    step->batch = *max_batch;
  }
  ModelBudget budget = budget_at(*step, device);
  budget.max_batch = max_batch;
  budget.ceilings = ceilings_of(*step, device, budget);
  return budget;
}

Result<ModelLengths> model_lengths(const ModelConfig& m, const Convention& convention) {
  const Result<ParameterCount> params = count_parameters(m, convention);
  if (!params) {
    return params.status();
  }
  const double per_pair =
      4 * static_cast<double>(m.head_dim) + convention.softmax_flops_per_element;
  const double heads = static_cast<double>(m.heads_q);
  const Mask mask = model_mask(m, convention.causal);
  if (Status s = model::check_mask(mask, convention); !s) {
    return s;
  }
  const model::AttentionShape shape = model::attention_shape(m, m.dtype, 1);
  // Attention grows with the pairs, products with the tokens: where pairs per token reach what the
  // products cost per token. A window bounds the pairs, so that it may never come.
  const auto meets = [&](double flops_per_token) {
    const auto reached = [&](double seqlen) {
      const double pairs = model::totals_of(shape, seqlen, seqlen, mask, convention).pairs;
      return pairs / seqlen * heads * per_pair >= flops_per_token;
    };
    return model::smallest_real(reached, 1, static_cast<double>(model::kMaxLength))
        .value_or(HUGE_VAL);
  };
  const bool all = convention.gemm_flops == GemmFlops::all_params || convention.n_params;
  const double weights = all ? params->active : params->active_matmul;
  ModelLengths lengths;
  lengths.attention_equals_gemm_seqlen = meets(2 * weights / static_cast<double>(m.num_layers));
  lengths.attention_equals_layer_gemm_seqlen = meets(2 * params->active_layer_matmul);
  return lengths;
}

Result<std::optional<double>> seqlen_for_gain(const ModelStep& request, double gain,
                                              const DeviceSpec& device,
                                              const Convention& convention) {
  ModelStep at_one = request;  // the length is what is sought
  at_one.phase = Phase::prefill;
  at_one.seqlen = 1;
  Result<Step> step = make_step(at_one, device, convention);
  if (Status s = first_error(step.status(), model::check_positive("gain", gain)); !s) {
    return s;
  }
  const auto reached = [&](double seqlen) {
    Step longer = *step;
    longer.seqlen = seqlen;
    return budget_at(longer, device).gain_over_unfused >= gain;
  };
  return model::smallest_real(reached, 1, static_cast<double>(model::kMaxLength));
}

}  // namespace rafter
