"""Models of transformers, random weights, on the CPU; skipped without transformers."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed")
import rafter.torch as rt  # noqa: E402

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=6),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    rt.register_with_transformers()


def model_of(name):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def prompt(padded):
    ids = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :5] = 0
    return dict(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "name,cache", [("llama", None), ("llama", "static"), ("mistral", None), ("gemma2", None)]
)
def test_generation_has_the_logits_of_the_eager_function(name, cache, padded):
    model, seen = model_of(name), {}
    for implementation in ("eager", "rafter"):
        model.set_attn_implementation(implementation)
        seen[implementation] = model.generate(
            **prompt(padded), max_new_tokens=6, do_sample=False, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0, cache_implementation=cache,
            disable_compile=True,
        )  # fmt: skip
    assert torch.equal(seen["eager"].sequences, seen["rafter"].sequences)
    for a, b in zip(seen["eager"].logits, seen["rafter"].logits):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_training_has_the_gradients_of_the_eager_function():
    model, ids = model_of("llama").train(), prompt(False)["input_ids"]
    gradients = {}
    for implementation in ("eager", "rafter"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients[implementation] = [p.grad.clone() for p in model.parameters()]
    for a, b in zip(*gradients.values()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_what_it_has_not_is_refused_by_name():
    model = model_of("llama")
    model.set_attn_implementation("rafter")
    ids = prompt(False)["input_ids"]
    packed = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6]])
    for more, message in [
        (dict(position_ids=packed), "mask_function"),
        (dict(attention_mask=torch.ones(1, 1, 13, 13, dtype=torch.bool)), "attention_mask"),
        (dict(attention_mask=torch.zeros(1, 1, 13, 13)), "attention_mask"),
        (dict(cu_seq_lens_q=torch.tensor([0, 6, 13])), "cu_seq_lens_q"),
    ]:
        with pytest.raises(NotImplementedError, match="^" + message):
            model(ids[:1], use_cache=False, **more)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(NotImplementedError, match="^dropout: 0.1"):
        model(ids)
