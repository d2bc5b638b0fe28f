// The operations of a prefill or decode step, in the order in which they are queued.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "transformer/session.h"

namespace rafter::transformer {
namespace {

using State = detail::SessionState;

/// `count` elements of the indices of a step, from `first` on.
IndexView indices_of(const Step& step, std::int64_t first, std::int64_t count) {
  return {static_cast<const std::int32_t*>(step.buffers.indices.data()) + first, DType::i32, count};
}

Cost pointwise_cost(double elements, double reads, double writes, double flops, DType dtype) {
  const Result<Cost> cost = elementwise_cost({elements, reads, writes, flops, dtype});
  return cost ? *cost : Cost{};  // elements and dtype are of a checked config
}

class Builder {
 public:
  Builder(const State& state, const Step& step)
      : state_(&state),
        step_(step),
        config_(state_->model.config()),
        m_(config_.model),
        device_(state_->model.device()),
        dtype_(state_->model.dtype()),
        n_(step.tokens) {}

  std::vector<StepOperation> build() {
    embed();
    const bool chains = !longest_chain().empty();
    if (chains) {
      layer_ = 0;
      chain("qkv", {qkv_link(0)});
    }
    for (layer_ = 0; layer_ < m_.num_layers; ++layer_) {
      if (chains) {
        attend_on_cache();
        chain("chain", links_behind_attention());
        continue;
      }
      norm(layer_ > 0, Slot::input_norm);
      attention_block();
      norm(true, Slot::mlp_norm);
      mlp_block();
    }
    layer_ = -1;
    add_norm(view(b().projected), !chains, state_->weights().norm);
    logits();
    if (step_.phase == Phase::decode) {
      advance_lengths();
    }
    return std::move(operations_);
  }

  std::int64_t chain_workspace_bytes() {
    const std::vector<Link> links = longest_chain();
    return links.empty() ? 0 : linear_chain_workspace_bytes(links, device_);
  }

 private:
  const StepBuffers& b() const { return step_.buffers; }
  TensorView view(const Storage& storage, std::int64_t cols) const {
    return matrix(storage.data(), dtype_, n_, cols);
  }
  TensorView view(const Storage& storage) const { return view(storage, m_.hidden_size); }
  double tokens() const { return static_cast<double>(n_); }
  std::int64_t q_cols() const { return m_.heads_q * m_.head_dim; }
  std::int64_t kv_cols() const { return m_.heads_kv * m_.head_dim; }
  std::int64_t qkv_cols() const { return q_cols() + 2 * kv_cols(); }
  TensorView qkv() const { return view(b().qkv, qkv_cols()); }

  /// Adds an operation; `run(device, stream)` queues it. One launch is counted, though a product of
  /// 3 to 256 rows may take two.
  template <typename Run>
  void add(std::string name, std::string kernel, Cost cost, Run run) {
    cost.launches = 1;
    operations_.push_back(
        {std::move(name), layer_, std::move(kernel), std::move(cost),
         [device = device_, run = std::move(run)](Stream stream) { return run(device, stream); }});
  }

  void embed() {
    const TensorView table = view_of(state_->weights().embedding, dtype_), out = view(b().residual);
    const IndexView rows = indices_of(step_, step_.places.tokens, n_);
    add("embedding", "gather",
        pointwise_cost(tokens() * static_cast<double>(m_.hidden_size), 1, 1, 0, dtype_),
        [=](const Device& device, Stream stream) {
          return gather(table, rows, out, device, stream);
        });
  }

  /// normed = RMSNorm of the residual stream; with `adds` the residual stream first takes up the
  /// block before.
  void norm(bool adds, Slot slot) {
    add_norm(view(b().projected), adds, state_->weights().at(layer_, slot));
  }
  void add_norm(const TensorView& block, bool adds, const Matrix& weight) {
    const TensorView sum = view(b().residual), y = view(b().normed);
    const TensorView w = view_of(weight, dtype_);
    const double elements = tokens() * static_cast<double>(m_.hidden_size);
    const auto eps = static_cast<float>(config_.rms_norm_eps);
    if (adds && state_->options.fuse) {
      add("add_rmsnorm", "rmsnorm", pointwise_cost(elements, 2, 2, 5, dtype_),
          [=](const Device& device, Stream stream) {
            return rmsnorm({.x = block, .residual = sum, .weight = w, .eps = eps},
                           {.y = y, .sum = sum}, device, stream);
          });
      return;
    }
    if (adds) {
      add("add", "pointwise", pointwise_cost(elements, 2, 1, 1, dtype_),
          [=](const Device& device, Stream stream) {
            return pointwise(Pointwise::add, block, sum, sum, device, stream);
          });
    }
    add("rmsnorm", "rmsnorm", pointwise_cost(elements, 1, 1, 4, dtype_),
        [=](const Device& device, Stream stream) {
          return rmsnorm({.x = sum, .weight = w, .eps = eps}, {.y = y}, device, stream);
        });
  }

  void product(const char* name, const TensorView& x, const Matrix& weight, const TensorView& out,
               const Matrix* bias = nullptr) {
    const TensorView w = view_of(weight, dtype_);
    const PackedWeight packed = packed_of(weight);
    const TensorView added = bias != nullptr ? view_of(*bias, dtype_) : TensorView{};
    const Workspace lent{b().linear_workspace.data(), b().linear_workspace.bytes()};
    const std::string kernel = linear_kernel(x.seqlen, dtype_, device_, packed);
    const bool dequantizes = kernel.starts_with("dequantize");
    add(name, kernel, product_cost(x.seqlen, weight, out.dtype, added.data != nullptr, dequantizes),
        [=](const Device& device, Stream stream) {
          return linear(
              {.x = x, .weight = w, .packed = packed, .bias = added, .weight_is_settled = true},
              out, lent, device, stream);
        });
    operations_.back().cost.launches += dequantizes ? 1 : 0;
  }

  /// A dequantised weight is written once and read once more.
  Cost product_cost(std::int64_t rows, const Matrix& weight, DType out, bool has_bias,
                    bool dequantizes) const {
    const Result<Cost> counted = gemm_cost({.m = rows,
                                            .n = weight.rows,
                                            .k = weight.cols,
                                            .dtype = dtype_,
                                            .weight_dtype = weight.packed});
    Cost cost = counted ? *counted : Cost{};
    const auto n = static_cast<double>(weight.rows),
               elements = n * static_cast<double>(weight.cols);
    const auto count = [&cost](const char* term, double bytes) {
      cost.bytes += bytes;
      cost.bytes_by_term.push_back({term, bytes});
    };
    if (out != dtype_) {
      count("c (f32)", static_cast<double>(rows) * n * (bytes_of(out) - bytes_of(dtype_)));
    }
    if (has_bias) {
      count("bias", n * bytes_of(dtype_));
    }
    if (weight.packed) {
      count("scales",
            static_cast<double>(weight.storage.bytes()) - elements * bytes_of(*weight.packed));
    }
    if (dequantizes) {
      count("dequantized weight", 2 * elements * bytes_of(dtype_));
    }
    return cost;
  }

  void head_norm(const char* name, const TensorView& heads, Slot slot) {
    const TensorView w = view_of(state_->weights().at(layer_, slot), dtype_);
    const auto eps = static_cast<float>(config_.rms_norm_eps);
    add(name, "rmsnorm", pointwise_cost(static_cast<double>(heads.elements()), 1, 1, 4, dtype_),
        [=](const Device& device, Stream stream) {
          return rmsnorm({.x = heads, .weight = w, .eps = eps}, {.y = heads}, device, stream);
        });
  }

  void attention_block() {
    const Weights& w = state_->weights();
    const Matrix& bias = w.at(layer_, Slot::qkv_bias);
    product("qkv", view(b().normed), w.at(layer_, Slot::qkv), qkv(),
            bias.storage ? &bias : nullptr);
    attend_on_cache();
    const Matrix& o_bias = w.at(layer_, Slot::o_bias);
    product("o", view(b().attended, q_cols()), w.at(layer_, Slot::o), view(b().projected),
            o_bias.storage ? &o_bias : nullptr);
  }

  /// From q, k and v to what is attended.
  void attend_on_cache() {
    if (m_.qk_norm) {
      head_norm("q_norm", heads_of(columns(qkv(), 0, q_cols()), m_.heads_q, m_.head_dim),
                Slot::q_norm);
      head_norm("k_norm", heads_of(columns(qkv(), q_cols(), kv_cols()), m_.heads_kv, m_.head_dim),
                Slot::k_norm);
    }
    if (turns_apart()) {
      turn();
    }
    append_rows();
    attend();
  }

  // ---- decode of few sequences: all between two attentions in one launch

  Link link(const TensorView& x, Slot weight, Slot bias, const TensorView& out, LinkEnd end,
            std::int64_t layer) const {
    const Matrix& matrix = state_->weights().at(layer, weight);
    const Matrix& added = state_->weights().at(layer, bias);
    return {.x = x,
            .weight = view_of(matrix, dtype_),
            .packed = packed_of(matrix),
            .bias = added.storage ? view_of(added, dtype_) : TensorView{},
            .out = out,
            .end = end};
  }
  Link qkv_link(std::int64_t layer) const {
    Link l = link(view(b().residual), Slot::qkv, Slot::qkv_bias, qkv(), LinkEnd::store, layer);
    l.norm = view_of(state_->weights().at(layer, Slot::input_norm), dtype_);
    return l;
  }
  /// With the next layer's qkv, where there is one.
  std::vector<Link> links_behind_attention() const {
    const TensorView residual = view(b().residual), act = view(b().activated, m_.intermediate_size);
    Link gate_up = link(residual, Slot::gate_up, Slot::gate_up_bias, act, LinkEnd::swiglu, layer_);
    gate_up.norm = view_of(state_->weights().at(layer_, Slot::mlp_norm), dtype_);
    std::vector<Link> links = {
        link(view(b().attended, q_cols()), Slot::o, Slot::o_bias, residual, LinkEnd::add, layer_),
        gate_up, link(act, Slot::down, Slot::down_bias, residual, LinkEnd::add, layer_)};
    if (layer_ + 1 < m_.num_layers) {
      links.push_back(qkv_link(layer_ + 1));
    }
    return links;
  }

  /// The longest chain there is, where the step has any. With plain weights it would be no quicker:
  /// they take the bus longer than the launches do that it spares.
  std::vector<Link> longest_chain() {
    if (step_.phase != Phase::decode || !state_->options.fuse ||
        !state_->model.weight_format().dtype) {
      return {};
    }
    layer_ = 0;
    std::vector<Link> links = links_behind_attention();
    links.resize(3);
    links.push_back(qkv_link(0));
    return why_no_linear_chain(links, device_).empty() ? links : std::vector<Link>{};
  }

  void chain(const char* name, const std::vector<Link>& links) {
    Cost cost;
    cost.dtype = dtype_;
    for (const Link& l : links) {
      add_link(l, cost);
    }
    cost.footprint_bytes = cost.bytes;
    const Workspace lent{b().chain_workspace.data(), b().chain_workspace.bytes()};
    add(name, "chain_rows", std::move(cost),
        [=, eps = static_cast<float>(config_.rms_norm_eps)](const Device& device, Stream stream) {
          return linear_chain(links, eps, lent, device, stream);
        });
  }

  /// The product, what is done to x and with the columns, and the bytes of all.
  void add_link(const Link& l, Cost& cost) const {
    const bool packed = l.packed.k > 0;
    const std::int64_t k = l.x.head_dim, n = packed ? l.packed.n : l.weight.seqlen;
    const Result<Cost> counted =
        gemm_cost({.m = n_,
                   .n = n,
                   .k = k,
                   .dtype = dtype_,
                   .weight_dtype = packed ? std::optional<DType>(l.packed.dtype) : std::nullopt});
    if (!counted) {
      return;  // sizes and dtypes are of a checked config
    }
    const auto rows = static_cast<double>(n_), columns = static_cast<double>(n);
    const double element = bytes_of(dtype_), outs = rows * static_cast<double>(l.out.head_dim);
    const double flops = (l.norm.data != nullptr ? 4 * rows * static_cast<double>(k) : 0) +
                         (l.end == LinkEnd::add ? outs : 0) +
                         (l.end == LinkEnd::swiglu ? 5 * outs : 0);
    const std::size_t first = cost.bytes_by_term.size();
    const double weights =
        columns * static_cast<double>(k) * bytes_of(packed ? l.packed.dtype : dtype_);
    add_bytes(cost, "x", rows * static_cast<double>(k) * element);
    add_bytes(cost, "weight", weights);
    add_bytes(cost, "out", outs * element);
    if (l.end == LinkEnd::add) {
      add_bytes(cost, "out, read", outs * element);
    }
    if (l.bias.data != nullptr) {
      add_bytes(cost, "bias", columns * element);
    }
    if (packed) {
      const Result<std::int64_t> all = packed_bytes(l.packed);
      add_bytes(cost, "scales", (all ? static_cast<double>(*all) : weights) - weights);
    }
    double bytes = 0;
    for (std::size_t i = first; i < cost.bytes_by_term.size(); ++i) {
      bytes += cost.bytes_by_term[i].bytes;
    }
    cost.matmul_flops += counted->matmul_flops;
    cost.softmax_flops += flops;
    cost.flops += counted->matmul_flops + flops;
    cost.untiled_bytes += counted->untiled_bytes;
    cost.kernels.push_back(
        {"gemm", counted->matmul_flops, flops, bytes, counted->kernels[0].elements});
  }

  /// A prefill on a cache of another dtype attends to its own rows, which turn in place.
  bool own_rows() const { return step_.phase == Phase::prefill && state_->quantised(); }
  bool turns_apart() const { return !state_->options.fuse || own_rows(); }

  /// Unfused: q and k turn in place. A decoded token's position is the length before it, which
  /// every run of the step lengthens.
  void turn() {
    const TensorView heads =
        heads_of(columns(qkv(), 0, q_cols() + kv_cols()), m_.heads_q + m_.heads_kv, m_.head_dim);
    const IndexPlaces& places = step_.places;
    const IndexView positions =
        indices_of(step_, step_.phase == Phase::decode ? places.before : places.positions, n_);
    const Rope tables = state_->rope();
    add("rope", "rope", pointwise_cost(static_cast<double>(heads.elements()), 1, 1, 3, dtype_),
        [=](const Device& device, Stream stream) {
          return rope(heads, positions, tables, heads, device, stream);
        });
  }

  /// Tokens [first, first + batch · seqlen) of sequences from `sequence` on.
  struct Group {
    std::int64_t sequence, batch, first, seqlen;
  };
  /// Sequences of one length in one launch, else each by itself.
  std::vector<Group> groups() const {
    const std::int64_t count = step_.sequences();
    const bool alike = std::all_of(step_.lengths.begin(), step_.lengths.end(),
                                   [&](std::int64_t n) { return n == step_.lengths[0]; });
    if (alike) {
      return {{0, count, 0, step_.lengths[0]}};
    }
    std::vector<Group> each;
    std::int64_t first = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      each.push_back({i, 1, first, step_.lengths[static_cast<std::size_t>(i)]});
      first += each.back().seqlen;
    }
    return each;
  }

  /// Columns of the group's rows as [batch, seqlen, heads, head_dim].
  TensorView rows_of(const Group& g, std::int64_t column, std::int64_t heads) const {
    TensorView t = heads_of(columns(qkv(), column, heads * m_.head_dim), heads, m_.head_dim);
    t.data = static_cast<std::byte*>(t.data) + g.first * t.stride_seqlen * bits_of(dtype_) / 8;
    t.batch = g.batch;
    t.seqlen = g.seqlen;
    t.stride_batch = g.seqlen * t.stride_seqlen;
    return t;
  }

  TensorView cache(const std::vector<Storage>& caches) const {
    return TensorView::contiguous(caches[static_cast<std::size_t>(layer_)].data(),
                                  state_->kv_dtype(), state_->pages(), state_->options.page_size,
                                  m_.heads_kv, m_.head_dim);
  }
  TensorView scales(const std::vector<Storage>& factors) const {
    return TensorView::contiguous(factors[static_cast<std::size_t>(layer_)].data(), DType::f32,
                                  state_->pages(), state_->options.page_size, m_.heads_kv, 1);
  }
  /// Rows of the page table.
  IndexView page_table(std::int64_t sequence, std::int64_t batch) const {
    const std::int64_t cols = state_->page_columns;
    return {static_cast<const std::int32_t*>(state_->page_table.data()) + sequence * cols,
            DType::i32, batch * cols, cols};
  }

  static void add_bytes(Cost& cost, std::string name, double bytes) {
    ByteTerm& term = cost.bytes_by_term.emplace_back();
    term.name = std::move(name);
    term.bytes = bytes;
    cost.bytes += bytes;
  }

  void append_rows() {
    const bool fused = !turns_apart(), quantised = state_->quantised();
    const double element = bytes_of(dtype_), width = static_cast<double>(kv_cols());
    for (const Group& g : groups()) {
      AppendInputs in{.k = rows_of(g, q_cols(), m_.heads_kv),
                      .v = rows_of(g, q_cols() + kv_cols(), m_.heads_kv),
                      .seqused_kv = indices_of(step_, step_.places.before + g.sequence, g.batch),
                      .page_table = page_table(g.sequence, g.batch)};
      AppendOutputs out{.k_cache = cache(state_->k_cache), .v_cache = cache(state_->v_cache)};
      if (quantised) {
        out.k_scale = scales(state_->k_scale);
        out.v_scale = scales(state_->v_scale);
      }
      const auto rows = static_cast<double>(g.batch * g.seqlen);
      Cost cost = pointwise_cost(rows * 2 * width, 1, 1, 0, dtype_);
      if (quantised) {
        const double written = rows * 2 *
                               (width * (bytes_of(state_->kv_dtype()) - element) +
                                static_cast<double>(m_.heads_kv) * 4);
        add_bytes(cost, "cache and factors, over rows", written);
      }
      if (fused) {
        in.rope = state_->rope();
        in.q = out.q = rows_of(g, 0, m_.heads_q);
        const double turned = rows * static_cast<double>(q_cols() + kv_cols());
        const double q_bytes = 2 * rows * static_cast<double>(q_cols()) * element;
        add_bytes(cost, "q", q_bytes);
        cost.softmax_flops = cost.flops = 3 * turned;
      }
      add(fused ? "rope_append" : "append", "append", std::move(cost),
          [=](const Device& device, Stream stream) { return append(in, out, device, stream); });
    }
  }

  void attend() {
    const Plan plan = *step_.plan;
    const AttentionProblem& p = plan.problem();
    ForwardInputs in;
    ForwardOutputs out{.o = heads_of(view(b().attended, q_cols()), m_.heads_q, m_.head_dim)};
    in.q = heads_of(columns(qkv(), 0, q_cols()), m_.heads_q, m_.head_dim);
    if (own_rows()) {
      in.k = heads_of(columns(qkv(), q_cols(), kv_cols()), m_.heads_kv, m_.head_dim);
      in.v = heads_of(columns(qkv(), q_cols() + kv_cols(), kv_cols()), m_.heads_kv, m_.head_dim);
    } else {
      in.k = cache(state_->k_cache);
      in.v = cache(state_->v_cache);
    }
    if (p.layout == Layout::paged && state_->quantised()) {
      in.k_scale = scales(state_->k_scale);
      in.v_scale = scales(state_->v_scale);
    }
    if (p.layout == Layout::paged) {
      for (TensorView* each : {&in.q, &out.o}) {
        each->batch = n_;
        each->seqlen = 1;
        each->stride_batch = each->stride_seqlen;
      }
      in.page_table = page_table(0, n_);
      in.seqused_kv = indices_of(step_, step_.places.after, n_);
    } else if (!own_rows()) {
      // A prompt's pages follow each other, so that its rows are rows of one long page.
      const std::int64_t rows = p.layout == Layout::packed ? p.total_kv : p.seqlen_kv;
      for (TensorView* each : {&in.k, &in.v}) {
        each->batch = 1;
        each->seqlen = rows;
        each->stride_batch = rows * each->stride_seqlen;
      }
    }
    if (p.layout == Layout::packed) {
      in.cu_seqlens_q = indices_of(step_, step_.places.cu_q, step_.sequences() + 1);
      in.cu_seqlens_kv = indices_of(step_, step_.places.cu_kv, step_.sequences() + 1);
      if (p.seqused_kv) {
        in.seqused_kv = indices_of(step_, step_.places.after, step_.sequences());
      }
    }
    const Workspace lent{b().attention_workspace.data(), b().attention_workspace.bytes()};
    const Result<Cost> cost =
        attention_cost(p, step_.attended, plan.pipeline(), Pass::forward, plan.convention());
    add("attention", plan.kernel(), cost ? *cost : plan.cost(),
        [=](const Device&, Stream stream) { return plan.forward(in, out, lent, stream); });
    operations_.back().cost.launches = plan.cost().launches;
  }

  void mlp_block() {
    const Weights& w = state_->weights();
    const std::int64_t f = m_.intermediate_size;
    const TensorView gate_up = view(b().gate_up, 2 * f), act = view(b().activated, f);
    const Matrix& up_bias = w.at(layer_, Slot::gate_up_bias);
    product("gate_up", view(b().normed), w.at(layer_, Slot::gate_up), gate_up,
            up_bias.storage ? &up_bias : nullptr);
    const TensorView gate = columns(gate_up, 0, f), up = columns(gate_up, f, f);
    const double elements = tokens() * static_cast<double>(f);
    const auto apply = [&](Pointwise function, const TensorView& a, const TensorView& other,
                           const TensorView& out, double reads, double flops) {
      add(to_string(function), "pointwise", pointwise_cost(elements, reads, 1, flops, dtype_),
          [=](const Device& device, Stream stream) {
            return pointwise(function, a, other, out, device, stream);
          });
    };
    if (state_->options.fuse) {
      apply(Pointwise::swiglu, gate, up, act, 2, 5);
    } else {
      // Not in place: the product alone, timed again and again, would go to zero.
      TensorView silu = act;
      silu.data = static_cast<std::byte*>(act.data) + n_ * f * bits_of(dtype_) / 8;
      apply(Pointwise::silu, gate, {}, silu, 1, 4);
      apply(Pointwise::multiply, silu, up, act, 2, 1);
    }
    const Matrix& down_bias = w.at(layer_, Slot::down_bias);
    product("down", act, w.at(layer_, Slot::down), view(b().projected),
            down_bias.storage ? &down_bias : nullptr);
  }

  /// Of every token, or of each sequence's last: one sequence's is a row of its own.
  void logits() {
    TensorView rows = view(b().normed);
    if (step_.logit_rows < n_ && step_.logit_rows == 1) {
      rows.data =
          static_cast<std::byte*>(rows.data) + (n_ - 1) * rows.stride_seqlen * bits_of(dtype_) / 8;
      rows.seqlen = 1;
    } else if (step_.logit_rows < n_) {
      const TensorView from = rows;
      rows = matrix(b().last.data(), dtype_, step_.logit_rows, m_.hidden_size);
      const IndexView which = indices_of(step_, step_.places.last_rows, step_.logit_rows);
      add("last_rows", "gather",
          pointwise_cost(static_cast<double>(rows.elements()), 1, 1, 0, dtype_),
          [=](const Device& device, Stream stream) {
            return gather(from, which, rows, device, stream);
          });
    }
    product("lm_head", rows, state_->weights().head_matrix(),
            matrix(b().logits.data(), DType::f32, step_.logit_rows, m_.vocab_size));
  }

  void advance_lengths() {
    const CountView counts{static_cast<std::int32_t*>(b().indices.data()) + step_.places.before,
                           2 * step_.sequences()};
    add("advance", "advance", pointwise_cost(static_cast<double>(counts.size), 1, 1, 0, DType::f32),
        [=](const Device& device, Stream stream) { return advance(counts, 1, device, stream); });
  }

  const State* state_;
  const Step& step_;
  const TransformerConfig& config_;
  const ModelConfig& m_;
  Device device_;
  DType dtype_;
  std::int64_t n_;
  std::int64_t layer_ = -1;
  std::vector<StepOperation> operations_;
};

}  // namespace

std::vector<StepOperation> operations_of(const State& state, const Step& step) {
  return Builder(state, step).build();
}

std::int64_t chain_workspace_bytes(const State& state, const Step& step) {
  return Builder(state, step).chain_workspace_bytes();
}

}  // namespace rafter::transformer
