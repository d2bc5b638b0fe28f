"""Whole models: tokens in, logits out."""

from __future__ import annotations

import json
import os
from array import array
from typing import Any, List, Mapping, Optional, Sequence, Union

from . import _core

Config = Union[str, "os.PathLike[str]", Mapping[str, Any]]


def _token_array(name: str, tokens: Any) -> Any:
    """Token numbers as an array: as they are, or those of a list or tuple."""
    if not isinstance(tokens, (list, tuple)):
        return tokens
    try:
        return array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name}: {error}; whole numbers of tokens allowed") from None


class Session:
    """Sequences in flight of a model: their cache and lengths; made by Transformer.session.

    Not for use by several threads at once.
    """

    def __init__(self, core: _core.Session):
        self._core = core

    def prefill(self, prompts: Any) -> Any:
        """Begins a sequence for each prompt, in place of those before.

        Args:
            prompts: a list of prompts, each an array (int32 or int64, in host memory) or a list of
                token numbers, of any lengths; or one array [batch, tokens].

        Returns:
            Logits of each sequence's last token, float32 [batch, vocab_size] in host memory, or
            with all_logits of all tokens, [tokens, vocab_size]; an array of the library of the
            prompts, for lists one with DLPack.

        Raises:
            ValueError: a prompt that is empty or too long, a token that the vocabulary lacks.
        """
        rows: List[Any] = list(prompts)
        if rows and all(getattr(row, "ndim", None) == 0 or isinstance(row, int) for row in rows):
            raise ValueError("prompts: numbers given; a list of prompts or [batch, tokens] allowed")
        return self._core.prefill(
            [_token_array(f"prompts[{i}]", row) for i, row in enumerate(rows)]
        )

    def decode(self, tokens: Union[Sequence[int], Any]) -> Any:
        """One more token of each sequence, by a step that a GPU replays as a graph.

        Args:
            tokens: [batch], an array (int32 or int64, in host memory) or a list.

        Returns:
            Logits float32 [batch, vocab_size] in host memory, as prefill gives them.

        Raises:
            ValueError: another number of tokens than sequences, a sequence that is full.
        """
        return self._core.decode(_token_array("tokens", tokens))

    @property
    def lengths(self) -> List[int]:
        """Tokens in the cache of each sequence."""
        return self._core.lengths

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache, in bytes."""
        return int(self._core.cache_bytes)


class Transformer:
    """A Llama-like model's weights on a device; made by load or random."""

    def __init__(self, core: _core.Transformer):
        self._core = core

    @classmethod
    def load(
        cls, folder: Union[str, "os.PathLike[str]"], device: str = "cpu",
        dtype: Optional[str] = None, weights: Optional[str] = None, group_size: int = 128,
    ) -> "Transformer":  # fmt: skip
        """Reads a Hugging Face folder: config.json with model.safetensors or shards of it.

        Args:
            folder: of model_type llama, mistral, qwen2 or qwen3.
            device: "cpu", "cuda" or "cuda:1".
            dtype: "f32", "bf16" or "f16", to which other weights are rounded; by default the
                published one.
            weights: of the layers' matrices: "int8", "e4m3" or "int4", quantised as they are read,
                with a factor for each row or, in int4, for each group_size elements of one; by
                default the dtype. The embedding, lm_head, norms and biases stay in the dtype.
            group_size: of int4: 32, 64 or 128.

        Raises:
            ValueError: a config.json or a tensor that means nothing, weights that a matrix has no
                such form of; OSError: a file that cannot be
                read. NotImplementedError: a key of config.json whose mathematics is not built, a
                dtype that the device has no products in.
        """
        return cls(
            _core.Transformer.load(os.fspath(folder), device, dtype, weights, group_size)
        )

    @classmethod
    def random(
        cls, config: Config = "reference-60m", seed: int = 0, device: str = "cpu",
        dtype: Optional[str] = None, weights: Optional[str] = None, group_size: int = 128,
    ) -> "Transformer":  # fmt: skip
        """Weights random by seed, the same bits on every device.

        Args:
            config: "reference-60m", "reference-7b", the path of a config.json, or its contents as a
                dict.
            seed: of the hash that gives each weight.
            device, dtype, weights, group_size: as for load.
        """
        if isinstance(config, Mapping):
            given, kind = json.dumps(dict(config)), "json"
        else:
            given = os.fspath(config)
            kind = "file" if os.sep in given or given.endswith(".json") else "name"
        return cls(
            _core.Transformer.random(given, kind, seed, device, dtype, weights, group_size)
        )

    def session(
        self, max_batch: int = 1, max_seqlen: int = 4096, page_size: int = 64,
        prefill: str = "fused", fuse: bool = True, all_logits: bool = False,
        kv_dtype: Optional[str] = None,
    ) -> Session:  # fmt: skip
        """Allocates a cache for max_batch sequences of max_seqlen tokens.

        Args:
            max_batch: sequences at once.
            max_seqlen: tokens of one, prompt and generated.
            page_size: tokens of a page of the cache.
            prefill: the pipeline of its attention: "unfused", "half-fused" or "fused".
            fuse: elementwise functions fused, or each by itself.
            all_logits: a prefill gives logits of every token.
            kv_dtype: of the cache: "int8" or "e4m3", with a factor for each token and KV head; by
                default the model's.
        """
        options = {
            "max_batch": max_batch, "max_seqlen": max_seqlen, "page_size": page_size,
            "prefill": prefill, "fuse": fuse, "all_logits": all_logits, "kv_dtype": kv_dtype,
        }  # fmt: skip
        return Session(self._core.session(options))

    @property
    def config(self) -> dict:
        """Its shapes and constants."""
        return self._core.config

    @property
    def device(self) -> str:
        """Where its weights are: "cpu", "cuda:0", ..."""
        return self._core.device

    @property
    def dtype(self) -> str:
        """Of its activations, and of weights that are not quantised."""
        return self._core.dtype

    @property
    def weights(self) -> str:
        """The format of its layers' matrices: its dtype, "int8", "e4m3" or "int4"."""
        return self._core.weights

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights, in bytes."""
        return int(self._core.weight_bytes)
