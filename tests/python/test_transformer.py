"""Whole models from Python: logits of prefill and decode, caches in 8 bits, refusals."""

import json

import numpy as np
import pytest
import rafter

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return rafter.Transformer.random(TINY, seed=3)


def test_a_model_says_what_it_is(model):
    assert model.config["hidden_size"] == 64
    assert model.config["heads_kv"] == 2
    assert (model.device, model.dtype) == ("cpu", "f32")
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    assert model.weight_bytes == 4 * (2 * 50 * 64 + 64 + 2 * layer)


def test_decoding_continues_a_prefill(model):
    tokens = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 49, 0, 7, 8]], np.int32)
    session = model.session(max_batch=2, max_seqlen=16, page_size=4, all_logits=True)
    whole = session.prefill(tokens)
    assert isinstance(whole, np.ndarray)
    assert whole.shape == (12, 50)
    assert whole.dtype == np.float32
    session = model.session(max_batch=2, max_seqlen=16, page_size=4)
    first = session.prefill(tokens[:, :4])
    np.testing.assert_allclose(first, whole.reshape(2, 6, 50)[:, 3], atol=1e-4)
    for t in (4, 5):
        step = session.decode(tokens[:, t])
        np.testing.assert_allclose(step, whole.reshape(2, 6, 50)[:, t], atol=1e-4)
    assert session.lengths == [6, 6]


def test_lists_and_arrays_are_the_same_tokens(model):
    session = model.session(max_batch=2, max_seqlen=8)
    of_lists = np.from_dlpack(session.prefill([[1, 2, 3], [4, 5]]))
    of_arrays = session.prefill([np.array([1, 2, 3]), np.array([4, 5])])
    np.testing.assert_array_equal(of_lists, of_arrays)
    assert session.lengths == [3, 2]


def test_an_8_bit_cache_is_a_quarter_with_its_factors_and_near(model):
    options = {"max_batch": 2, "max_seqlen": 16, "page_size": 4}
    exact, rounded = model.session(**options), model.session(**options, kv_dtype="int8")
    assert rounded.cache_bytes == exact.cache_bytes // 4 + exact.cache_bytes // 16
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]
    np.testing.assert_allclose(
        np.from_dlpack(rounded.prefill(prompts)), np.from_dlpack(exact.prefill(prompts)), atol=1e-4
    )
    for token in range(3):
        expected = np.from_dlpack(exact.decode([token, token + 1]))
        given = np.from_dlpack(rounded.decode([token, token + 1]))
        error = np.linalg.norm(given - expected) / np.linalg.norm(expected)
        assert 0 < error < 0.02
    other = model.session(**options, kv_dtype="e4m3")
    other.prefill([[1]])
    with pytest.raises(NotImplementedError, match="kv_dtype e4m3"):  # of a CPU's kernels
        other.decode([2])


@pytest.mark.parametrize(
    ("weights", "bound"), [("int8", 0.02), ("e4m3", 0.1), ("int4", 0.3)]
)
def test_quantised_weights_are_fewer_bytes_and_near(weights, bound):
    config = {**TINY, "hidden_size": 128, "intermediate_size": 128}
    plain = rafter.Transformer.random(config, seed=3)
    packed = rafter.Transformer.random(config, seed=3, weights=weights, group_size=32)
    assert (plain.weights, packed.weights, packed.dtype) == ("f32", weights, "f32")
    share = packed.weight_bytes / plain.weight_bytes
    assert (0.15 if weights == "int4" else 0.25) < share < (0.25 if weights == "int4" else 0.4)
    prompts = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]
    session, other = (m.session(max_batch=2, max_seqlen=16) for m in (plain, packed))
    for step in (lambda s: s.prefill(prompts), lambda s: s.decode([2, 7])):
        expected, given = (np.from_dlpack(step(s)) for s in (session, other))
        assert 0 < np.linalg.norm(given - expected) / np.linalg.norm(expected) < bound


def test_a_config_is_a_name_a_file_or_a_dict(model, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    of_file = rafter.Transformer.random(path, seed=3)
    prompt = [[1, 2]]
    np.testing.assert_array_equal(
        np.from_dlpack(of_file.session(max_seqlen=4).prefill(prompt)),
        np.from_dlpack(model.session(max_seqlen=4).prefill(prompt)),
    )
    with pytest.raises(ValueError, match="reference-60m"):
        rafter.Transformer.random("gpt-5")
    with pytest.raises(NotImplementedError, match="experts"):
        rafter.Transformer.random(
            {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
        )
    with pytest.raises(OSError, match="config.json"):
        rafter.Transformer.load(tmp_path / "nowhere")


def test_refusals_name_what_is_wrong(model):
    session = model.session(max_batch=2, max_seqlen=4)
    for prompts, words in [
        ([], "prompts"),
        ([1, 2], "prompts"),
        ([[]], r"prompts\[0\]"),
        ([[1], [2, 50]], r"prompts\[1\]\[1\].*50"),
        ([[1, 2, 3, 4, 5]], "max_seqlen = 4"),
        ([["a"]], r"prompts\[0\]"),
        ([np.array([1.0])], r"prompts\[0\].dtype"),
    ]:
        with pytest.raises(ValueError, match=words):
            session.prefill(prompts)
    session.prefill([[1, 2, 3, 4]])
    with pytest.raises(ValueError, match="max_seqlen = 4"):
        session.decode([1])
    with pytest.raises(ValueError, match="kv_dtype.*int8, e4m3"):
        model.session(kv_dtype="f16")
    with pytest.raises(ValueError, match="prefill.*half-fused"):
        model.session(prefill="slow")
    with pytest.raises(ValueError, match="weights.*f16"):
        rafter.Transformer.random(TINY, weights="f16")
    with pytest.raises(ValueError, match="group_size"):
        rafter.Transformer.random(TINY, weights="int4", group_size=48)
    with pytest.raises(ValueError, match="device.*cpu"):
        rafter.Transformer.random(TINY, device="tpu")
