"""On which line a key of a TOML text stands. tomllib does not
say, and an error without a line is half an error."""

import re
import tomllib

__all__ = ["key_lines"]

_TOKEN = re.compile(
    r'''(?P<space>[ \t\r]+|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<string>"""(?:\\.|[^\\])*?"{3,5} | \'\'\'.*?\'{3,5} | "(?:\\.|[^"\\\n])*" | '[^'\n]*')
      | (?P<mark>[\[\]{}=.,])
      | (?P<word>[^\s\[\]{}=.,"'\#]+)''',
    re.VERBOSE | re.DOTALL,
)


def key_lines(text: str) -> dict[tuple[str, ...], int]:
    """Line numbers, from 1, of every table header and every `key = value` outside of inline tables.

    text: TOML that tomllib accepts; anything else gives an incomplete answer. A key `a.b = 1` under [t] is
    ("t", "a", "b"). A header that appears several times (an array of tables) keeps its first line.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    path: list[str] = []
    line, depth, in_header, in_value = 1, 0, False, False
    for token in _TOKEN.finditer(text):
        kind, content = token.lastgroup, token.group()
        if kind == "newline" and depth == 0:
            path, in_value = [], False
        elif kind == "mark" and in_value:
            depth += (content in "[{") - (content in "]}")
        elif kind == "mark" and content == "[":
            in_header = True
        elif kind == "mark" and content == "]" and in_header and path:
            table, in_header, path = tuple(path), False, []
            lines.setdefault(table, line)
        elif kind == "mark" and content == "=":
            lines.setdefault((*table, *path), line)
            in_value = True
        elif kind == "word" and not in_value:
            path.append(content)
        elif kind == "string" and not in_value:
            path.append(tomllib.loads(f"key = {content}")["key"])
        line += content.count("\n")
    return lines
