"""reStructuredText of the CPython documentation -> plain text as a reader sees it.

In: one `.rst` source. Out: text with `# ` headings, signatures, "Note:", "New in version 3.2." and code as it stands.
A line-based rewrite, not a parser: tables and rare directives keep their source form.
"""

from __future__ import annotations

import re

# directives that leave nothing behind, with their body
DROPPED = {
    "index", "module", "moduleauthor", "sectionauthor", "highlight", "tabularcolumns", "toctree", "include",
    "literalinclude", "currentmodule", "program", "audit-event", "testsetup", "testcleanup", "contents", "image",
    "raw", "only", "audit-event-table", "miscnews", "role", "productionlist", "list-table",
}  # fmt: skip
# directives whose argument is a signature: printed as it is, after the word if there is one
SIGNATURES = {
    "class": "class ", "exception": "exception ", "decorator": "@", "coroutinemethod": "coroutine ",
    "coroutinefunction": "coroutine ", "classmethod": "classmethod ", "staticmethod": "staticmethod ",
    "abstractmethod": "abstractmethod ",
    **dict.fromkeys(("method", "function", "attribute", "data", "cmdoption", "option", "opcode", "envvar", "describe",
                     "pdbcommand", "object", "macro", "member", "type", "var", "enum", "enumerator", "struct"), ""),
}  # fmt: skip
LABELS = {
    "note": "Note:", "warning": "Warning:", "seealso": "See also:", "important": "Important:", "caution": "Caution:",
    "impl-detail": "CPython implementation detail:", "hint": "Hint:", "tip": "Tip:",
}  # fmt: skip
VERSIONS = {
    "versionadded": "New in version",
    "versionchanged": "Changed in version",
    "deprecated": "Deprecated since version",
    "deprecated-removed": "Deprecated since version",
}
CODE = {"code-block", "doctest", "testcode", "testoutput", "sourcecode", "parsed-literal", "code"}

DIRECTIVE = re.compile(r"^( *)\.\. +(?:(?:c|py):)?([A-Za-z][\w-]*):: ?(.*)$")
COMMENT = re.compile(r"^( *)\.\.(?: .*)?$")
OPTION = re.compile(r"^ +:[\w-]+:( .*)?$")
ADORNMENT = re.compile(r"^([=\-~^\"'*+#.])\1{2,}$")
ROLE = re.compile(r":[A-Za-z][\w:+-]*:`([^`]+)`")
LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`__?")
LITERAL = re.compile(r"``(.+?)``")
BARE = re.compile(r"`([^`]+)`_{1,2}")
FOOTNOTE = re.compile(r"\s*\[#?[\w-]*\]_")
EMPHASIS = re.compile(r"(?<![\w*\\])(\*{1,2})([^\s*](?:[^*\n]*[^\s*])?)\1(?![\w*])")


def inline(text: str) -> str:
    """Inline markup -> what is printed."""
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match.group(1))
        return f"\0{len(kept) - 1}\0"

    text = LITERAL.sub(keep, text)
    text = ROLE.sub(_role, text)
    text = LINK.sub(r"\1", text)
    text = BARE.sub(r"\1", text)
    text = FOOTNOTE.sub("", text)
    text = EMPHASIS.sub(r"\2", text)
    text = text.replace("\\ ", "").replace("\\*", "*").replace("\\\\", "\\")
    return re.sub(r"\0(\d+)\0", lambda m: f"`{kept[int(m.group(1))]}`", text)


def _role(match: re.Match[str]) -> str:
    body = match.group(1).strip()
    titled = re.match(r"^(.*?)\s*<[^>]*>$", body, re.DOTALL)
    if titled:
        return titled.group(1)
    if body.startswith("~"):
        body = body.rpartition(".")[2].lstrip("~")
    body = body.lstrip("!")
    name = match.group(0)[1:].partition(":`")[0].rpartition(":")[2]
    if name in ("func", "meth") and not body.endswith(")"):
        return body + "()"
    return {"pep": "PEP ", "rfc": "RFC "}.get(name, "") + body


class _Rewriter:
    """One pass over the lines. Single writer: `run`."""

    def __init__(self, text: str) -> None:
        self.lines = text.expandtabs(8).splitlines()
        self.at = 0
        self.out: list[str] = []
        self.code_indent: int | None = None  # lines indented deeper than this are code

    def run(self) -> str:
        while self.at < len(self.lines):
            line = self.lines[self.at].rstrip()
            self.at += 1
            if self._is_code(line):
                self.out.append(line)
            elif directive := DIRECTIVE.match(line):
                self._directive(len(directive.group(1)), directive.group(2), directive.group(3))
            elif COMMENT.match(line):
                self._skip_body(len(line) - len(line.lstrip()))
            else:
                self._text(line)
        return re.sub(r"\n{3,}", "\n\n", "\n".join(self.out)).strip() + "\n"

    def _is_code(self, line: str) -> bool:
        if self.code_indent is None:
            return False
        if not line or len(line) - len(line.lstrip()) > self.code_indent:
            return True
        self.code_indent = None
        return False

    def _directive(self, indent: int, name: str, argument: str) -> None:
        pad = " " * indent
        if name in DROPPED:
            self._skip_body(indent)
            return
        if name in SIGNATURES:
            self._signatures(pad + SIGNATURES[name], argument)
            return
        if name in VERSIONS:
            self.out.append(pad + _version(name, argument))
        elif name in CODE:
            self.code_indent = indent
        elif name == "availability":
            self.out.append(pad + "Availability: " + inline(argument))
        elif name in LABELS:
            self.out.append(pad + LABELS[name] + (" " + inline(argument) if argument else ""))
        elif argument:
            self.out.append(pad + inline(argument))
        while self.at < len(self.lines) and OPTION.match(self.lines[self.at]):
            self.at += 1

    def _signatures(self, prefix: str, argument: str) -> None:
        """One line per signature: those that follow directly, with continued lines joined and options left out."""
        found = [argument.strip()]
        while self.at < len(self.lines) and self.lines[self.at].strip():
            more = self.lines[self.at].strip()
            if DIRECTIVE.match(self.lines[self.at]):
                break
            self.at += 1
            if found[-1].endswith("\\"):
                found[-1] = found[-1][:-1].rstrip() + " " + more
            elif not more.startswith(":"):
                found.append(more)
        self.out += [prefix + inline(signature).replace("\\", "") for signature in found]

    def _skip_body(self, indent: int) -> None:
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.strip() and len(line) - len(line.lstrip()) <= indent:
                return
            self.at += 1

    def _text(self, line: str) -> None:
        if ADORNMENT.match(line):
            if self.out and self.out[-1] and not self.out[-1].startswith(("#", " ")) and line[0] != ".":
                self.out[-1] = "# " + self.out[-1]
            return
        stripped = line.rstrip()
        if stripped.endswith("::"):
            self.code_indent = len(line) - len(line.lstrip())
            stripped = stripped[:-1] if stripped.strip() != "::" else ""
        self.out.append(self._inline_paragraph(stripped))

    def _inline_paragraph(self, line: str) -> str:
        """Inline markup of one line; a role that runs over the line's end is joined first."""
        while line.count("`") % 2 and self.at < len(self.lines) and self.lines[self.at].strip():
            line += " " + self.lines[self.at].strip()
            self.at += 1
        if line.endswith("::"):
            self.code_indent = len(line) - len(line.lstrip())
            line = line[:-1]
        return inline(line)


def _version(name: str, argument: str) -> str:
    version, _, rest = argument.partition(" ")
    head = f"{VERSIONS[name]} {version}"
    if name == "deprecated-removed":
        until, _, rest = rest.partition(" ")
        head += f", will be removed in version {until}"
    return f"{head}: {inline(rest)}" if rest else f"{head}."


def plain(text: str) -> str:
    """The whole source as plain text."""
    return _Rewriter(text).run()


def sections(text: str, shortest: int = 400) -> list[str]:
    """Cut plain text at headings; a section shorter than `shortest` characters stays with the one after it."""
    parts, current = [], ""
    for piece in re.split(r"(?m)^(?=# )", text):
        current += piece
        if len(current) >= shortest:
            parts.append(current)
            current = ""
    return [*parts, current] if current.strip() else parts
