"""A module as a chain of blocks: it can be cut wherever one tensor alone is passed on.

A `nn.Sequential` is taken apart by its children. Another module is traced, by `torch.fx`, or by
`torch.export` where its forward has control flow that fx cannot follow; blocks then end wherever
one value alone is used by all that follows. Blocks hold the module's own parameters, under their
own names.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from pscore.errors import ConfigError

# Operations that compute nothing: a block of these alone joins the one before it.
VIEWS = {"view", "reshape", "flatten", "unsqueeze", "squeeze", "contiguous"}


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a model with one input and one output."""

    name: str
    module: nn.Module


def chain_of(model: nn.Module, example: torch.Tensor) -> list[Block]:
    """Returns the blocks of a model, in order; one after the other they are its forward.

    Args:
        model: Its forward takes one tensor and returns one.
        example: Such an input; a trace by `torch.export` holds for inputs of its shape only.

    Raises:
        ConfigError: It takes or returns something else, cannot be traced, or two blocks share a
            parameter.
    """
    if isinstance(model, nn.Sequential):
        blocks = list(_children(model, ""))
    else:
        blocks = _cut(_trace(model, example))
    _require_own_parameters(model, blocks)
    return blocks


def join_blocks(blocks: Sequence[Block]) -> nn.Sequential:
    """Returns a module that applies some blocks, in order; it holds their parameters."""
    return nn.Sequential(*(block.module for block in blocks))


def names_of(model: nn.Module, module: nn.Module) -> dict[str, str]:
    """Returns the name in `model` of each parameter and buffer of `module`, by its name there.

    Args:
        model: The whole model.
        module: Made of its blocks.
    """
    whole = {id(value): name for name, value in _tensors(model)}
    return {name: whole[id(value)] for name, value in _tensors(module)}


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _children(module: nn.Sequential, prefix: str) -> Iterator[Block]:
    """Yields the children of a sequential module, and those of the sequential ones in it."""
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield Block(f"{prefix}{name}", child)


def _trace(model: nn.Module, example: torch.Tensor) -> fx.GraphModule:
    """Returns the operations of a model's forward."""
    try:
        return fx.symbolic_trace(model)
    except Exception:  # noqa: BLE001  # The user's code fails, as the tracer runs it.
        pass
    try:
        exported = torch.export.export(model, (example,)).module()
    except Exception as problem:
        cause = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        raise ConfigError(
            f"the forward of {type(model).__name__} cannot be followed ({cause}); make the model a "
            "nn.Sequential of its blocks"
        ) from problem
    assert isinstance(exported, fx.GraphModule)
    return exported


def _cut(traced: fx.GraphModule) -> list[Block]:
    """Returns the blocks between the places where one value alone is live."""
    nodes = [node for node in traced.graph.nodes if _computes(node)]
    source = _input(traced.graph)
    place = {node: number for number, node in enumerate(nodes)}
    result = _result(nodes.pop())
    last_use = {
        node: max((place.get(user, -1) for user in node.users), default=-1)
        for node in (source, *nodes)
    }
    blocks: list[Block] = []
    begin, entry, live = 0, source, {source}
    for number, node in enumerate(nodes[:-1]):
        live = {value for value in (*live, node) if last_use[value] > number}
        if live == {node} and _is_tensor(node) and not _is_view(nodes[number + 1]):
            blocks.append(_block(traced, entry, nodes[begin : number + 1], node))
            begin, entry = number + 1, node
    blocks.append(_block(traced, entry, nodes[begin:], result))
    return blocks


def _computes(node: fx.Node) -> bool:
    """Returns whether a node is neither input nor parameter, nor a check of an exported input."""
    return node.op not in ("get_attr", "placeholder") and node.target != "_guards_fn"


def _result(output: fx.Node) -> fx.Node:
    """Returns the operation that makes the forward's result; raises ConfigError for several."""
    result = output.args[0]
    if isinstance(result, tuple | list) and len(result) == 1:  # As `torch.export` writes it.
        result = result[0]
    if not isinstance(result, fx.Node):
        raise ConfigError("forward returns several values, must return one tensor")
    return result


def _input(graph: fx.Graph) -> fx.Node:
    """Returns the input; raises ConfigError if there are several without a default."""
    inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
    if len(inputs) != 1:
        listed = ", ".join(node.name for node in inputs) or "none"
        raise ConfigError(f"forward has {len(inputs)} inputs ({listed}), must have one tensor")
    first: fx.Node = inputs[0]
    return first


def _is_tensor(node: fx.Node) -> bool:
    """Returns whether a value can be a tensor; sizes and the like cannot."""
    if node.op == "call_method":
        return node.target not in ("size", "dim", "numel")
    return node.target not in (operator.getitem, getattr)


def _is_view(node: fx.Node) -> bool:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return node.op != "call_module" and name.partition(".")[0] in VIEWS


def _block(traced: fx.GraphModule, entry: fx.Node, nodes: list[fx.Node], result: fx.Node) -> Block:
    """Returns the operations from `entry` to `result` as a module, with the tensors they use."""
    graph = fx.Graph()
    copies = {entry: graph.placeholder("x")}

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in copies:  # A parameter, or an input that has its default.
            assert node.op == "get_attr", node
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(copies[result])
    return Block(_name(nodes), fx.GraphModule(traced, graph))


def _name(nodes: list[fx.Node]) -> str:
    """Returns the name of the last module of a block, or of its last operation."""
    for node in reversed(nodes):
        if node.op == "call_module":
            return str(node.target)
        stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
        if stack:
            return f"{stack[-1]}.{node.name}"
    return nodes[-1].name


def _require_own_parameters(model: nn.Module, blocks: list[Block]) -> None:
    """Raises ConfigError for a model in which two blocks use one parameter."""
    names = {id(value): name for name, value in model.named_parameters()}
    users: dict[int, str] = {}
    for number, block in enumerate(blocks):
        for parameter in block.module.parameters():
            where = f"{number} ({block.name})"
            other = users.setdefault(id(parameter), where)
            if other != where:
                raise ConfigError(
                    f"parameter {names.get(id(parameter), '?')!r} is used by blocks {other} and "
                    f"{where}: stages cannot share a parameter; give each its own"
                )
