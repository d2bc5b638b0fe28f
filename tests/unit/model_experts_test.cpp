// Models with experts, and the ceilings of a step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>

#include "rafter/attention.h"
#include "rafter/model.h"
#include "rafter/transformer.h"

namespace rafter {
namespace {

template <typename T>
T must(Result<T> result) {
  EXPECT_TRUE(result) << result.status().message();
  return std::move(result).value();
}

constexpr const char* kMixtral = R"({"model_type": "mixtral", "hidden_size": 4096,
  "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
  "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
  "num_experts_per_tok": 2, "sliding_window": null, "torch_dtype": "bfloat16"})";
constexpr const char* kQwen3Moe = R"({"model_type": "qwen3_moe", "hidden_size": 2048,
  "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
  "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
  "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []})";

ModelBudget decode_of(const char* config, std::int64_t batch) {
  ModelStep step{
      .model = must(parse_model(config)), .phase = Phase::decode, .seqlen = 1024, .batch = batch};
  return must(model_budget(step, must(find_device("h200"))));
}

TEST(Experts, CountParametersOfPublishedModelsExactly) {
  const ParameterCount mixtral = must(count_parameters(must(parse_model(kMixtral))));
  EXPECT_EQ(mixtral.total, 46702792704.0);
  EXPECT_EQ(mixtral.active, 46702792704.0 - 32.0 * 6 * 3 * 4096 * 14336);
  const ParameterCount qwen = must(count_parameters(must(parse_model(kQwen3Moe))));
  EXPECT_EQ(qwen.total, 30532122624.0);
  double sum = 0;
  for (const ParameterTensor& tensor : qwen.tensors) {
    sum += tensor.count * tensor.elements;
  }
  EXPECT_EQ(sum, qwen.total);
}

/// The mean size of the union of `tokens` choices of `each` of `experts`, all choices listed.
double mean_union(int experts, int each, int tokens, unsigned met = 0) {
  if (tokens == 0) {
    return std::popcount(met);
  }
  double sum = 0;
  int choices = 0;
  for (unsigned choice = 0; choice < 1U << experts; ++choice) {
    if (std::popcount(choice) == each) {
      sum += mean_union(experts, each, tokens - 1, met | choice);
      ++choices;
    }
  }
  return sum / choices;
}

TEST(Experts, AreMetAsOftenAsAllChoicesSay) {
  ModelStep step{.model = must(parse_model(kMixtral)), .phase = Phase::decode, .seqlen = 8};
  for (const auto& [experts, each] : {std::pair{4, 1}, std::pair{5, 2}, std::pair{3, 3}}) {
    step.model.num_experts = experts;
    step.model.experts_per_token = each;
    for (int tokens = 1; tokens <= 4; ++tokens) {
      step.batch = tokens;
      EXPECT_NEAR(must(model_budget(step, must(find_device("h200")))).experts_read,
                  mean_union(experts, each, tokens), 1e-9)
          << experts << " " << each << " " << tokens;
    }
  }
}

TEST(Experts, AStepReadsThoseThatItMeetsAndMultipliesWithItsOwn) {
  const ParameterCount params = must(count_parameters(must(parse_model(kMixtral))));
  const ModelBudget one = decode_of(kMixtral, 1), many = decode_of(kMixtral, 4096);
  EXPECT_NEAR(one.experts_read, 2, 1e-9);
  EXPECT_NEAR(one.weight_bytes, 2 * params.active_matmul, 1);
  EXPECT_NEAR(one.gemm_flops, 2 * params.active_matmul, 1);
  EXPECT_NEAR(many.experts_read, 8, 1e-9);
  EXPECT_NEAR(many.weight_bytes, 2 * params.matmul, 1);
  EXPECT_NEAR(many.gemm_flops, 4096 * 2 * params.active_matmul, 1e3);
  EXPECT_EQ(one.weight_resident_bytes, 2 * params.total);
  EXPECT_GT(decode_of(kMixtral, 4).weight_bytes, one.weight_bytes);
  EXPECT_LT(decode_of(kMixtral, 4).weight_bytes, many.weight_bytes);
}

TEST(Experts, AreHeldInMemoryAllOfThem) {
  MemoryProblem problem{.model = must(parse_model(kMixtral)), .capacity_bytes = 141e9};
  const MemoryUse use = must(memory_use(problem, 1024, nullptr));
  const auto weights = std::ranges::find(use.terms, "weights", &ByteTerm::name);
  ASSERT_NE(weights, use.terms.end());
  EXPECT_EQ(weights->bytes, 2 * 46702792704.0);
}

TEST(Experts, RefuseWhatMeansNothingByName) {
  const auto refused = [](std::string text, const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
    return parse_model(text).status().parameter();
  };
  EXPECT_EQ(refused(kMixtral, "\"num_local_experts\": 8,", ""), "num_local_experts");
  EXPECT_EQ(refused(kMixtral, "per_tok\": 2", "per_tok\": 9"), "num_experts_per_tok");
  EXPECT_EQ(refused(kQwen3Moe, "step\": 1", "step\": 2"), "decoder_sparse_step");
  EXPECT_EQ(refused(kQwen3Moe, "layers\": []", "layers\": [0]"), "mlp_only_layers");
  Convention given;
  given.n_params = 5e9;
  EXPECT_EQ(count_parameters(must(parse_model(kMixtral)), given).status().parameter(), "n_params");
  EXPECT_EQ(parse_transformer(kMixtral).status().parameter(), "model_type");  // it is not run
}

TEST(StepCeilings, AreLowerRoofsInOrder) {
  DeviceSpec device = must(find_device("h200"));
  Figure vector;
  vector.value = 60e12;
  vector.unit = "FLOP/s";
  device.figures["peak_vector_f32_flop_per_s"] = vector;
  for (const std::int64_t seqlen : {128, 4096, 65536}) {
    ModelStep step{.model = must(find_model("reference-7b")), .seqlen = seqlen};
    const ModelBudget fused = must(model_budget(step, device));
    std::map<std::string, double> rates;
    double before = 0;
    for (const Ceiling& ceiling : fused.ceilings) {
      EXPECT_GE(ceiling.flop_per_s, before) << ceiling.name;
      before = rates[ceiling.name] = ceiling.flop_per_s;
    }
    const double roof = rates.at("kernels at their roofs");
    EXPECT_NEAR(roof, fused.flops / fused.device_time_s, 1e-9 * roof);
    for (const char* name : {"no fusion", "no tiling", "no tensor cores"}) {
      EXPECT_LT(rates.at(name), roof) << name;
    }
    EXPECT_LE(rates.at("no tensor cores"), 60e12);
    step.pipeline = Pipeline::unfused;
    const ModelBudget unfused = must(model_budget(step, device));
    EXPECT_NEAR(rates.at("no fusion"), fused.flops / unfused.device_time_s,
                1e-9 * rates.at("no fusion"));
    // Every multiply-add fetches two bf16 operands: half a FLOP a byte.
    EXPECT_NEAR(rates.at("no tiling") / device.find("bandwidth_bytes_per_s")->value, 0.5, 0.02);
  }
}

}  // namespace
}  // namespace rafter
