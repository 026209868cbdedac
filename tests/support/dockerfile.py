"""Reads our Dockerfile and .dockerignore: stages, their instructions, what a context holds.

What must not live here: running anything of it.
"""

import fnmatch
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FROM = re.compile(r"(?P<base>\S+)(?: AS (?P<name>[\w-]+))?")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its continued lines joined."""

    word: str
    rest: str

    @property
    def argv(self) -> tuple[str, ...]:
        """Of CMD, ENTRYPOINT and HEALTHCHECK in their JSON form."""
        return tuple(json.loads(self.rest[self.rest.index("[") :]))


@dataclass(frozen=True, slots=True)
class Stage:
    """A build stage."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def of(self, word: str) -> list[Instruction]:
        return [one for one in self.instructions if one.word == word]

    def runs(self) -> list[str]:
        """The commands of RUN, without what is mounted for them."""
        return [re.sub(r"^(--mount=\S+\s+)+", "", one.rest) for one in self.of("RUN")]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """All stages in order, by name."""

    stages: dict[str, Stage]

    def line(self, target: str) -> list[Stage]:
        """A target and the stages that it is FROM, itself first."""
        found = [self.stages[target]]
        while found[-1].base in self.stages:
            found.append(self.stages[found[-1].base])
        return found

    def last(self, target: str, word: str) -> Instruction:
        """What counts of an instruction that later ones replace."""
        for stage in self.line(target):
            if stage.of(word):
                return stage.of(word)[-1]
        raise KeyError(f"{target} has no {word}")

    def environment_stage(self, target: str) -> Stage:
        """Where /opt/kvtier of a target is made."""
        for stage in self.line(target):
            for copy in stage.of("COPY"):
                found = re.fullmatch(r"--from=([\w-]+) /opt/kvtier /opt/kvtier", copy.rest)
                if found is not None:
                    return self.stages[found[1]]
        raise KeyError(f"{target} copies no environment")


def read_dockerfile(path: Path) -> Dockerfile:
    """Parse a file without heredocs and escapes, as ours is."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    stages: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found = _FROM.fullmatch(rest.strip())
            assert found is not None, line
            assert found["name"], line
            stages[found["name"]] = Stage(found["name"], found["base"], ())
        elif stages:
            name, stage = next(reversed(stages.items()))
            told = (*stage.instructions, Instruction(word, rest.strip()))
            stages[name] = Stage(name, stage.base, told)
    return Dockerfile(stages)


def in_context(names: Sequence[str], ignored: Path) -> list[str]:
    """Which of a repository's files a build sees, by its .dockerignore: the last match decides."""
    rules = [
        line
        for line in ignored.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    return [name for name in names if not _is_left_out(name, rules)]


def _is_left_out(name: str, rules: Sequence[str]) -> bool:
    out = False
    parts = name.split("/")
    above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    for rule in rules:
        pattern = rule.removeprefix("!")
        if pattern.startswith("**/"):
            matches = any(fnmatch.fnmatchcase(part, pattern[3:]) for part in parts)
        else:
            matches = any(fnmatch.fnmatchcase(path, pattern) for path in above if "/" not in path)
        if matches:
            out = not rule.startswith("!")
    return out
