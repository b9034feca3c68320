"""From one lifted function to one jitted `jax.shard_map`, whose results come back where they were."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, get_abstract_mesh

from shardax._compat import current_trace, is_staged, trace_state_clean
from shardax.arrays.constrain import constrain
from shardax.errors import ArgumentError, Offence, ShardMapError
from shardax.names.mesh import same_mesh
from shardax.names.spec import axes_in
from shardax.state.effects import Effects, Result, with_moved
from shardax.state.faults import is_array
from shardax.state.lifted import Lifted, weakly
from shardax.state.map_specs import REPLICATED, Assigned, MapOptions, Specs, check_fit, cut
from shardax.state.prefixes import has, has_graph_node, is_mapping_prefix, is_prefix_leaf

_SHARDS = 0x73686172  # between a key and the index of a shard: no split and no count of draws reaches so far
_CLASH = re.compile(
    r"incompatible shapes|broadcast|same shape|shapes? mismatch|sizes? must|dimensions to (match|have)", re.I
)


class _NeedSpecs(Exception):
    """Raised out of a trace whose result needs specs that were not known when it began."""

    def __init__(self, effects: Effects, values: Sequence[Any]) -> None:
        super().__init__()
        self.effects, self.count = effects, len(values)


class Mapped:
    """The compiled callable of one structure under one assignment of specs."""

    def __init__(self, lifted: Lifted, options: MapOptions, assigned: Assigned) -> None:
        self.lifted, self.options, self.assigned = lifted, options, assigned
        self.more: tuple[Any, ...] = ()  # specs of what a recipe carries out
        self.explicit = AxisType.Explicit in options.mesh.axis_types
        lifted.needs_recipe = has(options.out_specs, is_mapping_prefix) or has_graph_node(options.out_specs)
        self.seen: list[Any] = []  # the shardings of the cells when they were last found in place
        names = map(str, options.mesh.axis_names)
        self.manual = [name for name in names if name in options.axis_names or not options.axis_names]
        self.check_vma = options.check_vma
        self._compile()
        self.elsewhere = False  # operands were committed to other devices once: from then on they are placed

    def __call__(self, *operands: Any) -> tuple[Any, Result]:
        moved: dict[int, Any] = {}
        if trace_state_clean():
            operands, moved = self._place(operands)
        while True:
            try:
                out, result = self._dispatch(operands)
                return out, with_moved(result, moved) if moved else result
            except _NeedSpecs as need:
                self.more = self._recipe_specs(need)
                self._compile()
            except (TypeError, ValueError) as error:
                if self._alone(error):
                    self.check_vma = False
                    self._compile()
                    continue
                self._explain(error, operands)
                raise

    def _dispatch(self, operands: Any) -> tuple[Any, Result]:
        if not trace_state_clean():  # while JAX only records, a `jit` in between would cost time and say nothing more
            return self.run(*operands) if is_staged(current_trace()) else self.staged(*operands)
        if not self.elsewhere:
            try:
                return self.jitted(*operands)
            except ValueError as error:
                if "incompatible devices" not in str(error):
                    raise
            self.elsewhere = True
        donated, *inputs = operands
        placed = _over(lambda spec, x: jax.device_put(x, self._named(spec)), self._specs(), self._inputs(*inputs))
        return self.jitted(donated, *placed)

    def _compile(self) -> None:
        """One `jax.jit` for calls under grad or vmap and one for eager calls, whose results lie as was asked."""
        self.staged = self.jitted = jax.jit(weakly(self.run))
        partly = self.manual != list(map(str, self.options.mesh.axis_names))
        if self.lifted.needs_recipe or self.explicit or partly or not isinstance(self.options.mesh, jax.sharding.Mesh):
            return
        results = jax.tree.map(self._named, _results(self.options.out_specs), is_leaf=is_prefix_leaf)
        self.jitted = jax.jit(weakly(self.run), out_shardings=(results, None))

    def _alone(self, error: Exception) -> bool:
        """Did JAX only miss that what varies between shards does not, where there is just one?"""
        shape = dict(zip(map(str, self.options.mesh.axis_names), self.options.mesh.axis_sizes, strict=True))
        return self.check_vma and "out_specs" in str(error) and all(shape[name] == 1 for name in self.manual)

    def _named(self, spec: Any) -> NamedSharding:
        return NamedSharding(self.options.mesh, spec)

    def _place(self, operands: Any) -> tuple[Any, dict[int, Any]]:
        """Put cells on the mesh where their specs want them; those that moved are stored, so that they move once."""
        donated, kept, plain, named = operands
        cells = kept[: self.lifted.cells]
        try:
            if [cell.sharding for cell in cells] == self.seen:
                return operands, {}
        except AttributeError:  # a number, a NumPy array or a tree, which has none
            pass
        leaves, structure = jax.tree.flatten(cells)
        now = [getattr(leaf, "sharding", None) for leaf in leaves]
        if now == self.seen:
            return operands, {}
        arrays = all(not isinstance(leaf, (Tracer, jax.ShapeDtypeStruct)) for leaf in leaves)
        if not arrays or not isinstance(self.options.mesh, jax.sharding.Mesh):
            return operands, {}
        check_fit(self.assigned, self.options.mesh, kept, plain)
        wanted = jax.tree.leaves(
            _over(lambda spec, _: self._named(spec), list(self.assigned.inputs[: len(cells)]), cells)
        )
        strayed = [
            n
            for n, (leaf, have, want) in enumerate(zip(leaves, now, wanted, strict=True))
            if have is None or not have.is_equivalent_to(want, leaf.ndim)
        ]
        self.seen = [wanted[n] if n in set(strayed) else have for n, have in enumerate(now)]
        if not strayed:
            return operands, {}
        for n, array in zip(
            strayed, jax.device_put([leaves[n] for n in strayed], [wanted[n] for n in strayed]), strict=True
        ):
            leaves[n] = array
        placed = jax.tree.unflatten(structure, leaves)
        moved = {n: value for n, (value, old) in enumerate(zip(placed, cells, strict=True)) if value is not old}
        return (donated, [*placed, *kept[self.lifted.cells :]], plain, named), moved

    # ---- tracing ----------------------------------------------------------------------------------------------------

    def _specs(self) -> tuple[Any, ...]:
        return list(self.assigned.inputs), self.assigned.plain, REPLICATED

    @staticmethod
    def _inputs(kept: Sequence[Any], plain: Any, named: Any) -> tuple[Any, ...]:
        return list(kept), tuple(plain), named

    def run(self, donated: Any, *inputs: Any) -> tuple[Any, Result]:
        """The mapped function over global arrays."""
        traced: list[Effects] = []

        def local(kept: Any, plain: Any, named: Any) -> tuple[Any, list[Any], list[Any]]:
            keys = {place: kept[place] for place in self.assigned.rng}
            out, result = self.lifted.run((), self._fold(kept, keys), plain, named)
            effects, values = result.effects, list(result.values)
            written, more = values[: len(effects.written)], values[len(effects.written) :]
            if len(more) != len(self.more):
                raise _NeedSpecs(effects, more)
            by_cell: list[Any] = [None] * self.lifted.cells
            for place, value in zip(effects.written, written, strict=True):
                by_cell[place] = self._advance(keys[place], value) if place in keys else value
            traced.append(effects)
            return out, by_cell, more

        results = None if self.lifted.needs_recipe else self.options.out_specs
        out_specs = (_results(results), list(self.assigned.written), list(self.more))
        out, by_cell, more = self._map(local, out_specs, self._inputs(*inputs))
        effects = traced[-1]
        return out, Result(effects, [*(by_cell[place] for place in effects.written), *more])

    def _map(self, local: Callable[..., Any], out_specs: Any, inputs: tuple[Any, ...]) -> Any:
        options = self.options
        context = get_abstract_mesh()
        inside = not trace_state_clean() and not context.empty and same_mesh(context, options.mesh)
        check_fit(self.assigned, options.mesh, inputs[0], inputs[1])
        if self.explicit:  # Explicit axes do not move by themselves: bring every input to where its spec wants it
            inputs = _over(lambda spec, x: constrain(x, spec, mesh=options.mesh), self._specs(), inputs)
        local.__name__ = getattr(self.lifted.function, "__name__", "function")
        return jax.shard_map(
            local,
            mesh=context if inside else options.mesh,  # which of its axes are Manual already, only the context knows
            in_specs=self._specs(),
            out_specs=out_specs,
            check_vma=self.check_vma,
            axis_names=set(options.axis_names),
        )(*inputs)

    def _fold(self, kept: list[Any], keys: dict[int, Any]) -> list[Any]:
        """Other keys on every shard."""
        if not keys:
            return kept
        index: Any = 0
        for name in self.manual:
            index = index * jax.lax.axis_size(name) + jax.lax.axis_index(name)

        def fold(key: Any) -> Any:
            return jax.random.fold_in(jax.random.fold_in(key, _SHARDS), index)

        return [_each_key(fold, key) if place in keys else key for place, key in enumerate(kept)]

    def _advance(self, key: Any, value: Any) -> Any:
        """Where a random cell stands after a mapped call: the same on every shard, and never where it was."""
        if self.check_vma and not jax.typeof(value).manual_axis_type.varying:
            return value  # not drawn from: set to something that is the same everywhere
        return _each_key(lambda one: jax.random.split(one)[0], key)

    # ---- results and errors -----------------------------------------------------------------------------------------

    def _recipe_specs(self, need: _NeedSpecs) -> tuple[Any, ...]:
        recipe = need.effects.recipe
        assert recipe is not None
        specs: list[Any] = [REPLICATED] * need.count
        if recipe.out is not None:
            self.lifted.needs_recipe = True  # the result goes out as a recipe: `out_specs` is for what that makes
            born = {number: family.make(spec, None) for number, (family, spec, _) in enumerate(recipe.born)}
            found = Specs(recipe.records, lambda ref: born[ref[1]], "out_specs")
            found.root(recipe.out, self.options.out_specs, "result")
            found.check()
            for (tag, number), (spec, _) in found.found.items():
                if tag in "bv":
                    specs[recipe.born[number][2] if tag == "b" else number] = spec
        return tuple(specs)

    def _explain(self, error: Exception, operands: Any) -> None:
        """Say of JAX's error what it means for cells and arguments; nothing where it has nothing to do with them."""
        text, assigned = str(error), self.assigned
        odd = [
            Offence(name + jax.tree_util.keystr(path), f"{leaf!r} ({type(leaf).__name__}) is no array")
            for name, tree in zip(assigned.arguments, operands[2], strict=True)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if not is_array(leaf)
        ]
        if odd:
            remedy = "pass what is fixed as a keyword argument, or close over it (functools.partial)"
            raise ArgumentError("shard_map cuts arrays, and these arguments are something else", odd, remedy) from error
        written = sorted({int(place) for place in re.findall(r"out_specs\[1\]\[(\d+)\]", text)})
        if "out_specs" in text and written:
            names = assigned.names()
            raise ShardMapError(
                "every shard would write something else to a state that all of them share",
                [
                    Offence(names[n], "is written with what depends on the shard", spec=assigned.written[n])
                    for n in written
                ],
                "combine the shards before writing (jax.lax.psum, pmean, all_gather), or give the state a spec that "
                "cuts it (state_out_specs; in_specs for an argument)",
            ) from error
        closed = range(len(self.lifted.own), self.lifted.cells)
        whole = [place for place in closed if not axes_in(assigned.inputs[place])]
        if _CLASH.search(text) and whole and cut((assigned.plain, assigned.inputs)):
            names = assigned.names()
            raise ShardMapError(
                f"{error}\nThe arguments are cut, while every shard holds these states whole",
                [
                    Offence(names[n], "is replicated: state_in_specs does not speak of it", spec=REPLICATED)
                    for n in whole
                ],
                "to cut a state like its argument: state_in_specs={the_state: P(...)}, and state_out_specs where its "
                "result lies otherwise",
            ) from error
        if "out_specs" in text:
            raise ShardMapError(_of_the_result(text)) from error


def _of_the_result(text: str) -> str:
    """JAX's words on results, which are the first of what we return, as said of the caller's function."""
    return re.sub(r"(out_specs|\(\*args\))\[0\]", r"\1", text)


def _results(out_specs: Any) -> Any:
    """Specs of the plain result: None stands for replicated, as for arguments."""
    if out_specs is None:
        return REPLICATED
    return jax.tree.map(lambda leaf: REPLICATED if leaf is None else leaf, out_specs, is_leaf=is_prefix_leaf)


def _over(function: Callable[[Any, Any], Any], specs: Any, inputs: Any) -> Any:
    """Apply to every array with the spec that its prefix gives it."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda x: function(spec, x), part), specs, inputs, is_leaf=is_prefix_leaf
    )


def _each_key(function: Callable[[Any], Any], keys: Any) -> Any:
    """Apply to a key, or to each of an array of keys."""
    typed = jax.numpy.issubdtype(keys.dtype, jax.dtypes.prng_key)
    for _ in range(keys.ndim if typed else keys.ndim - 1):
        function = jax.vmap(function)
    return function(keys)
