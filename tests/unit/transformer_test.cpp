// The transformer on the CPU: steps against a float64 model that is written differently.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "support/must.h"
#include "support/transformer_oracle.h"

namespace rafter {
namespace {

using Prompts = std::vector<std::vector<std::int32_t>>;

using testing::must;

/// head_dim · heads_q is not hidden_size; group 2.
TransformerConfig small_config() {
  TransformerConfig config;
  config.model = {.name = "small",
                  .hidden_size = 40,
                  .intermediate_size = 56,
                  .num_layers = 2,
                  .heads_q = 4,
                  .heads_kv = 2,
                  .head_dim = 16,
                  .vocab_size = 61,
                  .dtype = DType::f32};
  config.rms_norm_eps = 1e-5;
  return config;
}

std::vector<std::int32_t> random_tokens(std::size_t count, std::int64_t vocab, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<std::int32_t> tokens(count);
  for (std::int32_t& token : tokens) {
    token = static_cast<std::int32_t>(generator() % static_cast<unsigned>(vocab));
  }
  return tokens;
}

/// The largest error of f32 logits, with the row and column where it is.
void expect_near(const std::vector<float>& got, std::size_t first,
                 const testing::TransformerOracle::Row& wanted, const std::string& what) {
  ASSERT_LE(first + wanted.size(), got.size()) << what;
  double largest = 0;
  for (const double value : wanted) {
    largest = std::max(largest, std::abs(value));
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    // Some hundred roundings of f32 on the way, of values of this size.
    ASSERT_NEAR(got[first + i], wanted[i], 2e-5 * largest) << what << " logit " << i;
  }
}

struct Variant {
  const char* name;
  void (*change)(TransformerConfig&);
};

class EveryVariant : public ::testing::TestWithParam<Variant> {};

/// Prompts of unequal lengths prefilled together, then decoded together across a page's end: every
/// sequence as if it were alone.
TEST_P(EveryVariant, PrefillAndDecodeGiveTheLogitsOfTheDefinition) {
  TransformerConfig config = small_config();
  GetParam().change(config);
  const Transformer model = must(Transformer::random(config, 7, Device::cpu()));
  const auto oracle = testing::TransformerOracle::of(model);
  const std::int64_t vocab = config.model.vocab_size;
  for (const bool fuse : {true, false}) {
    TransformerSession session = must(TransformerSession::make(
        model, {.max_batch = 3, .max_seqlen = 24, .page_size = 4, .fuse = fuse}));
    Prompts texts = {random_tokens(7, vocab, 1), random_tokens(1, vocab, 2),
                     random_tokens(12, vocab, 3)};
    must(session.prefill(texts));
    for (int step = 0; step < 4; ++step) {
      const std::vector<float> logits = must(session.logits());
      ASSERT_EQ(logits.size(), texts.size() * static_cast<std::size_t>(vocab));
      for (std::size_t b = 0; b < texts.size(); ++b) {
        expect_near(logits, b * static_cast<std::size_t>(vocab), oracle.logits(texts[b]).back(),
                    "fuse " + std::to_string(fuse) + ", step " + std::to_string(step) +
                        ", sequence " + std::to_string(b));
      }
      const std::vector<std::int32_t> next = random_tokens(3, vocab, 10 + unsigned(step));
      must(session.decode(next));
      for (std::size_t b = 0; b < texts.size(); ++b) {
        texts[b].push_back(next[b]);
      }
    }
    EXPECT_THAT(session.lengths(), ::testing::ElementsAre(11, 5, 16));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Transformer, EveryVariant,
    ::testing::Values(
        Variant{"llama", [](TransformerConfig&) {}},
        Variant{"tied", [](TransformerConfig& c) { c.model.tie_word_embeddings = true; }},
        Variant{"biases",
                [](TransformerConfig& c) { c.model.attention_bias = c.model.mlp_bias = true; }},
        Variant{"qwen2", [](TransformerConfig& c) { c.model.qkv_bias = true; }},
        Variant{"qwen3", [](TransformerConfig& c) { c.model.qk_norm = true; }},
        Variant{"window", [](TransformerConfig& c) { c.model.sliding_window = 5; }},
        Variant{"llama3",
                [](TransformerConfig& c) {
                  c.rope = {.theta = 500.0,
                            .scaling = RopeConfig::Scaling::llama3,
                            .factor = 8,
                            .original_max_position_embeddings = 64};
                }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Transformer, OnePromptAndEqualPromptsTakeTheDenseAndTheBatchedPath) {
  const Transformer model = must(Transformer::random(small_config(), 3, Device::cpu()));
  const auto oracle = testing::TransformerOracle::of(model);
  for (const std::size_t batch : {1U, 2U}) {
    for (const Pipeline pipeline : {Pipeline::fused, Pipeline::half_fused, Pipeline::unfused}) {
      TransformerSession session = must(TransformerSession::make(model, {.max_batch = 2,
                                                                         .max_seqlen = 16,
                                                                         .page_size = 8,
                                                                         .prefill = pipeline,
                                                                         .all_logits = true}));
      Prompts texts;
      for (unsigned b = 0; b < batch; ++b) {
        texts.push_back(random_tokens(9, 61, b));
      }
      must(session.prefill(texts));
      const std::vector<float> logits = must(session.logits());
      ASSERT_EQ(logits.size(), batch * 9 * 61);
      for (std::size_t b = 0; b < batch; ++b) {
        const auto wanted = oracle.logits(texts[b]);
        for (std::size_t t = 0; t < 9; ++t) {
          expect_near(logits, (b * 9 + t) * 61, wanted[t], to_string(pipeline));
        }
      }
    }
  }
}

/// The oracle multiplies with what parameter() gives: values times scales.
TEST(Transformer, QuantizedWeightsGiveTheLogitsOfTheirValues) {
  TransformerConfig config = small_config();
  config.model.hidden_size = config.model.intermediate_size = 128;
  config.model.heads_q = 8;  // of 16: 128 columns of o
  config.model.attention_bias = true;
  const double plain = must(count_parameters(config.model)).total;
  const double layers = 2 * (128.0 * (8 + 4) * 16 + 128 * 128 + 3 * 128 * 128),
               rows = 2 * (12 * 16 + 128 + 2 * 128 + 128);
  for (const auto& [dtype, group_size, bytes] : {std::tuple{DType::int8, 128, layers + rows * 4},
                                                 {DType::e4m3, 128, layers + rows * 4},
                                                 {DType::int4, 32, layers / 2 + layers / 32 * 2}}) {
    const Transformer model =
        must(Transformer::random(config, 7, Device::cpu(), DType::f32, {dtype, group_size}));
    EXPECT_EQ(model.weight_bytes(), (plain - layers) * 4 + bytes) << to_string(dtype);
    const auto oracle = testing::TransformerOracle::of(model);
    TransformerSession session =
        must(TransformerSession::make(model, {.max_batch = 2, .max_seqlen = 16, .page_size = 4}));
    Prompts texts = {random_tokens(7, 61, 1), random_tokens(3, 61, 2)};
    must(session.prefill(texts));
    for (int step = 0; step < 2; ++step) {
      const std::vector<float> logits = must(session.logits());
      for (std::size_t b = 0; b < texts.size(); ++b) {
        expect_near(logits, b * 61, oracle.logits(texts[b]).back(), to_string(dtype));
      }
      const std::vector<std::int32_t> next = random_tokens(2, 61, 5);
      must(session.decode(next));
      texts[0].push_back(next[0]);
      texts[1].push_back(next[1]);
    }
    for (const StepOperation& operation : session.operations(Phase::decode)) {
      if (operation.name == "down") {
        EXPECT_EQ(operation.kernel, "dequantize+onednn");
        // Read packed, written and read in f32; x and y.
        const double elements = 128 * 128, scales = dtype == DType::int4 ? elements / 16 : 128 * 4;
        EXPECT_EQ(operation.cost.bytes,
                  elements * bytes_of(dtype) + scales + elements * 8 + 2 * 2 * 128 * 4);
      }
      EXPECT_FALSE(operation.name == "lm_head" && operation.kernel != "onednn");
    }
  }
  const auto refused = [&config](DType dtype, std::int64_t group_size) {
    return Transformer::random(config, 1, Device::cpu(), DType::f32, {dtype, group_size})
        .status()
        .parameter();
  };
  EXPECT_EQ(refused(DType::int4, 48), "group_size");
  EXPECT_EQ(refused(DType::f16, 128), "weights");
  config.model.intermediate_size = 192;
  EXPECT_EQ(refused(DType::int4, 64), "weights");  // down has 192 columns
  EXPECT_EQ(refused(DType::int8, 64), "");
}

TEST(Transformer, ASecondPrefillForgetsTheFirst) {
  const Transformer model = must(Transformer::random(small_config(), 3, Device::cpu()));
  const Prompts one = {random_tokens(5, 61, 1)},
                other = {random_tokens(12, 61, 2), random_tokens(3, 61, 3)};
  TransformerSession fresh =
      must(TransformerSession::make(model, {.max_batch = 2, .max_seqlen = 16, .page_size = 4}));
  must(fresh.prefill(one));
  must(fresh.decode(std::vector<std::int32_t>{9}));
  const std::vector<float> wanted = must(fresh.logits());
  TransformerSession used =
      must(TransformerSession::make(model, {.max_batch = 2, .max_seqlen = 16, .page_size = 4}));
  must(used.prefill(other));
  must(used.decode(std::vector<std::int32_t>{1, 2}));
  must(used.prefill(one));
  EXPECT_EQ(used.queue(Phase::decode).parameter(), "phase");  // it was of two sequences
  must(used.rewind());
  must(used.decode(std::vector<std::int32_t>{9}));
  EXPECT_EQ(must(used.logits()), wanted);
}

TEST(Transformer, OperationsCountWhatTheCostModelCounts) {
  const TransformerConfig config = small_config();
  const Transformer model = must(Transformer::random(config, 3, Device::cpu()));
  EXPECT_EQ(model.weight_bytes(), 4 * must(count_parameters(config.model)).total);
  const DeviceSpec spec = must(find_device("h100-sxm"));
  TransformerSession session =
      must(TransformerSession::make(model, {.max_batch = 3, .max_seqlen = 32, .page_size = 8}));
  const auto sum = [&session](Phase phase, auto member) {
    double total = 0;
    for (const StepOperation& operation : session.operations(phase)) {
      total += member(operation);
    }
    return total;
  };
  const auto attention = [](const StepOperation& o) {
    return o.name == "attention" ? o.cost.flops : 0;
  };
  const auto gemm = [](const StepOperation& o) {
    return o.name == "attention" ? 0 : o.cost.matmul_flops;
  };
  must(session.prepare_prefill(Prompts{random_tokens(11, 61, 1)}));
  const ModelBudget prefill =
      must(model_budget({.model = config.model, .phase = Phase::prefill, .seqlen = 11}, spec));
  EXPECT_EQ(sum(Phase::prefill, attention), prefill.attention_flops);
  EXPECT_EQ(sum(Phase::prefill, gemm), prefill.gemm_flops);

  must(session.assume_context(3, 19));
  const ModelBudget decode = must(model_budget(
      {.model = config.model, .phase = Phase::decode, .seqlen = 20, .batch = 3}, spec));
  EXPECT_EQ(sum(Phase::decode, attention), decode.attention_flops);
  EXPECT_EQ(sum(Phase::decode, gemm), decode.gemm_flops);
}

/// A queued step is a decode of token 0: each run continues the one before, until it is set back.
TEST(Transformer, QueuedDecodeStepsLengthenUntilTheyAreSetBack) {
  const Transformer model = must(Transformer::random(small_config(), 3, Device::cpu()));
  for (const bool fuse : {true, false}) {
    TransformerSession session = must(TransformerSession::make(
        model, {.max_batch = 2, .max_seqlen = 16, .page_size = 4, .fuse = fuse}));
    must(session.prefill(Prompts{random_tokens(5, 61, 1), random_tokens(2, 61, 2)}));
    must(session.decode(std::vector<std::int32_t>{7, 8}));
    const auto queued = [&session] {
      must(session.queue(Phase::decode));
      return must(session.logits());
    };
    must(session.rewind());
    const std::vector<float> first = queued(), second = queued();
    EXPECT_NE(first, second) << "fuse " << fuse;
    must(session.rewind());
    EXPECT_EQ(queued(), first) << "fuse " << fuse;
    EXPECT_THAT(session.lengths(), ::testing::ElementsAre(6, 3));
    for (const std::vector<float>& wanted : {first, second}) {
      must(session.decode(std::vector<std::int32_t>{0, 0}));
      EXPECT_EQ(must(session.logits()), wanted) << "fuse " << fuse;
    }
  }
}

#ifndef __SANITIZE_ADDRESS__  // which ends the process where memory is refused
TEST(Transformer, APrefillThatFailsLeavesNothingToQueue) {
  TransformerConfig config = small_config();
  config.model.hidden_size = config.model.intermediate_size = 8;
  config.model.num_layers = config.model.heads_q = config.model.heads_kv = 1;
  config.model.head_dim = 2;
  config.model.vocab_size = std::int64_t{1} << 20;
  config.model.tie_word_embeddings = true;
  const Transformer model = must(Transformer::random(config, 3, Device::cpu()));
  const std::int64_t most = std::int64_t{1} << 20;
  TransformerSession session =
      must(TransformerSession::make(model, {.max_seqlen = most, .all_logits = true}));
  must(session.prefill(Prompts{{1, 2}}));
  const std::vector<float> wanted = must(session.logits());
  must(session.decode(std::vector<std::int32_t>{3}));
  const Status refused =
      session.prepare_prefill(Prompts{std::vector<std::int32_t>(static_cast<std::size_t>(most))});
  if (refused) {
    GTEST_SKIP() << "this machine lends 4 TiB that it does not have";
  }
  EXPECT_EQ(refused.code(), StatusCode::kDeviceError) << refused.message();
  EXPECT_EQ(session.batch(), 0);
  EXPECT_EQ(session.decode(std::vector<std::int32_t>{3}).parameter(), "tokens");
  EXPECT_EQ(session.logits().status().parameter(), "logits");
  for (const Phase phase : {Phase::prefill, Phase::decode}) {
    EXPECT_EQ(session.queue(phase).parameter(), "phase");
    EXPECT_TRUE(session.operations(phase).empty());
  }
  must(session.rewind());
  must(session.prefill(Prompts{{1, 2}}));
  EXPECT_EQ(must(session.logits()), wanted);
}
#endif

/// Launches and bytes of a step's operations, products and attention apart.
struct Counted {
  double launches = 0, elementwise_bytes = 0;
};

TEST(Transformer, FusingSavesTheBytesAndLaunchesThatTheBudgetSays) {
  TransformerConfig plain = small_config(), normed = small_config();
  normed.model.qk_norm = true;
  const DeviceSpec spec = must(find_device("h100-sxm"));
  for (const TransformerConfig& config : {plain, normed}) {
    const Transformer model = must(Transformer::random(config, 3, Device::cpu()));
    for (const std::optional<DType> kv_dtype :
         {std::optional<DType>(), std::optional(DType::int8)}) {
      for (const Phase phase : {Phase::prefill, Phase::decode}) {
        ModelStep step{.model = config.model, .phase = phase, .seqlen = 8, .batch = 2};
        step.kv_dtype = kv_dtype;
        step.pipeline = phase == Phase::decode ? Pipeline::split_kv : Pipeline::fused;
        Counted counted[2];
        for (const bool fuse : {false, true}) {
          TransformerSession session =
              must(TransformerSession::make(model, {.max_batch = 2,
                                                    .max_seqlen = 16,
                                                    .page_size = 8,
                                                    .fuse = fuse,
                                                    .kv_dtype = kv_dtype}));
          must(phase == Phase::decode ? session.assume_context(2, 7)
                                      : session.prepare_prefill(Prompts{random_tokens(8, 61, 1),
                                                                        random_tokens(8, 61, 2)}));
          for (const StepOperation& operation : session.operations(phase)) {
            counted[fuse].launches += operation.cost.launches;
            counted[fuse].elementwise_bytes +=
                operation.cost.matmul_flops > 0 ? 0 : operation.cost.bytes;
          }
          step.fuse = fuse;
          EXPECT_EQ(must(model_budget(step, spec)).launches, counted[fuse].launches);
        }
        const FuseSaving saving = must(model_budget(step, spec)).fusing;
        EXPECT_EQ(saving.launches, counted[0].launches - counted[1].launches);
        EXPECT_EQ(saving.bytes, counted[0].elementwise_bytes - counted[1].elementwise_bytes);
        // SiLU and its product, RoPE and the append, and the adds with their norms; a prefill whose
        // cache is rounded turns its own rows first.
        const bool turned_before = phase == Phase::prefill && kv_dtype.has_value();
        EXPECT_EQ(saving.launches, 2 * (turned_before ? 1 : 2) + 4);
      }
    }
  }
}

/// Logits of two prompts together and of three decode steps, one after the other.
std::vector<float> run_of(TransformerSession session) {
  must(session.prefill(Prompts{random_tokens(9, 61, 1), random_tokens(4, 61, 2)}));
  std::vector<float> all = must(session.logits());
  for (unsigned step = 0; step < 3; ++step) {
    must(session.decode(random_tokens(2, 61, 3 + step)));
    const std::vector<float> logits = must(session.logits());
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

TEST(Transformer, ACacheInEightBitsIsSmallerAndNear) {
  const Transformer model = must(Transformer::random(small_config(), 3, Device::cpu()));
  SessionOptions options{.max_batch = 2, .max_seqlen = 16, .page_size = 4};
  const TransformerSession exact = must(TransformerSession::make(model, options));
  const std::vector<float> wanted = run_of(exact);
  options.kv_dtype = DType::int8;
  for (const bool fuse : {false, true}) {
    options.fuse = fuse;
    const TransformerSession session = must(TransformerSession::make(model, options));
    EXPECT_EQ(session.cache_bytes(), exact.cache_bytes() * (1 + 4.0 / 16) / 4);
    const std::vector<float> got = run_of(session);
    ASSERT_EQ(got.size(), wanted.size());
    double error = 0, norm = 0, prompt_error = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double difference = static_cast<double>(got[i]) - wanted[i];
      (i < 2 * 61 ? prompt_error : error) += difference * difference;
      norm += static_cast<double>(wanted[i]) * wanted[i];
    }
    EXPECT_LT(std::sqrt(prompt_error / norm), 1e-5);  // a prefill sees what was not rounded
    EXPECT_GT(error, 0);
    EXPECT_LT(std::sqrt(error / norm), 0.02);
  }
  // No kernel of a CPU decodes from e4m3: the plan says so, and there are no sequences.
  options.kv_dtype = DType::e4m3;
  TransformerSession refused = must(TransformerSession::make(model, options));
  must(refused.prefill(Prompts{{1, 2}}));
  const Status status = refused.decode(std::vector<std::int32_t>{3});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("kv_dtype e4m3"), std::string::npos) << status.message();
}

TEST(Transformer, TheMemoryPlannerCountsTheCacheThatASessionTakes) {
  TransformerConfig config = small_config();
  const Transformer model = must(Transformer::random(config, 3, Device::cpu()));
  const TransformerSession session =
      must(TransformerSession::make(model, {.max_batch = 3, .max_seqlen = 50, .page_size = 16}));
  const MemoryUse use =  // of 50 tokens in whole pages

      must(memory_use({.model = config.model, .batch = 3, .capacity_bytes = 1e9}, 64, nullptr));
  for (const ByteTerm& term : use.terms) {
    if (term.name == "kv_cache") {
      EXPECT_EQ(term.bytes, session.cache_bytes());
    } else if (term.name == "weights") {
      EXPECT_EQ(term.bytes, model.weight_bytes());
    }
  }
}

TEST(Transformer, RandomWeightsAreOfTheSeedAlone) {
  const TransformerConfig config = small_config();
  const auto q = [&](std::uint64_t seed) {
    return must(must(Transformer::random(config, seed, Device::cpu()))
                    .parameter("model.layers.1.self_attn.q_proj.weight"));
  };
  EXPECT_EQ(q(1), q(1));
  EXPECT_NE(q(1), q(2));
  double sum = 0, squares = 0;
  for (const float value : q(1)) {
    sum += value;
    squares += static_cast<double>(value) * value;
  }
  const auto count = static_cast<double>(q(1).size());
  EXPECT_NEAR(sum / count, 0, 0.01);
  EXPECT_NEAR(squares / count * 40, 1, 0.1);  // a variance of 1 / cols
  EXPECT_NE(q(1), must(must(Transformer::random(config, 1, Device::cpu()))
                           .parameter("model.layers.0.self_attn.q_proj.weight")));
}

TEST(Transformer, RefusesWhatItCannotDoByName) {
  const TransformerConfig config = small_config();
  const Transformer model = must(Transformer::random(config, 3, Device::cpu()));
  EXPECT_EQ(Transformer::random(config, 1, Device::cpu(), DType::int8).status().parameter(),
            "dtype");
  EXPECT_EQ(model.parameter("model.layers.2.mlp.up_proj.weight").status().parameter(), "name");
  const auto refused = [&model](SessionOptions options) {
    return TransformerSession::make(model, options).status().parameter();
  };
  EXPECT_EQ(refused({.max_batch = 0}), "max_batch");
  EXPECT_EQ(refused({.max_seqlen = -1}), "max_seqlen");
  EXPECT_EQ(refused({.page_size = 0}), "page_size");
  EXPECT_EQ(refused({.prefill = Pipeline::split_kv}), "prefill");
  EXPECT_EQ(refused({.kv_dtype = DType::f16}), "kv_dtype");
  EXPECT_EQ(refused({.max_batch = 1 << 20, .max_seqlen = 1 << 11}), "max_seqlen");  // 2^31 tokens

  TransformerSession session =
      must(TransformerSession::make(model, {.max_batch = 2, .max_seqlen = 4, .page_size = 4}));
  EXPECT_EQ(session.logits().status().parameter(), "logits");
  EXPECT_EQ(session.decode(std::vector<std::int32_t>{1}).parameter(), "tokens");
  EXPECT_EQ(session.prefill({}).parameter(), "prompts");
  EXPECT_EQ(session.prefill(Prompts{{1}, {2}, {3}}).parameter(), "prompts");
  EXPECT_EQ(session.prefill(Prompts{{1}, {}}).parameter(), "prompts[1]");
  EXPECT_EQ(session.prefill(Prompts{{1, 2, 3, 4, 5}}).parameter(), "prompts[0]");
  EXPECT_EQ(session.prefill(Prompts{{1, 61}}).parameter(), "prompts[0][1]");
  must(session.prefill(Prompts{{1, 2, 3, 4}}));
  EXPECT_EQ(session.decode(std::vector<std::int32_t>{-1}).parameter(), "tokens[0]");
  EXPECT_EQ(session.decode(std::vector<std::int32_t>{1}).parameter(), "tokens[0]");  // full
  EXPECT_EQ(session.assume_context(3, 1).parameter(), "batch");
  EXPECT_EQ(session.assume_context(1, 4).parameter(), "length");
}

}  // namespace
}  // namespace rafter
