"""Rules: paths of a tree, matching them, specs for a whole tree; cold with many rules; and how it grows."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import shardax as sx
from benchmarks.timing import Facts, Race, Result, once, race, simulate_devices
from shardax.names.matching import Matcher, matcher_of
from shardax.names.paths import flatten
from shardax.names.patterns import match_partition_rules
from shardax.names.rules import Rules

# Twenty rules in the style of real model code: literals, groups, gaps, anchors, digit classes.
TWENTY: list[tuple[str, Any]] = [
    ("embed_tokens/embedding", P("tp", "fsdp")),
    ("self_attn/(q|k|v)_proj/kernel", P("fsdp", "tp")),
    ("self_attn/o_proj/kernel", P("tp", "fsdp")),
    ("mlp/(gate|up)_proj/kernel", P("fsdp", "tp")),
    ("mlp/down_proj/kernel", P("tp", "fsdp")),
    ("block_sparse_moe/gate/kernel", P(None, None)),
    (r"experts/\d+/w(1|3)/kernel", P("fsdp", "tp")),
    (r"experts/\d+/w2/kernel", P("tp", "fsdp")),
    ("(input|post_attention)_layernorm/.*", P(None)),
    (".*norm/kernel$", P(None)),
    ("lm_head/kernel", P("fsdp", "tp")),
    ("attn/c_attn/kernel", P("fsdp", "tp")),
    ("attn/c_proj/kernel", P("tp", "fsdp")),
    (r"ln_[12]/(scale|bias)", P(None)),
    ("wte/embedding", P("tp", "fsdp")),
    ("wpe/embedding", P("tp", "fsdp")),
    ("router/.*kernel", P(None, None)),
    ("rotary_emb", P(None)),
    ("bias$", P(None)),
    (".*", P(None)),
]
MODULES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "": ("input_layernorm", "post_attention_layernorm"),
}
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tree_of(leaves: int, leaf: Any) -> dict[str, Any]:
    """A transformer of about that many leaves: kernels and biases, some eighteen a layer."""
    layers: dict[str, Any] = {}
    for number in range(max(1, leaves // 18)):
        layer: dict[str, Any] = {}
        for group, names in MODULES.items():
            inside = layer.setdefault(group, {}) if group else layer
            inside.update({name: {"kernel": leaf, "bias": leaf} for name in names})
        layers[str(number)] = layer
    return {"model": {"layers": layers, "embed_tokens": {"embedding": leaf}}, "lm_head": {"kernel": leaf}}


def walk_by_hand(tree: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """The floor: what anyone would write for nested dicts."""
    paths: list[str] = []
    leaves: list[Any] = []

    def visit(node: dict[str, Any], prefix: str) -> None:
        for key, child in node.items():
            if type(child) is dict:
                visit(child, f"{prefix}{key}/")
            else:
                paths.append(f"{prefix}{key}")
                leaves.append(child)

    visit(tree, "")
    return paths, leaves


def paths_by_jax(tree: Any) -> list[str]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return ["/".join(str(key.key) for key in keys) for keys, _ in found]


def twenty(quick: bool) -> Race:
    tree = tree_of(10_000 if quick else 100_000, jax.ShapeDtypeStruct((64, 64), "float32"))
    paths, _ = walk_by_hand(tree)
    compiled = [re.compile(pattern) for pattern, _ in TWENTY]

    def in_order() -> list[int]:
        return [next(i for i, p in enumerate(compiled) if p.search(path)) for path in walk_by_hand(tree)[0]]

    def shardax_match() -> list[Any]:
        matcher_of.cache_clear()
        return Rules.of(TWENTY).match_all(flatten(tree)[0])

    def shardax_specs() -> Any:
        matcher_of.cache_clear()
        return match_partition_rules(TWENTY, tree)

    assert [match.index for match in shardax_match()] == in_order()
    contenders: dict[str, Callable[[], Any]] = {
        "recursive dict walk": lambda: walk_by_hand(tree),
        "shardax: paths of any pytree": lambda: flatten(tree),
        "shardax: paths + first rule, cold": shardax_match,
        "shardax: match_partition_rules, cold": shardax_specs,
        "jax: tree_flatten_with_path + join": lambda: paths_by_jax(tree),
        "walk + 20 precompiled patterns in order": in_order,
    }
    theirs = _eformer()
    if theirs is not None:
        contenders["eformer: match_partition_rules"] = lambda: theirs(TWENTY, tree)
    return race(
        f"{len(paths):,} leaves × 20 rules",
        contenders,
        rounds=5 if quick else 21,
        per=len(paths),
        unit="leaf",
        clock="cpu",
        goal="match_partition_rules, which also builds the tree of specs, at most 0.6 µs per leaf where the walk takes 0.22 (2.7×)",
    )


def _eformer() -> Callable[[Any, Any], Any] | None:
    try:
        from eformer.escale import match_partition_rules
    except ImportError as error:
        print(f"eformer is left out: {error}", flush=True)
        return None
    return match_partition_rules


def others(quick: bool) -> list[Race]:
    """What Flax does to get from names to shardings; it has no rules over paths, so it is given the names at each leaf."""
    try:
        from flax import linen, nnx
    except ImportError as error:
        print(f"flax is left out: {error}", flush=True)
        return []
    mesh = sx.make_mesh("fsdp=2,tp=4")
    tree = tree_of(1_000 if quick else 10_000, jax.ShapeDtypeStruct((64, 64), "float32"))
    names = jax.tree.map(lambda _: P("embed", "mlp"), tree)
    with jax.set_mesh(mesh):
        array = jax.device_put(jax.numpy.ones((4, 4)), jax.NamedSharding(mesh, P("fsdp", "tp")))
        variables = nnx.State(jax.tree.map(lambda _: nnx.Param(array, out_sharding=("fsdp", "tp")), tree))

    def shardings() -> Any:
        matcher_of.cache_clear()
        return sx.layout(tree, TWENTY, mesh, on_misfit="adapt").shardings

    def specs() -> Any:
        matcher_of.cache_clear()
        return match_partition_rules(TWENTY, tree)

    count = len(walk_by_hand(tree)[0])
    contenders: dict[str, Callable[[], Any]] = {
        "shardax: match_partition_rules, cold": specs,
        "shardax: layout and its shardings, cold": shardings,
        "linen: logical_to_mesh": lambda: linen.logical_to_mesh(names, (("embed", "fsdp"), ("mlp", "tp"))),
        "nnx: get_named_sharding": lambda: nnx.get_named_sharding(variables, mesh),
    }
    return [
        race(
            f"{count:,} leaves, beside others",
            contenders,
            rounds=5 if quick else 15,
            per=count,
            unit="leaf",
            clock="cpu",
        )
    ]


def many_rules(style: str) -> list[tuple[str, Any]]:
    """700 rules that name a layer and a part each, and a last one for everything."""
    write = {
        "literals": "layers/{n}/.*{m}/kernel$",
        "groups": "layers/{n}/(attn|mlp)/{m}/(kernel|weight)",
        "regexes": r"layers\.?/{n}/\w+/{m}/kernel[_0-9]*",
    }[style]
    return [(write.format(n=n, m=m), P("tp")) for n in range(100) for m in PARTS] + [(".*", None)]


def cold(quick: bool) -> Race:
    leaf = jax.ShapeDtypeStruct((64, 64), "float32")
    names = ("kernel", "bias", "scale")
    tree = {"layers": {str(n): {"attn": {m: dict.fromkeys(names, leaf) for m in PARTS}} for n in range(100)}}

    def compile_all() -> None:
        re.purge()
        for pattern, _ in many_rules("regexes"):
            re.compile(pattern)

    def contender(rules: list[tuple[str, Any]]) -> Callable[[], Any]:
        def run() -> Any:
            matcher_of.cache_clear()
            return match_partition_rules(rules, tree)

        return run

    return race(
        "2,100 leaves × 701 rules, cold",
        {
            "re.compile of the 701 regexes, nothing else": compile_all,
            **{
                f"match_partition_rules, {style}": contender(many_rules(style))
                for style in ("literals", "groups", "regexes")
            },
        },
        rounds=5 if quick else 31,
        clock="cpu",
        goal="under 60 ms (eformer: 49.6 s)",
    )


def growth(quick: bool) -> Facts:
    """Microseconds per leaf as leaves and rules grow: layered paths, and paths that share nothing."""
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    letters = random.Random(0)
    rows: list[tuple[str | int | float, ...]] = []

    def match_cold(rules: list[str], paths: list[str]) -> Callable[[], Any]:
        return lambda: Matcher(rules).first_of(paths)

    for kind in ("layers", "every path different"):
        for count in (20, 200, 700):
            rules = [pattern for pattern, _ in (TWENTY if count == 20 else many_rules("groups")[-count:])]
            cells: list[float] = []
            for size in sizes:
                paths = walk_by_hand(tree_of(size, 0))[0]
                if kind != "layers":
                    paths = [f"{letters.getrandbits(40):x}/{path}" for path in paths]
                cells.append(min(once(match_cold(rules, paths), "cpu") for _ in range(3)) * 1e6 / len(paths))
            rows.append((kind, count, *(f"{cell:.2f}" for cell in cells)))
    columns = ("paths", "rules", *(f"µs per leaf at {size:,}" for size in sizes))
    goal = "linear in leaves (a row does not rise) and hardly dependent on rules; 100,000 × 700 in seconds"
    return Facts("How matching grows, index built anew each time (best of 3)", columns, tuple(rows), goal)


def run(quick: bool) -> list[Result]:
    simulate_devices(8)
    return [twenty(quick), cold(quick), growth(quick), *others(quick)]
