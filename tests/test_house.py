"""The rules that keep the house in order, as far as the linter's contracts don't (pyproject.toml)."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("kvstore", "connectors", "schemas")
#: The most that a reader takes in at a glance.
MOST_MODULES = 15
#: Where threads may be started: a conformance suite starts some to be called from several.
THREADS = ("kvstore/threads/", "kvstore/admin/serve/", "kvstore/conformance/")


def modules() -> list[str]:
    found = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def folders() -> list[str]:
    return sorted({name.rpartition("/")[0] for name in modules()})


def names_in(folder: str) -> list[str]:
    return [path.stem for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]


def tree_of(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def test_there_is_a_house() -> None:
    assert len(modules()) > 200 and len(folders()) > 20


@pytest.mark.parametrize("folder", folders())
def test_a_folder_is_taken_in_at_a_glance(folder: str) -> None:
    assert len(names_in(folder)) <= MOST_MODULES, "find the second idea, and give it a package"


@pytest.mark.parametrize("folder", folders())
def test_no_prefix_stands_for_a_package(folder: str) -> None:
    names = names_in(folder)
    firsts = Counter(name.partition("_")[0] for name in names)
    alike = [name for name in names if firsts[name.partition("_")[0]] > 1]
    assert not alike, "files of one prefix are a package, whose name is the prefix"


def threads_of(name: str) -> Iterator[str]:
    for node in ast.walk(tree_of(name)):
        called = node.func if isinstance(node, ast.Call) else None
        made = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if made in ("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"):
            yield f"{name}:{node.lineno}"


def test_threads_are_started_in_few_places() -> None:
    found = [line for name in modules() if not name.startswith(THREADS) for line in threads_of(name)]
    assert not found, "hand the work to kvstore.threads"
    assert list(threads_of("kvstore/threads/transfers.py")), "the search finds none where there are some"


#: What makes objects, code or commands of bytes or text.
RUN = re.compile(
    r"(eval|exec|compile|__import__|import_module|system|popen|Popen|check_output|check_call|spawn\w*|exec[lv]\w*"
    r"|(pickle|marshal|dill|cloudpickle|shelve|jsonpickle|torch|np|numpy|joblib)\.(loads?|open)"
    r"|(\w+\.)?Unpickler|yaml\.(load|load_all|full_load|unsafe_load)|subprocess\.\w+)"
)
#: Where such a call is given names of modules that are ours.
RUN_HERE = {
    "connectors/plugin.py: importlib.import_module",
    "kvstore/lazy.py: import_module",
}


def runs(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            # `re.compile` is no `compile`, but `os.system` is a `system`.
            short = name.removeprefix("os.").removeprefix("builtins.").removeprefix("importlib.")
            if RUN.fullmatch(short):
                yield node.lineno, name


def test_nothing_that_is_read_is_run() -> None:
    found = {f"{name}: {what}" for name in modules() for _, what in runs(tree_of(name))}
    assert found <= RUN_HERE, "segments, archives, settings and replies are parsed, never run"
    for code in (
        "pickle.loads(x)",
        "eval(x)",
        "yaml.load(x)",
        "os.system(x)",
        "subprocess.run(x, shell=True)",
    ):
        assert list(runs(ast.parse(code))), code


def conversions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in ("int", "float", "json.loads"):
            yield node.lineno, name


def test_numbers_of_replies_are_read_in_one_place() -> None:
    """Any other conversion believes whatever number a server tells; connections.py converts settings."""
    names = [one for one in modules() if one.startswith("kvstore/index/redis/")]
    names.remove("kvstore/index/redis/connections.py")
    found = [f"{name}:{line}: {what}" for name in names for line, what in conversions(tree_of(name))]
    assert not found, "kvstore.index.numbers reads them, each within bounds"
    assert list(conversions(ast.parse("int(x)")))


def borrowers(tops: tuple[str, ...], lent: str) -> list[str]:
    """Modules below these folders, but for the tests of trials, that import from these packages."""
    found = [path.relative_to(ROOT).as_posix() for top in tops for path in (ROOT / top).rglob("*.py")]
    borrowed = re.compile(rf"^\s*(from|import) ({lent})\b", re.MULTILINE)
    return [
        name
        for name in found
        if not name.startswith("tests/trials/") and borrowed.search((ROOT / name).read_text(encoding="utf-8"))
    ]


def test_trials_and_tests_are_borrowed_one_way() -> None:
    assert not borrowers(PRODUCT, "tests|trials"), "the product does without both"
    assert not borrowers(("tests", "tools"), "trials"), "what tests and trials share is the tests'"
    assert borrowers(("trials",), "tests"), "the search finds none where there are some"


def test_a_group_of_verbs_has_one_name() -> None:
    groups = set(names_in("kvstore/cli/commands"))
    texts = set(names_in("kvstore/cli/text"))
    assert texts <= groups, "a group whose models say it all has none"
    assert groups == {path.parent.name for path in (ROOT / "kvstore" / "admin").glob("*/reports.py")}
    for group in groups:
        text = (ROOT / "kvstore" / "cli" / "commands" / f"{group}.py").read_text(encoding="utf-8")
        own = {f"{group} as {group}_text"} if group in texts else set()
        assert set(re.findall(r"from kvstore\.cli\.text import (.+)", text)) == own


def own_classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in modules():
        for node in tree_of(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    return found


def test_a_class_has_a_name_of_its_own() -> None:
    twice = {name: where for name, where in own_classes().items() if len(where) > 1}
    assert not twice, "one word, one meaning"


def docstrings(name: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


#: Words with which no sentence begins that has a subject and a verb, as docstrings are to have.
FRAGMENT = re.compile(r"(Of|By|Who) ")


@pytest.mark.parametrize("top", PRODUCT)
def test_docstrings_are_sentences(top: str) -> None:
    found = [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name in modules()
        if name.startswith(f"{top}/")
        for line, text in docstrings(name)
        if FRAGMENT.match(text)
    ]
    assert not found, "\n".join(["say who does what:", *found])


def comments(name: str) -> Iterator[tuple[int, str]]:
    """The first line of each `#:` comment."""
    before = ""
    for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if line.startswith("#: ") and not before.startswith("#:"):
            yield number, line.removeprefix("#: ")
        before = line


@pytest.mark.parametrize("top", PRODUCT)
def test_comments_of_fields_say_what_they_are(top: str) -> None:
    found = [
        f"{name}:{number}: {text}"
        for name in modules()
        if name.startswith(f"{top}/")
        for number, text in comments(name)
        if FRAGMENT.match(text)
    ]
    assert not found, "\n".join(["a noun phrase, or a sentence:", *found])


def glossary() -> list[tuple[str, str]]:
    """The words of the glossary, each with those that are not used in its place."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [(row[0].strip(), row[2].strip()) for row in rows if row[0].strip() != "word"]


def test_a_word_of_the_glossary_stands_in_it_once() -> None:
    words = [word.strip() for row, _ in glossary() for word in row.split(",")]
    assert len(words) > 50 and len(words) == len(set(words))


def abstract_verbs(node: ast.ClassDef) -> list[str]:
    return [
        one.name
        for one in node.body
        if isinstance(one, ast.FunctionDef)
        and any(getattr(each, "id", "") == "abstractmethod" for each in one.decorator_list)
    ]


def test_a_port_is_narrow() -> None:
    ports = {
        node.name: abstract_verbs(node)
        for name in modules()
        if name.startswith("kvstore/")
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.ClassDef) and abstract_verbs(node)
    }
    assert {"PayloadStore", "Index", "Catalogue", "Pins"} <= set(ports)
    wide = {name: verbs for name, verbs in ports.items() if len(verbs) > 8}
    assert not wide, "an optional ability is a port of its own"


#: Decisions that exceed a page. A decision that comes to fit leaves the list.
LONG_DECISIONS = {"0039-sessions.md"}


def test_a_decision_has_one_page() -> None:
    pages = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    texts = {path.name: path.read_text(encoding="utf-8").splitlines() for path in pages}
    assert len(texts) > 40
    assert [name for name, lines in texts.items() if not lines[0].startswith(f"# {name[:4]}: ")] == []
    form = ["## Context", "## Decision", "## Consequences", "## Rejected"]
    long = {
        name
        for name, lines in texts.items()
        if len(lines) > 60 or max(map(len, lines)) > 140 or [one for one in lines if one[:3] == "## "] != form
    }
    assert long == LONG_DECISIONS, "60 lines of 140 characters, under four headings"
