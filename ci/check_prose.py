"""Check the language of docstrings, comments and Markdown pages.

    python ci/check_prose.py [FILE ...]

1. The docstring of a function begins with a verb of `VERBS`. Add a verb there if it is missing. Properties, special
   methods and tests are free.
2. A sentence has at most 30 words.
3. No text contains a word of `WORDS`: an idiom, a word without a technical meaning, or British spelling.
4. The name of a test has at most 60 characters.
5. A line of a Markdown page has at most 100 characters, outside of tables and code.

Without arguments, check all files that git tracks. Print one line per violation, `file:line: what (rule)`, and exit
with 1 if there is one.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SENTENCE_WORDS, TEST_NAME, PAGE_LINE = 30, 60, 100
NOT_PROSE = re.compile(r"(^|/)(LICENSE|evidence/|results/)")
VERBS = frozenset(re.findall(r"\w+", """
abort accept adapt add allocate analyze append apply assign begin broadcast build call cancel capture cast check
choose clear close combine compare compile compute concatenate configure connect convert copy count create declare
decode delay delete derive describe detect determine disable discard divide do draw drop emit enable encode end enter
estimate evaluate exchange exclude execute expand extract fill filter find fit flush format forward free gather
generate give group handle hash identify ignore import initialize insert inspect install iterate join keep kill launch
let limit list load locate lock log lower make map mark match measure merge move multiply name normalize notify omit
open overwrite pack pad parametrize parse patch permute pick pin plan point poll post predict prefer prepare prevent
print process profile put query queue raise rank read receive recompute record register release remove rename render
reorder repeat replace report request reshape resolve restore resume return reverse round run save scale scan search
see select send serialize set shard share show signal simulate skip sleep solve sort split start stop store subtract
sum suppress synchronize terminate test time trace train trim truncate try turn undo unpack update use validate verify
visit wait walk warn watch wrap write yield zero
"""))  # fmt: skip
WORDS = {
    r"to(ld|ells?) (the|a|it|them|by)\b|\btell(s|ing)?\b": "give, pass, report, notify",
    r"(no|some|any|every)body\b": "no caller, the user, a third party",
    r"stands?\b(?![- ](in|alone|for))": "is, is stored, waits",
    r"foreign\b": "remote, of another rank, third-party",
    r"of (its|their|one's|your|our) own\b": "own, separate, custom",
    r"at hand\b|in silence\b|in so many words\b": "available, without an error, explicitly",
    r"go(es)? (round|home)\b": "circulates, to the owner",
    r"the others\b": "the other ranks, the remaining ones",
    r"unless (given|told)\b": "state the default",
    r"hand(s|ed|ing)? (on|over|back)\b": "forward, pass, return",
    r"reckon(ed|s)?\b|worked out\b|comes? to (the same|nothing)\b": "computed, is equal",
    r"who (holds|waits|moves|runs|makes)\b": "which rank",
    r"beside\b": "next to, concurrently with",
    r"thrice\b|anew\b|whilst\b|abreast\b|in the meantime\b": "three times, again, while",
    r"(neighbour|colour|behaviour|favour|honour|centre|grey\b|spelt\b|learnt\b|licence\b)\w*": "American spelling",
    r"(normal|serial|initial|optim|util|final|recogn|summar|synchron|organ|vector|parallel)is(e|es|ed|ing|ation)\b":
        "American spelling",
}  # fmt: skip
FORBIDDEN = {re.compile(rf"\b(?:{pattern})", re.IGNORECASE): better for pattern, better in WORDS.items()}
SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Yields):$")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|no|fig|eq|al)\.", re.IGNORECASE)
NEW_SENTENCE = re.compile(r"(?<=[.!?;:])[\"')\]*]*\s+(?=[A-Z`\"'(\[*_0-9])")
ENTRY = re.compile(r"\s*([-*+] |\d+\. |\||#|\*{0,2}[\w.`]+(, \*{0,2}[\w.`]+)*: )")

Violation = tuple[int, str, str]


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence and the index of the line on which its paragraph begins.

    List items, entries of a section and rows of a table begin a new sentence. Code is left out: fences, and paragraphs
    that are indented outside of a section.
    """
    paragraph: list[str] = []
    begin, in_fence, in_section = 0, False, False
    for index, line in enumerate([*text.splitlines(), ""]):
        is_fence = line.lstrip().startswith("```")
        in_fence ^= is_fence
        is_code = in_fence or is_fence or (line.startswith("    ") and not in_section and not paragraph)
        if line and not line[0].isspace():
            in_section = SECTION.match(line) is not None
        if not line.strip() or is_code or ENTRY.match(line) or SECTION.match(line):
            flat = ABBREVIATION.sub(lambda match: match[0].replace(".", ""), " ".join(paragraph))
            yield from ((begin, part) for cell in flat.split("|") for part in NEW_SENTENCE.split(cell))
            paragraph, begin = [], index
        if line.strip() and not is_code:
            begin = begin if paragraph else index
            paragraph.append(line.strip())


def check_text(line: int, text: str) -> Iterator[Violation]:
    """Check the sentences and words of a text that begins on a line."""
    for offset, sentence in sentences(text):
        words = re.findall(r"[\w`'/.-]*[A-Za-z][\w`'/.-]*", re.sub(r"\]\([^)]*\)", "]", sentence))
        if len(words) > SENTENCE_WORDS:
            yield line + offset, f"{len(words)} words: {sentence[:70]}...", "make two sentences"
        for pattern, better in FORBIDDEN.items():
            for match in pattern.finditer(re.sub(r"`[^`]*`", "", sentence)):
                yield line + offset, f"{match[0]!r} in: {sentence[:70]}", f"write: {better}"


def is_free(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function's docstring may begin with another word than a verb."""
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    return re.search("property|setter", decorators) is not None or function.name.startswith(("__", "test_"))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment. Consecutive lines without code are one comment."""
    block: list[str] = []
    begin = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        (line, column), text = token.start, token.string.lstrip("# ")
        is_alone = not token.line[:column].strip()
        if block and not (is_alone and line == begin + len(block)):
            yield begin, "\n".join(block)
            block = []
        begin = begin if block else line
        block.append(text)
    yield begin, "\n".join(block)


def check_python(source: str, is_test: bool) -> Iterator[Violation]:
    """Check docstrings, comments and names of tests."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring, line = ast.get_docstring(node, clean=False), node.body[0].lineno if node.body else 1
        if docstring is not None:
            yield from check_text(line, inspect.cleandoc(docstring))
        if isinstance(node, ast.Module | ast.ClassDef):
            continue
        first = re.match(r"\W*(\w+)", docstring or "")
        if docstring is not None and not is_free(node) and (first is None or first[1].lower() not in VERBS):
            yield line, f"{node.name}: {docstring[:60]}", "begin with a verb"
        if is_test and node.name.startswith("test_") and len(node.name) > TEST_NAME:
            yield line, f"{node.name} has {len(node.name)} characters", f"at most {TEST_NAME}"
    for line, block in comments(source):
        yield from check_text(line, block)


def check_page(source: str) -> Iterator[Violation]:
    """Check the lines and sentences of a Markdown page."""
    yield from check_text(1, source)
    in_fence = False
    for number, line in enumerate(source.splitlines(), 1):
        in_fence ^= line.lstrip().startswith("```")
        if len(line) > PAGE_LINE and not in_fence and not line.lstrip().startswith(("|", "<", "[")):
            yield number, f"{len(line)} characters", f"at most {PAGE_LINE}"


def check(paths: Iterable[Path]) -> list[str]:
    """Return a line per violation, in order."""
    lines = []
    for path in paths:
        source = path.read_text(encoding="utf-8")
        is_test = path.name.startswith("test_")
        found = check_page(source) if path.suffix == ".md" else check_python(source, is_test)
        lines += [f"{path}:{line}: {what} ({rule})" for line, what, rule in sorted(set(found))]
    return lines


def main(arguments: list[str]) -> int:
    """Print the violations in files and return the exit code."""
    paths = [Path(argument) for argument in arguments]
    if not paths:
        command = ["git", "ls-files", "*.py", "*.md"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        paths = [ROOT / name for name in listed if not NOT_PROSE.search(name) and (ROOT / name).is_file()]
    lines = check(paths)
    print(*lines, f"check_prose: {len(lines)} violation{'' if len(lines) == 1 else 's'}", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
