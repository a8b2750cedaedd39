"""Each of the most used checkpoints is served or says why not, as docs/reference/models.md says.

`python -m tests.models.test_popular` writes it.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from disagg.capacity.shapes import shape_of
from disagg.errors import ModelError
from disagg.models.description import TEXT_PARTS, ModelDescription, describe_model
from disagg.models.families import FAMILIES
from disagg.models.family import Family
from disagg.models.gguf_model import gguf_families
from disagg.models.share import possible_ranks
from tests.models import test_gguf, test_quantized_logits
from tests.models.checkpoints import VARIANTS
from tests.models.popular import POPULAR

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
HEAD = """# Families and checkpoints

What [models](../models.md) can be served, by what the tests load.
"""
CHECKPOINTS = """## Checkpoints

`ranks` lists the possible values of `--tensor-parallel-size` up to 16.
"""


def _described(directory: Path, name: str) -> ModelDescription | ModelError:
    (directory / "config.json").write_text(json.dumps(POPULAR[name].config))
    try:
        return describe_model(directory)
    except ModelError as refused:
        return refused


@pytest.mark.parametrize("name", POPULAR)
def test_it_is_served_or_says_why_not(name: str, tmp_path: Path) -> None:
    popular, found = POPULAR[name], _described(tmp_path, name)
    if popular.why_not:
        assert isinstance(found, ModelError)
        assert re.search(popular.why_not, found.message)
        return
    assert isinstance(found, ModelDescription), found
    billions = shape_of(found).num_params / 1e9
    assert billions == pytest.approx(popular.billions, rel=2e-3)


def test_every_family_has_a_checkpoint_and_variants_that_equal_transformers(
    tmp_path: Path,
) -> None:
    served = {name for name, popular in POPULAR.items() if not popular.why_not}
    described = {name: _described(tmp_path, name) for name in served}
    found = [each for each in described.values() if isinstance(each, ModelDescription)]
    assert {each.config.family for each in found} == FAMILIES.keys()
    texts = {POPULAR[name].config["architectures"][0] for name in served} - FAMILIES.keys()
    assert texts == TEXT_PARTS.keys()
    assert _families_of(VARIANTS) == FAMILIES.keys()


def _families_of(variants: Iterable[str]) -> set[str]:
    return {f"{VARIANTS[variant][0]}ForCausalLM" for variant in variants}


def _quantized() -> set[str]:
    return _families_of(variant for variant, _ in test_quantized_logits.OF_FAMILIES)


def test_every_format_of_a_family_is_loaded_by_a_test() -> None:
    assert _families_of(test_gguf.OF_FAMILIES) == set(gguf_families())
    only_floats = {name for name, each in FAMILIES.items() if _stacking(each) == "gate first"}
    assert _quantized() == FAMILIES.keys() - only_floats


def _stacking(family: Family) -> str:
    return "" if family.experts is None else family.experts.stacked


_FORMATS = {"": ["quantised"], "alternating": ["MXFP4"], "gate first": []}


def families_table() -> str:
    rows = ["| family | formats | attention | MLP |", "|---|---|---|---|"]
    in_gguf = _families_of(test_gguf.OF_FAMILIES)
    for name, family in FAMILIES.items():
        formats = ["floats", *_FORMATS[_stacking(family)]]
        if name in in_gguf:
            formats.append("GGUF")
        attention = {
            "stated": "windows where config.json says",
            "all": "a window",
            "none": "full",
        }.get(family.windows, "windows and full in turn")
        more = [
            ("biases", bool(family.qkv_bias)),
            ("norms of q and k", family.qk_norm != "none"),
            ("norms after", family.norms == "after"),
            ("norms before and after", family.norms.startswith("around")),
            ("capped scores", "attn_logit_softcapping" in family.defaults),
            ("positions by kind of layer", family.ropes_by_kind),
            ("rotated in part", "partial_rotary_factor" in family.defaults),
            ("layers without positions", family.no_rope != "none"),
            ("neighbours rotated", family.rotates_pairs),
            ("sinks", family.sinks),
            ("latents", family.is_latent),
            ("of the tokens that an index chooses", bool(family.index_rotation)),
            ("gated", family.gates_output),
            ("KV of earlier layers", "num_kv_shared_layers" in family.defaults),
            ("several residual streams", family.has_altup),
            ("gated delta nets where config.json says", family.delta_nets != ""),
        ]
        attention = ", ".join([attention, *(word for word, has in more if has)])
        mlp, experts = "dense", family.experts
        if family.activations != ("silu",):
            mlp = "dense, GELU"
        if experts is not None:
            kinds = [
                ("a shared one", bool(experts.shared)),
                ("dense layers between", experts.has_dense_layers),
                ("dense layers first", bool(experts.first_dense or experts.layer_kinds)),
                ("routed as in DeepSeek", bool(experts.scoring)),
                ("clamped SwiGLU", experts.is_clamped),
            ]
            mlp = ", ".join(["experts", *(word for word, has in kinds if has)])
        rows.append(f"| `{name}` | {', '.join(formats)} | {attention} | {mlp} |")
    return "\n".join(rows)


def checkpoints_table() -> str:
    rows = ["| checkpoint | parameters | served | ranks |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as directory:
        for name, popular in POPULAR.items():
            found = _described(Path(directory), name)
            if isinstance(found, ModelDescription):
                number = f"{popular.billions:.{3 if popular.billions < 1000 else 4}g}"
                size, answer = f"{number} billion", "text only" if found.reads_images else "yes"
                ranks = ", ".join(map(str, possible_ranks(found.config)))
            else:
                missing = re.search(r"\(not yet: (.*)\); supported", found.message)
                why = re.search(r"(the weights are quantised.*?)[,;]", found.message)
                size = ranks = ""
                said = missing or why
                assert said is not None, found.message
                answer = f"no: {said[1]}"
            rows.append(f"| {name} | {size} | {answer} | {ranks} |")
    return "\n".join(rows)


def page() -> str:
    return f"{HEAD}\n{families_table()}\n\n{CHECKPOINTS}\n{checkpoints_table()}\n"


def test_the_page_says_what_was_found() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.models.test_popular`"


if __name__ == "__main__":
    PAGE.write_text(page())
