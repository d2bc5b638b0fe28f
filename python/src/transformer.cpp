// rafter.Transformer: whole models, their sessions and logits.
#include "rafter/transformer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "module.h"
#include "results.h"

namespace rafter::python {
namespace {

std::optional<DType> dtype_named(const char* parameter, const std::optional<std::string>& name) {
  if (!name) {
    return std::nullopt;
  }
  const Result<DType> dtype = parse_dtype(*name);
  if (!dtype) {
    raise_invalid(parameter, *name, dtype.status().allowed());
  }
  return *dtype;
}

/// Token numbers of an array in host memory, [tokens].
std::vector<std::int32_t> tokens_of(const std::string& name, nb::handle array, const Place& place) {
  if (place.is_cuda()) {
    raise_invalid(name, "an array on " + text(place.device), "token numbers in host memory");
  }
  const Array read(name, array, place, Array::Access::read);
  const bool is_int = read.dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Int) &&
                      read.dtype.lanes == 1 && (read.dtype.bits == 32 || read.dtype.bits == 64);
  if (!is_int || read.rank != 1) {
    raise_invalid(is_int ? name : name + ".dtype",
                  is_int ? std::to_string(read.rank) + " dims" : "another dtype",
                  is_int ? "1: [tokens]" : "int32, int64");
  }
  const bool wide = read.dtype.bits == 64;
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < read.shape[0]; ++i) {
    const std::int64_t at = i * read.stride[0];
    const std::int64_t token = wide ? static_cast<const std::int64_t*>(read.data)[at]
                                    : static_cast<const std::int32_t*>(read.data)[at];
    if (token != static_cast<std::int32_t>(token)) {
      raise_invalid(name + "[" + std::to_string(i) + "]", std::to_string(token),
                    "numbers of tokens");
    }
    tokens.push_back(static_cast<std::int32_t>(token));
  }
  return tokens;
}

/// The session's logits [rows, vocab_size], of the library of the tokens.
nb::object logits_of(const TransformerSession& session, const Place& place, std::int64_t vocab) {
  Result<std::vector<float>> values = [&] {
    nb::gil_scoped_release released;
    return session.logits();
  }();
  raise(values.status());
  const std::array<std::int64_t, 2> shape = {static_cast<std::int64_t>(values->size()) / vocab,
                                             vocab};
  const ResultArray result("logits", nb::none(), place, shape, DType::f32);
  std::copy(values->begin(), values->end(), static_cast<float*>(result.tensor().array.data));
  return result.finish(place);
}

/// Sequences of a model, which it keeps.
class Session {
 public:
  Session(const Transformer& model, const SessionOptions& options)
      : vocab_(model.config().model.vocab_size),
        session_(value_or_raise(TransformerSession::make(model, options))) {}

  nb::object prefill(const nb::list& prompts) {
    if (prompts.size() == 0) {
      raise_invalid("prompts", "none", "one or more");
    }
    const Place place = place_of("prompts[0]", prompts[0], nb::none());
    std::vector<std::vector<std::int32_t>> all;
    for (std::size_t b = 0; b < prompts.size(); ++b) {
      all.push_back(tokens_of("prompts[" + std::to_string(b) + "]", prompts[b], place));
    }
    Status done;
    {
      nb::gil_scoped_release released;
      done = session_.prefill(all);
    }
    raise(done);
    return logits_of(session_, place, vocab_);
  }
  nb::object decode(nb::handle tokens) {
    const Place place = place_of("tokens", tokens, nb::none());
    const std::vector<std::int32_t> next = tokens_of("tokens", tokens, place);
    Status done;
    {
      nb::gil_scoped_release released;
      done = session_.decode(next);
    }
    raise(done);
    return logits_of(session_, place, vocab_);
  }
  std::vector<std::int64_t> lengths() const { return session_.lengths(); }
  double cache_bytes() const { return session_.cache_bytes(); }

 private:
  std::int64_t vocab_;
  TransformerSession session_;
};

nb::dict config_dict(const Transformer& model) {
  const TransformerConfig& config = model.config();
  const ModelConfig& m = config.model;
  nb::dict d;
  d["name"] = m.name;
  d["hidden_size"] = m.hidden_size;
  d["intermediate_size"] = m.intermediate_size;
  d["num_layers"] = m.num_layers;
  d["heads_q"] = m.heads_q;
  d["heads_kv"] = m.heads_kv;
  d["head_dim"] = m.head_dim;
  d["vocab_size"] = m.vocab_size;
  d["tie_word_embeddings"] = m.tie_word_embeddings;
  d["sliding_window"] = m.sliding_window;
  d["rms_norm_eps"] = config.rms_norm_eps;
  d["rope_theta"] = config.rope.theta;
  return d;
}

/// int8, e4m3 or int4 by name; none: the model's dtype.
WeightFormat format_of(const std::optional<std::string>& weights, std::int64_t group_size) {
  return {.dtype = dtype_named("weights", weights), .group_size = group_size};
}

TransformerConfig config_of(const std::string& given, const std::string& kind) {
  return value_or_raise(kind == "json"   ? parse_transformer(given)
                        : kind == "file" ? load_transformer(given)
                                         : find_transformer(given));
}

Session make_session(const Transformer& model, const nb::dict& options) {
  SessionOptions o;
  const auto length = [&](const char* name) {
    return argument<std::int64_t>(name, options[name], "a whole number");
  };
  o.max_batch = length("max_batch");
  o.max_seqlen = length("max_seqlen");
  o.page_size = length("page_size");
  const auto prefill = argument<std::string>("prefill", options["prefill"], "a pipeline");
  const Result<Pipeline> pipeline = parse_pipeline(prefill);
  if (!pipeline) {
    raise_invalid("prefill", prefill, "unfused, half-fused, fused");
  }
  o.prefill = *pipeline;
  o.fuse = argument<bool>("fuse", options["fuse"], "True or False");
  o.all_logits = argument<bool>("all_logits", options["all_logits"], "True or False");
  o.kv_dtype = dtype_named("kv_dtype", argument<std::optional<std::string>>(
                                           "kv_dtype", options["kv_dtype"], "a dtype's name"));
  return {model, o};
}

}  // namespace

void bind_transformer(nb::module_& m) {
  nb::class_<Session>(m, "Session")
      .def("prefill", &Session::prefill, nb::arg("prompts"))
      .def("decode", &Session::decode, nb::arg("tokens"))
      .def_prop_ro("lengths", &Session::lengths)
      .def_prop_ro("cache_bytes", &Session::cache_bytes);
  nb::class_<Transformer>(m, "Transformer")
      .def_static(
          "load",
          [](const std::string& folder, const std::string& device,
             const std::optional<std::string>& dtype, const std::optional<std::string>& weights,
             std::int64_t group_size) {
            const Device on = device_named(device);
            const std::optional<DType> wanted = dtype_named("dtype", dtype);
            const WeightFormat format = format_of(weights, group_size);
            Result<Transformer> model = [&] {
              nb::gil_scoped_release released;
              return Transformer::load(folder, on, wanted, format);
            }();
            return value_or_raise(std::move(model));
          },
          nb::arg("folder"), nb::arg("device"), nb::arg("dtype").none(), nb::arg("weights").none(),
          nb::arg("group_size"))
      .def_static(
          "random",
          [](const std::string& config, const std::string& kind, std::uint64_t seed,
             const std::string& device, const std::optional<std::string>& dtype,
             const std::optional<std::string>& weights, std::int64_t group_size) {
            const TransformerConfig known = config_of(config, kind);
            const Device on = device_named(device);
            const std::optional<DType> wanted = dtype_named("dtype", dtype);
            const WeightFormat format = format_of(weights, group_size);
            Result<Transformer> model = [&] {
              nb::gil_scoped_release released;
              return Transformer::random(known, seed, on, wanted, format);
            }();
            return value_or_raise(std::move(model));
          },
          nb::arg("config"), nb::arg("kind"), nb::arg("seed"), nb::arg("device"),
          nb::arg("dtype").none(), nb::arg("weights").none(), nb::arg("group_size"))
      .def("session", &make_session, nb::arg("options"))
      .def_prop_ro("config", &config_dict)
      .def_prop_ro("device", [](const Transformer& model) { return text(model.device()); })
      .def_prop_ro("dtype", [](const Transformer& model) { return to_string(model.dtype()); })
      .def_prop_ro("weights",
                   [](const Transformer& model) {
                     return to_string(model.weight_format().dtype.value_or(model.dtype()));
                   })
      .def_prop_ro("weight_bytes", &Transformer::weight_bytes);
}

}  // namespace rafter::python
