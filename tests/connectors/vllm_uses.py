"""What connectors/ takes from vLLM, found by reading its source: no vLLM needed to find out.

A small type inference: parameters and fields are followed by their annotations, by name where the
annotation is `Any`, and on through attributes, loops and calls as far as `Known` says. It errs on the side of
not seeing, so the table that is compared with it may list more than it finds.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_CONTAINER_METHODS = {name for kind in (dict, list, set, tuple, str, bytes) for name in dir(kind)}
#: Calls that hand on what they are given, element by element.
_PASSING = {"list", "tuple", "sorted", "set", "frozenset", "iter", "reversed", "next", "enumerate", "zip"}


@dataclass(frozen=True)
class Import:
    """`from module import name`, at the top or inside a function."""

    module: str
    name: str
    where: str


@dataclass(frozen=True)
class Use:
    """`name` of an object of vLLM's type `owner` is read. `safe`: by getattr with a default."""

    owner: str
    name: str
    where: str
    safe: bool = False


@dataclass(frozen=True)
class Call:
    """A callable of vLLM's (`owner` or `owner.name`) is called so."""

    owner: str
    name: str
    positional: int
    keywords: tuple[str, ...]
    where: str


@dataclass(frozen=True)
class Known:
    """What can't be read from connectors/ itself."""

    #: Type of an attribute or of a call's result, containers standing for their elements: "Request.lora".
    results: Mapping[str, str]
    #: Type of a parameter annotated `Any`, by its name, or by its module's and its name: "tier/identity.key".
    names: Mapping[str, str]


@dataclass
class Found:
    """All of it, in the order of the source."""

    imports: list[Import] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    #: Our classes with a base of vLLM's: "connectors.kv:KVStoreConnector".
    classes: list[str] = field(default_factory=list)


@dataclass
class OwnClass:
    """A class of connectors/: the types of its fields and what its methods return."""

    bases: list[str]
    types: dict[str, str] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)


def find(folder: Path, known: Known) -> Found:
    """Everything that the modules in `folder` import from vLLM and read of vLLM's objects."""
    trees = {path: ast.parse(path.read_text(), str(path)) for path in sorted(folder.glob("**/*.py"))}
    found = Found()
    for path, tree in trees.items():
        found.imports += _imports(tree, path.relative_to(folder).as_posix())
    theirs = {one.name for one in found.imports} | set(known.names.values()) | set(known.results.values())
    theirs.discard("")
    own = {node.name: _own_class(node, theirs) for tree in trees.values() for node in _classes(tree)}
    for path, tree in trees.items():
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        names = [node.name for node in _classes(tree)]
        found.classes += [f"{module}:{name}" for name in names if theirs & set(own[name].bases)]
        _Reader(path.relative_to(folder).as_posix(), theirs, own, known, found).read(tree)
    return found


def _imports(tree: ast.Module, where: str) -> Iterator[Import]:
    for node in ast.walk(tree):
        at = f"{where}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and _is_vllm(node.module):
            yield from (Import(str(node.module), alias.name, at) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (Import(alias.name, alias.name, at) for alias in node.names if _is_vllm(alias.name))


def _is_vllm(module: str | None) -> bool:
    return module is not None and (module == "vllm" or module.startswith("vllm."))


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _own_class(node: ast.ClassDef, theirs: set[str]) -> OwnClass:
    made = OwnClass([base.id for base in node.bases if isinstance(base, ast.Name)])
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            made.members.add(one.target.id)
            made.types[one.target.id] = _named(one.annotation)
        elif isinstance(one, ast.FunctionDef):
            made.members.add(one.name)
            made.types[one.name] = _named(one.returns)
            given = {arg.arg: _named(arg.annotation) for arg in one.args.args}
            for inner in ast.walk(one):
                for target, annotation, value in _assigned(inner):
                    if isinstance(target, ast.Attribute) and _is_self(target.value):
                        made.members.add(target.attr)
                        kept = given.get(value.id, "") if isinstance(value, ast.Name) else ""
                        made.types.setdefault(target.attr, _named(annotation) or kept)
    return made


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    if isinstance(node, ast.AnnAssign):
        yield node.target, node.annotation, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from ((t, None, v) for t, v in zip(target.elts, node.value.elts, strict=False))
            else:
                yield target, None, node.value
    elif isinstance(node, ast.NamedExpr):
        yield node.target, None, node.value


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _named(annotation: ast.expr | None) -> str:
    """The last class that an annotation names: of `dict[str, Request] | None`, Request."""
    if annotation is None:
        return ""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
    names = [name for name in names if name[:1].isupper() and name not in _TYPING] or names
    return names[-1] if names else ""


_TYPING = {"Sequence", "Mapping", "Iterable", "Iterator", "Callable", "OrderedDict", "Literal", "ClassVar"}


class _Reader:
    """Walks one module."""

    def __init__(
        self, where: str, theirs: set[str], own: Mapping[str, OwnClass], known: Known, found: Found
    ) -> None:
        self._where = where
        self._theirs = theirs
        self._own = own
        self._known = known
        self._found = found

    def read(self, tree: ast.Module) -> None:
        self._body(tree.body, {}, "")

    def _body(self, body: Sequence[ast.stmt], scope: Mapping[str, str], inside: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self._body(node.body, scope, node.name)
            elif isinstance(node, ast.FunctionDef):
                self._function(node, dict(scope), inside)
            else:
                self._notes(node, dict(scope))

    def _function(self, node: ast.FunctionDef, scope: dict[str, str], inside: str) -> None:
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            named = _named(arg.annotation)
            scope[arg.arg] = self._by_name(arg.arg) if named == "Any" else named
        if inside:
            scope["self"] = scope["cls"] = inside
        narrowed = dict(_narrowed(node))
        scope |= narrowed
        for one in ast.walk(node):  # outer statements come before inner ones, which is what is needed
            self._bind(one, scope, narrowed)
        # Once more: a name may be bound after the comprehension that the walk met first.
        for one in ast.walk(node):
            self._bind(one, scope, narrowed)
        self._notes(node, scope)

    def _notes(self, node: ast.AST, scope: Mapping[str, str]) -> None:
        if isinstance(node, ast.Lambda):
            scope = {
                name: kind for name, kind in scope.items() if name not in {a.arg for a in node.args.args}
            }
        self._note(node, scope)
        for inner in ast.iter_child_nodes(node):
            self._notes(inner, scope)

    def _by_name(self, name: str) -> str:
        names = self._known.names
        return names.get(f"{self._where.removesuffix('.py')}.{name}", names.get(name, ""))

    def _bind(self, node: ast.AST, scope: dict[str, str], narrowed: Mapping[str, str]) -> None:
        pairs: list[tuple[ast.expr, str]] = []
        for target, annotation, value in _assigned(node):
            kind = _named(annotation) or (self._infer(value, scope) if value is not None else "")
            pairs.append((target, kind))
        if isinstance(node, ast.For | ast.comprehension):
            pairs += self._loop(node.target, node.iter, scope)
        for target, kind in pairs:
            if isinstance(target, ast.Name) and kind and target.id not in narrowed:
                scope[target.id] = kind

    def _loop(self, target: ast.expr, over: ast.expr, scope: Mapping[str, str]) -> list[tuple[ast.expr, str]]:
        if not isinstance(target, ast.Tuple):
            return [(target, self._infer(over, scope))]
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "zip":
            return [(t, self._infer(a, scope)) for t, a in zip(target.elts, over.args, strict=False)]
        return [(target.elts[-1], self._infer(over, scope))]  # enumerate(...), .items()

    def _infer(self, node: ast.expr, scope: Mapping[str, str]) -> str:
        """The name of the type of an expression, or "" if it isn't known."""
        match node:
            case ast.Name(id=name):
                return scope.get(name) or (name if name in self._theirs or name in self._own else "")
            case ast.Attribute(value=value, attr=attr):
                return self._member(self._infer(value, scope), attr)
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self._infer(value, scope)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_]):
                return self._member(self._infer(value, scope), attr)
            case ast.Call(func=ast.Name(id=name), args=[value, *_]) if name in _PASSING:
                return self._infer(value, scope)
            case ast.Call(func=ast.Name(id="super")):
                return scope.get("self", "")
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _CONTAINER_METHODS:
                return self._infer(value, scope)
            case ast.Call(func=func):
                kind = self._infer(func, scope)
                return self._known.results.get(f"{kind}()", kind)
            case ast.BoolOp(values=[first, *_]):
                return self._infer(first, scope)
            case ast.IfExp(body=body, orelse=orelse):
                return self._infer(body, scope) or self._infer(orelse, scope)
            case ast.NamedExpr(value=value):
                return self._infer(value, scope)
            case ast.ListComp(elt=one) | ast.SetComp(elt=one) | ast.GeneratorExp(elt=one):
                return self._infer(one, scope)
        return ""

    def _member(self, kind: str, attr: str) -> str:
        if attr in _CONTAINER_METHODS:
            return kind
        for base in self._lineage(kind):
            if base in self._own and self._own[base].types.get(attr):
                return self._own[base].types[attr]
            if (result := self._known.results.get(f"{base}.{attr}")) is not None:
                return result
        return ""

    def _lineage(self, kind: str) -> Iterator[str]:
        yield kind
        for base in self._own[kind].bases if kind in self._own else ():
            yield from self._lineage(base)

    def _owners(self, kind: str, attr: str) -> list[str]:
        """vLLM's type that `attr` of an object of type `kind` comes from; none if it is our own."""
        lineage = list(self._lineage(kind))
        if any(one in self._own and attr in self._own[one].members for one in lineage):
            return []
        return [one for one in lineage if one in self._theirs][:1]

    def _note(self, node: ast.AST, scope: Mapping[str, str]) -> None:
        where = f"{self._where}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=attr):
                bases = [base for base in self._own[scope["self"]].bases if base in self._theirs]
                self._found.uses += [Use(base, attr, where) for base in bases[:1]]
            case ast.Attribute(value=value, attr=attr) if isinstance(node.ctx, ast.Load):
                self._use(self._infer(value, scope), attr, where)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *default]):
                self._use(self._infer(value, scope), attr, where, safe=bool(default))
        if isinstance(node, ast.Call):
            self._call(node, scope, where)

    def _use(self, kind: str, attr: str, where: str, *, safe: bool = False) -> None:
        if kind and attr not in _CONTAINER_METHODS:
            self._found.uses += [Use(owner, attr, where, safe) for owner in self._owners(kind, attr)]

    def _call(self, node: ast.Call, scope: Mapping[str, str], where: str) -> None:
        if any(isinstance(arg, ast.Starred) for arg in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            return
        keywords = tuple(str(keyword.arg) for keyword in node.keywords)
        match node.func:
            case ast.Name(id=name) if name in self._theirs and not hasattr(builtins, name):
                self._found.calls.append(Call(name, "", len(node.args), keywords, where))
            case ast.Attribute(value=value, attr=attr) if attr not in _CONTAINER_METHODS:
                for owner in self._owners(self._infer(value, scope), attr):
                    self._found.calls.append(Call(owner, attr, len(node.args), keywords, where))


def _narrowed(node: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Names that the function tests with isinstance: taken for that type throughout."""
    for one in ast.walk(node):
        match one:
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), ast.Name(id=kind)]):
                yield name, kind
