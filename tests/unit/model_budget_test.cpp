// Models: configs, parameters, budgets, memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "rafter/attention.h"
#include "rafter/model.h"

namespace rafter {
namespace {

template <typename T>
T must(Result<T> result) {
  EXPECT_TRUE(result) << result.status().message();
  return std::move(result).value();
}

constexpr const char* kLlama3_8b = R"({"model_type": "llama", "hidden_size": 4096,
  "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
  "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "hidden_act": "silu"})";
constexpr const char* kQwen2_05b = R"({"model_type": "qwen2", "hidden_size": 896,
  "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
  "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16", "sliding_window": 32768, "use_sliding_window": false})";

TEST(Models, CountParametersOfPublishedModelsExactly) {
  // The published counts of the checkpoints.
  EXPECT_EQ(must(count_parameters(must(find_model("reference-7b")))).total, 6738415616.0);
  EXPECT_EQ(must(count_parameters(must(parse_model(kLlama3_8b)))).total, 8030261248.0);
  EXPECT_EQ(must(count_parameters(must(parse_model(kQwen2_05b)))).total, 494032768.0);
}

TEST(Models, AreTheSumOfTheirTensors) {
  ModelConfig m = must(parse_model(kLlama3_8b));
  m.attention_bias = m.mlp_bias = true;
  const ParameterCount c = must(count_parameters(m));
  double sum = 0, matmul = 0;
  for (const ParameterTensor& t : c.tensors) {
    sum += t.count * t.elements;
    matmul += t.matmul ? t.count * t.elements : 0;
  }
  EXPECT_EQ(c.total, sum);
  EXPECT_EQ(c.matmul, matmul);
  Convention given;
  given.n_params = 5e9;
  EXPECT_EQ(must(count_parameters(m, given)).total, 5e9);
}

TEST(Models, ReadDefaultsAndRefuseWhatIsNotLlamaLike) {
  const ModelConfig m = must(parse_model(
      R"({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
          "num_attention_heads": 4, "vocab_size": 100})"));
  EXPECT_EQ(m.heads_kv, 4);
  EXPECT_EQ(m.head_dim, 16);
  EXPECT_EQ(m.sliding_window, 0);
  EXPECT_EQ(must(parse_model(kQwen2_05b)).sliding_window, 0);  // published, but turned off

  const auto refused = [](const char* key, const char* value) {
    std::string text = kLlama3_8b;
    text.insert(1, std::string("\"") + key + "\": " + value + ", ");
    // The first of two equal keys is overwritten by the second: remove the original.
    const std::size_t second = text.find(std::string("\"") + key + "\"", 5);
    if (second != std::string::npos) {
      text.replace(second, std::string(key).size() + 2, "\"_unused\"");
    }
    const Result<ModelConfig> result = parse_model(text);
    return result ? std::string("accepted") : result.status().parameter();
  };
  EXPECT_EQ(refused("model_type", "\"mamba\""), "model_type");
  EXPECT_EQ(refused("hidden_size", "0"), "hidden_size");
  EXPECT_EQ(refused("hidden_size", "\"big\""), "hidden_size");
  EXPECT_EQ(refused("num_hidden_layers", "-1"), "num_hidden_layers");
  EXPECT_EQ(refused("num_hidden_layers", "1.5"), "num_hidden_layers");
  EXPECT_EQ(refused("num_key_value_heads", "5"), "heads_kv");
  EXPECT_EQ(refused("vocab_size", "18446744073709551615"), "vocab_size");
  EXPECT_EQ(refused("tie_word_embeddings", "1"), "tie_word_embeddings");
  EXPECT_EQ(refused("torch_dtype", "\"float8\""), "torch_dtype");
  EXPECT_EQ(refused("hidden_act", "\"gelu\""), "hidden_act");
  EXPECT_EQ(refused("head_dim", "128"), "accepted");
  EXPECT_EQ(refused("some_new_key", "7"), "some_new_key");
  EXPECT_EQ(refused("some_new_key", "null"), "accepted");
  EXPECT_EQ(refused("quantization_config", "{\"bits\": 4}"), "quantization_config");
  EXPECT_EQ(refused("num_local_experts", "8"), "num_local_experts");  // a llama has none
  EXPECT_EQ(refused("use_cache", "false"), "accepted");
  for (const char* text : {"", "[]", "{", "7"}) {
    EXPECT_EQ(parse_model(text).status().code(), StatusCode::kIoError) << text;
  }
  EXPECT_EQ(parse_model("{}").status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(find_model("gpt").status().message(), testing::HasSubstr("reference-7b"));
  EXPECT_EQ(load_model("/nowhere/config.json").status().code(), StatusCode::kIoError);
}

ModelStep prefill(std::int64_t seqlen) {
  ModelStep s;
  s.model = must(find_model("reference-7b"));
  s.seqlen = seqlen;
  return s;
}
ModelStep decode(std::int64_t context, std::int64_t batch = 1) {
  ModelStep s = prefill(context);
  s.phase = Phase::decode;
  s.batch = batch;
  s.pipeline = Pipeline::split_kv;
  return s;
}

TEST(ModelBudget, ItsAttentionIsTheLayersAttention) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  for (const Pipeline pipeline : {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused}) {
    ModelStep step = prefill(1000);
    step.batch = 3;
    step.pipeline = pipeline;
    AttentionProblem layer;
    layer.batch = 3;
    layer.heads_q = 32;
    layer.seqlen_q = layer.seqlen_kv = 1000;
    layer.dtype = DType::bf16;
    layer.mask = Mask::causal();
    const Cost cost = must(attention_cost(layer, pipeline));
    const ModelBudget b = must(model_budget(step, h100));
    EXPECT_EQ(b.attention_flops, 32 * cost.flops);
    EXPECT_EQ(b.attention_bytes, 32 * cost.bytes);
  }
  DecodeProblem layer;
  layer.batch = 4;
  layer.heads_q = 32;
  layer.seqlen_kv = 3000;
  ModelStep step = decode(3000, 4);
  EXPECT_EQ(must(model_budget(step, h100)).attention_bytes, 32 * must(decode_cost(layer)).bytes);
  EXPECT_EQ(must(model_budget(step, h100)).kv_bytes, 32 * must(decode_cost(layer)).kv_bytes);
}

TEST(ModelBudget, ItsProductsAreThoseOfTheLayers) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  const double tokens = 2 * 500, h = 4096, f = 11008, vocab = 32000;
  ModelStep step = prefill(500);
  step.batch = 2;
  const double layer = 2 * tokens * (4 * h * h + 3 * h * f);
  EXPECT_EQ(must(model_budget(step, h100)).gemm_flops, 32 * layer + 2 * 2 * h * vocab);
  step.all_logits = true;
  const ModelBudget all = must(model_budget(step, h100));
  EXPECT_EQ(all.gemm_flops, 32 * layer + 2 * tokens * h * vocab);
  EXPECT_EQ(all.weight_bytes, 2 * (32 * (4 * h * h + 3 * h * f) + h * vocab));
}

TEST(ModelBudget, ItsPartsAddUp) {
  const DeviceSpec h200 = *find_device("h200");
  for (const ModelStep& step : {prefill(2048), decode(0), decode(4096, 16)}) {
    const ModelBudget b = must(model_budget(step, h200));
    EXPECT_DOUBLE_EQ(b.flops, b.gemm_flops + b.attention_flops + b.elementwise_flops);
    EXPECT_DOUBLE_EQ(b.bytes,
                     b.weight_bytes + b.activation_bytes + b.attention_bytes + b.elementwise_bytes);
    EXPECT_DOUBLE_EQ(b.device_time_s, b.gemm_time_s + b.attention_time_s + b.elementwise_time_s);
    EXPECT_DOUBLE_EQ(b.time_s, std::max(b.device_time_s, b.dispatch_time_s));
    EXPECT_GE(b.gain_over_unfused, 1);
    EXPECT_LE(b.amdahl.gain, b.amdahl.bound);
    EXPECT_EQ(b.launches, 32 * 15 + 4);
  }
}

TEST(ModelBudget, NarrowWeightsShrinkTheFloorAndNotTheDispatch) {
  const DeviceSpec h200 = *find_device("h200");
  const ModelBudget wide = must(model_budget(decode(1), h200));
  for (const auto& [dtype, factor] :
       {std::pair{DType::int8, 2.0}, {DType::e4m3, 2.0}, {DType::int4, 4.0}}) {
    ModelStep step = decode(1);
    step.weight_dtype = dtype;
    const ModelBudget narrow = must(model_budget(step, h200));
    EXPECT_DOUBLE_EQ(wide.weights_time_s / narrow.weights_time_s, factor);
    EXPECT_EQ(wide.dispatch_time_s, narrow.dispatch_time_s);
    EXPECT_GT(narrow.dispatch_fraction, wide.dispatch_fraction);
  }
  ModelStep captured = decode(1);
  captured.graph = true;
  const double submit = *h200.value("graph_submit_s"), each = *h200.value("graph_launch_s");
  EXPECT_DOUBLE_EQ(must(model_budget(captured, h200)).dispatch_time_s, submit + 484 * each);
}

TEST(ModelBudget, FillsTheMemoryWithSequences) {
  const DeviceSpec h200 = *find_device("h200");
  ModelStep step = decode(4096, 0);
  const ModelBudget full = must(model_budget(step, h200));
  const double sequence = 4096 * 524288.0, weights = 2 * 6738415616.0;
  EXPECT_EQ(full.batch, std::floor((141e9 - weights) / sequence));
  EXPECT_EQ(*full.max_batch, full.batch);
  step.kv_dtype = DType::e4m3;
  EXPECT_EQ(must(model_budget(step, h200)).batch, std::floor((141e9 - weights) / (sequence / 2)));
  step.capacity_bytes = 1e9;
  EXPECT_EQ(model_budget(step, h200).status().parameter(), "batch");
  step = decode(0, 0);
  EXPECT_EQ(model_budget(step, h200).status().parameter(), "batch");
}

TEST(ModelBudget, ASlidingWindowBoundsTheCacheAndTheScores) {
  const DeviceSpec h200 = *find_device("h200");
  ModelStep step = decode(100'000);
  const double all = must(model_budget(step, h200)).kv_bytes;
  step.model.sliding_window = 4096;
  EXPECT_DOUBLE_EQ(must(model_budget(step, h200)).kv_bytes, all * 4096 / 100'000);
  step.phase = Phase::prefill;
  step.pipeline = Pipeline::fused;
  AttentionProblem layer;
  layer.heads_q = 32;
  layer.seqlen_q = layer.seqlen_kv = 100'000;
  layer.dtype = DType::bf16;
  layer.mask = Mask::window(4095, 0);
  EXPECT_EQ(must(model_budget(step, h200)).attention_flops,
            32 * must(attention_cost(layer, Pipeline::fused)).flops);
}

TEST(ModelBudget, AnUnknownLaunchCostIsNotZero) {
  const ModelBudget b = must(model_budget(decode(10), *find_device("device-r")));
  EXPECT_TRUE(std::isnan(b.dispatch_time_s));
  EXPECT_TRUE(std::isnan(b.dispatch_fraction));
  EXPECT_THAT(b.dispatch_reason, testing::HasSubstr("launch_s"));
  EXPECT_EQ(b.time_s, b.device_time_s);
  EXPECT_TRUE(std::isnan(b.fusing.launches_time_s));
  EXPECT_EQ(b.fusing.launches_reason, b.dispatch_reason);
  ModelStep graph = decode(10);
  graph.graph = true;
  const ModelBudget captured = must(model_budget(graph, *find_device("device-r")));
  EXPECT_THAT(captured.fusing.launches_reason, testing::HasSubstr("graph_launch_s"));
  EXPECT_EQ(must(model_budget(graph, *find_device("h200"))).fusing.launches_reason, "");
}

/// A layer is attention and the append beside the chain, and norms of q and k where there are any;
/// around them the embedding, the first q, k and v, the last norm, the head and the lengths.
TEST(ModelBudget, AChainIsOneLaunchFromOneAttentionToTheNext) {
  const DeviceSpec h200 = *find_device("h200");
  for (const bool normed : {false, true}) {
    ModelStep step = decode(4096);
    step.model.qk_norm = normed;
    step.fuse = true;
    const ModelBudget apart = must(model_budget(step, h200));
    step.chain = true;
    const ModelBudget chained = must(model_budget(step, h200));
    const double layers = 32, h = 4096, f = 11008, size = 2;
    EXPECT_EQ(chained.launches, layers * (normed ? 5 : 3) + 5);
    EXPECT_EQ(apart.launches - chained.launches, 6 * layers - 1);
    EXPECT_EQ(chained.flops, apart.flops);
    // Norms read what they add alone and write nothing; SwiGLU neither reads nor writes.
    EXPECT_EQ(apart.bytes - chained.bytes, layers * size * (2 * 3 * h + 3 * f));
    EXPECT_EQ(chained.fusing.launches, apart.fusing.launches + 6 * layers - 1);
    EXPECT_EQ(chained.fusing.bytes - apart.fusing.bytes, apart.bytes - chained.bytes);
  }
}

TEST(ModelBudget, AChainWhereNoneRunsIsRefused) {
  const DeviceSpec h200 = *find_device("h200");
  ModelStep step = decode(4096);
  step.chain = true;
  EXPECT_EQ(model_budget(step, h200).status().parameter(), "chain");
  step.fuse = true;
  EXPECT_TRUE(model_budget(step, h200));
  ModelStep experts = step, whole = step;
  experts.model.num_experts = 8;
  experts.model.experts_per_token = 2;
  EXPECT_EQ(model_budget(experts, h200).status().parameter(), "chain");
  whole.phase = Phase::prefill;
  EXPECT_EQ(model_budget(whole, h200).status().parameter(), "chain");
}

TEST(ModelBudget, FusingSavesThePassesAndLaunchesThatItLeavesOut) {
  const DeviceSpec h200 = *find_device("h200");
  const double layers = 32, tokens = 4096, h = 4096, f = 11008, kv = 4096, size = 2;
  ModelStep step = prefill(4096);
  const ModelBudget textbook = must(model_budget(step, h200));
  // An add and a norm: one pass of the sum; SiLU's result, written and read; k read and written.
  const double bytes = layers * tokens * size * (2 * h + 2 * f + 2 * kv);
  EXPECT_EQ(textbook.fusing.bytes, bytes);
  EXPECT_EQ(textbook.fusing.launches, 4 * layers);
  EXPECT_EQ(textbook.fusing.bytes_time_s, bytes / h200.find("bandwidth_bytes_per_s")->value);
  EXPECT_EQ(textbook.fusing.launches_time_s, 4 * layers * h200.find("launch_s")->value);
  step.fuse = true;
  const ModelBudget fused = must(model_budget(step, h200));
  step.fuse = false;
  const ModelBudget apart = must(model_budget(step, h200));
  EXPECT_EQ(apart.bytes - fused.bytes, bytes);
  EXPECT_EQ(apart.launches - fused.launches, 4 * layers);
  EXPECT_EQ(apart.flops, fused.flops);
  EXPECT_GT(apart.time_s, fused.time_s);
  EXPECT_EQ(fused.launches, 9 * layers + 3);
  step = decode(4096);
  step.graph = true;
  step.fuse = true;
  const ModelBudget decoded = must(model_budget(step, h200));
  EXPECT_EQ(decoded.launches, 9 * layers + 4);
  EXPECT_EQ(decoded.fusing.launches_time_s, 4 * layers * h200.find("graph_launch_s")->value);
}

TEST(ModelBudget, TakesTheRateThatFusedAttentionWasMeasuredToReach) {
  DeviceSpec h200 = *find_device("h200");
  const ModelBudget roof = must(model_budget(prefill(4096), h200));
  Figure rate = *h200.find("peak_bf16_flop_per_s");
  rate.value /= 2;
  h200.figures["attention_bf16_flop_per_s"] = rate;
  const ModelBudget measured = must(model_budget(prefill(4096), h200));
  EXPECT_EQ(measured.attention_time_s, measured.attention_flops / rate.value);
  // For every 128 rows a causal mask cuts one block of 128 keys in two, and as many are the first.
  Convention blocks;
  blocks.score_block_rows = 128;
  const ModelBudget whole = must(model_budget(prefill(4096), h200, blocks));
  EXPECT_DOUBLE_EQ(whole.attention_time_s,
                   measured.attention_time_s * (4096.0 + 128 + 2 * 128) / (4096 + 1));
  EXPECT_EQ(whole.attention_flops, measured.attention_flops);
  rate.value *= 4;  // what is in place cannot be multiplied sooner than by products alone
  h200.figures["attention_bf16_flop_per_s"] = rate;
  EXPECT_DOUBLE_EQ(must(model_budget(prefill(4096), h200, blocks)).attention_time_s,
                   whole.attention_time_s / 2);
  EXPECT_EQ(measured.gemm_time_s, roof.gemm_time_s);
  EXPECT_EQ(measured.ceilings.front().flop_per_s, roof.ceilings.front().flop_per_s);
  ModelStep unfused = prefill(4096);
  unfused.pipeline = Pipeline::unfused;
  EXPECT_EQ(must(model_budget(unfused, h200)).time_s,
            must(model_budget(unfused, *find_device("h200"))).time_s);
}

TEST(ModelBudget, ComparesWithTheUnfusedAttentionThatRuns) {
  const DeviceSpec h200 = *find_device("h200");
  ModelStep step = prefill(4096);
  const ModelBudget visible = must(model_budget(step, h200));
  step.unfused_score_block_rows = 1024;
  const ModelBudget blocks = must(model_budget(step, h200));
  EXPECT_EQ(blocks.time_s, visible.time_s);
  EXPECT_GT(blocks.gain_over_unfused, visible.gain_over_unfused);
  Convention counted;
  counted.score_block_rows = 1024;
  step.pipeline = Pipeline::unfused;
  EXPECT_EQ(blocks.unfused_time_s, must(model_budget(step, h200, counted)).time_s);
}

TEST(ModelBudget, RefusesImpossibleStepsByName) {
  const DeviceSpec h200 = *find_device("h200");
  const auto refused = [&](auto change) {
    ModelStep step = decode(10);
    change(step);
    const Result<ModelBudget> b = model_budget(step, h200);
    return b ? std::string("accepted") : b.status().parameter();
  };
  EXPECT_EQ(refused([](auto& s) { s.seqlen = -1; }), "seqlen");
  EXPECT_EQ(refused([](auto& s) { s.batch = -1; }), "batch");
  EXPECT_EQ(refused([](auto& s) { s.phase = Phase::prefill, s.seqlen = 0; }), "seqlen");
  EXPECT_EQ(refused([](auto& s) { s.phase = Phase::prefill, s.batch = 0; }), "batch");
  EXPECT_EQ(refused([](auto& s) { s.launches = -4; }), "launches");
  EXPECT_EQ(refused([](auto& s) { s.memory_floor_s = 0; }), "memory_floor_s");
  EXPECT_EQ(refused([](auto& s) { s.capacity_bytes = std::nan(""); }), "capacity_bytes");
  EXPECT_EQ(refused([](auto& s) { s.unfused_score_block_rows = -1; }), "unfused_score_block_rows");
  EXPECT_EQ(refused([](auto& s) { s.model.hidden_size = 0; }), "hidden_size");
  EXPECT_EQ(refused([](auto& s) { s.pipeline = Pipeline::fused, s.splits = 2; }), "splits");
}

TEST(ModelLengths, AreWhereTheFlopsMeet) {
  const ModelConfig m = must(find_model("reference-7b"));
  Convention c;
  const ModelLengths lengths = must(model_lengths(m, c));
  const auto s = static_cast<std::int64_t>(std::llround(lengths.attention_equals_gemm_seqlen));
  ModelStep step = prefill(s);
  step.all_logits = true;
  const ModelBudget b = must(model_budget(step, *find_device("h200"), c));
  EXPECT_NEAR(b.attention_flops / b.gemm_flops, 1, 1e-4);

  ModelConfig windowed = m;
  windowed.sliding_window = 4096;
  EXPECT_EQ(must(model_lengths(windowed, c)).attention_equals_gemm_seqlen, HUGE_VAL);
  windowed.sliding_window = 1'000'000;
  EXPECT_NEAR(must(model_lengths(windowed, c)).attention_equals_gemm_seqlen,
              lengths.attention_equals_gemm_seqlen, 1e-6);
}

TEST(SeqlenForGain, IsWhereTheBudgetReachesTheGain) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  const double s = *must(seqlen_for_gain(prefill(1), 1.5, h100));
  const auto whole = static_cast<std::int64_t>(std::ceil(s));
  EXPECT_GE(must(model_budget(prefill(whole), h100)).gain_over_unfused, 1.5);
  EXPECT_LT(must(model_budget(prefill(whole - 1), h100)).gain_over_unfused, 1.5);
  EXPECT_FALSE(must(seqlen_for_gain(prefill(1), 1000, h100)).has_value());
}

TEST(MemoryPlan, IsTheLongestLengthThatFits) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  for (const char* convention : {"exact", "lecture"}) {
    for (const Pipeline pipeline : {Pipeline::unfused, Pipeline::half_fused, Pipeline::fused}) {
      for (const double live : {1.0, 0.0, 4.0}) {
        Convention c = must(find_convention(convention));
        c.layers_live = live;
        MemoryProblem p;
        p.model = must(find_model("reference-7b"));
        p.pipeline = pipeline;
        const MemoryPlan plan = must(plan_memory(p, &h100, c));
        ASSERT_GT(plan.max_seqlen, 0);
        EXPECT_TRUE(must(memory_use(p, plan.max_seqlen, &h100, c)).fits);
        EXPECT_FALSE(must(memory_use(p, plan.max_seqlen + 1, &h100, c)).fits);
        double sum = 0;
        for (const ByteTerm& t : plan.at_max.terms) {
          sum += t.bytes;
        }
        EXPECT_EQ(sum, plan.at_max.footprint_bytes);
      }
    }
  }
}

TEST(MemoryPlan, ExactTermsAreThoseOfAListing) {
  MemoryProblem p;
  p.model = must(find_model("reference-7b"));
  p.batch = 2;
  p.pipeline = Pipeline::unfused;
  p.capacity_bytes = 80e9;
  const MemoryUse use = must(memory_use(p, 1000, nullptr));
  const double tokens = 2 * 1000;
  EXPECT_EQ(use.footprint_bytes, 2 * 6738415616.0                         // weights
                                     + tokens * 524288                    // KV cache
                                     + 2 * 32 * 1000.0 * 1000 * 2         // one layer's scores
                                     + 4 * tokens * 4096 * 2              // q, k, v, o
                                     + tokens * 32 * 4                    // lse
                                     + 2 * tokens * (4096 + 11008) * 2);  // activations
}

// A session's cache: whole pages of every sequence, also of rows that a window has left behind.
TEST(MemoryPlan, CountsACacheInWholePages) {
  MemoryProblem p;
  p.model = must(find_model("reference-7b"));
  p.batch = 3;
  p.capacity_bytes = 60e9;
  const MemoryUse rows = must(memory_use(p, 1000, nullptr));
  p.page_size = 64;
  const MemoryUse pages = must(memory_use(p, 1000, nullptr));
  EXPECT_EQ(pages.footprint_bytes - rows.footprint_bytes, 3 * 24 * 524288.0);  // 16 pages
  const MemoryPlan plan = must(plan_memory(p, nullptr));
  EXPECT_TRUE(must(memory_use(p, plan.max_seqlen, nullptr)).fits);
  EXPECT_FALSE(must(memory_use(p, plan.max_seqlen + 1, nullptr)).fits);
  p.model.sliding_window = 100;
  EXPECT_EQ(must(memory_use(p, 1000, nullptr)).footprint_bytes, pages.footprint_bytes);
  p.page_size = 0;
  EXPECT_EQ(rows.footprint_bytes - must(memory_use(p, 1000, nullptr)).footprint_bytes,
            3 * 900 * 524288.0);
  p.page_size = -1;
  EXPECT_EQ(memory_use(p, 1000, nullptr).status().parameter(), "page_size");
}

TEST(ModelBudget, FillsTheMemoryWithSequencesOfWholePages) {
  const DeviceSpec h100 = *find_device("h100-sxm");
  ModelStep step = decode(2050, 0);
  step.capacity_bytes = 100e9;
  step.page_size = 1024;
  const double weights = 6738415616.0 * 2, sequence = 3072 * 524288.0;
  const ModelBudget paged = must(model_budget(step, h100));
  EXPECT_EQ(paged.max_batch, std::floor((100e9 - weights) / sequence));
  EXPECT_EQ(paged.batch, paged.max_batch);
  step.page_size = 0;
  EXPECT_GT(must(model_budget(step, h100)).batch, paged.batch);
  step.page_size = -1;
  EXPECT_EQ(model_budget(step, h100).status().parameter(), "page_size");
}

TEST(MemoryPlan, SaysWhenNothingFitsAndRefusesWhatMeansNothing) {
  MemoryProblem p;
  p.model = must(find_model("reference-7b"));
  p.capacity_bytes = 1e9;  // less than the weights
  EXPECT_EQ(must(plan_memory(p, nullptr)).max_seqlen, 0);
  EXPECT_FALSE(must(plan_memory(p, nullptr)).at_max.fits);
  p.capacity_bytes = -1;
  EXPECT_EQ(plan_memory(p, nullptr).status().parameter(), "capacity_bytes");
  p.capacity_bytes.reset();
  EXPECT_EQ(plan_memory(p, nullptr).status().parameter(), "capacity_bytes");
  Convention usable;
  usable.capacity = Capacity::usable;
  const DeviceSpec r = *find_device("device-r");
  EXPECT_THAT(plan_memory(p, &r, usable).status().message(), testing::HasSubstr("usable_bytes"));
  Convention many;
  many.layers_live = 33;
  EXPECT_EQ(plan_memory(p, &r, many).status().parameter(), "layers_live");
  EXPECT_EQ(memory_use(p, 0, &r).status().parameter(), "seqlen");
}

}  // namespace
}  // namespace rafter
