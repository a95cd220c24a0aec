"""compressed-tensors checkpoints, written here from known numbers by the format's formula,
in every format there is.

The writer was compared with the package of that name once:
what it writes, the package reads as the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from kernels_triton_free.quantized_linear import can_multiply_int4
from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.errors import ModelError
from minivllm.linear.methods.int8 import Int8Linear, RoundedInputs
from minivllm.weights.packed_weights import PackedWeights
from minivllm.weights.quantization_config import StoredQuantization, WeightFormat, read_quantization
from minivllm.weights.stored_weight import (
    GroupedWeight,
    QuantizedWeight,
    RestoredWeight,
    RowScaledWeight,
    StoredWeight,
)
from tests.end_to_end.test_packed_checkpoints import Tensors, TinyModel, assert_same_logits, words, write
from tests.parity_reference import engine_logits, random_prompts, reference_logits, reference_model, tiny_llm

Settings = dict[str, Any]
GROUP, BLOCK = 32, (32, 48)
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def packed(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Signed numbers [rows, n] in int32 words along the rows:
    moved up by half their range, the first lowest."""
    count = 32 // bits
    moved = np.pad(numbers + 2 ** (bits - 1), ((0, 0), (0, -numbers.shape[1] % count)))
    return words([moved[:, first::count] for first in range(count)])


def stored_weight(
    shape: tuple[int, int], form: str, settings: Settings, seed: int
) -> tuple[Tensors, np.ndarray]:
    """The parts of a random weight [out, in] and its values, float64: (number - zero) * scale."""
    random = np.random.default_rng(seed)
    rows, columns = shape
    strategy, bits = settings["strategy"], settings["num_bits"]
    if strategy == "block":
        scale = random.uniform(0.01, 0.05, (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))).astype(np.float32)
        every = scale.repeat(BLOCK[0], 0)[:rows].repeat(BLOCK[1], 1)[:, :columns]
    else:
        groups = columns // GROUP if strategy == "group" else 1
        scale = random.uniform(0.01, 0.05, (1,) if strategy == "tensor" else (rows, groups)).astype(
            np.float32
        )
        every = np.broadcast_to(scale.reshape(-1, groups), (rows, groups)).repeat(columns // groups, 1)
    if settings["type"] == "float":
        eights = torch.from_numpy(random.normal(size=shape)).to(torch.float8_e4m3fn)
        return {"weight": eights, "weight_scale": torch.from_numpy(scale)}, eights.double().numpy() * every
    half = 2 ** (bits - 1)
    scale, every = scale * 8 / half, every * 8 / half
    parts = {"weight_scale": torch.from_numpy(scale)}
    group_of = np.arange(columns) // (columns // (scale.shape[1] if scale.ndim == 2 else 1))
    if settings.get("actorder") == "group":
        np.random.default_rng(columns).shuffle(group_of)  # layers that share their inputs share the order
        parts["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        every = scale[:, group_of]
    numbers, zeros = random.integers(-half, half, shape), np.zeros((rows, group_of.max() + 1), dtype=np.int64)
    if not settings["symmetric"]:
        zeros = random.integers(-half, half, zeros.shape)
        packed_zeros = (
            packed(zeros.T, bits).T if form == "pack-quantized" else torch.from_numpy(zeros.astype(np.int8))
        )
        parts["weight_zero_point"] = packed_zeros.contiguous()
    if form == "pack-quantized":
        parts |= {"weight_packed": packed(numbers, bits), "weight_shape": torch.tensor(shape)}
    else:
        parts["weight"] = torch.from_numpy(numbers.astype(np.int8))
    return parts, (numbers - zeros[:, group_of]) * every


def weights(bits: int = 4, strategy: str = "group", kind: str = "int", **others: Any) -> Settings:
    settings = {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        **others,
    }
    size = {"group": GROUP, "channel": -1}.get(strategy)
    return {
        **settings,
        "group_size": size,
        **({"block_structure": list(BLOCK)} if strategy == "block" else {}),
    }


def group(form: str, settings: Settings, targets: list[str] | None = None, inputs: Any = None) -> Settings:
    return {
        "format": form,
        "weights": settings,
        "targets": targets or ["Linear"],
        "input_activations": inputs,
    }


def compressed_copy(
    source: Path,
    target: Path,
    groups: list[Settings],
    ignore: list[str],
    group_of: Callable[[str], int | None],
) -> tuple[Path, Path, Tensors]:
    """(checkpoint, the same dequantised, the dequantised weights).
    group_of: which group a layer is stored by."""
    tensors, stored = load_file(source / "model.safetensors"), {}
    for seed, name in enumerate(list(tensors)):
        module = name.removesuffix(".weight")
        index = group_of(module) if module.endswith(("_proj", "lm_head")) and name != module else None
        if index is None:
            stored[name] = tensors[name]
            continue
        form, settings = groups[index]["format"], groups[index]["weights"]
        parts, values = stored_weight(tuple(tensors[name].shape), form, settings, seed)  # type: ignore[arg-type]
        stored.update({f"{module}.{part}": tensor for part, tensor in parts.items()})
        tensors[name] = torch.from_numpy(values.astype(np.float32))
    forms = {each["format"] for each in groups}
    config = {
        "quant_method": "compressed-tensors",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": each for index, each in enumerate(groups)},
        "ignore": ignore,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }
    return *write(source, target, stored, tensors, config), tensors


def all_but_the_head(module: str) -> int | None:
    return None if module == "lm_head" else 0


FORMATS = [
    pytest.param("pack-quantized", weights(), GroupedWeight, id="int4 groups"),
    pytest.param("pack-quantized", weights(symmetric=False), GroupedWeight, id="int4 groups with zeros"),
    pytest.param("pack-quantized", weights(strategy="channel"), GroupedWeight, id="int4 channels"),
    pytest.param(
        "pack-quantized", weights(strategy="channel", symmetric=False), GroupedWeight, id="int4 zeros"
    ),
    pytest.param("pack-quantized", weights(strategy="tensor"), GroupedWeight, id="int4 tensor"),
    pytest.param("pack-quantized", weights(actorder="group"), GroupedWeight, id="int4 in an order"),
    pytest.param(
        "pack-quantized", weights(actorder="group", symmetric=False), GroupedWeight, id="int4 order, zeros"
    ),
    pytest.param("pack-quantized", weights(actorder="weight"), GroupedWeight, id="int4 in its own order"),
    pytest.param("pack-quantized", weights(8), GroupedWeight, id="packed int8 groups"),
    pytest.param(
        "pack-quantized", weights(8, symmetric=False), GroupedWeight, id="packed int8 groups with zeros"
    ),
    pytest.param("pack-quantized", weights(8, "channel"), GroupedWeight, id="packed int8 channels"),
    pytest.param("int-quantized", weights(8, "channel"), RowScaledWeight, id="int8 channels"),
    pytest.param("int-quantized", weights(8, "tensor"), RowScaledWeight, id="int8 tensor"),
    pytest.param(
        "int-quantized", weights(8, "channel", symmetric=False), GroupedWeight, id="int8 channels with zeros"
    ),
    pytest.param("naive-quantized", weights(8), GroupedWeight, id="int8 groups"),
    pytest.param("naive-quantized", weights(8, symmetric=False), GroupedWeight, id="int8 groups with zeros"),
    pytest.param("float-quantized", weights(8, "tensor", "float"), RowScaledWeight, id="float8 tensor"),
    pytest.param("float-quantized", weights(8, "channel", "float"), RowScaledWeight, id="float8 channels"),
    pytest.param("float-quantized", weights(8, "block", "float"), RestoredWeight, id="float8 blocks"),
    pytest.param("naive-quantized", weights(8, "channel", "float"), RowScaledWeight, id="naive float8"),
]


@pytest.mark.parametrize(("form", "settings", "kind"), FORMATS)
def test_every_format_is_read_as_its_numbers_and_multiplied_as_transformers_multiplies_them(
    tiny_model: TinyModel, tmp_path: Path, form: str, settings: Settings, kind: type[QuantizedWeight]
) -> None:
    path, reference, values = compressed_copy(
        tiny_model("qwen2"), tmp_path, [group(form, settings)], ["lm_head"], all_but_the_head
    )
    read = loaded(path)
    assert set(read) == set(values)
    for name, expected in values.items():
        weight = read[name]
        assert isinstance(weight, kind) is name.endswith("_proj.weight")
        got = weight.restore(torch.float32) if isinstance(weight, QuantizedWeight) else weight
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert_same_logits(path, reference)


def loaded(path: Path) -> dict[str, Any]:
    return dict(iterate_weights(path, "auto", read_decoder_config(path), torch.float32))


def test_groups_of_layers_have_their_own_formats_and_ignored_ones_none(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    groups = [
        group("int-quantized", weights(8, "channel")),
        group("pack-quantized", weights(symmetric=False), ["re:.*self_attn.*"]),
        group("float-quantized", weights(8, "tensor", "float"), ["model.layers.0.mlp.down_proj"]),
    ]
    ignore = ["re:.*lm_head", "model.layers.1.mlp.up_proj", r"re:model\.layers\.(1|2)\.self_attn\.v_proj$"]

    def group_of(module: str) -> int | None:
        if module == "lm_head" or module == "model.layers.1.mlp.up_proj":
            return None
        if module.endswith("v_proj") and module[len("model.layers.")] in "12":
            return None
        return 1 if "self_attn" in module else 2 if module == "model.layers.0.mlp.down_proj" else 0

    path, reference, values = compressed_copy(tiny_model("llama"), tmp_path, groups, ignore, group_of)
    for name, weight in loaded(path).items():
        got = weight.restore(torch.float32) if isinstance(weight, QuantizedWeight) else weight
        torch.testing.assert_close(got, values[name], rtol=1e-6, atol=1e-6)
    assert_same_logits(path, reference)


@contextmanager
def rounding_inputs(reference: Path) -> Iterator[None]:
    """transformers' own model, each of whose projections sees inputs rounded to 8 bits with a scale per
    token."""

    def rounded(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        x = arguments[0]
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        return ((x / scale).clamp(-128, 127).round() * scale,)

    model = reference_model(reference, None)  # as ``reference_logits`` calls it, so that it is the same one
    hooks = [
        module.register_forward_pre_hook(rounded)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj")
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_inputs_are_rounded_where_the_checkpoint_rounds_them(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Not bit for bit: a token's largest input lies between two numbers,
    and the last bit decides which it gets."""
    groups = [group("int-quantized", weights(8, "channel"), inputs=PER_TOKEN)]
    path, reference, _ = compressed_copy(tiny_model("qwen2"), tmp_path, groups, ["lm_head"], all_but_the_head)
    (prompt,) = random_prompts((62,))
    with tiny_llm(path) as llm:
        layer = llm.llm_engine.client.core.executor.worker._model.layers[0]  # type: ignore[attr-defined]
        assert all(linear.method == RoundedInputs(Int8Linear(torch.float32)) for linear in layer.linears)
        completion, logits = engine_logits(llm, prompt, max_tokens=3)
    tokens = prompt + completion[:-1]
    unrounded = reference_logits(reference, tokens)
    with rounding_inputs(reference):
        rounded = reference_logits(reference, tokens)
    error = (logits - rounded).abs().amax(-1) / rounded.abs().max()
    effect = (unrounded - rounded).abs().amax(-1) / rounded.abs().max()
    assert effect.median() > 5e-3
    assert error.median() <= effect.median() / 5 and error.max() < effect.max()


@pytest.mark.parametrize(
    ("part", "damage", "settings"),
    [
        ("weight_packed", "missing", weights()),
        ("weight_scale", "missing", weights()),
        ("weight_zero_point", "missing", weights(symmetric=False)),
        ("weight_g_idx", "missing", weights(actorder="group")),
        ("weight_packed", "misshapen", weights()),
        ("weight_scale", "misshapen", weights()),
        ("weight_zero_point", "misshapen", weights(symmetric=False)),
        ("weight_g_idx", "misshapen", weights(actorder="group")),
        ("weight_shape", "misshapen", weights()),
        ("weight_packed", "float", weights()),
        ("weight_scale", "int", weights()),
        ("weight", "beside", weights()),
    ],
)
def test_parts_that_do_not_fit_are_named_before_anything_is_read(
    tiny_model: TinyModel, tmp_path: Path, part: str, damage: str, settings: Settings
) -> None:
    groups = [group("pack-quantized", settings)]
    path, _, _ = compressed_copy(tiny_model("llama"), tmp_path, groups, ["lm_head"], all_but_the_head)
    damaged = weights_after(path, f"model.layers.1.mlp.up_proj.{part}", damage)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj"):
        next(damaged)


@pytest.mark.parametrize(
    ("part", "damage"),
    [("weight_scale", "missing"), ("weight", "missing"), ("weight_scale", "misshapen"), ("weight", "float")],
)
@pytest.mark.parametrize("kind", ["int", "float"])
def test_numbers_of_8_bits_need_their_scale(
    tiny_model: TinyModel, tmp_path: Path, part: str, damage: str, kind: str
) -> None:
    groups = [group("naive-quantized", weights(8, "channel", kind))]
    path, _, _ = compressed_copy(tiny_model("llama"), tmp_path, groups, ["lm_head"], all_but_the_head)
    damaged = weights_after(path, f"model.layers.1.mlp.up_proj.{part}", damage)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj"):
        next(damaged)


def weights_after(path: Path, name: str, damage: str) -> Iterator[tuple[str, StoredWeight]]:
    stored = load_file(path / "model.safetensors")
    tensor = stored.pop(name, torch.zeros(3, 3))
    if damage == "misshapen":
        stored[name] = tensor[:-1].contiguous()
    elif damage != "missing":
        stored[name] = tensor.to(torch.int32 if damage == "int" else torch.float32)
    save_file(stored, path / "model.safetensors")
    return iterate_weights(path, "auto", read_decoder_config(path), torch.float32)


def test_contents_that_contradict_the_shapes_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    groups = [group("pack-quantized", weights(actorder="group"))]
    path, _, _ = compressed_copy(tiny_model("llama"), tmp_path, groups, ["lm_head"], all_but_the_head)
    intact = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj."
    for part, value, sentence in (
        ("weight_shape", torch.tensor([7, 9]), r"weight_shape of .*up_proj.* is \[7, 9\]"),
        (
            "weight_g_idx",
            intact[name + "weight_g_idx"] + 1,
            r"g_idx of .*up_proj.* names groups outside 0 to",
        ),
        (
            "weight_g_idx",
            intact[name + "weight_g_idx"] - 2,
            r"g_idx of .*up_proj.* names groups outside 0 to",
        ),
    ):
        save_file({**intact, name + part: value}, path / "model.safetensors")
        with pytest.raises(ModelError, match=sentence):
            loaded(path)


def config_of(**changes: Any) -> Settings:
    entry = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {**entry, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights()}}, **changes}


def scheme(form: str = "pack-quantized", **changes: Any) -> Settings:
    return config_of(config_groups={"group_0": {**group(form, weights()), **changes}})


def rounding(settings: Settings, **changes: Any) -> Settings:
    return scheme("int-quantized", weights=settings, input_activations={**PER_TOKEN, **changes})


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        (config_of(config_groups={}), "config_groups is {}, but must name"),
        (config_of(config_groups=["a"]), r"config_groups is \['a'\], but must name"),
        (
            config_of(config_groups={"W4A16": ["Linear"]}),
            r"config_groups\.W4A16 is \['Linear'\], but must be",
        ),
        (
            config_of(format="nvfp4-pack-quantized"),
            "format is 'nvfp4-pack-quantized', but supported are",
        ),
        (config_of(format=None), "format is None, but supported are"),
        (config_of(format=["pack-quantized"]), r"format is \['pack-quantized'\], but supported are"),
        (
            config_of(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format is 'sparse-24-bitmask'",
        ),
        (config_of(transform_config={"config_groups": {"R1": {}}}), "transforms, which are not applied"),
        (config_of(ignore="lm_head"), "ignore is 'lm_head', but must list names"),
        (config_of(ignore=[3]), r"ignore is \[3\], but must list names"),
        (config_of(ignore=["re:("]), "no regular expression"),
        (config_of(ignore=["re:(?=a)(a+)+b"]), "many repeats, and lookaround"),
        (config_of(ignore=["re:" + "a" * 3000]), "more than 1024 characters"),
        (config_of(ignore=["re:(a{100}){100}"]), "more than 512 elements"),
        (scheme(targets=None), "targets is None, but must list"),
        (scheme(weights=None), "weights is not set"),
        (scheme(weights="int4"), "weights is 'int4', but must be an object"),
        (scheme(output_activations=PER_TOKEN), "output_activations is set"),
        (scheme(weights=weights(3)), r"group_0\.weights\.num_bits is 3, but must be 4 or 8 here"),
        (scheme(weights=weights(True)), r"num_bits is True, but must be 4 or 8"),
        (scheme(weights=weights(kind="float")), "type is 'float', but must be 'int' here"),
        (scheme(weights=weights(symmetric="yes")), "symmetric is 'yes'"),
        (scheme(weights=weights(dynamic=True)), r"weights\.dynamic is True"),
        (
            scheme(weights=weights(strategy="tensor_group")),
            "strategy is 'tensor_group', but must be 'tensor' or",
        ),
        (scheme(weights=weights(actorder="random")), "actorder is 'random'"),
        (scheme(weights={**weights(), "group_size": -5}), "group_size is -5, but must be a positive number"),
        (scheme(weights={**weights(), "group_size": 10**30, "strategy": "group"}), None),
        (scheme("int-quantized", weights=weights(4)), r"weights\.num_bits is 4, but must be 8 here"),
        (scheme("float-quantized", weights=weights(8)), "type is 'int', but must be 'float' here"),
        (
            scheme("float-quantized", weights=weights(8, "block", "float", symmetric=False)),
            "symmetric is False",
        ),
        (
            scheme("float-quantized", weights={**weights(8, "block", "float"), "block_structure": None}),
            "block_structure is not set",
        ),
        (
            scheme("float-quantized", weights={**weights(8, "block", "float"), "block_structure": [0, 1]}),
            r"must be two positive numbers",
        ),
        (scheme(input_activations=PER_TOKEN), "not with pack-quantized weights"),
        (rounding(weights(8)), "not with int-quantized weights of strategy 'group'"),
        (rounding(weights(8, "channel", symmetric=False)), "symmetric int8 weights"),
        (
            rounding(weights(8, "channel"), dynamic=False),
            r"input_activations\.dynamic is False, but must be True",
        ),
        (rounding(weights(8, "channel"), num_bits=4), r"input_activations\.num_bits is 4"),
        (rounding(weights(8, "channel"), strategy="tensor"), r"input_activations\.strategy is 'tensor'"),
        (rounding(weights(8, "channel"), symmetric=False), r"input_activations\.symmetric is False"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_setting(entry: Settings, sentence: str | None) -> None:
    if sentence is None:  # a number that no weight fits is refused with the weight
        assert read_quantization(entry, "config.json") is not None
        return
    with pytest.raises(ModelError, match=r"config\.json.*" + sentence):
        read_quantization(entry, "config.json")


def test_a_layer_gets_the_format_that_means_it_most_closely() -> None:
    every, some, one = (WeightFormat(layout="int8", group_size=size) for size in (1, 2, 3))
    stored = StoredQuantization(
        method="compressed-tensors",
        formats=((("model.a.k_proj",), one), (("Linear",), every), (("re:.*k_proj",), some)),
        ignore=("re:.*head", "model.b.k_proj"),
    )
    assert [stored.format_of(f"model.{name}") for name in ("a.k_proj", "c.k_proj", "a.q_proj")] == [
        one,
        some,
        every,
    ]
    assert [stored.format_of(name) for name in ("lm_head", "model.b.k_proj", "x" * 1000)] == [None] * 3


def test_lists_of_layers_mean_the_names_in_the_checkpoint() -> None:
    stored = read_quantization(config_of(ignore=["language_model.model.layers.0.mlp.up_proj"]), "config.json")
    assert stored is not None
    names = PackedWeights(stored)
    for module, place in (
        ("up_proj", None),
        ("down_proj", ("model.layers.0.mlp.down_proj.weight", "weight_packed")),
    ):
        own = f"model.layers.0.mlp.{module}.weight_packed"
        assert names.place(own, f"language_model.{own}") == place


@pytest.mark.skipif(
    not can_multiply_int4(), reason="this CPU has no 4-bit operator whose order of weights is known"
)
def test_the_configuration_may_leave_out_what_has_a_default(tiny_model: TinyModel, tmp_path: Path) -> None:
    """As older versions of the package wrote it:
    no format in the group, no strategy, the format beside the groups."""
    groups = [group("pack-quantized", weights())]
    path, reference, _ = compressed_copy(tiny_model("llama"), tmp_path, groups, ["lm_head"], all_but_the_head)
    config = json.loads((path / "config.json").read_text())
    scheme = config["quantization_config"]["config_groups"]["group_0"]
    del (
        scheme["format"],
        scheme["weights"]["strategy"],
        scheme["weights"]["symmetric"],
        scheme["input_activations"],
    )
    (path / "config.json").write_text(json.dumps(config))
    assert_same_logits(path, reference)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["re:(", "int", "group", "", "Linear"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weights", "targets"]), inner)
    ),
    max_leaves=4,
)


@hypothesis_settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_a_setting_is_it_is_read_or_refused_with_a_sentence(data: st.DataObject) -> None:
    """One entry of a good configuration, at any depth, becomes anything else."""
    inputs = data.draw(st.sampled_from([None, PER_TOKEN]))
    entry = json.loads(
        json.dumps(scheme("int-quantized", weights=weights(8, "channel"), input_activations=inputs))
    )
    place: Any = entry
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        read_quantization(entry, "config.json")
    except ModelError as error:
        assert "config.json" in str(error)
