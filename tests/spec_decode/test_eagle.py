"""EAGLE heads: their logits are those of the papers' equations,
and a head that can know everything is always right."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm import LLM
from minivllm.batch.layer_caches import block_bytes
from minivllm.batch.step_inputs import Row
from minivllm.errors import ConfigError, ModelError
from tests.parity_reference import (
    assert_pool_unused,
    reference_model,
    reference_tokens,
    run,
    runner_of,
    tiny_llm,
    tokens_of,
)
from tests.spec_decode.drafting_cases import (
    GREEDY,
    MAX_TOKENS,
    PARAMS,
    PROMPTS,
    SETTINGS,
    HeadGuess,
    always_drafts,
    draft_of,
    recorded_heads,
)
from tests.spec_decode.eagle_heads import (
    DRAFT_VOCAB,
    HIDDEN,
    VOCAB,
    crafted_model,
    head_config,
    knowing_head,
    random_head,
    random_weights,
    save_head,
)
from tutorials.recorded_graphs import RecordedGraphs

TinyModel = Callable[..., Path]
VERSIONS = ("eagle", "eagle3")
SETTINGS_AS_PARAMETERS = [
    pytest.param(settings, id=name, marks=[pytest.mark.slow] if name in ("plain", "no prefix cache") else [])
    for name, settings in SETTINGS.items()
]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("heads")
    return {version: random_head(directory / version, version) for version in VERSIONS}


@pytest.fixture(scope="module")
def known_model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that a head can guess: its next token follows from the last two."""
    mistral = tiny_model("mistral", sliding_window=2)
    return crafted_model(tmp_path_factory.mktemp("crafted") / "model", mistral)


@pytest.fixture(scope="module")
def knowing_heads(known_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("knowing")
    return {version: knowing_head(directory / version, version, known_model) for version in VERSIONS}


def drafting(version: str, head: Path, count: int = 3) -> dict[str, Any]:
    config = {
        "method": version,
        "model": str(head),
        "num_speculative_tokens": count,
        "verification_cost": 0.0,
    }
    return {"speculative_config": config}


# -- the papers' equations, for a whole text at once, in float64 -----------------------------------


class ReferenceHead:
    """A head as its paper has it: no cache, no chunks, nothing shared with the engine but the file."""

    def __init__(self, target: Path, head: Path, version: str) -> None:
        self.target: Any = copy.deepcopy(reference_model(target)).double()
        weights = {name: tensor.double() for name, tensor in load_file(head / "model.safetensors").items()}
        self.weights = {
            name.removeprefix("layers.0.").removeprefix("midlayer."): value for name, value in weights.items()
        }
        self.config, self.version = json.loads((head / "config.json").read_text()), version
        own = self.target.get_input_embeddings().weight.double()
        self.embedding = self.weights.get("embed_tokens.weight", own)

    def features(self, tokens: list[int]) -> Tensor:
        """What the target hands out for a text, [tokens, HIDDEN]."""
        with torch.inference_mode():
            states = self.target.model(
                torch.tensor([tokens]), output_hidden_states=True, use_cache=False
            ).hidden_states
        if self.version == "eagle":
            return states[-1][0]
        layers = sorted((2, len(self.target.model.layers) // 2, len(self.target.model.layers) - 3))
        return torch.cat([states[layer][0] for layer in layers], -1) @ self.weights["fc.weight"].T

    def logits(self, tokens: list[int], num_known: int) -> Tensor:
        """Logits [VOCAB] of what follows ``tokens``,
        of which the target has seen all but the last known one."""
        features = self.features(tokens[: num_known - 1])
        while True:
            count = len(features)
            outputs = self._layer(torch.tensor(tokens[1 : count + 1]), features)
            if count == len(tokens) - 1:
                break
            features = torch.cat([features, outputs[-1:]])
        hidden = outputs[-1]
        if self.version == "eagle":
            return hidden @ self.target.lm_head.weight.double().T
        logits = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
        targets = torch.arange(DRAFT_VOCAB) + self.weights["d2t"].long()
        logits[targets] = self._norm(hidden, "norm") @ self.weights["lm_head.weight"].T
        return logits

    def _layer(self, tokens: Tensor, features: Tensor) -> Tensor:
        embedded, weights = self.embedding[tokens], self.weights
        if self.version == "eagle":
            x = residual = torch.cat([embedded, features], -1) @ weights["fc.weight"].T + weights["fc.bias"]
        else:
            residual = features
            x = torch.cat([self._norm(embedded, "input_layernorm"), self._norm(features, "hidden_norm")], -1)
            if self.config.get("norm_before_residual"):
                residual = self._norm(features, "hidden_norm")
        hidden = residual + self._attention(x)
        x = self._norm(hidden, "post_attention_layernorm")
        gate, up = (x @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + (F.silu(gate) * up) @ weights["mlp.down_proj.weight"].T

    def _attention(self, x: Tensor) -> Tensor:
        length, dim, heads = len(x), 16, self.config["num_attention_heads"]
        q, k, v = (
            (x @ self.weights[f"self_attn.{name}_proj.weight"].T).view(length, -1, dim).transpose(0, 1)
            for name in ("q", "k", "v")
        )
        angles = torch.arange(length)[:, None] * 10000.0 ** (
            -torch.arange(0, dim, 2, dtype=torch.float64) / dim
        )
        cos, sin = (torch.cat([function(angles)] * 2, -1) for function in (torch.cos, torch.sin))

        def rotated(t: Tensor) -> Tensor:
            return t * cos + torch.cat([-t[..., dim // 2 :], t[..., : dim // 2]], -1) * sin

        k, v = (t.repeat_interleave(heads // len(k), 0) for t in (rotated(k), v))
        scores = rotated(q) @ k.transpose(1, 2) / dim**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ self.weights["self_attn.o_proj.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weights[f"{name}.weight"]


def assert_reference_logits(recorded: list[HeadGuess], reference: ReferenceHead) -> None:
    for text, num_known, logits, _ in recorded:
        expected = reference.logits(text, num_known)
        is_guessable = expected > -torch.inf
        torch.testing.assert_close(
            logits.double()[is_guessable], expected[is_guessable], atol=3e-3, rtol=1e-3
        )
        assert bool((logits[~is_guessable] == torch.finfo(torch.float32).min).all())


@pytest.mark.parametrize("settings", SETTINGS_AS_PARAMETERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_logits_are_those_of_the_papers_and_tokens_those_of_the_model_whatever_became_of_the_cache(
    model: Path, heads: dict[str, Path], version: str, settings: dict[str, Any]
) -> None:
    with always_drafts(tiny_llm(model, **drafting(version, heads[version]), **settings)) as llm:
        with recorded_heads(llm) as recorded:
            for _ in range(2):  # the second time from the prefix cache
                assert tokens_of(run(llm, PROMPTS, GREEDY)) == reference_tokens(model, PROMPTS)
        metrics = llm.get_metrics()
        assert "num_gpu_blocks_override" not in settings or metrics.num_preemptions > 0
        assert_pool_unused(llm)
    assert {len(text) - num_known for text, num_known, _, _ in recorded} == {0, 1, 2}
    step = max(1, len(recorded) // 40)
    assert_reference_logits(recorded[::step], ReferenceHead(model, heads[version], version))


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}}),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}),
        ("eagle", {"architectures": ["EagleLlamaForCausalLM"]}),
    ],
)
def test_what_else_a_published_configuration_may_say(
    model: Path, tmp_path: Path, version: str, changes: dict[str, Any]
) -> None:
    head = random_head(tmp_path, version, seed=5, **changes)
    with always_drafts(tiny_llm(model, **drafting(version, head))) as llm, recorded_heads(llm) as recorded:
        run(llm, PROMPTS[:2], GREEDY)
    assert_reference_logits(recorded[:9], ReferenceHead(model, head, version))


@pytest.mark.parametrize("version", VERSIONS)
def test_random_tokens_are_those_without_a_head(model: Path, heads: dict[str, Path], version: str) -> None:
    with tiny_llm(model) as llm:
        plain = tokens_of(run(llm, PROMPTS, PARAMS))
    for name in ("chunks", "preemption"):
        with always_drafts(tiny_llm(model, **drafting(version, heads[version]), **SETTINGS[name])) as llm:
            assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain


# -- a head that knows -----------------------------------------------------------------------------


def acceptance(llm: LLM, model: Path) -> float:
    """Share of guesses that were right, while greedy tokens are checked against transformers."""
    before = llm.get_metrics()
    for _ in range(2):
        tokens = tokens_of(run(llm, PROMPTS, GREEDY))
        assert tokens == reference_tokens(model, PROMPTS)
        assert (
            len({token for text in tokens for token in text}) > 30
        )  # a text that stands still is guessed by anyone
    after = llm.get_metrics()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert drafted > 0
    return (after.num_accepted_tokens - before.num_accepted_tokens) / drafted


@pytest.mark.parametrize("settings", SETTINGS_AS_PARAMETERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_head_that_can_know_what_the_model_says_is_right(
    known_model: Path, knowing_heads: dict[str, Path], version: str, settings: dict[str, Any]
) -> None:
    with always_drafts(tiny_llm(known_model, **drafting(version, knowing_heads[version]), **settings)) as llm:
        assert acceptance(llm, known_model) > 0.97


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_wrong_if_tokens_or_features_are_shifted_by_one(
    known_model: Path, knowing_heads: dict[str, Path], version: str
) -> None:
    with always_drafts(tiny_llm(known_model, **drafting(version, knowing_heads[version]))) as llm:
        draft = draft_of(llm)
        features = draft.model.features
        draft._paged._builder._token_offset = 0
        assert acceptance(llm, known_model) < 0.1
        draft._paged._builder._token_offset = 1
        for shift in (1, -1):
            draft.model.features = lambda *args, s=shift: features(*args).roll(s, 0)  # type: ignore[method-assign]
            assert llm.reset_prefix_cache()
            assert (
                acceptance(llm, known_model) < 0.5
            )  # rows of a single token cannot be shifted within their step
        draft.model.features = features  # type: ignore[method-assign]
        assert llm.reset_prefix_cache()
        assert acceptance(llm, known_model) > 0.97


@pytest.mark.parametrize("version", VERSIONS)
def test_right_guesses_save_their_share_of_steps(
    known_model: Path, knowing_heads: dict[str, Path], version: str
) -> None:
    with always_drafts(tiny_llm(known_model, **drafting(version, knowing_heads[version]))) as llm:
        run(llm, PROMPTS[:1], GREEDY)
        assert llm.get_metrics().num_steps == 1 + -(-(MAX_TOKENS - 1) // 4)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_head_computes_every_place_once(
    known_model: Path, knowing_heads: dict[str, Path], version: str
) -> None:
    """18 tokens of the prompt and 15 of the answer make 32 places,
    and each guess behind the first takes one more."""
    with always_drafts(tiny_llm(known_model, **drafting(version, knowing_heads[version]))) as llm:
        draft, computed = draft_of(llm), []
        original = draft._compute

        def compute(rows: list[Row], **settings: Any) -> Any:
            computed.append(sum(row.count for row in rows))
            return original(rows, **settings)

        draft._compute = compute  # type: ignore[method-assign]
        run(llm, PROMPTS[:1], GREEDY)
        num_guesses = llm.get_metrics().num_draft_tokens
        num_proposals = llm.get_metrics().num_drafts
        first = sum(computed)
        run(llm, PROMPTS[:1], GREEDY)
    # The last four tokens are never looked at: no guess follows them.
    assert first == 18 + 15 - 4 + 1 + num_guesses - num_proposals
    assert sum(computed) - first <= first - 16  # two blocks of the prompt are there already


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_it_sleeps_and_wakes_up_with_its_model(
    known_model: Path, knowing_heads: dict[str, Path], version: str, level: int
) -> None:
    with always_drafts(tiny_llm(known_model, **drafting(version, knowing_heads[version]))) as llm:
        client = llm.llm_engine.client
        assert acceptance(llm, known_model) > 0.97
        client.call("sleep", level)
        assert client.call("collective_rpc", "memory_bytes", [])[0]["kv_cache"] == 0
        client.call("wake_up")
        assert acceptance(llm, known_model) > 0.97


@pytest.mark.parametrize("version", VERSIONS)
def test_graphs_hand_out_features_too(
    known_model: Path, knowing_heads: dict[str, Path], version: str
) -> None:
    with always_drafts(tiny_llm(known_model, **drafting(version, knowing_heads[version]))) as llm:
        runner = runner_of(llm)
        with torch.inference_mode():
            runner.capture_graphs("full_and_piecewise", RecordedGraphs())
        assert acceptance(llm, known_model) > 0.97
        assert runner.graphs is not None and {choice.kind for choice in runner.graphs.num_replays} >= {
            "piecewise"
        }


def test_nothing_is_tapped_without_a_head(model: Path) -> None:
    with tiny_llm(model, speculative_config={"method": "ngram"}) as llm:
        assert runner_of(llm).model.tap is None


@pytest.mark.parametrize("version", VERSIONS)
def test_cache_and_features_count(model: Path, heads: dict[str, Path], version: str) -> None:
    megabyte = 2**20
    settings: dict[str, Any] = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": megabyte}
    with tiny_llm(model, **settings, **drafting(version, heads[version])) as llm:
        worker = llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]
        page = 8 * 4 * (2 * 3 * 32 + 2 * 32 + HIDDEN)
        assert page == sum(block_bytes(decoder, 8) for decoder in worker._text_models)
        assert runner_of(llm).limits.groups[0].num_blocks == megabyte // page
        assert worker.memory_bytes()["kv_cache"] == megabyte // page * page


@pytest.mark.parametrize("version", VERSIONS)
def test_an_embedding_that_is_the_models_own_is_kept_once(model: Path, tmp_path: Path, version: str) -> None:
    weights = random_weights(version)
    weights["embed_tokens.weight"] = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    head = save_head(tmp_path, weights, head_config(version))
    with tiny_llm(model, **drafting(version, head)) as llm:
        assert draft_of(llm).model.embedding == ()


@pytest.mark.parametrize(
    "version",
    [pytest.param("eagle3", marks=pytest.mark.slow), pytest.param("eagle", marks=pytest.mark.matrix)],
)
def test_a_compiled_head_is_right_too_and_nothing_is_compiled_after_warm_up(
    known_model: Path, knowing_heads: dict[str, Path], version: str
) -> None:
    settings = {"enforce_eager": False, **drafting(version, knowing_heads[version])}
    with always_drafts(tiny_llm(known_model, **settings)) as llm:
        assert acceptance(llm, known_model) > 0.97
        for prompt in PROMPTS[1:3]:
            run(llm, [prompt], GREEDY)
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


# -- what cannot work ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "changes", "sentence"),
    [
        (
            "eagle",
            {"architectures": ["BertModel"]},
            "names the architecture BertModel, but supported are: LlamaFor",
        ),
        ("eagle", {"vocab_size": 500}, "vocab_size is 500, but the model it guesses for has 416 tokens"),
        ("eagle", {"hidden_size": 128}, "reads hidden states of 128 values, but .* have 64: take the head"),
        (
            "eagle3",
            {"target_hidden_size": 128},
            "reads hidden states of 128 values, but .* have 64: take the head",
        ),
        ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers is 2, but an eagle head has 1 layer"),
        (
            "eagle",
            {"draft_vocab_size": 100},
            "draft_vocab_size is what EAGLE-3 heads have: use method 'eagle3'",
        ),
        (
            "eagle3",
            {"draft_vocab_size": 500},
            "draft_vocab_size is 500, but must be from 1 to vocab_size, 416",
        ),
        ("eagle3", {"draft_vocab_size": "all"}, "draft_vocab_size is 'all', but must be a whole number"),
        ("eagle3", {"norm_before_residual": "no"}, "norm_before_residual is 'no', but must be true or false"),
        (
            "eagle3",
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state is false, but EAGLE-3",
        ),
        ("eagle3", {"eagle_config": []}, None),
        ("eagle3", {"eagle_config": 3}, "eagle_config is 3, but must be an object"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "must list 3 different layers"),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
            "the model the head guesses for has 3 layers",
        ),
        (
            "eagle3",
            {"quantization_config": {"quant_method": "fp8"}},
            "the head is quantised, which is not supported",
        ),
    ],
)
def test_a_head_that_cannot_be_run_is_refused_with_a_sentence(
    model: Path, tmp_path: Path, version: str, changes: dict[str, Any], sentence: str | None
) -> None:
    head = random_head(tmp_path, version, **changes)
    if sentence is None:
        tiny_llm(model, **drafting(version, head)).close()
        return
    with pytest.raises((ModelError, ConfigError), match=sentence):
        tiny_llm(model, **drafting(version, head))


def test_a_model_of_few_layers_needs_other_layers_to_be_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    shallow = tiny_model("llama", num_hidden_layers=4)
    with pytest.raises(ModelError, match="The model has 4 layers, too few for an EAGLE-3 head"):
        tiny_llm(shallow, **drafting("eagle3", random_head(tmp_path / "a", "eagle3")))
    head = random_head(tmp_path / "b", "eagle3", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    tiny_llm(shallow, **drafting("eagle3", head)).close()


def _without(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in weights.items() if key != name}


EAGLE, EAGLE3 = random_weights("eagle"), random_weights("eagle3")


@pytest.mark.parametrize(
    ("version", "weights", "sentence"),
    [
        ("eagle", _without(EAGLE, "fc.weight"), "lacks tensor 'fc.weight'; the checkpoint is incomplete"),
        (
            "eagle",
            {**EAGLE, "fc.weight": torch.zeros(64, 64)},
            r"'fc.weight' has shape \[64, 64\], but .* \[64, 128\]",
        ),
        (
            "eagle",
            {**EAGLE, "layers.0.input_layernorm.weight": torch.ones(64)},
            "which the .* does not call for",
        ),
        (
            "eagle",
            {**EAGLE, "fc.bias": torch.zeros(64, dtype=torch.int8)},
            "'fc.bias' is stored as I8, but must be",
        ),
        ("eagle", EAGLE3, "holds the tensors of an EAGLE-3 head: use method 'eagle3'"),
        ("eagle3", EAGLE, "holds the tensors of no EAGLE-3 head: use method 'eagle'"),
        ("eagle3", _without(EAGLE3, "d2t"), "lacks tensor 'd2t'"),
        (
            "eagle3",
            {**EAGLE3, "d2t": torch.zeros(400)},
            "'d2t' is stored as F32, but must be one of I64, I32",
        ),
        (
            "eagle3",
            {**EAGLE3, "d2t": EAGLE3["d2t"] + 20},
            "d2t must lead to 400 different tokens from 0 to 415",
        ),
        ("eagle3", {**EAGLE3, "t2d": ~EAGLE3["t2d"]}, "d2t and t2d contradict each other"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_a_sentence(
    model: Path, tmp_path: Path, version: str, weights: dict[str, Tensor], sentence: str
) -> None:
    head = save_head(tmp_path, weights, head_config(version))
    with pytest.raises(ModelError, match=sentence):
        tiny_llm(model, **drafting(version, head))


def test_pickled_weights_and_other_directories_are_refused(
    model: Path, heads: dict[str, Path], tmp_path: Path
) -> None:
    pickled = shutil.copytree(heads["eagle"], tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"pytorch_model.bin, a pickle file .* convert the model to safetensors"
    ):
        tiny_llm(model, **drafting("eagle", pickled))
    (pickled / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="must be converted to safetensors first"):
        tiny_llm(model, **drafting("eagle", pickled))
    with pytest.raises(ModelError, match="is no eagle head: it holds no config"):
        tiny_llm(model, **drafting("eagle", tmp_path))
    with pytest.raises(ConfigError, match="method 'eagle3' needs the name or the path of an EAGLE-3 head"):
        tiny_llm(model, speculative_config={"method": "eagle3"})


def test_two_files_must_not_hold_the_same_tensor(model: Path, tmp_path: Path) -> None:
    head = save_head(
        tmp_path, {**EAGLE3, "layers.0.hidden_norm.weight": torch.ones(64)}, head_config("eagle3")
    )
    with pytest.raises(ModelError, match=r"hidden_norm.weight' is also in"):
        tiny_llm(model, **drafting("eagle3", head))
    save_file(EAGLE3, head / "model.safetensors")
    tiny_llm(model, **drafting("eagle3", head)).close()


@pytest.mark.parametrize("version", VERSIONS)
def test_random_weights_need_a_configuration_only(model: Path, heads: dict[str, Path], version: str) -> None:
    settings = {"load_format": "dummy", **drafting(version, heads[version])}
    with always_drafts(tiny_llm(model, **settings)) as llm:
        (text,) = tokens_of(run(llm, PROMPTS[:1], GREEDY))
        assert len(text) == MAX_TOKENS
        assert llm.get_metrics().num_draft_tokens > 0
